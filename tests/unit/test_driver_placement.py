"""Gang placement: the properties that every placement has, and the choices among several."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megascale_driver.placement.gang import Candidate, Part, place, replace_lost, spares


def node(name: str, count: int = 4, switch: str = "s0", kind: str = "cpu") -> Candidate:
    return Candidate(name, kind, tuple(range(count)), switch)


nodes = st.lists(
    st.tuples(
        st.integers(0, 9), st.sampled_from(["s0", "s1", "s2"]), st.sampled_from(["cpu", "cuda"])
    ),
    max_size=12,
).map(lambda items: [node(f"n{i}", *item) for i, item in enumerate(items)])


@given(candidates=nodes, tp=st.integers(1, 4), groups=st.integers(1, 8))
def test_a_placement_holds_every_rank_once_in_whole_groups_of_one_kind(
    candidates: list[Candidate], tp: int, groups: int
) -> None:
    by_name = {c.name: c for c in candidates}
    parts = place(tp * groups, tp, candidates)
    room = {
        kind: sum(len(c.devices) // tp * tp for c in candidates if c.kind == kind)
        for kind in ("cpu", "cuda")
    }
    assert (parts is None) == (max(room.values()) < tp * groups), (
        "it is placed exactly when there is room"
    )
    if parts is None:
        return
    assert [rank for part in parts for rank in part.ranks] == list(range(tp * groups))
    assert len({by_name[part.node].kind for part in parts}) == 1
    for part in parts:
        assert len(part.ranks) == len(part.devices) and len(part.ranks) % tp == 0
        assert set(part.devices) <= set(by_name[part.node].devices)
    switches = {by_name[part.node].switch for part in parts}
    kind = by_name[parts[0].node].kind
    alone = {
        s: sum(len(c.devices) // tp * tp for c in candidates if c.switch == s and c.kind == kind)
        for s in ("s0", "s1", "s2")
    }
    if max(alone.values()) >= tp * groups:
        assert len(switches) == 1, "one switch is enough"
    elif max(a + b for s, a in alone.items() for t, b in alone.items() if s != t) >= tp * groups:
        assert len(switches) == 2, "two switches are enough"


def test_one_switch_is_preferred_and_the_smallest_that_suffices() -> None:
    candidates = [
        node("a", switch="s0"),
        node("b", switch="s1"),
        node("c", switch="s1"),
        node("d", switch="s2"),
    ]
    candidates += [node("e", switch="s2"), node("f", switch="s2")]
    parts = place(8, 2, candidates)
    assert parts is not None and [part.node for part in parts] == ["b", "c"]


def test_a_small_job_takes_the_smallest_node_that_holds_it() -> None:
    parts = place(2, 2, [node("big", 8), node("small", 2)])
    assert parts == (Part("small", (0, 1), (0, 1)),)


def test_survivors_keep_their_ranks_and_named_spares_come_first() -> None:
    parts = place(8, 2, [node("n1"), node("n2")])
    assert parts is not None
    for lost, kept in (("n1", "n2"), ("n2", "n1")):
        survivors = {kept: node(kept)}
        again = replace_lost(parts, survivors, [node("spare", switch="s9")], [node("other")])
        assert again is not None
        ranks = {part.node: part.ranks for part in again}
        assert ranks[kept] == next(part.ranks for part in parts if part.node == kept)
        assert ranks["spare"] == next(part.ranks for part in parts if part.node == lost)


def test_nodes_too_small_or_of_another_kind_replace_no_lost_node() -> None:
    parts = place(8, 2, [node("n1"), node("n2")])
    assert parts is not None
    survivors = {"n1": node("n1")}
    assert replace_lost(parts, survivors, [node("s", 2)], [node("g", kind="cuda")]) is None
    assert spares(2, parts, [node("n1"), node("s", 2), node("z"), node("y")]) == ("y", "z")
