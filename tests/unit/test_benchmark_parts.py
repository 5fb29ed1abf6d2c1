"""Parts of the benchmarks: options, sweeps, presets, summaries of times, gains, loss curves."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks import compare_losses, fleet, timing
from benchmarks.ablation import ladder
from benchmarks.launch import Journal
from benchmarks.loop_overhead import overhead, student_t
from benchmarks.options import entry_of, read_sweep
from benchmarks.presets import PRESETS, ConfigurationRefused, job
from benchmarks.report import table, text
from hypothesis import given
from hypothesis import strategies as st

from megascale_common.etcd.errors import EtcdUnavailable

SWEEPS = sorted((Path(__file__).resolve().parents[2] / "benchmarks" / "sweeps").glob("*.json"))
Times = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=30)


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_every_sweep_can_run_on_the_devices_that_its_name_says(path: Path) -> None:
    ranks = int(path.stem.rpartition("-")[2])
    entries = read_sweep(path, [] if "text" not in path.stem else ["--data", "/corpus"])
    assert len({entry.name for entry in entries}) == len(entries)
    for entry in entries:
        for variant in entry.variants:
            config = job(variant.run, ranks, cuda=True)
            assert config.layout.world_size == ranks
            assert config.model.bias, "the peers' rows have biases"


def test_presets_are_the_models_of_the_peers_rows() -> None:
    preset = PRESETS["175b-stage"]
    assert (preset.hidden, preset.heads, preset.layers, preset.vocabulary) == (12288, 96, 12, 51200)
    assert [PRESETS[name].layers for name in ("7b", "13b", "30b")] == [32, 40, 48]


def test_a_comparison_has_the_measured_configuration_last() -> None:
    options = [
        "--tp",
        "2",
        "--overlap",
        "dp,tp",
        "--against",
        "overlap=none",
        "--against",
        "deterministic=true",
    ]
    entry = entry_of(options)
    assert [variant.run.overlap for variant in entry.variants] == [(), ("tp", "dp")]
    assert [variant.run.deterministic for variant in entry.variants] == [True, False]
    assert entry.run.tp == 2
    assert entry.rounds == 5, "five A/B pairs by default"
    assert entry_of(["--tp", "2"]).rounds == 1


def test_the_bound_of_an_overhead_follows_its_spread() -> None:
    # Tables of Student's t, one-sided 95 %.
    for freedom, quantile in ((5, 2.015), (9, 1.833), (19, 1.729), (120, 1.658)):
        assert student_t(freedom) == pytest.approx(quantile, rel=2e-3)
    found = overhead([1.0] * 20, [1.001, 1.003] * 10)
    assert found["overhead_percent"] == pytest.approx(0.2)
    spread = 0.1 * math.sqrt(20 / 19)
    assert found["upper_95_percent"] == pytest.approx(
        0.2 + 1.729 * spread / math.sqrt(20), rel=1e-3
    )
    assert overhead([1.0, 2.0], [1.0, 2.0])["upper_95_percent"] == 0
    with pytest.raises(ValueError, match="--rounds"):
        overhead([1.0], [1.0])


def test_a_ladder_adds_one_thing_after_the_other() -> None:
    run = entry_of(["--preset", "7b", "--tp", "2", "--dp", "4"]).run
    rows = ladder(run, ranks=8, batch_factor=3)
    entry = entry_of(["--preset", "7b", "--tp", "2", "--dp", "4", "--block", "serial"], rows)
    assert [variant.label for variant in entry.variants] == [
        "baseline",
        "+ parallel block",
        "+ kernels",
        "+ TP overlap",
        "+ DP overlap",
        "+ larger batch",
    ], "no row for a pipeline that is not there"
    assert [variant.run.overlap for variant in entry.variants][2:] == [
        (),
        ("tp",),
        ("tp", "dp"),
        ("tp", "dp"),
    ]
    assert [variant.run.kernels for variant in entry.variants] == ["torch"] * 2 + ["triton"] * 4
    assert entry.run.global_batch == 384


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({"micro_bacth": 4}, "--micro-bacth"),
        ({"overlap": "tp,sp"}, "tp,sp"),
        ({"steps": 3}, "at least 4"),
        ({"against": {"preset": "8b"}}, "8b"),
        ({"rows": [{"row": "x"}], "against": {"block": "serial"}}, "either rows or"),
    ],
)
def test_a_mistake_in_a_sweep_is_refused_with_its_place(
    values: dict[str, object], names: str, tmp_path: Path
) -> None:
    path = tmp_path / "sweep.json"
    path.write_text(json.dumps([{"name": "good"}, {"name": "bad", **values}]))
    with pytest.raises(ConfigurationRefused, match=r"entry 1 \(bad\)") as refusal:
        read_sweep(path, [])
    assert names in str(refusal.value)


def test_a_sweep_that_is_not_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text("[{")
    with pytest.raises(ConfigurationRefused, match="is not JSON"):
        read_sweep(tmp_path / "sweep.json", [])


def test_a_layout_that_does_not_fit_is_refused_with_a_remedy() -> None:
    with pytest.raises(ConfigurationRefused, match="is not the 8 ranks"):
        job(entry_of(["--tp", "16"]).run, 8, cuda=True)
    with pytest.raises(ConfigurationRefused, match="global_batch_size"):
        job(entry_of(["--global-batch", "9"]).run, 8, cuda=True)


def test_an_entry_has_one_line_whoever_fails_first(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "lines.jsonl")
    assert journal.add(3, {"failed": "a cause", "rank": 1})
    assert not journal.add(3, {"failed": "a symptom", "rank": 0})
    assert journal.lines() == [{"entry": 3, "failed": "a cause", "rank": 1}]


@given(Times)
def test_a_summary_lies_within_its_times(times_s: list[float]) -> None:
    found = timing.summary(times_s)
    assert min(times_s) == found["min"] <= found["p50"] <= found["max"] == max(times_s)
    assert found["p90"] in times_s
    assert sum(time_s <= found["p90"] for time_s in times_s) >= 0.9 * len(times_s)


def test_a_gain_is_computed_pair_by_pair() -> None:
    found = timing.gain([100.0, 200.0, 100.0], [110.0, 190.0, 150.0])
    assert found["median"] == pytest.approx(0.1)
    assert (found["min"], found["max"]) == (pytest.approx(-0.05), pytest.approx(0.5))
    assert timing.exposed([2.0, 4.0], [1.5, 3.0])["share"] == pytest.approx(0.25)


def test_losses_that_lie_on_each_other() -> None:
    same = compare_losses.compare([3.0, 2.0], [3.0, 2.0], 0.0)
    assert same["bitwise_equal"]
    assert same["first_step_above_tolerance"] is None
    apart = compare_losses.compare([3.0, 2.0, 1.0, 1.0], [3.0, 2.01, 1.2, 1.0], 0.1)
    assert apart["max_difference"] == pytest.approx(0.2)
    assert apart["mean_difference"] == pytest.approx(0.0525)
    assert apart["first_step_above_tolerance"] == 3
    assert compare_losses.compare([1.0], [math.nan], 0.1)["max_difference"] == math.inf


def test_compare_losses_fails_on_a_difference_and_on_a_shorter_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {"a": [3.0, 2.0], "b": [3.0, 2.5], "c": [3.0]}
    for name, losses in files.items():
        lines = [
            json.dumps({"step": step, "loss": loss}) for step, loss in enumerate(losses, start=1)
        ]
        (tmp_path / name).write_text("\n".join(reversed(lines)))
    a, b, c = (str(tmp_path / name) for name in files)
    assert compare_losses.main([a, a]) == 0
    assert compare_losses.main([a, b, "--tolerance", "0.5"]) == 0
    assert compare_losses.main([a, b, "--tolerance", "0.4"]) == 1
    assert compare_losses.main([a, c]) == 1
    capsys.readouterr()
    assert compare_losses.main([a, b, c]) == 1
    found = json.loads(capsys.readouterr().out)["comparisons"]
    assert [one["file"] for one in found] == [b, c]
    (tmp_path / "other").write_text('{"step": 1}')
    for unreadable in ("none", "other"):
        assert compare_losses.main([a, str(tmp_path / unreadable)]) == 2
        assert unreadable in capsys.readouterr().err


def test_results_read_as_text() -> None:
    row = {
        "label": "+ kernels",
        "tokens_per_s_per_device": 12345.6,
        "mfu_causal": 0.523,
        "mfu_full": 0.541,
        "gain_over_first": {"median": 0.1, "min": -0.02, "max": 0.2, "pairs": 5},
    }
    row["gain_over_previous"] = row["gain_over_first"]
    assert table([row], {"paper": ["+1.7"]}).splitlines()[-1] == (
        "| + kernels | 12,346 | 52.3% / 54.1% | +10.0% (-2.0% to +20.0%, 5 pairs) "
        "| +10.0% (-2.0% to +20.0%, 5 pairs) | +1.7 |"
    )
    assert (
        text({"name": "30b", "failed": "OutOfMemoryError: no room"})
        == "30b: failed: OutOfMemoryError: no room"
    )


class SlowEtcd:
    """Takes transactions, each a turn of the loop later."""

    def __init__(self, fails_after: int = 10**9) -> None:
        self.stored, self.fails_after = 0, fails_after

    async def txn(self, **_: Any) -> None:
        await asyncio.sleep(0)
        if self.stored >= self.fails_after:
            raise EtcdUnavailable("etcd is gone")
        self.stored += 1


def test_the_rows_of_a_fleet_are_made_as_they_are_stored() -> None:
    etcd, ahead = SlowEtcd(), []

    def batches() -> Iterator[list[Any]]:
        for made in range(1, 101):
            ahead.append(made - etcd.stored)
            yield []

    asyncio.run(fleet.put_all(etcd, batches()))  # type: ignore[arg-type]
    assert etcd.stored == 100 and max(ahead) <= fleet.TXNS_AT_ONCE + 1
    with pytest.raises(EtcdUnavailable, match="etcd is gone"):
        asyncio.run(fleet.put_all(SlowEtcd(3), batches()))  # type: ignore[arg-type]
