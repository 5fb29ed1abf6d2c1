"""Whether a job with all processes alive still advances, and which ranks hold the others up.

A rank advances when it writes its status page: a step, a phase, a micro-batch, an operation entered
or completed. When no rank does for the limit of its phase, the job hangs. The operations show which
rank is to blame: a rank inside one waits for the members of its group that have not entered it yet.
A rank for which others wait, and which waits for none itself, holds the job up (MegaScale section
5.2: in a hang the silent rank is the culprit).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megascale_common.job.rank_layout import RankLayout

MAX_STEP_TIMES = 128
# With fewer step times than this the job's pace is unknown, and a step may take as long as the
# warm-up.
MIN_STEP_TIMES = 3
# Last writes this close together do not show which rank stopped first.
SAME_TIME_S = 1.0
DONE = "DONE"


@dataclass(frozen=True, kw_only=True, slots=True)
class HangLimits:
    """How long no rank may advance before the job counts as hung, in seconds, by phase.

    For a step it is max(``floor_s``, ``p99_factor`` x p99 of the step times).
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
    """The job's ``ranks`` on a node by its newest heartbeat, which arrived at ``at_s``."""

    node: str
    at_s: float
    ranks: tuple[int, ...]
    statuses: tuple[RankStatus, ...]


class RankView(NamedTuple):
    """A rank at its last known write; ``status`` is None if its page cannot be read."""

    rank: int
    node: str
    written_at_s: float
    status: RankStatus | None

    def __str__(self) -> str:
        if self.status is None:
            return f"rank {self.rank} on node {self.node} has no readable status page"
        where = f"is in phase {self.status.phase} at step {self.status.step}"
        return f"rank {self.rank} on node {self.node} {where}"


@dataclass(frozen=True, slots=True)
class Standing:
    """For how long no rank has advanced, and the limit; ``ranks`` are those that are not done."""

    still_s: float
    limit_s: float
    ranks: tuple[RankView, ...]

    @property
    def hangs(self) -> bool:
        """Whether the limit is reached."""
        return self.still_s >= self.limit_s


def add_step_time(times: tuple[float, ...], interval_s: float) -> tuple[float, ...]:
    """The sample with one more time per step, cut to the newest MAX_STEP_TIMES."""
    return (*times, interval_s)[-MAX_STEP_TIMES:] if interval_s > 0 else times


def p99(times: Sequence[float]) -> float:
    """The 99th percentile by nearest rank; 0 of an empty sample."""
    return sorted(times)[math.ceil(0.99 * len(times)) - 1] if times else 0.0


def standing(
    beats: Sequence[Beat], step_times: Sequence[float], since_s: float, limits: HangLimits
) -> Standing | None:
    """What the newest heartbeats of all nodes of a job prove; None if they prove nothing.

    Time counts from ``since_s`` or the newest write of any rank, whichever is later, to the oldest
    of the heartbeats. What a node's ranks did after its newest heartbeat is not known, so a node
    that stops sending them stops this clock, and silence decides about it instead.
    """
    views: list[RankView] = []
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
                views.append(RankView(rank, node, -math.inf, None))
                continue
            # The page's age, measured on the node, against the arrival of the heartbeat: the clocks
            # of nodes and driver are never compared.
            written_at_s = at_s - status.age_s
            newest_s = max(newest_s, written_at_s)
            if status.phase != DONE:
                phases.add(status.phase)
                views.append(RankView(rank, node, written_at_s, status))
    if not phases:
        return None
    still_s = max(0.0, min(beat.at_s for beat in beats) - newest_s)
    return Standing(still_s, max(limits.of(phase, step_times) for phase in phases), tuple(views))


