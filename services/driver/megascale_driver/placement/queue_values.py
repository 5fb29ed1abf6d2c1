"""Inputs and outputs of the queue as values: jobs, nodes, quotas, rules; decisions.

Times are Unix seconds. A job's size is its number of ranks, each on one device.

:class:`Ledger` counts the devices that the jobs of each tenant hold or are promised.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from megascale_driver.placement.gang import Candidate, Part
from megascale_job.visible import counted
from megascale_planner.placement_cost import Score, Traffic


@dataclass(frozen=True, slots=True)
class Choice:
    """A placement, and why it is the cheapest, as a clause.

    ``order``: which neighbours are kept together, if there was a choice. ``score``: its cost on
    the network; None if no switch or no traffic is known.
    """

    parts: tuple[Part, ...]
    why: str
    order: str = ""
    score: Score | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingJob:
    """A queued job.

    ``last``: while it recovers from a fault, its last placement; empty for a job that is new, was
    preempted or resumed. ``evicted``: nodes that it was moved away from. ``waiting_since_s``: when
    it was queued. ``not_before_s``: it backs off until then. ``traffic``: the bytes that its ranks
    send; None: not known. ``node_group``: consecutive ranks that share a node.
    """

    name: str
    world_size: int
    node_group: int = 1
    priority: int = 0
    tenant: str = "default"
    created_s: float = 0.0
    waiting_since_s: float = 0.0
    last: tuple[Part, ...] = ()
    spares: tuple[str, ...] = ()
    evicted: frozenset[str] = frozenset()
    not_before_s: float = 0.0
    traffic: Traffic | None = None

    @property
    def recovering(self) -> bool:
        """True if it had nodes, of which some may have survived."""
        return bool(self.last)

    @property
    def order(self) -> tuple[int, bool, float, str]:
        """Sort key of the queue: priority, then recovering jobs, then age."""
        return (-self.priority, not self.recovering, self.created_s, self.name)


# Chooses the cheapest placement of a job among candidates; None if they do not suffice. It must
# find one whenever megascale_driver.placement.pool.Room.fits is true for the candidates.
Placer = Callable[[WaitingJob, Iterable[Candidate]], Choice | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningJob:
    """A job that holds nodes.

    ``ends_s``: its expected end; None if unknown. ``preemptible``: True if it can save and then
    stop; if not, ``cannot`` is the reason. ``leaving``: it was already ordered to leave its nodes,
    or is stopping.
    """

    name: str
    world_size: int
    nodes: tuple[str, ...]
    priority: int = 0
    tenant: str = "default"
    started_s: float = 0.0
    ends_s: float | None = None
    spares: tuple[str, ...] = ()
    preemptible: bool = False
    cannot: str = ""
    leaving: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Limits of the queue, in seconds.

    ``preempt``: True if jobs of higher priority displace others. A gang that has waited for
    ``backfill_s`` holds every free node that it could use, so that a wrong estimate of when others
    end can no longer delay it. A job whose lost nodes cannot be replaced keeps its survivors for
    ``survivors_s``.
    """

    preempt: bool = True
    backfill_s: float = 1800.0
    survivors_s: float = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The state of the cluster from which the queue decides.

    ``idle``: nodes on which a job could start now. ``known``: all nodes that are or will soon be
    usable, idle and busy ones included. ``quotas``: most devices that all jobs of a tenant hold at
    once; a tenant without an entry is not limited.
    """

    now_s: float
    waiting: tuple[WaitingJob, ...]
    running: tuple[RunningJob, ...] = ()
    idle: Mapping[str, Candidate]
    known: Mapping[str, Candidate]
    quotas: Mapping[str, int] = field(default_factory=dict)
    rules: Rules = field(default_factory=Rules)


class Kind(enum.StrEnum):
    """Kinds of decisions about a job.

    PLACE: it starts. BACKFILL: it starts on nodes that no earlier job in the queue can use sooner.
    RESERVE: it waits, and nodes are held for it: those in ``nodes`` now, others when they become
    free. KEEP: it recovers and cannot be placed, but keeps its survivors and spares for a while.
    WAIT: it waits and holds nothing. PREEMPT: it runs, and must save and leave its nodes.
    """

    PLACE = "PLACE"
    BACKFILL = "BACKFILL"
    RESERVE = "RESERVE"
    KEEP = "KEEP"
    WAIT = "WAIT"
    PREEMPT = "PREEMPT"


STARTS = frozenset({Kind.PLACE, Kind.BACKFILL})


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision. ``why`` is a clause for the job's reason and the audit log; "": it backs off.

    ``parts``: with PLACE and BACKFILL. ``nodes``: idle nodes that are held for the job.
    ``makes_room_for``: with PREEMPT, the job that needs the nodes. ``order`` and ``score``: of the
    placement.
    """

    kind: Kind
    job: str
    why: str
    parts: tuple[Part, ...] = ()
    nodes: tuple[str, ...] = ()
    makes_room_for: str = ""
    order: str = ""
    score: Score | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """All decisions in the order in which they were made, and the idle nodes that are left."""

    decisions: tuple[Decision, ...]
    free: Mapping[str, Candidate]


class Ledger:
    """Devices that each tenant's jobs use, during one decision of the queue.

    A job that waits for nodes is promised its devices, so that later jobs of the same tenant cannot
    use up the quota before it starts.
    """

    def __init__(self, quotas: Mapping[str, int], running: Iterable[RunningJob]) -> None:
        self._quotas = quotas
        self._used: Counter[str] = Counter()
        self._promised: Counter[str] = Counter()
        for job in running:
            self._used[job.tenant] += job.world_size

    def never(self, job: WaitingJob) -> str:
        """Why the quota can never admit the job; "" if it could."""
        quota = self._quotas.get(job.tenant)
        if quota is None or job.world_size <= quota:
            return ""
        needs = f"it needs {counted(job.world_size, 'device')}"
        return f"{needs}, and the quota of tenant {job.tenant} is {counted(quota, 'device')}"

    def short(self, job: WaitingJob) -> int:
        """Devices that the tenant must give up before the job can start; 0: none."""
        quota = self._quotas.get(job.tenant)
        if quota is None:
            return 0
        taken = self._used[job.tenant] + self._promised[job.tenant]
        return max(0, taken + job.world_size - quota)

    def why(self, job: WaitingJob) -> str:
        """Why the quota does not admit the job now, as a clause."""
        used, promised = self._used[job.tenant], self._promised[job.tenant]
        quota = counted(self._quotas[job.tenant], "device")
        text = f"tenant {job.tenant} has a quota of {quota}: {used} are in use"
        text += f" and {promised} are promised to jobs before it" if promised else ""
        return f"{text}, and it needs {job.world_size}"

    def use(self, job: WaitingJob) -> None:
        """Count a job that starts."""
        self._used[job.tenant] += job.world_size

    def promise(self, job: WaitingJob) -> None:
        """Promise devices to the job, which is the tenant's next to start."""
        self._promised[job.tenant] += job.world_size
