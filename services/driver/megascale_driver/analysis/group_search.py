"""Search by bisection for the node that fails when nodes compute together.

A pure state machine. Each round checks disjoint groups at the same time: the nodes of a group
all-reduce a known payload. A group that passes has nodes that are good with each other. A group
that fails is halved until two or three suspects are left, and each suspect is paired with good
nodes. So one bad node among N is found in at most log2(N) + 3 rounds (ByteRobust also halves its
groups).

- A node is bad if it fails with good partners. Two partners are required if there are two, so that
  one broken link does not look like a broken node.
- Two good nodes that fail together have a bad link. If two halves pass separately and fail
  together, they are crossed until the pair is found.
- If no group passes, suspects and ``helpers`` (stand-by nodes) are paired in turn.
- If the search is stopped early, the culprit is one of :attr:`Search.suspects`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

SMALL = 3  # a failed group of this size is not halved: its nodes are paired with good ones
PARTNERS = 2  # good nodes with which a node must have failed to count as bad

Pair = tuple[str, str]


class Answer(enum.StrEnum):
    """Answers of a node to the check of a group.

    SILENT: no answer. SKIPPED: the answer says nothing about the node, which is then left out.
    """

    PASS = "PASS"
    FAIL = "FAIL"
    SILENT = "SILENT"
    SKIPPED = "SKIPPED"


class Kind(enum.StrEnum):
    """States of a task: what is known about its groups, and which groups are checked next."""

    WHOLE = "WHOLE"  # nothing yet: check it
    SPLIT = "SPLIT"  # it fails: check its halves
    CROSS = "CROSS"  # the parts pass alone and fail together: check quarters of both
    PAIRS = "PAIRS"  # it fails, and each node is good: check its pairs


@dataclass(frozen=True, slots=True)
class Task:
    """One group, or two parts of one, that is searched further."""

    kind: Kind
    first: tuple[str, ...]
    second: tuple[str, ...] = ()
    turn: int = 0

    @property
    def nodes(self) -> tuple[str, ...]:
        """All nodes of the task."""
        return (*self.first, *self.second)

    def groups(self) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
        """The groups of the next round, each as the two parts that it joins."""
        if self.kind is Kind.WHOLE:
            return [(self.first, ())]
        a, b = halves(self.first)
        if self.kind is Kind.SPLIT:
            return [(a, ()), (b, ())]
        if self.kind is Kind.PAIRS:
            one, other = pairs(self.first)[self.turn]
            return [((one,), (other,))]
        c, d = halves(self.second)
        crossed = [(a, d), (b, c)] if self.turn else [(a, c), (b, d)]
        return [(left, right) for left, right in crossed if left and right]


@dataclass(frozen=True, slots=True)
class Search:
    """A search. ``running``: the groups of the present round; without any the search is over."""

    running: tuple[tuple[str, ...], ...] = ()
    rounds: int = 1
    tasks: tuple[Task, ...] = ()
    # Suspects that are paired with good nodes, or with each other while none is known.
    pool: tuple[str, ...] = ()
    helpers: tuple[str, ...] = ()
    good: frozenset[str] = frozenset()
    bad: tuple[str, ...] = ()
    links: tuple[Pair, ...] = ()
    left_out: tuple[str, ...] = ()
    # By node: the partners with which it has failed as a pair.
    failed_with: Mapping[str, frozenset[str]] = field(default_factory=dict)
    # Failed groups of at most SMALL nodes: if none of them is bad, a link between them is.
    small: tuple[tuple[str, ...], ...] = ()

    @property
    def over(self) -> bool:
        """True if there is nothing left to check."""
        return not self.running

    @property
    def suspects(self) -> tuple[str, ...]:
        """The nodes, without helpers, among which a culprit is that was not found."""
        names = dict.fromkeys(
            [*(n for task in self.tasks if task.kind is not Kind.WHOLE for n in task.nodes)]
            + [n for n in self.pool if n not in self.helpers]
        )
        return tuple(names)


@dataclass(frozen=True, slots=True)
class Taken:
    """The result of one round: numbers of the failed groups, and nodes that skipped the check."""

    failed: tuple[int, ...] = ()
    skipped: tuple[str, ...] = ()


def taken(search: Search, answers: Mapping[str, Answer]) -> Taken:
    """The part of the answers to the running groups that :func:`advance` uses."""
    skipped = {name for name, answer in answers.items() if answer is Answer.SKIPPED}
    failed = (
        number
        for number, group in enumerate(search.running)
        if any(answers.get(name) is not Answer.PASS for name in group if name not in skipped)
    )
    return Taken(tuple(failed), tuple(sorted(skipped)))


def replayed(nodes: Sequence[str], helpers: Sequence[str], rounds: Sequence[Taken]) -> Search:
    """The search after these rounds: equal to the search that took them from answers."""
    search = begin(nodes, helpers)
    for each in rounds:
        answers = {
            name: Answer.FAIL if number in each.failed else Answer.PASS
            for number, group in enumerate(search.running)
            for name in group
        }
        search = advance(search, answers | dict.fromkeys(each.skipped, Answer.SKIPPED))
    return search


def begin(nodes: Sequence[str], helpers: Sequence[str] = ()) -> Search:
    """Start a search among two or more nodes, ordered so that neighbours are close together."""
    whole = Task(Kind.WHOLE, tuple(nodes))
    return Search(running=(whole.first,), tasks=(whole,), helpers=tuple(helpers))


def advance(search: Search, answers: Mapping[str, Answer]) -> Search:
    """The search after a round; a node of a running group without an answer counts as SILENT."""
    if search.over:
        return search
    draft = _Round(search, answers)
    for task in search.tasks:
        draft.take(task)
    for pair in _pool_pairs(search):
        draft.paired(pair)
    return _next(draft.result())


def halves(nodes: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Two halves; the first is larger if the number is odd."""
    middle = (len(nodes) + 1) // 2
    return nodes[:middle], nodes[middle:]


