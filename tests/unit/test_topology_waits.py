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
from megascale_job.layout import GroupName, RankLayout

LAYOUTS = [
    RankLayout(tp=2, dp=2, pp=2),
    RankLayout(tp=4),
    RankLayout(dp=3, pp=2),
    RankLayout(dp=16),
    RankLayout(tp=2, cp=2, dp=2, pp=2, ep=4),
    RankLayout(dp=8, ep=2),
]
GROUPS: tuple[GroupName, ...] = ("tp", "cp", "dp", "ep", "expert_gradient", "world")


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
        entered = {group: data.draw(st.integers(1, 3)) for group in GROUPS}
        counts.append({g: (n, data.draw(st.integers(n - 1, n))) for g, n in entered.items()})
    views = [view(rank, counts[rank]) for rank in range(layout.world_size)]
    for rank, found in waits(views, layout).items():
        inside = [group for group, (entered, done) in counts[rank].items() if done < entered]
        assert list(found.inside) == inside
        expected = {
            other
            for group in GROUPS
            if group in inside
            for other in layout.members(rank, group)
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


def test_in_a_hang_of_experts_the_rank_that_is_in_no_exchange_is_named() -> None:
    layout = RankLayout(dp=8, ep=4)
    # Rank 6 is stuck before dispatch. Ranks 4, 5 and 7 wait for it there; the other ep group has
    # ended its step and waits for them where the experts' gradients are summed.
    counts = [{"ep": (9, 9), "expert_gradient": (3, 2)} for _ in range(4)]
    counts += [{"ep": (9, 8), "expert_gradient": (2, 2)} for _ in range(4)]
    counts[6] = {"ep": (8, 8), "expert_gradient": (2, 2)}
    views = [view(rank, counts[rank]) for rank in range(8)]
    assert [found.rank for found in suspects(views, layout)] == [6]
    found = waits(views, layout)
    assert found[4].inside == ("ep",) and found[4].waits_for == (6,)
    assert found[2].inside == ("expert_gradient",) and found[2].waits_for == (6,)
    assert found[3].waits_for == (7,)
