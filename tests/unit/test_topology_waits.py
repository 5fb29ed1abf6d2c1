"""Who waits for whom, against the definition: members that have entered fewer operations."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tests.harness.properties import examples

from megascale_driver.analysis.progress import (
    MAX_LISTED,
    OperationCount,
    RankStatus,
    RankView,
    suspects,
    waits,
)
from megascale_job.layout import RankLayout

LAYOUTS = [
    RankLayout(tp=2, dp=2, pp=2),
    RankLayout(tp=4),
    RankLayout(dp=3, pp=2),
    RankLayout(dp=16),
]
AXES = {"tp": ["tp"], "dp": ["dp"], "world": ["tp", "cp", "dp", "pp"]}


def view(rank: int, counts: dict[str, tuple[int, int]]) -> RankView:
    operations = tuple(OperationCount(group, *count) for group, count in counts.items())
    return RankView(rank, f"n{rank}", 0.0, RankStatus(rank, 5, "STEP", 70.0, operations))


@examples(150)
@given(st.sampled_from(LAYOUTS), st.data())
def test_a_rank_waits_for_the_members_that_have_entered_fewer(
    layout: RankLayout, data: st.DataObject
) -> None:
    counts: list[dict[str, tuple[int, int]]] = []
    for _ in range(layout.world_size):
        entered = {group: data.draw(st.integers(1, 3)) for group in AXES}
        counts.append({g: (n, data.draw(st.integers(n - 1, n))) for g, n in entered.items()})
    views = [view(rank, counts[rank]) for rank in range(layout.world_size)]
    for rank, found in waits(views, layout).items():
        inside = [group for group, (entered, done) in counts[rank].items() if done < entered]
        assert list(found.inside) == inside
        expected = {
            other
            for group in inside
            for other in layout.group_of(rank, AXES[group])
            if counts[other][group][0] < counts[rank][group][0]
        }
        assert set(found.waits_for) <= expected
        assert len(found.waits_for) == min(len(expected), MAX_LISTED)
        if len(expected) <= MAX_LISTED:
            assert found.more == 0


def test_all_wait_for_the_silent_rank_which_waits_for_none() -> None:
    layout = RankLayout(tp=2, dp=2)
    # Rank 3 never enters the reduction over dp; rank 2, its tp partner, waits in the next layer.
    views = [
        view(0, {"tp": (9, 8), "dp": (4, 4)}),
        view(1, {"tp": (8, 8), "dp": (4, 3)}),
        view(2, {"tp": (9, 8), "dp": (4, 4)}),
        view(3, {"tp": (8, 8), "dp": (3, 3)}),
    ]
    found = waits(views, layout)
    assert {rank: each.waits_for for rank, each in found.items()} == {
        0: (1,),
        1: (3,),
        2: (3,),
        3: (),
    }
    assert [each.rank for each in suspects(views, layout)] == [3]
