"""One attempt of a job: where it runs, what was ordered for it, how far it came, what broke it.

A job keeps its newest attempt after it has ended, because the next one is placed near it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megascale_driver.analysis.group_search import Answer, Search, Taken
from megascale_driver.core.values.overlay import changed_keys
from megascale_driver.core.values.stored_fields import RIDES, VOLATILE, added_members, stored_as
from megascale_job.restore import RestorePlan
from megascale_planner.placement_cost import Score


@dataclass(frozen=True, slots=True)
class ReplicaSource:
    """The node that keeps the replica that ``rank`` restores, and its replica server."""

    rank: int
    node: str
    endpoint: str


@dataclass(frozen=True, slots=True)
class NodeReplicaOrders:
    """One node's part: the replica server for its snapshots, and the sources of its ranks."""

    target: str = ""
    sources: tuple[ReplicaSource, ...] = ()


@dataclass(frozen=True, slots=True)
class FailedCopies:
    """Step of the attempt's newest snapshot without a replica, and the number of such snapshots."""

    step: int = 0
    count: int = 0


@dataclass(frozen=True, slots=True)
class ReplicaOrders:
    """``peers``: the node that keeps each node's replicas; ``targets``: its replica server.

    ``sources``: the ranks that restore from a replica.
    """

    peers: Mapping[str, str] = field(default_factory=dict)
    targets: Mapping[str, str] = field(default_factory=dict)
    sources: tuple[ReplicaSource, ...] = ()

    def of(self, node: str, ranks: Collection[int]) -> NodeReplicaOrders:
        """The part of ``node``, which has ``ranks``."""
        sources = tuple(source for source in self.sources if source.rank in ranks)
        return NodeReplicaOrders(self.targets.get(node, ""), sources)


class FaultKind(enum.StrEnum):
    """The kind of a fault that broke an attempt.

    WORKER_SYMPTOM is the error of a rank that lost its peer: the cause is on another rank.
    JOB_TOO_BIG and BAD_JOB are facts about the job, on a healthy node. DEADLINE names a node only
    if no other node was late.
    """

    NODE_DEAD = "NODE_DEAD"
    KERNEL_FAULT = "KERNEL_FAULT"
    NODE_RESTARTED = "NODE_RESTARTED"
    NODE_EVICTED = "NODE_EVICTED"
    CHECK_FAILED = "CHECK_FAILED"
    JOB_TOO_BIG = "JOB_TOO_BIG"
    BAD_JOB = "BAD_JOB"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    WORKER_EXITED = "WORKER_EXITED"
    WORKER_SYMPTOM = "WORKER_SYMPTOM"
    CHECKPOINT_CORRUPT = "CHECKPOINT_CORRUPT"
    DEADLINE = "DEADLINE"
    HANG = "HANG"
    OPEN_FAILED = "OPEN_FAILED"


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that broke the current attempt. ``hard``: a fact, not an inference."""

    # Earlier builds read KERNEL_FAULT as WORKER_EXITED: they evaluate the kernel logs only when the
    # attempt has ended.
    kind: FaultKind = field(
        metadata=added_members({FaultKind.KERNEL_FAULT: FaultKind.WORKER_EXITED})
    )
    node: str
    at_s: float
    message: str
    rank: int = -1
    hard: bool = True


class LeaveKind(enum.StrEnum):
    """Why a job is ordered to leave its nodes.

    SUSPEND: until it is resumed. PREEMPT: a job of higher priority needs them. RESTART: it begins a
    new attempt. DRAIN: one of its nodes is emptied.
    """

    SUSPEND = "SUSPEND"
    PREEMPT = "PREEMPT"
    RESTART = "RESTART"
    DRAIN = "DRAIN"


@dataclass(frozen=True, slots=True)
class Leaving:
    """An order to save and leave the nodes; a PREEMPT makes room for job ``beside``.

    ``nodes`` are emptied: they get no work when the attempt has stopped.
    """

    kind: LeaveKind
    reason: str
    actor: str
    since_s: float
    beside: str = ""
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeSlot:
    """One node's slot in an attempt: ``ranks[i]`` runs on the node's device ``devices[i]``.

    The slot is bound to one incarnation of the node. A later incarnation runs nothing of it.
    """

    node: str
    ranks: tuple[int, ...]
    devices: tuple[int, ...]
    incarnation: str = ""


class _SlotIndex:
    """Index of an attempt's slots by node, built on first use, and where scans ended last.

    Both only save time: no answer depends on them, so the states that share them remain values.
    """

    __slots__ = ("_at", "_by_node", "_sound", "slots")

    def __init__(self, slots: tuple[NodeSlot, ...]) -> None:
        self.slots = slots
        self._by_node: Mapping[str, tuple[int, NodeSlot]] | None = None
        self._at = 0
        self._sound: tuple[int, Mapping[str, Any]] | None = None

    def of(self, node: str) -> NodeSlot | None:
        found = self._index().get(node)
        return found[1] if found is not None else None

    def note_sound(self, number: int, nodes: Mapping[str, Any]) -> None:
        self._sound = number, nodes

    def doubtful(self, number: int, nodes: Mapping[str, Any]) -> Sequence[NodeSlot]:
        # The map of nodes that a scan found sound is the memory: only nodes that differ from it are
        # in doubt (Note [Overlay maps]).
        if self._sound is None or self._sound[0] != number:
            return self.slots
        index = self._index()
        changed = changed_keys(self._sound[1], nodes)
        found = sorted(index[name] for name in changed if name in index)
        return [slot for _, slot in found]

    def _index(self) -> Mapping[str, tuple[int, NodeSlot]]:
        if self._by_node is None:
            self._by_node = {slot.node: (at, slot) for at, slot in enumerate(self.slots)}
        return self._by_node

    def all(self, holds: Callable[[NodeSlot], bool]) -> bool:
        # For most events the slot that failed last fails again, so the scan begins there. When it
        # passes, the scan continues behind it: a phase that n nodes enter one by one costs n steps
        # in all, not n for each event.
        slots, first = self.slots, self._at
        for at in range(first, first + len(slots)):
            index = self._at = at % len(slots)  # threads may scan at the same time
            if not holds(slots[index]):
                return False
        return True


@dataclass(frozen=True, slots=True)
class FailureCount:
    """Faults that ended attempts, and the hours that devices trained, over the fleet's jobs."""

    count: int = 0
    device_hours: float = 0.0


