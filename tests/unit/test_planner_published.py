"""The planner beside published rows: fitted ones, and rows that were held out."""

from __future__ import annotations

from typing import Any

import pytest
from tests.harness import planner_rows as rows

from megascale_job.config import ModelConfig
from megascale_job.sizes.flops import flops_per_token
from megascale_planner.devices import GPUS
from megascale_planner.prediction import predict_lines
from megascale_planner.systems import SYSTEMS

MEAN_ERROR, WORST_ERROR = 0.04, 0.08  # what is promised of published rows
STATED_MEAN, STATED_WORST = 0.012, 0.042  # what docs/planner.md states of these


def by_system(name: str) -> list[tuple[rows.Row, float]]:
    """Rows of Table 2 that ran under ``name``."""
    return [pair for pair in rows.table_2() if pair[0]["system"] == name]


FITTED = {
    "megatron-lm-2021": rows.sc21(),
    "megatron-lm-2023": by_system("megatron-lm-2023"),
    "megascale": by_system("megascale"),
}


def test_step_times_of_the_published_tables_agree() -> None:
    found = [abs(e) for pairs in FITTED.values() for e in rows.errors(pairs)]
    assert len(found) == 13
    assert sum(found) / len(found) <= STATED_MEAN <= MEAN_ERROR
    assert max(found) <= STATED_WORST <= WORST_ERROR


@pytest.mark.parametrize("name", list(FITTED))
def test_a_row_that_the_fit_did_not_see_is_predicted_as_well(name: str) -> None:
    pairs = FITTED[name]
    for held in range(len(pairs)):
        share = rows.fitted_share(pairs[:held] + pairs[held + 1 :])
        (error,) = rows.errors([pairs[held]], kernel_share=share)
        assert abs(error) <= 0.06, (name, held, error)


@pytest.mark.parametrize("name", list(FITTED))
def test_the_constant_that_stands_is_the_fitted_one(name: str) -> None:
    assert SYSTEMS[name].kernel_share == pytest.approx(rows.fitted_share(FITTED[name]), abs=0.011)


@pytest.mark.parametrize(
    ("system", "measured_s"), [("megatron-lm-2023", 8.57), ("megascale", 6.34)]
)
def test_twelve_thousand_devices_are_predicted_from_a_thousand(
    system: str, measured_s: float
) -> None:
    (error,) = rows.errors([(rows.model_175b(system, 192, 6144), measured_s)])
    assert abs(error) <= 0.05


def test_the_ends_of_the_ablation_agree() -> None:
    mfu = {
        int(row["idx"]): float(row["mfu_pct"])
        for row in rows.table("megascale_table3_ablation.csv")
    }
    baseline = rows.predicted([rows.model_175b("megatron-lm-2023", 4, 256)])
    last = rows.predicted([rows.model_175b("megascale", 4, 768)])
    assert 100 * baseline.mfu_full[0] == pytest.approx(mfu[1], rel=0.01)
    assert 100 * last.mfu_full[0] == pytest.approx(mfu[9], rel=0.025)


@pytest.mark.parametrize(("gpus", "mfu"), [(96, 0.47), (4608, 0.42)])
def test_megatron_core_scales_as_its_readme_states(gpus: int, mfu: float) -> None:
    """GPT-3 175B, batch 1,152, sequence 4,096, vocabulary 131,072, 96 to 4,608 H100s."""
    row = {
        "system": "megatron-core-2024",
        "gpu": "h100",
        "layers": 96,
        "hidden": 12288,
        "heads": 96,
        "sequence": 4096,
        "vocab": 131072,
        "tp": 8,
        "pp": 6,
        "vpp": 16,
        "gpus": gpus,
        "micro_batch": 1,
        "global_batch": 1152,
    }
    assert rows.predicted([row]).mfu_full[0] == pytest.approx(mfu, rel=0.04)


def test_the_interval_holds_every_published_row() -> None:
    for pairs in FITTED.values():
        found = rows.predicted([row for row, _ in pairs])
        for (_, measured), low, high in zip(pairs, found.low_s, found.high_s, strict=True):
            assert low <= measured <= high


@pytest.mark.parametrize("window", [0, 512])
def test_both_counts_of_mfu_are_those_of_the_services(window: int) -> None:
    row = {"layers": 24, "hidden": 2048, "heads": 16, "kv_heads": 4, "mlp": "swiglu", "ffn": 5632}
    row |= {"vocab": 32000, "sequence": 4096, "window": window, "block": "serial"}
    model = ModelConfig(
        layers=24,
        hidden_size=2048,
        heads=16,
        kv_heads=4,
        mlp="swiglu",
        ffn_size=5632,
        vocab_size=32000,
        sequence_length=4096,
        window=window,
    )
    found, flops = rows.predicted([row]), flops_per_token(model)
    per_token = float(found.step_time_s[0]) * GPUS["h100"].peak_flops / 4096
    assert found.mfu_causal[0] * per_token == pytest.approx(flops.exact, rel=1e-9)
    assert found.mfu_full[0] * per_token == pytest.approx(flops.full, rel=1e-9)


def one(line: str) -> dict[str, Any]:
    (result,) = predict_lines([line])
    return result


def test_a_line_has_the_promised_keys_and_the_defaults_that_were_taken() -> None:
    result = one('{"id": "a", "layers": 24, "hidden": 2048, "heads": 16, "gpus": 8}')
    wanted = {"id", "step_time_s", "mfu_causal", "mfu_full", "memory_gib", "low", "high", "terms"}
    assert wanted <= set(result)
    assert sum(result["terms"].values()) == pytest.approx(result["step_time_s"])
    assert result["low"] < result["step_time_s"] < result["high"]
    assert result["mfu_causal"] < result["mfu_full"] < 1
    assert (result["assumed"]["dp"], result["assumed"]["ffn"]) == (8, 8192)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ('"tp": 3', "tp"),
        ('"gpus": 9, "tp": 2', "gpus"),
        ('"layers": 25, "pp": 2', "layers"),
        ('"pp": 2, "vpp": 2, "global_batch": 3, "dp": 1', "vpp"),
        ('"dp": 2, "global_batch": 3', "global_batch"),
        ('"gpu": "v100"', "gpu"),
        ('"system": "theirs"', "system"),
        ('"hidden": 2047', "heads"),
        ('"precision": "fp8", "gpu": "a100-80g"', "precision"),
        ('"precision": "fp8", "bf16_layers": 999', "bf16_layers: 999 of"),
        ('"precision": "fp8", "bf16_layers": -1', "bf16_layers: -1"),
        ('"widht": 3', "widht"),
        ('"heads": "16"', "heads"),
        ('"layers": -1', "layers"),
        ('"micro_batch": true', "micro_batch"),
        (f'"vocab": {10**400}', "vocab"),
        ('"sequence": 2048.5', "sequence"),
        ('"window": 1e400', "window"),
    ],
)
def test_a_row_that_cannot_run_is_refused_by_name(change: str, named: str) -> None:
    base = '{"id": 7, "layers": 24, "hidden": 2048, "heads": 16, %s}'
    result = one(base % change)
    assert set(result) == {"id", "refused"}
    assert (result["id"], named in result["refused"]) == (7, True)
