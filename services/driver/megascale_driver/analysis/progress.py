"""Detects a hang of a job whose processes are all alive, and the ranks that hold the others up.

A rank advances when it writes its status page: a step, a phase, a micro-batch, an operation entered
or completed. If no rank advances for the limit of its phase, the job hangs (:func:`no_progress`).

Note [Blame in a hang]. Operations are counted per communication group. A rank inside operation n
waits for the members of its group that have entered fewer. A rank for which others wait, and which
waits for no other rank, holds the job up (MegaScale section 5.2: in a hang the silent rank is the
culprit). :func:`waits` lists these waits for people; :func:`suspects` follows them to their ends.

A transfer between pipeline stages that was sent and has not arrived needs more care. Its receiver
is inside an operation that its peer has entered too, so it waits for no rank and looks like the
culprit, and its peer can look like one as well. Neither has to be broken; the transport between
them is the suspect. So :func:`culprits` names both ends, as a set, and no single node is blamed.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, get_args

from megascale_job.layout import GroupName, RankLayout

MAX_STEP_TIMES = 128
# With fewer step times than this the job's pace is unknown, and a step can take as long as the
# warm-up.
MIN_STEP_TIMES = 3
# If last writes are this close together, they do not show which rank stopped first.
SAME_TIME_S = 1.0
DONE = "DONE"
_GROUP_NAMES: tuple[GroupName, ...] = get_args(GroupName)


@dataclass(frozen=True, kw_only=True, slots=True)
class HangLimits:
    """Limits without progress after which a job counts as hung, in seconds, by phase.

    For a step the limit is max(``floor_s``, ``p99_factor`` x p99 of the step times).
    """

    floor_s: float = 60.0
    p99_factor: float = 5.0
    starting_s: float = 900.0
    warmup_s: float = 900.0
    compile_s: float = 1800.0
    evaluation_s: float = 900.0
    snapshot_s: float = 900.0
    restore_s: float = 900.0

    def __post_init__(self) -> None:
        if not 0 < self.floor_s < math.inf:
            raise ValueError(
                f"the hang floor must be a positive number of seconds, got {self.floor_s}"
            )

    def of(self, phase: str, step_times: Sequence[float]) -> float:
        """The limit for a rank in ``phase``, a name of megascale_common.node.status_page.Phase."""
        generous = {
            "STARTING": self.starting_s,
            "WARMUP": self.warmup_s,
            "COMPILE": self.compile_s,
            "EVAL": self.evaluation_s,
            "SNAPSHOT": self.snapshot_s,
            "RESTORE": self.restore_s,
        }
        if phase in generous:
            return max(generous[phase], self.floor_s)
        if len(step_times) < MIN_STEP_TIMES:
            return max(self.warmup_s, self.floor_s)
        return max(self.floor_s, self.p99_factor * p99(step_times))


@dataclass(frozen=True, slots=True)
class OperationCount:
    """Operations of one communication group that a rank has entered and completed."""

    group: str
    entered: int
    completed: int


@dataclass(frozen=True, slots=True)
class RankStatus:
    """A rank's status page in a heartbeat. ``age_s``: time since the rank last wrote it."""

    rank: int
    step: int
    phase: str
    age_s: float
    operations: tuple[OperationCount, ...] = ()


@dataclass(frozen=True, slots=True)
class Beat:
    """The job's ``ranks`` on a node in its newest heartbeat, which arrived at ``at_s``."""

    node: str
    at_s: float
    ranks: tuple[int, ...]
    statuses: tuple[RankStatus, ...]


class RankView(NamedTuple):
    """A rank at the last known write of its page; ``status`` is None if it cannot be read."""

    rank: int
    node: str
    written_at_s: float
    status: RankStatus | None

    def __str__(self) -> str:
        if self.status is None:
            return f"rank {self.rank} on node {self.node} has no readable status page"
        where = f"is in phase {self.status.phase} at step {self.status.step}"
        return f"rank {self.rank} on node {self.node} {where}"


