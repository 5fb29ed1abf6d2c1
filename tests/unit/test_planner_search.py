"""The search over layouts, goodput, and calibration files."""

from __future__ import annotations

import json
import random
import time
from dataclasses import replace

import pytest

from megascale_job.sizes.failures import best_interval_s
from megascale_planner.devices import GPUS, BadCalibration, calibrated
from megascale_planner.goodput import goodput
from megascale_planner.prediction import plain, predict, predict_one
from megascale_planner.search import Found, search, sources
from megascale_planner.systems import SYSTEMS
from megascale_planner.workload import Refused, Workload, from_row, illegal, points_of


def model(gpus: int, **changes: object) -> Workload:
    """175B on ``gpus`` H100s, one sequence for each device."""
    row = {"gpu": "h100", "layers": 96, "hidden": 12288, "heads": 128, "vocab": 64000}
    return from_row({**row, "gpus": gpus, "global_batch": gpus, **changes})[0]


def found(workload: Workload) -> Found:
    return search(workload, GPUS[workload.gpu], SYSTEMS[workload.system])


def test_every_candidate_is_ranked_or_rejected_with_a_reason() -> None:
    result = found(model(256))
    assert len(result.ranked) > 100
    times = [row["step_time_s"] for row in result.rows(len(result.ranked))]
    assert times == sorted(times)
    assert all(illegal(workload) == "" for workload in result.ranked)
    assert all(item.reason for item in result.rejected)
    assert {name for name, _ in result.reasons()} >= {"memory", "vpp", "global_batch"}
    every = {*result.ranked, *(item.candidate for item in result.rejected)}
    assert len(every) == len(result.ranked) + len(result.rejected)


def test_a_ranked_layout_is_predicted_as_it_is_alone() -> None:
    result = found(model(64))
    for workload, row in zip(result.ranked[:20], result.rows(20), strict=True):
        alone = predict_one(workload)
        assert row["step_time_s"] == pytest.approx(alone["step_time_s"], rel=1e-12)
        assert row["memory_gib"] == pytest.approx(alone["memory_gib"], rel=1e-12)


def test_memory_rejects_what_one_device_cannot_hold() -> None:
    result = found(model(8))
    assert result.ranked == ()
    assert all(item.reason for item in result.rejected)
    assert any(item.reason.startswith("memory: needs") for item in result.rejected)


def test_a_search_on_twelve_thousand_devices_is_quick() -> None:
    start = time.process_time()
    result = found(replace(model(64), gpus=12288, global_batch=6144))
    assert result.ranked
    assert time.process_time() - start < 10
    start = time.process_time()
    for _ in range(100):
        predict_one(result.ranked[0])
    assert (time.process_time() - start) / 100 < 1e-3  # 0.25 ms of processor time; 1 is promised


def test_one_configuration_is_predicted_as_it_is_among_others() -> None:
    workloads = [
        from_row(
            {
                "layers": 96,
                "hidden": 12288,
                "heads": 96,
                "system": system,
                "mlp": mlp,
                "recompute": recompute,
                "window": window,
                "global_batch": 1536,
                "dp": 8,
                **dict(zip(("tp", "pp", "vpp"), layout, strict=True)),
            }
        )[0]
        for system in SYSTEMS
        for recompute in ("none", "selective", "full")
        for mlp, window in (("gelu", 0), ("swiglu", 1024))
        for layout in ((1, 1, 1), (8, 8, 6), (16, 4, 1))
    ]
    for system in SYSTEMS:
        own = [each for each in workloads if each.system == system]
        together = predict(points_of(own), GPUS["h100"], SYSTEMS[system])
        for index, workload in enumerate(own):
            alone, among = predict_one(workload), plain(together, index)
            for name in ("terms", "memory"):
                assert alone.pop(name) == pytest.approx(among.pop(name), rel=1e-12)
            assert alone == pytest.approx(among, rel=1e-12)


def test_the_share_of_a_calibrations_step_is_found_once_for_all_rows() -> None:
    step = {"layers": 4, "hidden": 4096, "heads": 32, "global_batch": 16, "step_time_s": 0.341}
    rates = {"gemm_flops": 684e12, "attention_flops": 502e12, "copy_bytes_s": 2.92e12}
    text = json.dumps({"version": 1, "attention_tokens": 8192, "rates": rates, "training": step})
    workload = model(64)
    first = predict_one(workload, text)
    start = time.process_time()
    for _ in range(100):
        assert predict_one(workload, text) == first
    assert (time.process_time() - start) / 100 < 2e-3  # to find the share takes some 15 ms


def test_too_many_devices_are_refused() -> None:
    with pytest.raises(Refused, match="gpus"):
        found(replace(model(64), gpus=10**9))


def test_every_constant_that_is_fitted_or_assumed_has_a_source() -> None:
    for system in SYSTEMS.values():
        for gpu in GPUS.values():
            named = {item["constant"] for item in sources(gpu, system)}
            assert {"kernel_share", "lost_interleaving", "fixed_s", "peak_flops"} <= named
            assert all(item["source"] for item in sources(gpu, system))


