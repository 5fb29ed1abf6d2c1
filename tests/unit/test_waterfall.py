"""The waterfall of a step: its rows add up, and its floors are those of the rank's own work."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks.presets import Run, job
from benchmarks.waterfall import Work, waterfall, work_of

from megascale_job.sizes.flops import flops_per_token

TOKENS = 64 * 2048


def found(**exclusive_ms: float) -> dict[str, Any]:
    kinds = ("gemm", "attention", "other", "communication", "copies", "idle")
    split = {kind: exclusive_ms.get(kind, 0.0) for kind in kinds}
    return {"step_ms": sum(split.values()), "exclusive_ms": split}


def test_the_work_of_all_stages_is_the_work_of_the_model() -> None:
    whole = work_of(job(Run(preset="7b", global_batch=64), 1, cuda=True))
    counted = flops_per_token(job(Run(preset="7b"), 1, cuda=True).model)
    assert whole.gemm_bf16 == pytest.approx(TOKENS * counted.gemm)
    assert whole.attention == pytest.approx(TOKENS * counted.attention_exact)
    first = work_of(job(Run(preset="7b", global_batch=64, tp=2, pp=2, vpp=2), 4, cuda=True))
    assert first.attention == pytest.approx(whole.attention / 4)
    assert first.gemm_bf16 < whole.gemm_bf16 / 4, "the head is on the last stage"


def test_layers_in_fp8_are_counted_apart_from_the_head() -> None:
    bf16, fp8 = (
        work_of(job(Run(preset="7b", global_batch=64, precision=name), 4, cuda=True))
        for name in ("bf16", "fp8")
    )
    assert fp8.gemm_fp8 + fp8.gemm_bf16 == pytest.approx(bf16.gemm_bf16)
    assert 0 < fp8.gemm_bf16 < 0.05 * fp8.gemm_fp8


def test_rows_add_up_and_fp8_is_twice_as_fast() -> None:
    profiled = found(gemm=60, attention=10, other=5, communication=8, copies=2, idle=15)
    # One multiprocessor at 1 MHz: 4096 operations in bf16 a microsecond.
    rows = waterfall(Work(4096 * 20e3, 8192 * 20e3, 4096 * 4e3), 0.1, 1.0, 1, profiled)
    ms = {row["what"]: row["ms"] for row in rows}
    assert ms["GEMMs at the clock's peak"] == pytest.approx(40)
    assert ms["GEMMs above that"] == pytest.approx(20)
    assert ms["attention above that"] == pytest.approx(6)
    assert sum(ms.values()) == pytest.approx(profiled["step_ms"])
    assert sum(row["share"] for row in rows) == pytest.approx(1)


@pytest.mark.parametrize(
    ("communication", "idle", "ideal", "exposed", "left"),
    [(12, 10, 7.5, 4.5, 10), (3, 10, 7.5, 0, 5.5), (2, 1, 3, 0, 0)],
)
def test_the_ideal_bubble_comes_out_of_waiting_first(
    communication: float, idle: float, ideal: float, exposed: float, left: float
) -> None:
    profiled = found(gemm=75, communication=communication, idle=idle)
    rows = waterfall(Work(1.0, 0.0, 0.0), 0.1, 1000.0, 132, profiled)
    ms = {row["what"]: row["ms"] for row in rows}
    assert ms["ideal bubble"] == pytest.approx(ideal)
    assert ms["exposed communication and copies"] == pytest.approx(exposed)
    assert ms["idle"] == pytest.approx(left)
