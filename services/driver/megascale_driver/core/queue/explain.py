"""Explains why a job is where it is, for `megascale explain` and ExplainJob.

One sentence; then what happened (the cause), what the system did about it, and what the caller can
do. The cause is a line of the job's audit log: of all errors of an attempt, the one that it was
stopped for. Faults and decisions come before routine lines.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from megascale_driver.core.checkpoints import replicas
from megascale_driver.core.faults import blame, budgets
from megascale_driver.core.queue.suggestions import Suggestion, holders, suggestions
from megascale_driver.core.recovery import log_roots
from megascale_driver.core.signs import hang, traffic
from megascale_driver.core.values import accounting, reasons
from megascale_driver.core.values.attempt import Placement
from megascale_driver.core.values.cluster import (
    AttemptPhase,
    Cluster,
    Disposition,
    Liveness,
    Node,
    candidate,
    usable,
)
from megascale_driver.core.values.events import Audit, utc
from megascale_driver.core.values.job import ConditionType, Job, JobPhase
from megascale_driver.core.values.policy import Policy
from megascale_job.visible import counted

MAX_EVENTS = 5  # of faults and decisions, and again of routine lines
MAX_ACTIONS = 8
# Troubles that end no attempt, each with the line that shows its end.
_PASSING = {
    "CHECKPOINT_FAILED": "CHECKPOINT_COMMITTED",
    "CHECKPOINT_SKIPPED": "CHECKPOINT_COMMITTED",
    "LOSS_DIVERGED": "ATTEMPT_STARTED",
}
# Orders to leave the nodes; they explain a job until it has nodes again.
_ORDERS = ("SUSPEND_REQUESTED", "PREEMPTION_ORDERED")
# Lines that do not report an action of the system.
_NO_ACTIONS = frozenset(
    {
        "SUBMITTED",
        "ATTEMPT_PREPARING",
        "CHECKPOINT_COMMITTED",
        "JOB_SUCCEEDED",
        "JOB_WAITS",
        "SLOWER_THAN_PLAN",
        "AS_PLANNED",
        "EXPERTS_HOT",
        "PROFILE_REQUESTED",
        "PROFILE_WRITTEN",
        "PROFILE_MISSED",
        "PROFILE_CANCELLED",
    }
)


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a job is where it is at ``now_s``. ``cause``: None if nothing happened to it.

    ``actions``: what the system did about the cause, oldest first. ``events``: newest first, faults
    and decisions before routine lines.
    """

    sentence: str
    cause: Audit | None
    actions: tuple[Audit, ...]
    events: tuple[Audit, ...]
    suggestions: tuple[Suggestion, ...]
    # For the attempt that the cause is about.
    log_root: Audit | None = None
    placement: Placement = field(default_factory=Placement)
    stall: hang.Stall | None = None
    setback: budgets.Setback | None = None
    now_s: float = 0.0

    @property
    def text(self) -> str:
        """All but the events, as lines for a terminal; times are in UTC (Z)."""
        lines = [self.sentence]
        if self.placement.score is not None:
            lines += ["", "why there", f"  {self.placement.why}"]
        if self.cause is not None:
            lines += ["", "what happened", f"  {self._line(self.cause)}"]
        if self.log_root is not None:
            lines += ["", "what the logs say", f"  {self._line(self.log_root)}"]
            lines += [f"    {self.log_root.outcome}"] if self.log_root.outcome else []
        # Not repeated: the end of the job is in the sentence, the cause of the stop in what
        # happened.
        did = [line for line in self.actions if line.message not in self.sentence]
        if did:
            cause = f": {self.cause.message}" if self.cause is not None else ""
            shown = (self._line(line).removesuffix(cause) for line in did)
            lines += ["", "what the system did", *(f"  {line}" for line in shown)]
        if self.suggestions:
            lines += ["", "what you can do"]
            for suggestion in self.suggestions:
                lines += [f"  {suggestion.text}:", f"    {suggestion.command}"]
        return "\n".join(lines)

    def _line(self, line: Audit) -> str:
        return f"{utc(line.at_s, self.now_s)} {line.reason} {line.message}"