def test_more_work_takes_longer_and_better_devices_less() -> None:
    base = model(256, tp=8, pp=8, dp=4)
    slow = predict_one(base)["step_time_s"]
    assert predict_one(replace(base, global_batch=512))["step_time_s"] > slow
    assert predict_one(replace(base, gpu="a100-80g"))["step_time_s"] > slow
    assert predict_one(replace(base, precision="fp8"))["step_time_s"] < slow
    assert predict_one(replace(base, recompute="full"))["step_time_s"] > slow
    assert predict_one(replace(base, window=512))["step_time_s"] < slow
    assert predict_one(replace(base, vpp=12))["step_time_s"] < slow


@pytest.mark.parametrize("restart_s", [60.0, 1500.0])
def test_goodput_agrees_with_a_simulated_run(restart_s: float) -> None:
    mtbf_s, save_s = 4000.0, 10.0
    found = goodput(mtbf_s, restart_s, save_s)
    assert found.interval_s == best_interval_s(save_s, mtbf_s)
    chance = random.Random(7)
    wall_s = work_s = 0.0
    for _ in range(40_000):
        left = found.interval_s + save_s
        while True:
            failure_s = chance.expovariate(1 / mtbf_s)
            if failure_s >= left:
                wall_s += left
                break
            wall_s += failure_s + restarted(chance, mtbf_s, restart_s)
        work_s += found.interval_s
    assert found.ettr == pytest.approx(work_s / wall_s, rel=0.01)
    total = found.ettr + found.saving + found.repeated_work + found.restarting
    assert total == pytest.approx(1.0)


def restarted(chance: random.Random, mtbf_s: float, restart_s: float) -> float:
    """Seconds of a restart that may fail as well."""
    spent = 0.0
    while (failure_s := chance.expovariate(1 / mtbf_s)) < restart_s:
        spent += failure_s
    return spent + restart_s


def test_goodput_at_its_edges() -> None:
    assert goodput(3600, 0, 0).ettr == 1.0
    assert goodput(1e-3, 1e6, 1.0, interval_s=100.0).ettr == 0.0
    assert goodput(4 * 3600, 180, 1).ettr > goodput(4 * 3600, 1500, 1).ettr
    for bad in ((0.0, 1.0, 1.0), (1.0, -1.0, 1.0), (1.0, 1.0, -1.0)):
        with pytest.raises(ValueError, match="mtbf_s"):
            goodput(*bad)


def test_a_calibration_replaces_the_datasheets_rates() -> None:
    gpu = GPUS["h200"]
    text = json.dumps(
        {
            "version": 1,
            "device": "this one",
            "attention_tokens": 8192,
            "rates": {"gemm_flops": 0.5 * gpu.peak_flops, "attention_flops": 4e14},
        }
    )
    changed = calibrated(gpu, text)
    assert (changed.gemm_share, changed.hbm_bytes_s) == (0.5, gpu.hbm_bytes_s)
    assert changed.attention_share == pytest.approx(4e14 / gpu.peak_flops * (8192 + 1500) / 8192)
    assert "this one" in dict(changed.sources)["gemm_share"]
    workload = model(256, gpu="h200")
    slower = search(workload, changed, SYSTEMS["ours"]).rows(1)[0]["step_time_s"]
    assert slower > 1.3 * found(workload).rows(1)[0]["step_time_s"]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "JSON"),
        ("[]", "version"),
        ('{"version": 2, "rates": {}}', "version"),
        ('{"version": 1, "rates": {"speed": 1}}', "rates"),
        ('{"version": 1, "rates": {"gemm_flops": 0}}', "gemm_flops"),
        ('{"version": 1, "rates": {"gemm_flops": NaN}}', "gemm_flops"),
        ('{"version": 1, "rates": {"attention_flops": 1.0}}', "attention_tokens"),
    ],
)
def test_a_calibration_that_cannot_be_used_is_refused(text: str, named: str) -> None:
    with pytest.raises(BadCalibration, match=named):
        calibrated(GPUS["h100"], text)


def test_split_backwards_shorten_the_bubble_and_nothing_else() -> None:
    sizes = {"tp": 8, "pp": 8, "dp": 1}
    whole, split = (
        predict_one(model(64, **sizes, schedule=schedule)) for schedule in ("1f1b", "zero_bubble")
    )
    before, after = whole["terms"], split["terms"]
    assert after["bubble"] < 0.55 * before["bubble"]
    kept = set(before) - {"bubble", "straggler"}
    assert {name: before[name] for name in kept} == {name: after[name] for name in kept}
    with pytest.raises(Refused, match="schedule: zero_bubble needs more than one stage"):
        model(8, tp=8, pp=1, dp=1, schedule="zero_bubble")


def test_stages_are_balanced_where_this_trainer_gains_by_it() -> None:
    sizes = {"layers": 32, "hidden": 4096, "heads": 32, "vocab": 51200, "precision": "fp8"}
    workload = from_row({"gpu": "h200", **sizes, "gpus": 4, "dp": 4, "global_batch": 64})[0]
    result = found(workload)
    uneven = [
        (one, row["step_time_s"])
        for one, row in zip(result.ranked, result.rows(len(result.ranked)), strict=True)
        if one.stage_layers
    ]
    assert uneven
    for one, step_s in uneven:
        assert (sum(one.stage_layers), len(one.stage_layers)) == (32, one.pp * one.vpp)
        assert predict_one(replace(one, stage_layers=()))["step_time_s"] > 1.01 * step_s
        assert step_s == pytest.approx(predict_one(one)["step_time_s"])
    theirs = search(workload, GPUS["h200"], SYSTEMS["megascale"])
    assert theirs.ranked and not any(one.stage_layers for one in theirs.ranked)