def suspects(views: Sequence[RankView], layout: RankLayout) -> tuple[RankView, ...]:
    """The ranks that hold the others up, the most likely first.

    These are the ranks without a readable page; if there are none, those for which others wait and
    which wait for none; if there are none either, all whose host is inside an operation that all
    members have entered: it hangs itself, and who entered first has only waited longest. If the
    operations do not single out some of the ranks, those at the lowest step that stopped writing
    first: a device that hangs is the first to complete nothing.
    """
    silent = tuple(view for view in views if view.status is None)
    if silent:
        return silent
    stands = _standing(views, layout)
    found = [view for view in views if stands[view.rank] is _Stands.HOLDS_UP]
    if not found:
        found = [view for view in views if stands[view.rank] is _Stands.JOINED]
    elif len(found) == len(views):
        found = []
    if not found:
        lowest = min(view.status.step for view in views if view.status is not None)
        found = [view for view in views if view.status is not None and view.status.step == lowest]
        oldest_s = min(view.written_at_s for view in found)
        found = [view for view in found if view.written_at_s <= oldest_s + SAME_TIME_S]
    return tuple(sorted(found, key=lambda view: (view.written_at_s, view.rank)))


class _Stands(enum.Enum):
    """How a rank stands in the chains of waiting.

    HOLDS_UP is the end of one: a rank inside no operation, or inside one that all members of its
    group have entered, if others wait for it elsewhere. JOINED is in such an operation alone, and
    nobody waits for it; a host that is ahead of its device would be in several.
    """

    HOLDS_UP = enum.auto()
    JOINED = enum.auto()
    OTHER = enum.auto()


def _standing(views: Sequence[RankView], layout: RankLayout) -> dict[int, _Stands]:
    """How each rank stands.

    In a group, a rank inside operation n waits for the members that have entered fewer. So the
    least count, and the highest operation that somebody is inside of, show for each member by
    itself whether it waits and whether it is waited for: linear in ranks.
    """
    # Of the names that nobody is inside of an operation of, no rank waits: most of them.
    names = {
        count.group
        for view in views
        if view.status is not None
        for count in view.status.operations
        if count.completed < count.entered
    }
    groups = {name: NamedGroups(name, layout) for name in names}
    for rank, _, _, status in views:
        for count in status.operations if status is not None else ():
            if (named := groups.get(count.group)) is None:
                continue
            key, entered = named.key(rank), count.entered
            if entered < named.least.get(key, math.inf):
                named.least[key] = entered
            if count.completed < entered and entered > named.highest.get(key, 0):
                named.highest[key] = entered
    return {view.rank: _stands(view, groups) for view in views}


class NamedGroups:
    """All groups of one name, each under a key: the coordinates that its members share.

    Pipeline edges are named by their stages, so the ranks of a pipeline are a group here.
    """

    __slots__ = ("_inner", "_outer", "highest", "least")

    def __init__(self, name: str, layout: RankLayout) -> None:
        self.least: dict[int, int] = {}  # operations entered
        self.highest: dict[int, int] = {}  # operation that a member is inside of
        self._inner, self._outer = 1, layout.world_size
        if name == "tp":
            self._outer = layout.tp
        elif name == "dp":
            self._inner = layout.tp * layout.cp
            self._outer = self._inner * layout.dp
        elif name.startswith("pp"):
            self._inner = layout.tp * layout.cp * layout.dp

    def key(self, rank: int) -> int:
        """The same number for all members of a group."""
        return rank % self._inner + rank // self._outer * self._inner


def _stands(view: RankView, groups: dict[str, NamedGroups]) -> _Stands:
    rank = view.rank
    waited_for, inside = False, 0
    for count in view.status.operations if view.status is not None else ():
        if (named := groups.get(count.group)) is None:
            continue
        key, entered = named.key(rank), count.entered
        if count.completed < entered:
            if named.least[key] < entered:
                return _Stands.OTHER
            inside += entered - count.completed
        if entered < named.highest.get(key, 0):
            waited_for = True
    if waited_for or not inside:
        return _Stands.HOLDS_UP
    return _Stands.JOINED if inside == 1 else _Stands.OTHER
