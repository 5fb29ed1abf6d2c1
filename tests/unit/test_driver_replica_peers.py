"""The choice of the node that keeps a node's replicas."""

from __future__ import annotations

import time
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from megascale_driver.placement.replicas import DOMAINS, Member, choose_peers
from megascale_job.layout import AXES, RankLayout

SIZES = st.sampled_from([1, 2, 3, 4])


@st.composite
def attempts(draw: st.DrawFn) -> tuple[list[Member], RankLayout]:
    """Nodes with whole tensor-parallel groups, as placement gives them, on any switches.

    An ep group can cross nodes.
    """
    tp, cp, dp, pp = draw(SIZES), draw(st.sampled_from([1, 2])), draw(SIZES), draw(SIZES)
    stage = tp * cp * dp
    ep = draw(st.sampled_from([n for n in range(1, stage + 1) if stage % n == 0]))
    layout = RankLayout(tp=tp, cp=cp, dp=dp, pp=pp, ep=ep)
    groups = layout.world_size // layout.tp
    members: list[Member] = []
    first = 0
    while first < groups:
        count = draw(st.integers(1, min(3, groups - first)))
        ranks = tuple(range(first * layout.tp, (first + count) * layout.tp))
        labels = {key: draw(st.sampled_from(["", "a", "b"])) for key in DOMAINS}
        members.append(Member(f"n{len(members)}", ranks, labels))
        first += count
    return members, layout


def shared_groups(one: Member, other: Member, layout: RankLayout) -> int:
    """In how many parallel groups of several ranks both nodes have one."""
    every = {layout.members(rank, axis) for axis in AXES for rank in range(layout.world_size)}
    groups = [set(group) for group in every if len(group) > 1]
    if layout.ep > 1:
        groups += [
            set(range(first, first + layout.ep)) for first in range(0, layout.world_size, layout.ep)
        ]
    return sum(
        not group.isdisjoint(one.ranks) and not group.isdisjoint(other.ranks) for group in groups
    )


@given(attempts())
def test_a_peer_is_another_node_that_shares_the_fewest_groups(
    attempt: tuple[list[Member], RankLayout],
) -> None:
    members, layout = attempt
    by_name = {member.name: member for member in members}
    peers = choose_peers(members, layout)
    assert peers == choose_peers(members, layout)
    assert set(peers) == (set(by_name) if len(members) > 1 else set())
    for name, peer in peers.items():
        assert peer != name
        others = [shared_groups(by_name[name], m, layout) for m in members if m.name != name]
        assert shared_groups(by_name[name], by_name[peer], layout) == min(others)


@given(attempts())
def test_no_node_keeps_two_while_one_that_would_do_as_well_keeps_none(
    attempt: tuple[list[Member], RankLayout],
) -> None:
    members, layout = attempt
    by_name = {member.name: member for member in members}
    peers = choose_peers(members, layout)
    load = Counter(peers.values())
    for name, peer in peers.items():
        best = shared_groups(by_name[name], by_name[peer], layout)
        for member in members:
            if member.name != name and shared_groups(by_name[name], member, layout) == best:
                assert load[peer] < 2 or load[member.name] > 0


@given(st.integers(2, 40))
def test_nodes_that_are_alike_form_a_ring(count: int) -> None:
    members = [Member(f"n{rank}", (rank,)) for rank in range(count)]
    peers = choose_peers(members, RankLayout(dp=count))
    assert peers == {f"n{rank}": f"n{(rank + 1) % count}" for rank in range(count)}


def test_a_grid_of_stages_and_replicas_copies_across_both() -> None:
    layout = RankLayout(tp=2, dp=3, pp=4)  # a node per tensor-parallel group
    members = [Member(f"n{i}", (2 * i, 2 * i + 1)) for i in range(12)]
    peers = choose_peers(members, layout)
    assert sorted(peers.values()) == sorted(peers)
    for name, peer in peers.items():
        stage, replica = divmod(int(name[1:]), 3)
        other_stage, other_replica = divmod(int(peer[1:]), 3)
        assert stage != other_stage and replica != other_replica


def test_the_peer_lies_on_another_host_rack_and_switch_where_one_does() -> None:
    places = [("h0", "r0", "s0"), ("h0", "r0", "s0"), ("h1", "r0", "s1"), ("h2", "r1", "s2")]
    members = [
        Member(f"n{i}", (i,), dict(zip(DOMAINS, place, strict=True)))
        for i, place in enumerate(places)
    ]
    peers = choose_peers(members, RankLayout(dp=4))
    assert peers == {"n0": "n3", "n1": "n2", "n2": "n0", "n3": "n1"}


def test_the_peer_of_experts_over_two_nodes_holds_another_copy_of_them() -> None:
    """Ranks 0 to 3 are two nodes of one ep group, and so are 4 to 7: each copies to the other."""
    members = [Member(f"n{i}", (2 * i, 2 * i + 1)) for i in range(4)]
    assert choose_peers(members, RankLayout(dp=8))["n0"] == "n1"
    peers = choose_peers(members, RankLayout(dp=8, ep=4))
    assert {name: int(peer[1:]) // 2 for name, peer in peers.items()} == {
        "n0": 1,
        "n1": 1,
        "n2": 0,
        "n3": 0,
    }


def test_experts_within_nodes_change_no_peer() -> None:
    members = [Member(f"n{i}", tuple(range(4 * i, 4 * i + 4))) for i in range(6)]
    dense = choose_peers(members, RankLayout(tp=2, dp=4, pp=3))
    assert choose_peers(members, RankLayout(tp=2, dp=4, pp=3, ep=4)) == dense


def test_one_node_has_no_peer() -> None:
    assert choose_peers([Member("n0", (0, 1))], RankLayout(dp=2)) == {}


def test_a_thousand_nodes_of_one_group_are_served_in_seconds() -> None:
    members = [Member(f"n{i:04d}", tuple(range(8 * i, 8 * i + 8))) for i in range(1000)]
    begun_s = time.process_time()
    peers = choose_peers(members, RankLayout(tp=8, dp=125, pp=8))
    assert len(set(peers.values())) == 1000
    assert time.process_time() - begun_s < 20.0