# A RankView, or a plain tuple of its values: a verdict reads ten thousand of them within 50 ms.
RankRow = tuple[int, str, float, RankStatus | None]


@dataclass(frozen=True, slots=True)
class NoProgress:
    """Time without progress of any rank, and its limit; ``rows``: the ranks that are not done."""

    still_s: float
    limit_s: float
    rows: Sequence[RankRow]

    @property
    def hangs(self) -> bool:
        """True if the limit is reached."""
        return self.still_s >= self.limit_s


def add_step_time(times: tuple[float, ...], interval_s: float) -> tuple[float, ...]:
    """The step times with one more, cut to the newest MAX_STEP_TIMES."""
    return (*times, interval_s)[-MAX_STEP_TIMES:] if interval_s > 0 else times


def p99(times: Sequence[float]) -> float:
    """The 99th percentile by nearest rank; 0 for no times."""
    return sorted(times)[math.ceil(0.99 * len(times)) - 1] if times else 0.0


def no_progress(
    beats: Sequence[Beat], step_times: Sequence[float], since_s: float, limits: HangLimits
) -> NoProgress | None:
    """The lack of progress that the newest heartbeats of all nodes prove; None: they prove none.

    The time counts from ``since_s`` or the newest write of any rank, whichever is later, to the
    arrival of the oldest of these heartbeats. Progress after a node's newest heartbeat is unknown.
    So a node that stops sending heartbeats stops this clock, and the rule of silence decides about
    that node instead.
    """
    rows: list[RankRow] = []
    newest_s = since_s
    phases: set[str] = set()
    for beat in beats:
        node, at_s = beat.node, beat.at_s
        known = {status.rank: status for status in beat.statuses}
        if not known:
            return None
        for rank in beat.ranks:
            status = known.get(rank)
            if status is None:
                rows.append((rank, node, -math.inf, None))
                continue
            # The page's age is measured on the node and subtracted from the arrival on the driver's
            # clock, so the clocks of nodes and driver are never compared.
            written_at_s = at_s - status.age_s
            if written_at_s > newest_s:  # noqa: PLR1730 - max() would be a call for each rank
                newest_s = written_at_s
            if (phase := status.phase) != DONE:
                phases.add(phase)
                rows.append((rank, node, written_at_s, status))
    if not phases:
        return None
    still_s = max(0.0, min(beat.at_s for beat in beats) - newest_s)
    return NoProgress(still_s, max(limits.of(phase, step_times) for phase in phases), rows)


def suspects(rows: Sequence[RankRow], layout: RankLayout) -> tuple[RankView, ...]:
    """The ranks that hold the others up, the most likely first; see Note [Blame in a hang].

    The first of these groups that is not empty:

    1. Ranks without a readable page.
    2. Ranks for which others wait and which wait for no rank, unless these are all ranks.
    3. Ranks inside an operation that all members have entered. The operation itself hangs; the
       member that entered first has only waited longest.
    4. Among the ranks at the lowest step, those that stopped writing first: the rank whose device
       hangs is the first that completes nothing.
    """
    # Nothing is known about the operations of a rank without a readable page, and the waits of its
    # peers would lead to it anyway.
    silent = [row for row in rows if row[3] is None]
    if silent:
        return tuple(map(RankView._make, silent))
    pages = [(rank, status) for rank, _, _, status in rows if status is not None]
    hold_up, joined = _ends_of_waiting(pages, layout)
    found = [row for row in rows if hold_up[row[0]]]
    if not found:
        found = [row for row in rows if joined[row[0]]]
    elif len(found) == len(rows):
        found = []  # all ranks say nothing about any one of them
    if not found:
        lowest = min(status.step for _, status in pages)
        steps = dict(pages)
        found = [row for row in rows if steps[row[0]].step == lowest]
        oldest_s = min(row[2] for row in found)
        found = [row for row in found if row[2] <= oldest_s + SAME_TIME_S]
    return tuple(map(RankView._make, sorted(found, key=lambda row: (row[2], row[0]))))


