"""A transfer that was sent and has not arrived: both ends are named, and the link between them."""

from __future__ import annotations

from megascale_driver.analysis.progress import OperationCount, RankStatus, RankView, culprits
from megascale_job.layout import RankLayout

FORWARD, BACK = "pp0-1.activation", "pp0-1.gradient"
PAIR = RankLayout(pp=2)


def view(rank: int, *counts: tuple[str, int, int], node: str = "") -> RankView:
    operations = tuple(OperationCount(*count) for count in counts)
    status = RankStatus(rank, 5, "STEP", 70.0, operations)
    return RankView(rank, node or f"n{rank}", 0.0, status)


def named(*views: RankView, layout: RankLayout = PAIR) -> tuple[list[int], list[str]]:
    found = culprits(views, layout)
    return sorted(each.rank for each in found.ranks), [str(each) for each in found.lost]


def test_an_activation_is_lost_between_the_stage_that_sent_it_and_the_one_that_waits() -> None:
    # Stage 0 waits for the gradient that stage 1 cannot compute.
    ranks, lost = named(
        view(0, (FORWARD, 4, 4), (BACK, 1, 0)), view(1, (FORWARD, 4, 3), (BACK, 0, 0))
    )
    assert ranks == [0, 1]
    assert lost == [
        "rank 0 has sent an activation that rank 1 waits for: the link between n0 and n1 is the "
        "suspect"
    ]


def test_a_gradient_goes_against_the_edge() -> None:
    _, lost = named(view(0, (BACK, 3, 2), (FORWARD, 5, 5)), view(1, (BACK, 3, 3), (FORWARD, 6, 5)))
    assert len(lost) == 1 and lost[0].startswith("rank 1 has sent a gradient that rank 0 waits for")


def test_on_one_node_the_transport_between_the_ranks_is_the_suspect() -> None:
    _, lost = named(
        view(0, (FORWARD, 4, 4), (BACK, 1, 0), node="n7"),
        view(1, (FORWARD, 4, 3), (BACK, 0, 0), node="n7"),
    )
    assert lost[0].endswith("the transport between its ranks is the suspect")


def test_over_the_edge_that_closes_a_ring_the_last_stage_sends_to_the_first() -> None:
    closing = "pp1-0.activation"
    _, lost = named(
        view(0, (closing, 2, 1), (FORWARD, 2, 2)), view(1, (closing, 2, 2), (FORWARD, 3, 2))
    )
    assert [text[:41] for text in lost] == ["rank 1 has sent an activation that rank 0"]


def test_what_was_not_sent_or_has_arrived_is_not_lost() -> None:
    # Stage 0 hangs in its own code and has sent three of four: it is named alone.
    assert named(view(0, (FORWARD, 3, 3)), view(1, (FORWARD, 4, 3))) == ([0], [])
    # The receive has ended, stage 1 hangs behind it, and stage 0 waits until its send has ended.
    ranks, lost = named(
        view(0, (FORWARD, 5, 4), (BACK, 0, 0)), view(1, (FORWARD, 4, 4), (BACK, 0, 0))
    )
    assert (ranks, lost) == ([1], [])
    # An edge of a layout that the job has no longer.
    assert named(view(0, ("pp3-4.activation", 1, 0)), view(1, (BACK, 0, 0)))[1] == []


def test_of_groups_side_by_side_only_the_edge_that_lost_is_named() -> None:
    layout = RankLayout(dp=2, pp=2)
    ranks, lost = named(
        view(0, (FORWARD, 4, 4), (BACK, 3, 3), ("dp", 2, 1)),
        view(1, (FORWARD, 4, 4), (BACK, 3, 2), ("dp", 1, 1)),
        view(2, (FORWARD, 4, 4), (BACK, 3, 3), ("dp", 2, 1)),
        view(3, (FORWARD, 4, 3), (BACK, 2, 2), ("dp", 1, 1)),
        layout=layout,
    )
    assert ranks == [1, 3] and len(lost) == 1
    assert "the link between n1 and n3 is the suspect" in lost[0]
