"""Whether a job whose processes all live still advances, and which ranks hold the others up.

A rank advances when it writes its status page: a step, a phase, a micro-batch, an operation entered
or completed. When no rank does for the limit of its phase, the job hangs. Who is to blame is read
off the operations: a rank inside one waits for the members of its group that have not entered it
yet; whoever is waited for, and waits for nobody, holds the job up (MegaScale section 5.2: in a hang
the silent rank is the culprit).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megascale_common.job.rank_layout import RankLayout

MAX_STEP_TIMES = 128
# With fewer step times than this, nothing is known of the job's pace, and a step may take as long
# as the warm-up.
MIN_STEP_TIMES = 3
# Last writes this close together tell nothing about who stopped first.
SAME_TIME_S = 1.0
DONE = "DONE"


@dataclass(frozen=True, kw_only=True, slots=True)
class HangLimits:
    """How long no rank may advance, in seconds. A step: max(``floor_s``, ``p99_factor`` x p99 of
    the step times).
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
        """The limit for a rank in ``phase`` (:class:`megascale_common.node.status_page.Phase`, by
        name).
        """
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
    """A rank's status page as a heartbeat carries it; ``age_s``: time since the rank last wrote it."""

    rank: int
    step: int
    phase: str
    age_s: float
    operations: tuple[OperationCount, ...] = ()


@dataclass(frozen=True, slots=True)
class Beat:
    """What the newest heartbeat of a node, at ``at_s``, says of the job's ``ranks`` there."""

    node: str
    at_s: float
    ranks: tuple[int, ...]
    statuses: tuple[RankStatus, ...]


@dataclass(frozen=True, slots=True)
class RankView:
    """Where a rank stood when it was last seen to write; ``status`` is None where its page cannot
    be read.
    """

    rank: int
    node: str
    written_at_s: float
    status: RankStatus | None

    def __str__(self) -> str:
        if self.status is None:
            return f"rank {self.rank} on node {self.node} has no status page that can be read"
        return f"rank {self.rank} on node {self.node} stands in phase {self.status.phase} at step {self.status.step}"


@dataclass(frozen=True, slots=True)
class Standing:
    """How long no rank is known to have advanced, against the limit; ``ranks`` are those that are
    not done.
    """

    still_s: float
    limit_s: float
    ranks: tuple[RankView, ...]

    @property
    def hangs(self) -> bool:
        """Whether the limit is reached."""
        return self.still_s >= self.limit_s


def add_step_time(times: tuple[float, ...], interval_s: float) -> tuple[float, ...]:
    """The sample with one more time per step; the oldest leave it."""
    return (*times, interval_s)[-MAX_STEP_TIMES:] if interval_s > 0 else times


def p99(times: Sequence[float]) -> float:
    """The 99th percentile by nearest rank; 0 of nothing."""
    return sorted(times)[math.ceil(0.99 * len(times)) - 1] if times else 0.0


def standing(
    beats: Sequence[Beat], step_times: Sequence[float], since_s: float, limits: HangLimits
) -> Standing | None:
    """What the beats of all nodes of a job prove; None when they prove nothing.

    Time counts from ``since_s`` or the newest write of any rank up to the oldest of the beats: what
    happened after a node was last heard of is not known, so heartbeats that stop, stop the clock
    with them.
    """
    views: list[RankView] = []
    newest_s = since_s
    for beat in beats:
        known = {status.rank: status for status in beat.statuses}
        if not known:
            return None
        for rank in beat.ranks:
            status = known.get(rank)
            written_at_s = beat.at_s - status.age_s if status is not None else -math.inf
            newest_s = max(newest_s, written_at_s)
            if status is None or status.phase != DONE:
                views.append(RankView(rank, beat.node, written_at_s, status))
    phases = {view.status.phase for view in views if view.status is not None}
    if not phases:
        return None
    still_s = max(0.0, min(beat.at_s for beat in beats) - newest_s)
    return Standing(still_s, max(limits.of(phase, step_times) for phase in phases), tuple(views))


def suspects(views: Sequence[RankView], layout: RankLayout) -> tuple[RankView, ...]:
    """The ranks that hold the others up, best guess first.

    Ranks without a readable page; else those that are waited for and wait for nobody; where the
    operations do not tell some ranks from the others, those that are behind in steps and were the
    first to stop writing.
    """
    silent = tuple(view for view in views if view.status is None)
    if silent:
        return silent
    guilty = _holding_up(views, layout)
    found = [view for view in views if view.rank in guilty]
    if not 0 < len(found) < len(views):
        lowest = min(view.status.step for view in views if view.status is not None)
        found = [view for view in views if view.status is not None and view.status.step == lowest]
        oldest_s = min(view.written_at_s for view in found)
        found = [view for view in found if view.written_at_s <= oldest_s + SAME_TIME_S]
    return tuple(sorted(found, key=lambda view: (view.written_at_s, view.rank)))


def _holding_up(views: Iterable[RankView], layout: RankLayout) -> set[int]:
    """Ends of the chains of waiting: ranks inside no operation, or waited for in one that all
    members have entered.
    """
    entered: dict[tuple[str, tuple[int, ...]], dict[int, int]] = {}
    inside: dict[int, list[tuple[tuple[str, tuple[int, ...]], int]]] = {}
    for view in views:
        inside[view.rank] = []
        for count in view.status.operations if view.status is not None else ():
            group = (count.group, _members(count.group, view.rank, layout))
            entered.setdefault(group, {})[view.rank] = count.entered
            if count.entered > count.completed:
                inside[view.rank].append((group, count.entered))
    waits: dict[int, set[int]] = {
        rank: {
            peer
            for group, number in places
            for peer, theirs in entered[group].items()
            if theirs < number
        }
        for rank, places in inside.items()
    }
    waited_for = set[int]().union(*waits.values())
    return {
        rank
        for rank, peers in waits.items()
        if not peers and (not inside[rank] or rank in waited_for)
    }


def _members(group: str, rank: int, layout: RankLayout) -> tuple[int, ...]:
    """Ranks among which the group's name is unique: the trainer names a pipeline edge by its
    stages.
    """
    if group == "tp":
        return layout.group_of(rank, ("tp",))
    if group == "dp":
        return layout.group_of(rank, ("dp",))
    return layout.group_of(rank, ("pp",)) if group.startswith("pp") else ()