def explanation(
    state: Cluster, name: str, log: Sequence[Audit], now_s: float, policy: Policy
) -> Explanation:
    """Everything about job ``name``, which must exist; ``log``: its audit lines, oldest first."""
    job = state.jobs[name]
    cause = _cause(state, job, log)
    actions = [
        line
        for line in log
        if cause is not None
        and line.seq > cause.seq >= 1
        and line.reason not in _NO_ACTIONS
        and not _symptom(line)
        and line.reason != log_roots.REASON.name
    ]
    stall = hang.stall(state.nodes, job, now_s, policy)
    newest_first = list(reversed(log))
    notable = [line for line in newest_first if not reasons.is_routine(line.reason)]
    routine = [line for line in newest_first if reasons.is_routine(line.reason)]
    return Explanation(
        sentence=explain(state, name, now_s, policy),
        cause=cause,
        actions=tuple(actions[:MAX_ACTIONS]),
        events=(*notable[:MAX_EVENTS], *routine[:MAX_EVENTS]),
        suggestions=suggestions(state, job, cause, stall),
        log_root=_log_root(cause, log),
        placement=job.current.placement if job.active else Placement(),
        stall=stall,
        setback=budgets.setback(job),
        now_s=now_s,
    )


def _log_root(cause: Audit | None, log: Sequence[Audit]) -> Audit | None:
    """The root in the logs of the attempt that the cause is about."""
    if cause is None:
        return None
    return _newest(
        [line for line in log if line.attempt == cause.attempt], (log_roots.REASON.name,)
    )


def explain(state: Cluster, name: str, now_s: float, policy: Policy) -> str:
    """One sentence about job ``name``, which must exist, and its state at ``now_s``."""
    job = state.jobs[name]
    if job.phase is JobPhase.QUEUED:
        return f"job {name} is waiting: {_waiting(state, job)}"
    if job.phase in (JobPhase.PREPARING, JobPhase.STARTING):
        return f"job {name} is {job.phase.lower()} attempt {job.attempt}: {_laggards(state, job)}"
    if job.phase is JobPhase.SUSPENDED:
        return f"job {name} is {job.reason}"
    if job.phase is JobPhase.RUNNING and job.current.leaving is not None:
        step = f"its last known step is {job.current.step}"
        return f"job {name}: {job.reason}; {step}{_failing_checkpoint(job, now_s)}"
    if job.phase is JobPhase.RUNNING:
        restarts = f" after {counted(job.restarts, 'restart')}" if job.restarts else ""
        nodes = ", ".join(slot.node for slot in job.slots)
        text = (
            f"job {name} runs attempt {job.attempt} on {nodes}{restarts}; "
            f"its last known step is {job.current.step}"
            f"{_setback(job)}{_failing_checkpoint(job, now_s)}{_failing_replicas(state, job)}"
            f"{_auto_interval(job)}{_short_of_spares(job)}{_slower_than_plan(job)}"
            f"{_hot_experts(job)}{traffic.describe(job)}"
        )
        stall = hang.stall(state.nodes, job, now_s, policy)
        return f"{text}; {stall}" if stall else text
    if job.phase is JobPhase.STOPPING and (found := job.current.searching) and not found.over:
        return (
            f"job {name} has stopped attempt {job.attempt} because {job.stop_reason}; no fault "
            f"names a node, so they check each other in groups (round {found.search.rounds})"
        )
    if job.phase is JobPhase.STOPPING:
        return f"job {name} is stopping attempt {job.attempt} because {job.stop_reason}"
    return f"job {name} {job.state}: {job.reason}"


def _setback(job: Job) -> str:
    found = budgets.setback(job)
    return f"; {found}" if found else ""


def _failing_replicas(state: Cluster, job: Job) -> str:
    problem = replicas.problem(job, state.nodes) if job.config.checkpoint.replicas else ""
    return f"; the newest snapshots have no replicas: {problem}" if problem else ""