@dataclass(frozen=True, slots=True)
class Searching:
    """The search for an unnamed culprit, with the answers of its current round.

    ``missing``: the groups of the round that have not answered. ``details``: the newest answer of
    each node in words. See :mod:`megascale_driver.core.recovery.search`.
    """

    search: Search
    begun_at_s: float
    round_at_s: float
    missing: frozenset[int] = frozenset()
    answers: Mapping[str, Answer] = field(default_factory=dict)
    details: Mapping[str, str] = field(default_factory=dict)
    over: bool = False


@dataclass(frozen=True, slots=True)
class SearchLog:
    """Stored for the next leader, which continues the search: members, and the rounds so far."""

    nodes: tuple[str, ...] = ()
    helpers: tuple[str, ...] = ()
    begun_at_s: float = 0.0
    rounds: tuple[Taken, ...] = ()


@dataclass(frozen=True, slots=True)
class Placement:
    """Why an attempt runs on its nodes, and the network cost of that placement.

    ``order``: which neighbours are kept together; "" where there was no choice. ``score``: None
    where no switches are known.
    """

    why: str = ""
    order: str = ""
    score: Score | None = None


@dataclass(frozen=True, slots=True)
class PlanVerdict:
    """The term by which an attempt is slower than planned, as logged; "" if it is not slower.

    ``changes``: number of lines in the log about it.
    """

    slower_by: str = ""
    sentence: str = ""
    changes: int = 0