def pairs(nodes: tuple[str, ...]) -> list[Pair]:
    """All pairs of the nodes."""
    return [(a, b) for i, a in enumerate(nodes) for b in nodes[i + 1 :]]


class _Round:
    """The next search in progress, built from one round's answers."""

    def __init__(self, search: Search, answers: Mapping[str, Answer]) -> None:
        self._answers = answers
        self._search = search
        self.tasks: list[Task] = []
        self.pool = list(search.pool)
        self.good = set(search.good)
        self.small = list(search.small)
        self.links = list(search.links)
        self.failed_with = dict(search.failed_with)
        running = {name for group in search.running for name in group}
        self.skipped = {name for name in running if answers.get(name) is Answer.SKIPPED}

    def _passed(self, nodes: Sequence[str]) -> bool:
        """True if the group passed, which makes its nodes good if there is more than one."""
        passed = all(self._answers.get(name) is Answer.PASS for name in nodes)
        if passed and len(nodes) > 1:
            self.good.update(nodes)
        elif len(nodes) == 2:
            # Only a failed pair names its partners; in a larger group anyone can be the culprit.
            for one, other in (nodes, nodes[::-1]):
                self.failed_with[one] = self.failed_with.get(one, frozenset()) | {other}
        return passed

    def take(self, task: Task) -> None:
        """Add the tasks that follow from the answers to a task's groups."""
        groups = task.groups()
        if any(name in self.skipped for a, b in groups for name in (*a, *b)):
            self._repeat(task)
            return
        passed = [self._passed((*a, *b)) for a, b in groups]
        if task.kind is Kind.WHOLE:
            if not passed[0]:
                self._failed(task.first)
        elif task.kind is Kind.SPLIT:
            # If both halves pass, they fail only together: the fault is a link between them.
            if all(passed):
                self.tasks.append(Task(Kind.CROSS, groups[0][0], groups[1][0]))
            for (group, _), good in zip(groups, passed, strict=True):
                if not good:
                    self._failed(group)
        else:
            self._crossed(task, [g for g, good in zip(groups, passed, strict=True) if not good])

    def _failed(self, nodes: tuple[str, ...]) -> None:
        if len(nodes) > SMALL:
            self.tasks.append(Task(Kind.SPLIT, nodes))
            return
        self.small.append(nodes)
        self.pool += nodes

    def _crossed(self, task: Task, failed: list[tuple[tuple[str, ...], tuple[str, ...]]]) -> None:
        for a, b in failed:
            if len(a) == len(b) == 1:
                self.links.append((a[0], b[0]))
            else:
                self.tasks.append(Task(Kind.CROSS, a, b))
        # A crossing takes two turns, since a quarter can be in one running group only; pairs are
        # checked one per turn for the same reason.
        turns = len(pairs(task.first)) if task.kind is Kind.PAIRS else 2
        if not failed and task.turn + 1 < turns:
            self.tasks.append(replace(task, turn=task.turn + 1))

    def _repeat(self, task: Task) -> None:
        """Repeat a task without the nodes that skipped the check."""
        first = tuple(name for name in task.first if name not in self.skipped)
        second = tuple(name for name in task.second if name not in self.skipped)
        if task.kind is Kind.CROSS:
            if first and second:
                self.tasks.append(Task(Kind.CROSS, first, second))
        elif task.kind is Kind.SPLIT and 1 <= len(first) <= SMALL:
            self._failed(first)
        elif len(first) > 1:
            self.tasks.append(Task(task.kind, first))

    def paired(self, pair: Pair) -> None:
        """Take the answer of a pair of suspects from the pool."""
        if not self.skipped.intersection(pair):
            self._passed(pair)

    def result(self) -> Search:
        """The search with this round's results."""
        # A node that passed in any group is good, even if it also failed as one of a pair: then the
        # partner or the link is to blame.
        good, pool = frozenset(self.good), dict.fromkeys(self.pool)
        pool = {name: None for name in pool if name not in good and name not in self.skipped}
        needed = min(PARTNERS, len(good))
        bad = [
            name
            for name in pool
            if needed and len(self.failed_with.get(name, frozenset()) & good) >= needed
        ]
        return replace(
            self._search,
            running=(),
            tasks=tuple(self.tasks),
            pool=tuple(name for name in pool if name not in bad),
            good=good,
            bad=(*self._search.bad, *bad),
            links=tuple(self.links),
            left_out=(*self._search.left_out, *sorted(self.skipped)),
            failed_with=self.failed_with,
            small=tuple(self.small),
        )