def _short_of_spares(job: Job) -> str:
    missing = job.current.spares_short
    return f"; {counted(missing, 'more spare')} should stand by" if missing else ""


def _slower_than_plan(job: Job) -> str:
    verdict = job.current.plan
    return f"; it is slower than planned: {verdict.sentence}" if verdict.slower_by else ""


def _hot_experts(job: Job) -> str:
    return f"; {job.current.hot_experts}" if job.current.hot_experts else ""


def _auto_interval(job: Job) -> str:
    """The interval of a job that chooses it itself, and what it is based on."""
    checkpoint = job.config.checkpoint
    if checkpoint.interval != "auto":
        return ""
    steps = int(job.last_record.get("checkpoint_interval_steps", 0))
    if not steps:
        return "; it decides how often it saves once it has taken steps"
    cost_s = job.last_record.get("checkpoint_cost_s")
    if cost_s is None:
        return f"; it saves every {counted(steps, 'step')} until it has measured what a save costs"
    found = accounting.failure_rate(
        checkpoint, job.current.failure_count, job.config.layout.world_size
    )
    return (
        f"; it saves every {counted(steps, 'step')}: a save costs {cost_s:.2g} s, and one "
        "failure is expected "
        f"every {found.mtbf_s / 3600:.3g} hours"
    )


def _failing_checkpoint(job: Job, now_s: float) -> str:
    """The problem of the job's checkpoints, and the age of the newest complete one."""
    found = next((i for i in job.conditions if i.type is ConditionType.CHECKPOINT_FAILING), None)
    if found is None:
        return ""
    newest = "none is complete"
    if job.committed_step:
        age_s = max(0.0, now_s - job.committed_at_s)
        newest = f"the newest complete one is that of step {job.committed_step}"
        newest += f", {age_s:.0f} s old" if job.committed_at_s else ""
    return f"; {found.message} ({newest})"


def needs(job: Job, nodes: list[Node]) -> str:
    """The need of the job in nodes of the largest known size: ``2 nodes with 4 cpu devices``."""
    world, group = job.config.layout.world_size, job.config.parallelism.node_group
    shapes = sorted(
        {(len(c.devices), c.kind) for c in map(candidate, nodes) if len(c.devices) >= group},
        reverse=True,
    )
    if not shapes:
        return f"{counted(world, 'device')} in groups of {group} on one node"
    size, kind = shapes[0]
    size = size // group * group
    if world <= size:
        return f"1 node with {counted(world, f'{kind} device')}"
    return f"{counted(-(-world // size), 'node')} with {counted(size, f'{kind} device')}"


def _waiting(state: Cluster, job: Job) -> str:
    """The need of the job, the idle nodes, and why each other node cannot be used."""
    nodes = list(state.nodes.values())
    taken, reserved = holders(state, job)
    idle = [n for n in nodes if usable(n) and n.name not in taken and n.name not in reserved]
    count = len(idle)
    parts = [
        f"it needs {needs(job, nodes)}",
        f"{count} schedulable {'node is' if count == 1 else 'nodes are'} idle",
    ]
    decided = job.reason.startswith("waiting for nodes (")
    if not decided:
        parts.append("it is about to be placed")
    idle_names = {n.name for n in idle}
    blocked = [_blocked(n, taken, reserved) for n in nodes if n.name not in idle_names]
    text = ", ".join(parts)
    return (
        text
        + ("; " + "; ".join(blocked[:8]) if blocked else "")
        + (f" ({job.reason})" if job.attempt or decided else "")
    )


def _blocked(node: Node, taken: dict[str, str], reserved: dict[str, str]) -> str:
    if node.disposition is not Disposition.SCHEDULABLE:
        return f"{node.name} is {node.disposition.lower()} ({node.disposition_reason})"
    if node.liveness is not Liveness.ALIVE:
        return f"{node.name} is {node.liveness.lower()}"
    if node.name in taken:
        return f"{node.name} runs job {taken[node.name]}"
    if node.name in reserved:
        return f"{node.name} is a spare of job {reserved[node.name]}"
    return f"{node.name} has not reported idle yet"