@dataclass(frozen=True, slots=True)
class TrafficSeen:
    """Traffic between the nodes of an attempt, as far as the log has it.

    ``unseen``: why it is not watched; "" if it is. ``stood_since_s``: time of the newest step
    before the standstill that was logged last; 0 without one. ``changes``: logged declines and
    fluctuations.
    """

    unseen: str = ""
    stood_since_s: float = 0.0
    changes: int = 0


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt; ``number`` counts from 1, and is 0 for a job that was never placed."""

    number: int = field(default=0, metadata=stored_as("attempt"))
    slots: tuple[NodeSlot, ...] = ()
    placement: Placement = field(default_factory=Placement)
    store_endpoint: str = ""
    committer_endpoint: str = ""
    # The plan that the committer chose; None before it has.
    restore: RestorePlan | None = None
    replica_orders: ReplicaOrders = field(default_factory=ReplicaOrders)
    # The fleet's at the start of the attempt, for jobs with checkpoint.interval or recovery.spares
    # auto.
    failure_count: FailureCount = field(default_factory=FailureCount)
    faults: tuple[Fault, ...] = ()
    # With `recovery.spares: auto`: the shortage that was logged last.
    spares_short: int = 0
    # Kept after the attempt has stopped for this order: the job then holds none of its nodes.
    leaving: Leaving | None = None
    # It could not save when it was last asked to, so it is not displaced before this time.
    stays_until_s: float = 0.0
    # Newest step that is known to be completed.
    step: int = field(default=0, metadata=RIDES)
    last_step_at_s: float = field(default=0.0, metadata=VOLATILE)
    # Time per step between the two newest step records; 0 before there are two.
    step_interval_s: float = field(default=0.0, metadata=VOLATILE)
    open_asked: bool = field(default=False, metadata=VOLATILE)
    open_failures: int = field(default=0, metadata=VOLATILE)
    open_not_before_s: float = field(default=0.0, metadata=VOLATILE)
    # When the committer was first called; 0 before.
    open_since_s: float = field(default=0.0, metadata=VOLATILE)
    # When all nodes had finished while the commit of the last step was still unknown; else 0.
    finished_at_s: float = field(default=0.0, metadata=VOLATILE)
    # The newest skipped snapshot, and the number of them.
    skipped_step: int = field(default=0, metadata=VOLATILE)
    skipped_snapshots: int = field(default=0, metadata=VOLATILE)
    failed_copies: FailedCopies = field(default_factory=FailedCopies, metadata=VOLATILE)
    # When the job last advanced before a hang that was only observed; 0 without one.
    observed_hang_s: float = field(default=0.0, metadata=VOLATILE)
    # First step of the newest divergence in the log; 0 without one.
    diverged_from: int = field(default=0, metadata=VOLATILE)
    plan: PlanVerdict = field(default_factory=PlanVerdict)
    # Nodes that the log has named as slow.
    slow_nodes: tuple[str, ...] = field(default=(), metadata=VOLATILE)
    # The verdict on the rank with the hottest experts while it holds; "" if there is none.
    hot_experts: str = field(default="", metadata=VOLATILE)
    # Lines that a detector writes once in an attempt (Draft.once).
    written: tuple[str, ...] = field(default=(), metadata=VOLATILE)
    # Logged traffic, and why it is not watched.
    traffic: TrafficSeen = field(default_factory=TrafficSeen, metadata=VOLATILE)
    # Checks at its start besides the usual ones, and those that follow from its own end.
    checks: tuple[str, ...] = ()
    next_checks: tuple[str, ...] = ()
    # It ends because its values were not finite: a device may have computed them wrong.
    suspects_devices: bool = False
    # The search for the node that broke it, if no fault names one, and the stored part of it.
    searching: Searching | None = field(default=None, metadata=VOLATILE)
    search_log: SearchLog = field(default_factory=SearchLog)
    _index: _SlotIndex = field(
        default_factory=lambda: _SlotIndex(()), metadata=VOLATILE, compare=False, repr=False
    )

    def __post_init__(self) -> None:
        # replace() keeps the index as long as the slots are the same
        if self._index.slots is not self.slots:
            object.__setattr__(self, "_index", _SlotIndex(self.slots))

    def slot_of(self, node: str) -> NodeSlot | None:
        """The node's slot, if it has one."""
        return self._index.of(node)

    def all_slots(self, holds: Callable[[NodeSlot], bool]) -> bool:
        """True if ``holds`` is true for every slot; O(1) while one and the same slot fails."""
        return self._index.all(holds)

    def note_sound(self, nodes: Mapping[str, Any]) -> None:
        """Note that a scan of all slots found nothing wrong with these nodes."""
        self._index.note_sound(self.number, nodes)

    def doubtful_slots(self, nodes: Mapping[str, Any]) -> Sequence[NodeSlot]:
        """The slots whose nodes may differ from those last found sound, in order."""
        return self._index.doubtful(self.number, nodes)