def _next(search: Search) -> Search:
    """Choose the groups of the next round."""
    search = _settle_small(search)
    # No good node is known and no group is left that could show one: borrow stand-by nodes.
    if search.pool and not search.good and not search.tasks:
        fresh = [n for n in search.helpers if n not in search.pool and n not in search.left_out]
        search = replace(search, pool=(*search.pool, *fresh))
    groups = [(*a, *b) for task in search.tasks for a, b in task.groups()]
    running = (*groups, *_pool_pairs(search))
    if not running:
        return search
    return replace(search, running=tuple(running), rounds=search.rounds + 1)


def _settle_small(search: Search) -> Search:
    """Find bad links: in small failed groups of good nodes, and between good nodes of a pair."""
    links, tasks, left = list(search.links), list(search.tasks), []
    for group in search.small:
        open_ = any(name in search.pool for name in group)
        if open_:
            left.append(group)
        elif len(group) == SMALL and all(name in search.good for name in group):
            tasks.append(Task(Kind.PAIRS, group))
    for one, partners in search.failed_with.items():
        for other in sorted(partners):
            if one < other and {one, other} <= search.good and (one, other) not in links:
                links.append((one, other))
    known = dict.fromkeys((min(pair), max(pair)) for pair in links)
    return replace(search, links=tuple(known), tasks=tuple(tasks), small=tuple(left))


def _pool_pairs(search: Search) -> list[Pair]:
    """The next pairs of suspects: with free good nodes if any is known, else with each other.

    It depends only on the search, and gives the same pairs before a round, to run them, and after
    it, to read the answers.
    """
    busy = {name for task in search.tasks for a, b in task.groups() for name in (*a, *b)}
    partners = [*sorted(search.good - busy)] if search.good else [*search.pool]
    found: list[Pair] = []
    used: set[str] = set()
    for suspect in search.pool:
        if suspect in used:
            continue
        tried = search.failed_with.get(suspect, frozenset())
        free = (p for p in partners if p != suspect and p not in used and p not in tried)
        partner = next(free, None)
        if partner is not None:
            found.append((suspect, partner))
            used.update((suspect, partner))
    return found
