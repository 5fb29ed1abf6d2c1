"""The arithmetic of benchmarks/tensor_plan.py: when a plan ends whose rows travel."""

from __future__ import annotations

import pytest
from benchmarks.tensor_plan import _BARRIER_MS, gather_ms, scatter_ms


def test_transfers_that_are_shorter_than_the_gemms_before_them_hide() -> None:
    assert gather_ms([2.0, 3.0, 3.0], [9.0, 1.0, 1.0]) == 8.0
    assert scatter_ms([3.0, 3.0, 2.0], [1.0, 1.0, 9.0], 0.5) == 8.5


def test_a_gather_waits_for_rows_that_arrive_late() -> None:
    # 4 and 8 (and a barrier) are the arrivals; the second step ends at 7, before the third's rows.
    assert gather_ms([2.0, 3.0, 3.0], [9.0, 4.0, 4.0]) == pytest.approx(8 + 3 + _BARRIER_MS)


def test_a_scatter_ends_with_the_last_rows_that_leave() -> None:
    # The first rows leave from 1 to 6, the second ones, computed by then, from 6 to 11.
    found = scatter_ms([1.0, 1.0, 1.0], [5.0, 5.0, 9.0], 0.25)
    assert found == pytest.approx(11 + _BARRIER_MS + 0.25)