def _ends_of_waiting(
    pages: Sequence[tuple[int, RankStatus]], layout: RankLayout
) -> tuple[bytearray, bytearray]:
    """Two flags per rank: it holds others up; it is inside an operation that hangs by itself.

    In a group, a rank inside operation n waits for the members that have entered fewer. So each
    member can be compared with two numbers of its group: the least count entered, and the highest
    operation that any member is inside. This is linear in ranks.

    Ranks with the first flag are the ends of the chains of waiting: inside no operation, or inside
    one that all members of its group have entered while others wait for it elsewhere. Ranks with
    the second flag are inside exactly one operation that all have entered, and no rank waits for
    them; a host that is ahead of its device would be inside several.
    """
    # Only groups with a member inside an operation: in all others, most of them, no rank waits.
    counts: dict[str, list[tuple[int, int, int]]] = {
        count.group: []
        for _, status in pages
        for count in status.operations
        if count.completed < count.entered
    }
    for rank, status in pages:
        for count in status.operations:
            if (group := count.group) in counts:
                counts[group].append((rank, count.entered, count.completed))
    size = layout.world_size
    waits, waited_for, inside = bytearray(size), bytearray(size), [0] * size
    for name, found in counts.items():
        # By group: the least count entered, and the highest operation that a member is inside.
        least, highest = [-1] * size, [0] * size
        keys = NamedGroups(name, layout).keys([rank for rank, _, _ in found])
        for key, (_, entered, completed) in zip(keys, found, strict=True):
            if not 0 <= least[key] <= entered:
                least[key] = entered
            if completed < entered and entered > highest[key]:
                highest[key] = entered
        for key, (rank, entered, completed) in zip(keys, found, strict=True):
            if completed < entered:
                inside[rank] += entered - completed
                if least[key] < entered:
                    waits[rank] = True
            if entered < highest[key]:
                waited_for[rank] = True
    hold_up, joined = bytearray(size), bytearray(size)
    for rank, _ in pages:
        if not waits[rank]:
            if waited_for[rank] or not inside[rank]:
                hold_up[rank] = True
            elif inside[rank] == 1:
                joined[rank] = True
    return hold_up, joined


