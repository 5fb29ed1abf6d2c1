"""Recovery: the fault that broke an attempt, the node to blame, and whether the job tries again.

When one rank fails, all its peers report errors of their collectives within a second. Those are
symptoms. The culprit is the earliest explicit failure, or the node that is gone. Reports arrive in
any order, so faults are collected while the attempt stops. Only when every node has stopped is
blame decided (:mod:`megascale_driver.core.faults.blame`), and whether the job can try again
(:mod:`megascale_driver.core.faults.budgets`). Two kinds of faults blame no node: a damaged
checkpoint, whose step is refused, and a fault of the job itself
(:mod:`megascale_driver.core.faults.job_faults`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megascale_driver.core.draft import Draft
from megascale_driver.core.faults import blame, breaker, budgets, job_faults
from megascale_driver.core.nodes import nodes
from megascale_driver.core.recovery import log_roots
from megascale_driver.core.signs import hang, kernel
from megascale_driver.core.values import reasons
from megascale_driver.core.values.attempt import Fault, FaultKind, NodeSlot
from megascale_driver.core.values.cluster import (
    AttemptPhase,
    Disposition,
    Liveness,
    Node,
    StoppedReport,
    WorkerReport,
)
from megascale_driver.core.values.events import Evidence
from megascale_driver.core.values.job import Job, JobPhase
from megascale_driver.core.values.policy import Policy
from megascale_driver.core.values.reasons import Reason

SIGNALS = {6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL", 11: "SIGSEGV", 15: "SIGTERM"}
MAX_ERROR = 600  # characters of a worker's error that a message shows
CLOCK_ERROR_S = 0.5  # error of corrected times of a node on a busy network
REPORT_S = 5.0  # the driver usually knows of a failure within this time
MEMORY_ROOM = "memory_room"  # the self-check about the sizes of the job, not about the node
# Error kinds of a worker that explain the failures of all others, the most serious first.
_EXPLAINING = {
    "BAD_JOB": FaultKind.BAD_JOB,
    "CHECKPOINT_CORRUPT": FaultKind.CHECKPOINT_CORRUPT,
    "OUT_OF_MEMORY": FaultKind.OUT_OF_MEMORY,
}
_LESS_MEMORY = (
    "use less memory per rank (trainer.parallelism.recompute: full, a smaller "
    "trainer.training.micro_batch_size, a larger tp or pp) or give the node more"
)
_OF_WORKERS = frozenset({FaultKind.WORKER_EXITED, FaultKind.WORKER_SYMPTOM, *_EXPLAINING.values()})


def observe(draft: Draft, job: Job, node: str = "") -> Job:
    """Record every fault of the attempt that is not recorded yet, and log it.

    ``node``: only faults of this node; "" for all nodes.
    """
    before = job.current.faults
    known: set[tuple[str, FaultKind]] | None = None  # built only if something is wrong
    if node:
        own = job.slot_of(node)
        slots: Sequence[NodeSlot] = (own,) if own is not None else ()
    else:
        # A fault follows from its node alone, so a node that was sound and has not changed still
        # is.
        nodes = draft.nodes.frozen()
        slots = job.current.doubtful_slots(nodes)
    sound = True
    for slot in slots:
        fault = _fault_of(draft, job, slot)
        if fault is None:
            continue
        sound = False
        if known is None:
            known = {(each.node, each.kind) for each in before}
        if (fault.node, fault.kind) not in known:
            job = draft.fault(job.name, fault)
            _announce(draft, job, fault)
            job = draft.jobs[job.name]
    if sound and not node:
        job.current.note_sound(nodes)
    return job


def settle(draft: Draft, job: Job) -> Job:
    """Count the restart and blame a node, once the attempt has stopped.

    Sets ``after_stop`` to FAILED when a restart budget is spent.
    """
    faults = job.current.faults
    # Evidence first: budgets and blame below may already end the job.
    hang.write_stacks(draft, job)
    root = log_roots.write(draft, draft.jobs[job.name])
    job = draft.put_attempt(
        job.name,
        replace(
            draft.jobs[job.name].current,
            next_checks=job_faults.checks_after(draft.jobs[job.name], root),
        ),
    )
    if (final := job_faults.final_fault(job, faults)) is not None:
        return job_faults.end(draft, job, final.message)
    # Charged before blame: progress since the last restart clears the counts that blame adds to.
    job = budgets.charge(draft, job)
    # A damaged checkpoint, or a job that does not fit, explains all other failures of the attempt:
    # then no worker failure is counted against its node.
    if any(f.kind is FaultKind.CHECKPOINT_CORRUPT for f in faults):
        job = _refuse_checkpoint(draft, job)
    elif any(f.kind is FaultKind.JOB_TOO_BIG for f in faults):
        job_faults.decide_on_size(draft, job)
    elif not log_roots.decide(draft, job, root):
        blame.blame(draft, job)
    job_faults.decide_on_memory(draft, draft.jobs[job.name])
    return budgets.check(draft, draft.jobs[job.name])


def prepare_limit_s(job: Job, policy: Policy) -> float:
    """Time limit of preparing; longer with checks that the previous attempt asks for."""
    return policy.prepare_timeout_s + (job_faults.CHECKS_EXTRA_S if job.current.checks else 0.0)


def _fault_of(draft: Draft, job: Job, slot: NodeSlot) -> Fault | None:
    """The fault of the node, the most serious first; None without one."""
    # The node itself comes before its report: if it is dead, evicted or restarted, the errors of
    # its workers are consequences.
    node = draft.nodes.get(slot.node)
    now_s = draft.now_s
    if node is None or node.liveness is Liveness.DEAD:
        return Fault(FaultKind.NODE_DEAD, slot.node, now_s, f"node {slot.node} is dead")
    if node.disposition is Disposition.QUARANTINED:
        message = f"node {slot.node} is quarantined: {node.disposition_reason}"
        return Fault(FaultKind.NODE_EVICTED, slot.node, now_s, message)
    if node.identity.incarnation and node.identity.incarnation != slot.incarnation:
        return Fault(
            FaultKind.NODE_RESTARTED,
            slot.node,
            now_s,
            f"the executor of node {slot.node} was restarted",
        )
    if job.phase is not JobPhase.STOPPING and (fault := kernel.found(draft, job, node)):
        return fault
    report = node.report
    if report is not None and report.stopped is not None and report.phase is AttemptPhase.IDLE:
        return _fault_before_stop(job, node, report.stopped)
    if report is None or (report.job, report.attempt, report.phase) != (
        job.name,
        job.attempt,
        AttemptPhase.FAILED,
    ):
        return None
    failed = [check for check in report.checks if check.verdict == "FAIL"]
    if failed and all(check.name == MEMORY_ROOM for check in failed):
        found = f"{failed[0].target} {failed[0].detail}"
        message = f"job {job.name} does not fit on node {slot.node}: {found}"
        return Fault(FaultKind.JOB_TOO_BIG, slot.node, now_s, message)
    failed = [check for check in failed if check.name != MEMORY_ROOM]
    if failed:
        message = f"self-check {failed[0].name} of node {slot.node} failed: {failed[0].detail}"
        return Fault(FaultKind.CHECK_FAILED, slot.node, now_s, message)
    return _worker_fault(node, report.workers, report.failure, now_s)


def _fault_before_stop(job: Job, node: Node, stopped: StoppedReport) -> Fault | None:
    """The failure of a worker before the stop of the attempt that was reported only after it.

    The stop was started by the report of another node, which may be a symptom of this failure. An
    error from after the stop is a consequence of the stop, and so is any error in an attempt
    without a fault.
    """
    if (stopped.job, stopped.attempt) != (job.name, job.attempt):
        return None
    if job.phase is not JobPhase.STOPPING or not job.current.faults:
        return None
    # Under a new leader the timer starts later than the stop.
    reported_s = min(fault.at_s for fault in job.current.faults) + REPORT_S
    latest_s = min(job.timer_s, reported_s) + CLOCK_ERROR_S
    workers = tuple(w for w in stopped.workers if not _secondary(w) and w.exited_at_s <= latest_s)
    return _worker_fault(node, workers, stopped.failure, latest_s) if workers else None


def _worker_fault(
    node: Node, workers: tuple[WorkerReport, ...], failure: str, now_s: float
) -> Fault:
    # A worker that ended with status 0 before its last step also has an error kind.
    bad = (w for w in workers if w.exited and (w.exit_status != 0 or w.error_kind))
    ended = sorted(bad, key=lambda w: (_secondary(w), w.exited_at_s, w.rank))
    explaining = [w for kind in _EXPLAINING for w in workers if w.error_kind == kind]
    first = next(iter([*explaining, *ended]), None)
    if first is None:
        message = f"node {node.name}: {failure or 'the attempt failed, no reason was reported'}"
        return Fault(FaultKind.WORKER_EXITED, node.name, now_s, message)
    kind = _EXPLAINING.get(first.error_kind, FaultKind.WORKER_EXITED)
    if _secondary(first):
        kind = FaultKind.WORKER_SYMPTOM
    message = f"rank {first.rank} on node {node.name} {_how(first)}"
    return Fault(kind, node.name, first.exited_at_s or now_s, message, first.rank)


def _how(worker: WorkerReport) -> str:
    """A description of the worker's end, with the last line of its error."""
    last_line = worker.error.strip().splitlines()[-1][:MAX_ERROR] if worker.error.strip() else ""
    if worker.error_kind == "BAD_JOB" and last_line:
        return f"cannot run the job: {last_line}"
    if worker.error_kind == "OUT_OF_MEMORY":
        return f"ran out of memory: {last_line or 'no details'}; {_LESS_MEMORY}"
    how = f"ended with status {worker.exit_status}"
    if worker.exit_status < 0:
        how = f"was killed by {SIGNALS.get(-worker.exit_status, f'signal {-worker.exit_status}')}"
    return f"{how}: {last_line}" if last_line else how


