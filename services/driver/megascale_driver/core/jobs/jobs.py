"""The state machine of a job, advanced whenever the job or one of its nodes has changed.

QUEUED -> PREPARING -> STARTING -> RUNNING -> SUCCEEDED, and from each of them through STOPPING back
to QUEUED (for a new attempt) or to SUSPENDED, FAILED or CANCELLED. A running attempt never changes:
a new configuration waits for the next one.

Note [Attempts]
~~~~~~~~~~~~~~~
An attempt opens in two phases. PREPARE: every node reserves its devices and checks itself, and rank
0's node binds the rendezvous port. When all nodes are prepared, the committer (the checkpoint
daemon of the first node) appends OPEN(attempt) to the job's commit log. That record fences all
earlier attempts: if one still runs on a node that was given up, it can commit no checkpoint from
then on. The committer returns what to restore, and with that the nodes get START. A job without
checkpoints has no commit log and starts as soon as all nodes are prepared.

Attempts never overlap on a live node: the next one is placed only when every node of the last one
has reported idle, is dead, or has been given up. The fence covers the nodes that were given up, the
report covers all others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from megascale_driver.core.checkpoints import replicas, roll_back, save
from megascale_driver.core.checkpoints.replicas import sealed_everywhere
from megascale_driver.core.draft import Draft, unreadable_key
from megascale_driver.core.faults import blame, budgets, job_faults
from megascale_driver.core.nodes import departures, nodes, profiles
from megascale_driver.core.queue import quotas
from megascale_driver.core.recovery import recovery, search
from megascale_driver.core.signs import hang
from megascale_driver.core.values import accounting, goodput, reasons
from megascale_driver.core.values.attempt import (
    FailureCount,
    Fault,
    FaultKind,
    NodeSlot,
    ReplicaOrders,
    ReplicaSource,
)
from megascale_driver.core.values.bounds import MAX_ATTEMPT
from megascale_driver.core.values.cluster import AttemptPhase, Liveness, Node
from megascale_driver.core.values.events import (
    AttemptOpened,
    CancelRequested,
    Evidence,
    JobSubmitted,
    OpenAttempt,
    OpenFailed,
)
from megascale_driver.core.values.job import Job, JobPhase
from megascale_driver.core.values.reasons import Reason
from megascale_job import loading
from megascale_job.restore import RestorePlan, RestoreSource
from megascale_job.visible import counted

MAX_NAMED = 4  # nodes in a reason
MAX_REFUSALS = 8  # damaged checkpoints named in the audit log when one attempt opens
STARTED = frozenset({AttemptPhase.RUNNING, AttemptPhase.FINISHED})
_PREPARED = frozenset({AttemptPhase.PREPARED})
_FINISHED = frozenset({AttemptPhase.FINISHED})


def submit(draft: Draft, event: JobSubmitted) -> None:
    """Add a new job, which waits for nodes."""
    name = event.config.name
    if name in draft.jobs:
        draft.refuse("JOB_EXISTS", _exists(draft.jobs[name]))
        return
    if unreadable_key(name) in draft.unreadable:
        draft.refuse_unknown_job(name)
        return
    if quotas.too_many(draft, event.config.tenant):
        return
    draft.jobs[name] = Job(
        name,
        event.config,
        created_at_s=draft.now_s,
        updated_at_s=draft.now_s,
        timer_s=draft.now_s,
        reason="waiting for nodes",
        goodput=goodput.submitted(draft.now_s),
    )
    draft.log_job(
        draft.jobs[name], reasons.SUBMITTED, f"submitted by {event.actor}", actor=event.actor
    )


def _exists(job: Job) -> str:
    """The alternatives to submitting a job whose name is taken."""
    ways = [f"start one like it with `megascale clone {job.name}`"]
    if job.phase is not JobPhase.SUCCEEDED:
        ways.insert(0, "change it with `megascale update JOB.YAML --reason REASON`")
    if job.phase in (JobPhase.FAILED, JobPhase.CANCELLED):
        ways.insert(1, f"continue it with `megascale restart {job.name} --reason REASON`")
    if job.terminal:
        ways.append(f"free its name with `megascale delete {job.name} --reason REASON`")
    return f"job {job.name} exists already and {job.state}; {', '.join(ways[:-1])} or {ways[-1]}"


def cancel(draft: Draft, event: CancelRequested) -> None:
    """Stop the workers of the job at once; nothing changes if it is or will be cancelled."""
    job = draft.known_job(event.job)
    if job is None:
        return
    asked_before = job.phase is JobPhase.STOPPING and job.after_stop is JobPhase.CANCELLED
    if asked_before or job.phase is JobPhase.CANCELLED:
        return
    if job.terminal:
        draft.refuse("JOB_ENDED")
        return
    draft.log_job(
        job,
        reasons.CANCEL_REQUESTED,
        f"{event.actor} asked to cancel the job: {event.reason}",
        actor=event.actor,
    )
    why = f"cancelled by {event.actor}: {event.reason}"
    if job.active:
        stop(draft, draft.jobs[job.name], JobPhase.CANCELLED, why)
    else:
        _end(draft, draft.jobs[job.name], JobPhase.CANCELLED, why)


def advance(draft: Draft, name: str, reporter: str = "") -> None:
    """Advance the job as far as its nodes' reports and the clock allow.

    ``reporter``: the only node whose report has changed; "" if any may have.
    """
    job = draft.jobs[name]
    if not job.active:
        return
    # Faults are recorded while the attempt stops, too: the culprit is often reported after the
    # symptom that started the stop.
    job = recovery.observe(draft, job, reporter)
    if job.phase is JobPhase.STOPPING:
        _advance_stopping(draft, job)
        return
    profiles.expire(draft, job)
    job = draft.jobs[name]
    if not job.current.faults:
        job = _check_deadline(draft, job)
        job = hang.without_workers(draft, job)
    if job.current.faults:
        stop(draft, job, JobPhase.QUEUED, _why(job))
    elif job.phase is JobPhase.PREPARING:
        _advance_preparing(draft, job)
    elif job.phase is JobPhase.STARTING:
        _advance_starting(draft, job)
    if draft.jobs[name].phase is JobPhase.RUNNING:
        _advance_running(draft, draft.jobs[name])


def opened(draft: Draft, event: AttemptOpened) -> None:
    """The committer has fenced all earlier attempts and chosen what to restore: start."""
    job = draft.jobs.get(event.job)
    # The answer may be to a call for an attempt that was given up meanwhile: it starts nothing.
    if job is None or job.attempt != event.attempt or job.phase is not JobPhase.PREPARING:
        return
    for item in event.refused[:MAX_REFUSALS]:
        draft.log_job(
            job,
            reasons.CHECKPOINT_REFUSED,
            f"a newer checkpoint is not used: {item[:300]}",
            policy="commit-log",
            outcome="an older one is restored",
        )
    if (lost := save.restore_problem(job, event.restore, event.refused)) is not None:
        if roll_back.refuse_late(draft, job, event.restore):
            stop(draft, draft.jobs[job.name], JobPhase.QUEUED, lost)
        else:
            _not_opened(draft, job, lost)
        return
    sources = replicas.sources(job, draft.nodes, event.restore)
    what = f"restores step {event.restore.step} from {event.restore.source}"
    what += replicas.describe(sources)
    if save.is_earlier(job, event.restore):
        what += f", which {save.EARLIER} wrote"
    if event.restore.source is RestoreSource.NONE:
        what = "starts from step 0"
    draft.log_job(
        job,
        reasons.ATTEMPT_OPENED,
        f"attempt {job.attempt} {what}",
        policy="newest-complete",
        evidence=tuple(
            Evidence("refused", "commit-log", item[:300]) for item in event.refused[:MAX_REFUSALS]
        ),
    )
    end = save.ending_of_restored(draft, job, event.restore)
    if end is not None:
        stop(draft, draft.jobs[job.name], *end)
    else:
        _start(draft, draft.jobs[job.name], event.restore, event.committer_endpoint, sources)


def open_failed(draft: Draft, event: OpenFailed) -> None:
    """The committer did not open the attempt: call it again a few times, then give up.

    If it refuses a job that has not run yet, it would refuse every attempt. A repeated call is safe
    even if the failed one has reached the commit log: an attempt is opened there once, and every
    later call gets the same answer.
    """
    job = draft.jobs.get(event.job)
    if job is None or job.attempt != event.attempt or job.phase is not JobPhase.PREPARING:
        return
    if job.attempt <= event.newest < MAX_ATTEMPT:
        # This is no fault: the job was run by hand, for example, and continues behind that attempt.
        why = (
            f"attempt {event.newest} was opened elsewhere, by hand or before the job was "
            f"submitted: attempt {event.newest + 1} continues behind it"
        )
        stop(
            draft,
            draft.put_job(replace(draft.jobs[job.name], opened_elsewhere=event.newest)),
            JobPhase.QUEUED,
            why,
        )
        return
    if event.refused and not job_faults.has_run(job):
        fault = Fault(FaultKind.BAD_JOB, job.slots[0].node, draft.now_s, event.error)
        draft.fault(job.name, fault)
        return
    failures = job.current.open_failures + 1
    later_s = draft.now_s + draft.policy.open_retry_s
    job = draft.put_attempt(
        job.name,
        replace(
            draft.jobs[job.name].current,
            open_failures=failures,
            open_asked=False,
            open_not_before_s=later_s,
        ),
    )
    if failures >= draft.policy.open_attempts:
        _not_opened(draft, job, event.error)


def _not_opened(draft: Draft, job: Job, why: str) -> None:
    first = job.slots[0].node
    message = f"node {first} could not open attempt {job.attempt}: {why}"
    draft.fault(job.name, Fault(FaultKind.OPEN_FAILED, first, draft.now_s, message))


def steps_seen(
    draft: Draft,
    name: str,
    attempt: int,
    step: int,
    record: Mapping[str, float],
    checkpointing_s: float,
) -> None:
    """Take in the newest step record of the current attempt."""
    job = draft.jobs.get(name)
    if job is not None and 0 < attempt == job.attempt - 1 and job.current.restore is None:
        # The record arrived after its attempt had ended; the next one has not restored yet.
        draft.put_job(replace(draft.jobs[name], goodput=goodput.learned(job.goodput, step)))
    if job is None or attempt != job.attempt or step <= job.current.step:
        return
    draft.jobs[name] = accounting.stepped(
        job, step, record, checkpointing_s, draft.now_s, draft.policy
    )


def _advance_preparing(draft: Draft, job: Job) -> None:
    if not _all_in(draft, job, _PREPARED):
        return
    first = draft.nodes[job.slots[0].node]
    if not job.config.checkpoint.uri:
        _start(draft, job, RestorePlan(), "")
    elif not job.current.open_asked and draft.now_s >= job.current.open_not_before_s:
        # Evaluated only now: with all nodes prepared nothing of the old attempt runs, so what their
        # memory holds no longer changes.
        step, attempt = sealed_everywhere(job, draft.nodes)
        draft.put_attempt(
            job.name,
            replace(
                draft.jobs[job.name].current,
                open_asked=True,
                open_since_s=job.current.open_since_s or draft.now_s,
            ),
        )
        draft.ask(
            OpenAttempt(
                job=job.name,
                attempt=job.attempt,
                node=first.name,
                endpoint=first.identity.checkpoint_endpoint,
                checkpoint=job.config.checkpoint,
                world_size=job.config.layout.world_size,
                sealed_step=step,
                sealed_by_attempt=attempt,
                refused_steps=job.refused_steps,
            )
        )


def _start(
    draft: Draft,
    job: Job,
    restore: RestorePlan,
    committer_endpoint: str,
    sources: tuple[ReplicaSource, ...] = (),
) -> None:
    first = draft.nodes[job.slots[0].node]
    # Rank 0's node bound the port while it prepared, so all workers can connect at once.
    store = first.report.store_endpoint if first.report is not None else ""
    peers, targets = replicas.peers(job, draft.nodes)
    draft.put_job(
        replace(
            draft.jobs[job.name],
            phase=JobPhase.STARTING,
            reason=f"attempt {job.attempt}: workers are starting on "
            f"{counted(len(job.slots), 'node')}",
            current=replace(
                job.current,
                restore=restore,
                store_endpoint=store,
                committer_endpoint=committer_endpoint,
                replica_orders=ReplicaOrders(peers, targets, sources),
                failure_count=accounting.failure_count(draft.jobs.values())
                if "auto" in (job.config.checkpoint.interval, job.config.recovery.spares)
                else FailureCount(),
            ),
        )
    )


def _advance_starting(draft: Draft, job: Job) -> None:
    if _all_in(draft, job, STARTED):
        draft.put_job(
            replace(
                draft.jobs[job.name],
                phase=JobPhase.RUNNING,
                reason=f"attempt {job.attempt} runs on {counted(len(job.slots), 'node')}",
            )
        )
        workers = job.config.layout.world_size
        all_run = f"all {workers} workers of attempt {job.attempt} run"
        one_runs = f"the one worker of attempt {job.attempt} runs"
        draft.log_job(job, reasons.ATTEMPT_STARTED, message=all_run if workers > 1 else one_runs)


def _advance_running(draft: Draft, job: Job) -> None:
    if _all_in(draft, job, _FINISHED):
        early = departures.ended_early(draft, job)
        if early:
            stop(draft, draft.jobs[job.name], JobPhase.QUEUED, early)
        end = save.ending(draft, job) if early is None else None
        if end is not None:
            _end(draft, draft.jobs[job.name], *end)
    else:
        departures.expire(draft, job)


def _check_deadline(draft: Draft, job: Job) -> Job:
    limits = {
        JobPhase.PREPARING: recovery.prepare_limit_s(job, draft.policy),
        JobPhase.STARTING: draft.policy.start_timeout_s,
    }
    limit_s, since_s = limits.get(job.phase), job.timer_s
    if job.phase is JobPhase.PREPARING and job.current.open_since_s:
        limit_s, since_s = draft.policy.open_timeout_s, job.current.open_since_s
    if limit_s is None or draft.now_s - since_s < limit_s:
        return job
    wanted = {AttemptPhase.PREPARED} if job.phase is JobPhase.PREPARING else STARTED
    late = [
        slot.node
        for slot in job.slots
        if _report_phase(draft.nodes.get(slot.node), job) not in wanted
    ]
    # Several nodes that are late at once have a common cause, which is not one of them.
    blamed = late[0] if len(late) == 1 else ""
    message = (
        f"{job.phase.lower()} took longer than {limit_s:g} s; "
        f"not ready: {', '.join(late) or 'the committer'}"
    )
    fault = Fault(FaultKind.DEADLINE, blamed, draft.now_s, message, hard=False)
    return draft.fault(job.name, fault)


def stop(draft: Draft, job: Job, after: JobPhase, why: str) -> None:
    """Order the attempt of an active job to stop; ``after``: the phase that follows."""
    if job.phase is JobPhase.STOPPING:
        draft.put_job(replace(draft.jobs[job.name], after_stop=after, stop_reason=why))
    else:
        profiles.attempt_ends(draft, job)
        draft.put_job(
            replace(
                draft.jobs[job.name],
                phase=JobPhase.STOPPING,
                after_stop=after,
                stop_reason=why,
                reason=f"attempt {job.attempt} is being stopped: {why}",
            )
        )


def _why(job: Job) -> str:
    """The cause of a stop in one sentence, as far as it is known."""
    cause = blame.culprit(job.current.faults)
    if cause is None:
        return job.stop_reason
    if cause.kind is FaultKind.WORKER_SYMPTOM:
        return f"node {cause.node} lost contact with a peer ({cause.message})"
    return cause.message


def _advance_stopping(draft: Draft, job: Job) -> None:
    """End the attempt when all its nodes are idle or gone; give up on nodes that do not confirm.

    Before that, if no fault names a culprit, its nodes check each other.
    """
    in_time = draft.now_s - job.timer_s < draft.policy.stop_timeout_s
    if in_time and not job.current.all_slots(lambda s: _stopped(draft.nodes.get(s.node), s)):
        return
    waiting = [slot for slot in job.slots if not _stopped(draft.nodes.get(slot.node), slot)]
    running = [slot.node for slot in waiting if _still_runs(draft.nodes[slot.node], job)]
    patience_s = draft.policy.stop_timeout_s + draft.policy.fence_timeout_s
    if running and draft.now_s - job.timer_s < patience_s:
        _wait_for(draft, job, running)
        return
    if job.after_stop is JobPhase.QUEUED:
        job = hang.blame_by_records(draft, job)
        # A symptom may have started the stop, and the culprit may have been reported since.
        job = draft.put_job(replace(draft.jobs[job.name], stop_reason=_why(job)))
    for slot in waiting:
        if slot.node in running and draft.enforced("stop-deadline"):
            nodes.quarantine(
                draft,
                slot.node,
                f"it did not stop attempt {job.attempt} of job {job.name} within {patience_s:g} s",
                policy="stop-deadline",
            )
            job = draft.jobs[job.name]
        elif slot.node not in job.evicted:
            job = draft.put_job(replace(draft.jobs[job.name], evicted=(*job.evicted, slot.node)))
            draft.log_node(
                slot.node,
                job,
                reasons.NODE_EVICTED,
                f"node {slot.node} did not confirm within "
                f"{draft.policy.stop_timeout_s:g} s that its workers have stopped",
                policy="stop-deadline",
                outcome="it gets no work until it reports idle",
            )
    # Only with all nodes stopped: a node that did not confirm cannot take part in checks.
    if not waiting and search.in_progress(draft, draft.jobs[job.name]):
        return
    job = draft.jobs[job.name]
    draft.log_job(
        job, reasons.ATTEMPT_STOPPED, f"attempt {job.attempt} has stopped: {job.stop_reason}"
    )
    # Between two attempts is the only moment at which a configuration can change.
    job = apply_update(draft, draft.jobs[job.name])
    if job.after_stop is JobPhase.QUEUED and job.current.faults:
        job = recovery.settle(draft, job)
    if job.current.leaving is not None and not job.after_stop_ends:
        departures.left(draft, job)
    elif job.after_stop is JobPhase.QUEUED:
        draft.put_job(
            replace(
                draft.jobs[job.name],
                phase=JobPhase.QUEUED,
                reason=budgets.why_queued(job, draft.now_s),
            )
        )
    else:
        _end(draft, job, job.after_stop, job.stop_reason)


def _still_runs(node: Node, job: Job) -> bool:
    """True if a live node reports that it still runs the attempt, against its order."""
    report = node.report
    return (
        node.connected
        and node.liveness is Liveness.ALIVE
        and report is not None
        and (report.job, report.attempt) == (job.name, job.attempt)
        and report.phase is not AttemptPhase.IDLE
    )


def _wait_for(draft: Draft, job: Job, nodes_: list[str]) -> None:
    """Show which nodes the stop waits for: attempts must not overlap on a live node."""
    names = ", ".join(nodes_[:MAX_NAMED])
    reason = f"attempt {job.attempt} is being stopped, {names} still runs it: {job.stop_reason}"
    if reason != job.reason:
        draft.put_job(replace(draft.jobs[job.name], reason=reason))


def _stopped(node: Node | None, slot: NodeSlot) -> bool:
    """True if nothing of the attempt runs on the node any more."""
    if (
        node is None
        or node.liveness is Liveness.DEAD
        or node.identity.incarnation != slot.incarnation
    ):
        return True
    report = node.report
    idle = report is not None and report.phase is AttemptPhase.IDLE
    # An idle report counts only if the node has received the order to stop: an earlier one may be
    # from a node that was about to prepare. See Note [Desired state].
    return idle and report is not None and report.desired_version >= node.desired_version


def _end(draft: Draft, job: Job, phase: JobPhase, why: str) -> None:
    ended: dict[JobPhase, Reason] = {
        JobPhase.SUCCEEDED: reasons.JOB_SUCCEEDED,
        JobPhase.FAILED: reasons.JOB_FAILED,
        JobPhase.CANCELLED: reasons.JOB_CANCELLED,
    }
    profiles.attempt_ends(draft, job)
    departures.empty(draft, job)
    draft.put_job(replace(draft.jobs[job.name], phase=phase, reason=why, spares=()))
    draft.log_job(
        job,
        ended[phase],
        why,
        outcome=_way_out(draft.jobs[job.name]) if phase is JobPhase.FAILED else "",
    )


def _way_out(job: Job) -> str:
    """Remedies for a job that has failed."""
    where = f"from step {job.committed_step}" if job.committed_step else "at step 0"
    return (
        f"once the cause is gone, `megascale restart {job.name} --reason REASON` continues it "
        f"{where}; `megascale update JOB.YAML --reason REASON` before that changes its file"
    )


def _all_in(draft: Draft, job: Job, phases: frozenset[AttemptPhase]) -> bool:
    """True if every node of the attempt reports one of these phases of it."""
    return job.current.all_slots(lambda s: _report_phase(draft.nodes.get(s.node), job) in phases)


def _report_phase(node: Node | None, job: Job) -> AttemptPhase | None:
    """The node's phase in this attempt; None if its report is missing or about another one."""
    if (
        node is None
        or node.report is None
        or (node.report.job, node.report.attempt) != (job.name, job.attempt)
    ):
        return None
    return node.report.phase


def restart_timers(draft: Draft) -> None:
    """Give every phase its full time under a new leader.

    The previous leader may have called the committer, but the answer went to that process: the call
    is repeated.
    """
    for name, job in list(draft.jobs.items()):
        draft.jobs[name] = replace(
            job,
            timer_s=draft.now_s,
            current=replace(job.current, open_asked=False, open_since_s=0.0),
            goodput=accounting.adopted(job, draft.now_s),
        )


def apply_update(draft: Draft, job: Job) -> Job:
    """If a new configuration waits, make it the job's; no attempt runs now."""
    if not job.pending_spec:
        return job
    config = loading.from_json(job.pending_spec)
    return draft.put_job(
        replace(
            draft.jobs[job.name],
            config=config,
            spec_revision=job.spec_revision + 1,
            pending_spec="",
        )
    )
