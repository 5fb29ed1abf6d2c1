"""Rows of experts over real ranks: any routing, with empty experts and with all tokens to a few."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tests.harness.properties import examples
from tests.harness.ranks import RankPool

RANKS = 3


def test_rows_go_to_their_experts_and_back_under_any_routing(
    pool: RankPool, tmp_path: Path
) -> None:
    """Expert, then rank, then position; and the bits of one rank that holds all experts."""
    cases: list[dict[str, Any]] = []

    @examples(60)
    @given(
        tokens=st.one_of(
            st.lists(st.integers(0, 9), min_size=RANKS, max_size=RANKS),
            st.integers(0, 9).map(lambda number: [number] * RANKS),
        ),
        each=st.integers(1, 4),
        top_k=st.integers(1, 3),
        kind=st.sampled_from(["random", "few"]),
        seed=st.integers(0, 999),
    )
    def draw(tokens: list[int], each: int, top_k: int, kind: str, seed: int) -> None:
        top_k = min(top_k, each * RANKS)
        cases.append({"tokens": tokens, "each": each, "top_k": top_k, "kind": kind, "seed": seed})

    draw()
    assert any(sum(case["tokens"]) == 0 for case in cases) or len(cases) > 30
    program = "tests.harness.expert_exchange:exchange_under_any_routing"
    for wrong in pool.run(program, RANKS, tmp_path, cases=cases):
        assert wrong == []