def _secondary(worker: WorkerReport) -> bool:
    """True if the worker ended because of another: it lost a peer, or its agent stopped it."""
    return worker.error_kind == "COLLECTIVE" or (
        worker.error_kind == "STOPPED" and worker.exit_status in (-9, 0)
    )


def _announce(draft: Draft, job: Job, fault: Fault) -> None:
    """Log the fault; one that is a hard fact about the node evicts the node."""
    subject = f"nodes/{fault.node}"
    if (
        fault.kind in (FaultKind.NODE_DEAD, FaultKind.NODE_RESTARTED)
        and fault.node not in job.evicted
    ):
        if fault.kind is FaultKind.NODE_DEAD:
            draft.put_job(replace(draft.jobs[job.name], evicted=(*job.evicted, fault.node)))
        reason: Reason = (
            reasons.NODE_EVICTED if fault.kind is FaultKind.NODE_DEAD else reasons.NODE_RESTARTED
        )
        draft.log_job(
            job,
            reason,
            fault.message,
            subject=subject,
            policy="hard-fact",
            evidence=(Evidence("liveness", subject, fault.message),),
            outcome="the attempt ends",
        )
    elif fault.kind is FaultKind.KERNEL_FAULT:
        draft.log_job(
            job,
            reasons.KERNEL_FAULT,
            fault.message,
            subject=subject,
            policy=kernel.KERNEL_LOG,
            evidence=(Evidence("log-line", f"{subject}/kernel", fault.message),),
            outcome="the attempt ends at once; all logs decide what happens to the node",
        )
    elif fault.kind is FaultKind.CHECK_FAILED and not blame.check_is_about_its_node(
        draft, job, fault
    ):
        return  # blame has logged it as software
    elif fault.kind is FaultKind.CHECK_FAILED and breaker.allows(
        draft, fault.node, nodes.SELF_CHECK
    ):
        nodes.quarantine(draft, fault.node, fault.message, policy=nodes.SELF_CHECK)
    elif fault.kind is FaultKind.CHECK_FAILED and draft.enforced(nodes.SELF_CHECK):
        why = "too many nodes were evicted recently: only this job leaves the node"
        job_faults.leave(draft, job, fault, nodes.SELF_CHECK, why)
    elif fault.kind is FaultKind.CHECK_FAILED:
        # The job could not start there, so it leaves the node in any mode of the rule.
        why = "the rule is observed: the node is not quarantined, only this job leaves it"
        job_faults.leave(draft, job, fault, nodes.SELF_CHECK, why, mode="OBSERVE")
    elif fault.kind in _OF_WORKERS:
        memory = fault.kind is FaultKind.OUT_OF_MEMORY
        draft.log_job(
            job,
            reasons.WORKER_OUT_OF_MEMORY if memory else reasons.WORKER_EXITED,
            fault.message,
            subject=subject,
            policy="process-exit",
            evidence=(Evidence("exit", f"{subject}/ranks/{fault.rank}", fault.message),),
            outcome=_outcome(job, fault),
        )


def _outcome(job: Job, fault: Fault) -> str:
    """Consequence of a worker's end."""
    if fault.kind is FaultKind.WORKER_SYMPTOM:
        return "a symptom: another rank is the culprit"
    if job_faults.final_fault(job, (fault,)) is not None:
        return "the job ends: another attempt would fail the same way"
    return "the attempt ends"


def _refuse_checkpoint(draft: Draft, job: Job) -> Job:
    fault = next(f for f in job.current.faults if f.kind is FaultKind.CHECKPOINT_CORRUPT)
    step = job.current.restore.step if job.current.restore is not None else 0
    if step and step not in job.refused_steps:
        job = draft.put_job(replace(draft.jobs[job.name], refused_steps=(*job.refused_steps, step)))
    draft.log_job(
        job,
        reasons.CHECKPOINT_REFUSED,
        f"the checkpoint of step {step} is refused: {fault.message}",
        policy="checksum",
        evidence=(Evidence("checksum", f"nodes/{fault.node}", fault.message),),
        outcome="an older checkpoint is restored",
    )
    return draft.jobs[job.name]
