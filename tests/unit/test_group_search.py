"""The search for bad nodes by checks of groups: one, several, none, links, silence, skipped."""

from __future__ import annotations

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from megascale_driver.analysis.group_search import (
    Answer,
    Search,
    advance,
    begin,
    replayed,
    taken,
)

Pair = tuple[str, str]


def run(
    count: int,
    bad: set[str] = frozenset(),  # type: ignore[assignment]
    *,
    links: set[Pair] = frozenset(),  # type: ignore[assignment]
    silent: set[str] = frozenset(),  # type: ignore[assignment]
    skipped: set[str] = frozenset(),  # type: ignore[assignment]
    helpers: tuple[str, ...] = (),
    limit: int = 500,
) -> Search:
    """Search among ``count`` nodes of which some fail, until it is over or ``limit`` rounds ran."""
    names = [f"n{i}" for i in range(count)]
    search, rounds = begin(names, helpers), []
    for _ in range(limit):
        if search.over:
            break
        used = list(itertools.chain.from_iterable(search.running))
        assert len(used) == len(set(used)), "a node is in two groups of one round"
        answers: dict[str, Answer] = {}
        for group in search.running:
            assert len(group) > 1
            broken = bool((bad | silent) & set(group))
            broken |= any(set(link) <= set(group) for link in links)
            for name in group:
                if name in skipped:
                    answers[name] = Answer.SKIPPED
                elif name not in silent:
                    answers[name] = Answer.FAIL if broken else Answer.PASS
        rounds.append(taken(search, answers))
        search = advance(search, answers)
    assert replayed(names, helpers, rounds) == search, "what is stored leads to the same search"
    return search


def rounds_of_one(count: int) -> int:
    """The most rounds in which one bad node may be found."""
    return math.ceil(math.log2(count)) + 3


@given(st.integers(3, 300), st.data())
def test_one_bad_node_is_found_in_a_logarithm_of_rounds(count: int, data: st.DataObject) -> None:
    name = f"n{data.draw(st.integers(0, count - 1))}"
    search = run(count, {name})
    assert (search.over, search.bad, search.links, search.suspects) == (True, (name,), (), ())
    assert search.rounds <= rounds_of_one(count)


@given(st.integers(3, 300), st.data())
def test_a_node_that_never_answers_is_found_like_a_bad_one(count: int, data: st.DataObject) -> None:
    name = f"n{data.draw(st.integers(0, count - 1))}"
    search = run(count, silent={name})
    assert (search.bad, search.suspects) == ((name,), ())
    assert search.rounds <= rounds_of_one(count)


@given(st.integers(2, 300))
def test_nodes_that_are_all_good_pass_in_one_round(count: int) -> None:
    search = run(count)
    assert (search.over, search.rounds) == (True, 1)
    assert (search.bad, search.links, search.suspects) == ((), (), ())


@given(st.integers(6, 120), st.data())
def test_several_bad_nodes_are_found_and_no_good_one(count: int, data: st.DataObject) -> None:
    most = (count - 2) // 2
    indices = data.draw(st.sets(st.integers(0, count - 1), min_size=2, max_size=most))
    search = run(count, {f"n{i}" for i in indices})
    assert (search.over, search.suspects, search.links) == (True, (), ())
    assert set(search.bad) == {f"n{i}" for i in indices}


@given(st.integers(4, 200), st.data())
def test_a_bad_link_is_named_and_neither_of_its_nodes(count: int, data: st.DataObject) -> None:
    ends = data.draw(st.lists(st.integers(0, count - 1), min_size=2, max_size=2, unique=True))
    link = tuple(sorted(f"n{i}" for i in ends))
    search = run(count, links={(link[0], link[1])})
    assert (search.over, search.bad, search.links, search.suspects) == (True, (), (link,), ())
    assert search.rounds <= 3 * rounds_of_one(count)


@given(st.integers(4, 60), st.data())
def test_nodes_that_cannot_be_checked_are_left_out(count: int, data: st.DataObject) -> None:
    out = data.draw(st.sets(st.integers(0, count - 1), max_size=count - 3))
    rest = [i for i in range(count) if i not in out]
    bad = data.draw(st.sampled_from(rest))
    search = run(count, {f"n{bad}"}, skipped={f"n{i}" for i in out})
    assert search.over and set(search.left_out) == {f"n{i}" for i in out}
    assert (search.bad, search.suspects) == ((f"n{bad}",), ())


@given(st.integers(2, 60), st.data())
def test_a_search_always_ends_and_never_names_a_good_node(count: int, data: st.DataObject) -> None:
    some = st.sets(st.integers(0, count - 1))
    bad = {f"n{i}" for i in data.draw(some)}
    skipped = {f"n{i}" for i in data.draw(some)} - bad
    search = run(count, bad, skipped=skipped, limit=4 * count + 40)
    assert search.over
    assert set(search.bad) <= bad
    assert search.links == ()
    left = bad - set(search.bad) - set(search.suspects)
    assert not left or len(set(f"n{i}" for i in range(count)) - skipped) < 2


def test_of_two_nodes_neither_is_named_without_a_third() -> None:
    search = run(2, {"n1"})
    assert (search.over, search.bad, search.suspects) == (True, (), ("n0", "n1"))


def test_a_node_that_stands_by_decides_between_two() -> None:
    search = run(2, {"n1"}, helpers=("spare",))
    assert (search.bad, search.suspects) == (("n1",), ())
    assert search.rounds <= 4


def test_a_helper_that_is_bad_itself_is_named_and_the_good_nodes_are_not() -> None:
    search = run(3, {"n1", "spare"}, helpers=("spare",))
    assert set(search.bad) <= {"n1", "spare"} and "n1" in search.bad


def test_a_search_that_is_given_up_names_the_group_that_shares_the_culprit() -> None:
    search = run(64, {"n17"}, limit=3)
    assert not search.over and search.bad == ()
    assert "n17" in search.suspects and len(search.suspects) <= 16
