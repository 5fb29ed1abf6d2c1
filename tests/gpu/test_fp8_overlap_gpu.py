"""Overlapped FP8 GEMMs on CUDA stay the plain ones, with random delays on both streams.

One process per device. Data are small whole numbers, whose sums are exact in any order: comparisons
are for equality.
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


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize(("part_rows", "operations"), [(700, 100), (40_000, 12)])
def test_gemms_are_the_plain_ones(
    part_rows: int, operations: int, size: int, pool: RankPool, tmp_path: Path
) -> None:
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} CUDA devices, there are {torch.cuda.device_count()}")
    arguments = {"part_rows": part_rows, "operations": operations, "delay_s": 2e-4}
    program = "tests.harness.fp8_gemms:compare"
    for wrong in pool.run(program, size, tmp_path, 200, chunks=[1, 2, 3, 8], **arguments):
        assert set(wrong.values()) == {0}, wrong
