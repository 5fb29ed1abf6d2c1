"""Predictions of this trainer's own rows on H200s beside what was measured (benchmarks/results)."""

from __future__ import annotations

from typing import Any

import pytest
from tests.harness import planner_rows as rows

from megascale_planner.systems import SYSTEMS

SERIAL: dict[str, Any] = {"block": "serial"}
SWIGLU: dict[str, Any] = {"mlp": "swiglu", "ffn": 11008, "micro_batch": 8}
FP8: dict[str, Any] = {"precision": "fp8"}
TP2, DP2, PP2 = (2, 1, 1, 1), (1, 1, 1, 2), (1, 2, 2, 1)
TP4, TP2_PP2, DP4 = (4, 1, 1, 1), (2, 2, 2, 1), (1, 1, 1, 4)


def of_tokens(row: rows.Row, tokens: float) -> tuple[rows.Row, float]:
    """A row and its seconds from tokens/s/GPU."""
    return row, rows.own_seconds(row, tokens)


# 2026-11-21, peers and overlap on 2 H200s: kernel_share is fitted on these.
ON_TWO = [
    of_tokens(rows.own("7b", 16, TP2, 32), 27250),
    of_tokens(rows.own("7b", 16, TP2, 32, **SERIAL), 26357),
    of_tokens(rows.own("30b", 12, TP2, 16), 12654),
    of_tokens(rows.own("30b", 12, TP2, 16, **SERIAL), 12305),
    of_tokens(rows.own("175b", 3, TP2, 16), 16710),
    of_tokens(rows.own("175b", 3, TP2, 16, **SERIAL), 16411),
    of_tokens(rows.own("7b", 16, DP2, 32), 28032),
    of_tokens(rows.own("7b", 16, DP2, 32, **SERIAL), 27412),
    of_tokens(rows.own("7b", 16, DP2, 16, **SWIGLU), 26600),
    of_tokens(rows.own("7b", 16, DP2, 16, **SWIGLU, **SERIAL), 26467),
    of_tokens(rows.own("7b", 16, PP2, 32), 24650),
]
# 2026-11-22, FP8 on 4 H200s, all sums fast: held out. 7B at TP2 PP2 in the serial block (12,965) is
# left out: its host falls behind (545 of 700 W, spread 18 %), which the model does not have.
ON_FOUR = [
    of_tokens(rows.own("175b", 6, TP4, 32), 8816),
    of_tokens(rows.own("7b", 32, TP2_PP2, 64), 13664),
    of_tokens(rows.own("175b", 6, TP4, 32, **FP8), 15001),
    of_tokens(rows.own("175b", 6, TP4, 32, **SERIAL, **FP8), 14250),
    of_tokens(rows.own("30b", 24, TP4, 32, **FP8), 10186),
    of_tokens(rows.own("30b", 24, TP4, 32, **SERIAL, **FP8), 9202),
    of_tokens(rows.own("7b", 32, TP2_PP2, 64, **FP8), 20787),
    of_tokens(rows.own("7b", 32, DP4, 64, **FP8), 23029),
    of_tokens(rows.own("7b", 32, DP4, 64, **SERIAL, **FP8), 22237),
]


# 2026-11-28, FP8 on 2 H200s: gradients summed in float32, and all sums fast.
SUMS = [
    (rows.own("7b", 16, DP2, 32, **FP8), 42205, 43780),
    (rows.own("7b", 16, TP2, 32, **FP8), 39996, 41593),
    (rows.own("30b", 10, TP2, 16, **FP8), 23054, 23952),
]


def test_rows_on_two_devices_agree() -> None:
    found = [abs(error) for error in rows.errors(ON_TWO)]
    assert sum(found) / len(found) <= 0.015
    assert max(found) <= 0.04


def test_rows_on_four_devices_are_predicted_from_those_on_two() -> None:
    assert SYSTEMS["ours"].kernel_share == pytest.approx(rows.fitted_share(ON_TWO), abs=0.01)
    found = [abs(error) for error in rows.errors(ON_FOUR, fp8_sums=1.0)]
    assert sum(found) / len(found) <= 0.035
    assert max(found) <= 0.06


def test_sums_in_float32_take_the_time_that_was_measured() -> None:
    for row, exact, fast in SUMS:
        slower = rows.predicted([row], fp8_sums=1.06).step_time_s[0]
        slower /= rows.predicted([row], fp8_sums=1.0).step_time_s[0]
        assert slower == pytest.approx(fast / exact, abs=0.004)


def test_layers_in_bf16_lie_between_the_two_precisions() -> None:
    row = rows.own("7b", 16, TP2_PP2, 32)
    bf16, none, half, every = (
        rows.predicted([{**row, **more}])
        for more in ({}, FP8, {**FP8, "bf16_layers": 8}, {**FP8, "bf16_layers": 16})
    )
    assert every.step_time_s == pytest.approx(bf16.step_time_s)
    assert every.memory_bytes == pytest.approx(bf16.memory_bytes)
    for name in ("step_time_s", "memory_bytes"):
        ends = [getattr(found, name)[0] for found in (none, bf16)]
        assert getattr(half, name)[0] == pytest.approx(sum(ends) / 2)
