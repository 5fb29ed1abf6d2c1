"""Overlapped matmuls on CUDA give the plain ones' bits, with random delays on both streams.

They run over NVLink and copy engines, with one process per device. Data are small whole numbers,
whose sums are exact in any order: comparisons are for equality.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.harness.ranks import RankPool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PROGRAMS = "tests.harness.tensor_products"
SIZES = pytest.mark.parametrize("size", [2, 4, 8])


def _need(devices: int) -> None:
    if torch.cuda.device_count() < devices:
        pytest.skip(f"needs {devices} CUDA devices, there are {torch.cuda.device_count()}")


@SIZES
@pytest.mark.parametrize(
    ("dtype", "part_bytes", "operations"),
    [("bf16", 1 << 18, 150), ("fp32", 1 << 18, 150), ("bf16", 1 << 21, 12)],
    ids=["bf16", "fp32", "large"],
)
def test_results_are_the_plain_ones(
    dtype: str, part_bytes: int, operations: int, size: int, pool: RankPool, tmp_path: Path
) -> None:
    _need(size)
    arguments = {
        "dtype": dtype,
        "part_bytes": part_bytes,
        "operations": operations,
        "delay_s": 2e-4,
    }
    for wrong in pool.run(
        f"{PROGRAMS}:compare", size, tmp_path, 200, chunks=[1, 2, 3, 8], **arguments
    ):
        assert set(wrong.values()) == {0}, wrong


@SIZES
def test_memory_is_shared(size: int, pool: RankPool, tmp_path: Path) -> None:
    _need(size)
    for rank, result in enumerate(pool.run(f"{PROGRAMS}:memory_is_shared", size, tmp_path, 120)):
        assert result["reason"] == ""
        assert result["found"] == [10 * rank + writer for writer in range(size)]
        assert result["error"], "an access beyond the memory is refused"


@SIZES
def test_partial_sums_are_added_in_float32_and_rounded_once(
    size: int, pool: RankPool, tmp_path: Path
) -> None:
    _need(size)
    for total in pool.run(f"{PROGRAMS}:sum_is_wide", size, tmp_path, 120):
        assert total == torch.tensor(255.0 + size).bfloat16().item()


def test_the_job_gets_overlapped_matmuls_where_it_sets_overlap(
    pool: RankPool, tmp_path: Path
) -> None:
    _need(2)
    for result in pool.run(f"{PROGRAMS}:choice", 2, tmp_path, 120, overlap=True, one_host=True):
        assert result == {"products": "OverlappedMatmuls", "log": ""}