class NamedGroups:
    """All groups with one name, each with a number as its key; group 0 has the lowest ranks.

    Pipeline edges are named by their stages, so here the ranks of a pipeline are a group. A name
    that the layout does not know is one group of all ranks.
    """

    __slots__ = ("_extent", "_stride")

    def __init__(self, name: str, layout: RankLayout) -> None:
        known = "pp" if name.startswith("pp") else name
        wanted: GroupName = next((each for each in _GROUP_NAMES if each == known), "world")
        self._stride, self._extent = layout.span(wanted)

    def key(self, rank: int) -> int:
        """The key of the rank's group."""
        return rank % self._stride + rank // self._extent * self._stride

    def keys(self, ranks: Sequence[int]) -> list[int]:
        """The keys of many ranks; faster than a call of :meth:`key` for each."""
        stride, extent = self._stride, self._extent
        return [rank % stride + rank // extent * stride for rank in ranks]


MAX_LISTED = 8  # listed ranks that one rank waits for; further ones are only counted


@dataclass(frozen=True, slots=True)
class Waits:
    """The groups of the operations that a rank is inside, and the ranks for which it waits.

    ``more``: how many ranks it waits for besides those in ``waits_for``.
    """

    inside: tuple[str, ...]
    waits_for: tuple[int, ...]
    more: int


def waits(views: Sequence[RankView], layout: RankLayout) -> dict[int, Waits]:
    """The waits of each rank with a readable page. Linear in ranks, plus sorting each group."""
    groups: dict[tuple[str, int], list[tuple[int, int]]] = {}
    names: dict[str, NamedGroups] = {}
    for view in views:
        for count in view.status.operations if view.status is not None else ():
            named = names.get(count.group)
            if named is None:
                named = names[count.group] = NamedGroups(count.group, layout)
            members = groups.setdefault((count.group, named.key(view.rank)), [])
            members.append((count.entered, view.rank))
    for members in groups.values():
        members.sort()
    return {view.rank: _of(view, groups, names) for view in views if view.status is not None}


def _of(
    view: RankView,
    groups: dict[tuple[str, int], list[tuple[int, int]]],
    names: dict[str, NamedGroups],
) -> Waits:
    assert view.status is not None
    inside, late, more = [], dict[int, None](), 0
    for count in view.status.operations:
        if count.completed >= count.entered:
            continue
        inside.append(count.group)
        members = groups[count.group, names[count.group].key(view.rank)]
        behind = bisect_left(members, (count.entered, -1))
        for _, rank in members[: min(behind, MAX_LISTED)]:
            late[rank] = None
        more += max(behind - MAX_LISTED, 0)
    listed = tuple(late)[:MAX_LISTED]
    return Waits(tuple(inside), listed, more + len(late) - len(listed))


# The trainer's names of pipeline edges. Activations go from the first stage to the second,
# gradients go back.
_EDGE = re.compile(r"pp(\d+)-(\d+)\.(activation|gradient)")


class LostTransfer(NamedTuple):
    """The newest transfer of an edge, which ``source`` has sent and ``target`` waits for."""

    payload: str
    source: RankView
    target: RankView

    def __str__(self) -> str:
        between = "the transport between its ranks"
        if self.source.node != self.target.node:
            between = f"the link between {self.source.node} and {self.target.node}"
        return (
            f"rank {self.source.rank} has sent {_ARTICLES[self.payload]} {self.payload} that rank "
            f"{self.target.rank} waits for: {between} is the suspect"
        )


_ARTICLES = {"activation": "an", "gradient": "a"}


class Culprits(NamedTuple):
    """The ranks that hold the others up, the most likely first, and transfers that were lost."""

    ranks: tuple[RankView, ...]
    lost: tuple[LostTransfer, ...]


def culprits(rows: Sequence[RankRow], layout: RankLayout) -> Culprits:
    """The ranks of :func:`suspects`, with both ends of every lost transfer, and these transfers."""
    found = suspects(rows, layout)
    # Most hangs have no lost transfer: do not build the index of all ranks for those.
    if not any(_edges(view) for view in found):
        return Culprits(found, ())
    by_rank = {row[0]: row for row in rows}
    lost = dict.fromkeys(
        transfer
        for view in found
        for count in _edges(view)
        if (transfer := _lost(view, count, by_rank, layout)) is not None
    )
    ends = [end for transfer in lost for end in (transfer.source, transfer.target)]
    return Culprits(tuple(dict.fromkeys((*found, *ends))), tuple(lost))


def _edges(view: RankView) -> list[OperationCount]:
    """The transfers between stages that the rank is inside."""
    return [
        count
        for count in (view.status.operations if view.status is not None else ())
        if count.completed < count.entered and _EDGE.fullmatch(count.group)
    ]


def _lost(
    view: RankView, count: OperationCount, by_rank: dict[int, RankRow], layout: RankLayout
) -> LostTransfer | None:
    """The transfer of an edge, if its receiver waits for one that its sender has sent."""
    edge = _EDGE.fullmatch(count.group)
    assert edge is not None
    low, high = int(edge[1]), int(edge[2])
    line = layout.members(view.rank, "pp")
    if max(low, high) >= len(line):
        return None
    first, second = (
        RankView._make(row) if (row := by_rank.get(line[stage])) is not None else None
        for stage in (low, high)
    )
    source, target = (first, second) if edge[3] == "activation" else (second, first)
    if source is None or target is None:
        return None
    sent, received = _count(source, count.group), _count(target, count.group)
    if sent is None or received is None or not received.completed < received.entered:
        return None
    return LostTransfer(edge[3], source, target) if received.entered <= sent.entered else None


def _count(view: RankView, group: str) -> OperationCount | None:
    operations = view.status.operations if view.status is not None else ()
    return next((count for count in operations if count.group == group), None)
