"""Attention over a sequence that is cut: any documents and windows, the bits of one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.harness.properties import examples
from tests.harness.ranks import RankPool


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_head_sees_the_whole_sequence(ranks: int, pool: RankPool, tmp_path: Path) -> None:
    cases: list[dict[str, Any]] = []

    @examples(25)
    @given(
        sequences=st.integers(1, 2),
        length=st.integers(1, 12),
        groups=st.integers(1, 2),
        shared=st.integers(1, 3),
        window=st.sampled_from([0, 0, 1, 5, 100]),
        starts=st.lists(st.lists(st.integers(1, 47), max_size=5), min_size=2, max_size=2),
        seed=st.integers(0, 99),
    )
    def draw(**case: Any) -> None:
        cases.append({**case, "starts": case["starts"][: case["sequences"]]})

    draw()
    program = "tests.harness.context_parallel:attend_any_documents"
    for wrong in pool.run(program, ranks, tmp_path, cases=cases):
        assert wrong == []
