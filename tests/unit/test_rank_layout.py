"""The rank layout is a bijection, its groups partition the ranks, and tensor parallelism is
innermost.
"""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale_job.layout import AXES, GroupName, RankLayout

sizes = st.integers(1, 4)
layouts = st.builds(RankLayout, tp=sizes, cp=st.integers(1, 2), dp=sizes, pp=sizes)


@given(layouts)
def test_coordinates_and_rank_are_inverse(layout: RankLayout) -> None:
    for rank in range(layout.world_size):
        assert layout.rank(layout.coordinates(rank)) == rank


@given(layouts, st.data())
def test_groups_of_a_name_partition_the_ranks(layout: RankLayout, data: st.DataObject) -> None:
    stage = layout.stage_size
    ep = data.draw(st.sampled_from([size for size in range(1, stage + 1) if stage % size == 0]))
    folded = replace(layout, ep=ep)
    for name in get_args(GroupName):
        for rank in range(folded.world_size):
            group = folded.members(rank, name)
            assert rank in group and {*group} <= {*range(folded.world_size)}
            assert group[folded.index_in(folded.coordinates(rank), name)] == rank
            assert all(folded.members(other, name) == group for other in group)
            if name in AXES:
                at = folded.coordinates(rank)
                places = [replace(at, **{name: each}) for each in range(len(group))]
                assert list(group) == [folded.rank(place) for place in places]


def test_tensor_parallel_ranks_are_neighbours_and_stages_contiguous() -> None:
    layout = RankLayout(tp=2, dp=2, pp=2)
    assert list(layout.members(5, "tp")) == [4, 5]
    assert list(layout.members(5, "dp")) == [5, 7]
    assert list(layout.members(5, "pp")) == [1, 5]
    assert [layout.coordinates(rank).pp for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_refuses_empty_axes_and_foreign_ranks() -> None:
    with pytest.raises(ValueError, match="pp=0"):
        RankLayout(pp=0)
    with pytest.raises(ValueError, match="rank 8"):
        RankLayout(tp=8).coordinates(8)