def _laggards(state: Cluster, job: Job) -> str:
    """The nodes that have not reached the phase that the job waits for."""
    wanted = {
        JobPhase.PREPARING: (AttemptPhase.PREPARED,),
        JobPhase.STARTING: (AttemptPhase.RUNNING, AttemptPhase.FINISHED),
    }[job.phase]
    waiting = []
    for slot in job.slots:
        node = state.nodes.get(slot.node)
        report = node.report if node is not None else None
        if report is None or report.attempt != job.attempt or report.phase not in wanted:
            waiting.append(slot.node)
    if not waiting:
        return "all nodes are ready, the checkpoint daemon is opening the attempt"
    return f"waiting for {', '.join(waiting)}"


def _cause(state: Cluster, job: Job, log: Sequence[Audit]) -> Audit | None:
    """The line that explains where the job is; None if nothing has happened to it."""
    cancelled = JobPhase.CANCELLED in (job.phase, job.after_stop)
    if cancelled and (job.terminal or job.phase is JobPhase.STOPPING):
        return _newest(log, ("CANCEL_REQUESTED",))
    if job.current.leaving is not None and not job.current.faults and not job.terminal:
        return _newest(log, _ORDERS)
    if job.phase is JobPhase.STOPPING:
        return _cause_of_stop(job, log)
    # Before the last stop: a failing checkpoint is the newer trouble of an attempt that runs.
    passing = _passing(log)
    if passing is not None or job.phase is JobPhase.SUCCEEDED:
        return passing
    stopped = _newest(log, ("ATTEMPT_STOPPED",))
    uncopied = _without_replica(state, job, log)
    if uncopied is not None and (stopped is None or stopped.seq < uncopied.seq):
        return uncopied
    if stopped is None:
        return _newest(log, ("JOB_FAILED",))
    before = [line for line in log if line.seq < stopped.seq and line.attempt == stopped.attempt]
    why = stopped.message.removeprefix(f"attempt {stopped.attempt} has stopped: ")
    return _stopped_for(before, why) or stopped


def _without_replica(state: Cluster, job: Job, log: Sequence[Audit]) -> Audit | None:
    """The newest failed copy of this attempt, unless its node has reported a success since."""
    if not job.config.checkpoint.replicas or not replicas.problem(job, state.nodes):
        return None
    lines = [line for line in log if line.attempt == job.attempt]
    return _newest(lines, ("REPLICA_FAILED",))


def _cause_of_stop(job: Job, log: Sequence[Audit]) -> Audit | None:
    """The line of the fault that the attempt is being stopped for, or the fault as a line."""
    lines = [line for line in log if line.attempt == job.attempt]
    fault = blame.culprit(job.current.faults)
    found = _stopped_for(lines, fault.message if fault is not None else job.stop_reason)
    if found is not None or fault is None:
        return found
    # Some faults, such as a missed deadline, have no line of their own: the line of the stop will
    # name them.
    subject = f"nodes/{fault.node}" if fault.node else f"jobs/{job.name}"
    return Audit(
        job.name, 0, fault.at_s, "driver", subject, fault.kind, fault.message, attempt=job.attempt
    )


def _stopped_for(lines: Iterable[Audit], why: str) -> Audit | None:
    """The first line whose message contains the reason of the stop, or is part of it."""
    return next(
        (
            line
            for line in lines
            if reasons.is_cause(line.reason) and (line.message in why or why in line.message)
        ),
        None,
    )


def _passing(log: Sequence[Audit]) -> Audit | None:
    """The newest trouble that ends no attempt, unless a later line shows its end."""
    over: set[str] = set()
    for line in reversed(log):
        if line.reason in _PASSING and _PASSING[line.reason] not in over:
            return line
        over.add(line.reason)
    return None


def _newest(log: Sequence[Audit], wanted: tuple[str, ...]) -> Audit | None:
    return next((line for line in reversed(log) if line.reason in wanted), None)


def _symptom(line: Audit) -> bool:
    return line.reason.startswith("WORKER_")
