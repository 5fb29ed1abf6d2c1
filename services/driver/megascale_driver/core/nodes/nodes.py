"""Nodes: hello, heartbeat, disposition, slow checks, and when a departed node is forgotten.

Disposition: schedulable, cordoned, draining or quarantined, by operators and by rules.

Slow checks: one slow measurement condemns no node, because another process may have used the
device. A second FAIL in a row of the same target, compared with the fleet, is evidence. It is still
a comparison, so the rule is observed unless an operator has it enforced; then the node is
quarantined, within the breaker's limits. The count is stored with the node, so that a new leader
continues it.

Departed nodes: a fleet that replaces machines would otherwise keep every name forever, in memory
and in etcd. A node is forgotten when it has been dead for long and no job holds it. One that was
cordoned, drained or quarantined stays until an operator puts it back: if it were forgotten, it
could come back as a node that gets work. A forgotten node that returns joins as a new one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from megascale_driver.analysis.baselines import REPEATS
from megascale_driver.core.checkpoints import roll_back, save
from megascale_driver.core.draft import Draft, unreadable_job_on
from megascale_driver.core.faults import breaker
from megascale_driver.core.nodes import profiles
from megascale_driver.core.signs import kernel
from megascale_driver.core.values import bounds, reasons
from megascale_driver.core.values.cluster import (
    MAX_SLOW,
    Disposition,
    Liveness,
    Node,
    Progress,
    Report,
    SlowCheck,
)
from megascale_driver.core.values.events import (
    CheckCompared,
    CordonRequested,
    Evidence,
    MessageRefused,
    NodeHello,
    NodeReport,
    UncordonRequested,
    listed,
)
from megascale_driver.core.values.job import Job
from megascale_job.visible import counted

SELF_CHECK = "self-check"  # policy of a quarantine after a failed self-check
GROUP_CHECK = "group-check"  # policy of a quarantine after failed checks with other nodes


def hello(draft: Draft, event: NodeHello) -> None:
    """A node opened its link, so it is alive.

    A new incarnation has lost all workers and snapshots of the one before.
    """
    known = draft.nodes.get(event.node)
    if known is None:
        draft.nodes[event.node] = Node(event.node)
    elif known.liveness is Liveness.UNKNOWN and draft.now_s < draft.grace_until_s:
        _extend_grace(draft)
    fresh = known is None or known.identity.incarnation != event.identity.incarnation
    if known is not None and fresh and known.disposition_policy in (SELF_CHECK, GROUP_CHECK):
        _lift_self_check_quarantine(draft, known)
    draft.put_node(
        replace(
            draft.nodes[event.node],
            identity=event.identity,
            liveness=Liveness.ALIVE,
            connected=True,
            last_seen_s=draft.now_s,
            heard_at_s=draft.now_s,
            reset_at_s=0.0,
            probe_failed_at_s=0.0,
            mute_at_s=0.0,
        )
    )
    # Always: the node may have missed what was sent while its link was broken, and has nothing of
    # this leader's epoch yet. See Note [Desired state].
    draft.command(event.node)
    if fresh:
        draft.put_node(replace(draft.nodes[event.node], report=None, checks=()))
        draft.log_node(
            event.node,
            None,
            reasons.NODE_JOINED,
            f"node {event.node} has joined with {counted(len(event.identity.devices), 'device')}",
        )


def _extend_grace(draft: Draft) -> None:
    """Extend the grace period: a fleet is linking, and other nodes may be waiting in line."""
    policy = draft.policy
    until_s = min(
        draft.now_s + policy.leader_grace_s / 2, draft.leader_since_s + policy.leader_grace_max_s
    )
    draft.grace_until_s = max(draft.grace_until_s, until_s)


def _lift_self_check_quarantine(draft: Draft, node: Node) -> None:
    """Lift a quarantine by self-check: the restart may have fixed what failed.

    The next PREPARE checks the node again.
    """
    dispose(draft, node.name, Disposition.SCHEDULABLE)
    _readmit(draft, node.name)
    draft.log_node(
        node.name,
        None,
        reasons.NODE_UNCORDONED,
        f"node {node.name} was restarted and can get work again",
        policy=node.disposition_policy,
        outcome=f"it was quarantined: {node.disposition_reason}",
    )


def _readmit(draft: Draft, name: str) -> None:
    """Let jobs that left the node when it was quarantined return to it."""
    for job in list(draft.jobs.values()):
        if not job.terminal and name in job.evicted:
            draft.put_job(
                replace(
                    draft.jobs[job.name],
                    evicted=tuple(other for other in job.evicted if other != name),
                )
            )


def report(draft: Draft, event: NodeReport) -> Job | None:
    """Take in a heartbeat; returns the job that it may advance, None if it changes nothing."""
    node = draft.nodes.get(event.node)
    # Events queue up, so this heartbeat may be older than a restart of the agent, or from a link
    # that has broken since.
    if node is None or node.identity.incarnation != event.incarnation or not node.connected:
        return None
    if problem := bounds.report(draft.jobs, event.report):
        message_refused(draft, MessageRefused(draft.now_s, f"nodes/{node.name}", problem))
        return None
    draft.put_node(
        replace(
            draft.nodes[node.name],
            report=event.report,
            beat_at_s=event.now_s,
            checks=event.report.checks or node.checks,
            liveness=Liveness.ALIVE,
            last_seen_s=max(node.last_seen_s, event.now_s),
            heard_at_s=max(node.heard_at_s, event.now_s),
            probe_failed_at_s=0.0,
            mute_at_s=0.0,
        )
    )
    if node.report is None and draft.unreadable:
        draft.command(node.name)  # the order was withheld until it was known what the node runs
    for progress in event.report.progress:
        _committed(draft, node.name, progress)
    roll_back.report_restored(draft, node.name, event.report)
    roll_back.report_differences(draft, node.name, node.report, event.report)
    save.report(draft, node, event.report)
    profiles.report(draft, node.name, event.report)
    before = node.report
    if (
        before is not None
        and node.liveness is Liveness.ALIVE
        and _relevant(before) == _relevant(event.report)
    ):
        return None
    return draft.holder_of(node.name)


def message_refused(draft: Draft, event: MessageRefused) -> None:
    """Log that a message was refused: implausible, or not readable by this build."""
    draft.log(
        reasons.MESSAGE_REFUSED,
        f"a message of {event.subject} is refused: {event.problem}",
        subject=event.subject,
        policy="plausible",
        outcome="it is dropped as a whole",
    )


def _relevant(report: Report) -> tuple[object, ...]:
    """The part of a report that can advance a job or free a node."""
    return (
        report.desired_version,
        report.job,
        report.attempt,
        report.phase,
        report.failure,
        report.finished_step,
        report.workers,
        report.checks,
        report.store_endpoint,
        report.leave_failed,
        tuple((report.logs_of, one.finding.fingerprint) for one in kernel.fatal(report)),
    )


def _committed(draft: Draft, node: str, progress: Progress) -> None:
    job = draft.jobs.get(progress.job)
    if job is None or not progress.committed_step:
        return
    if job.slots and job.slot_of(node) is None:
        return  # a node of another job cannot know what this one has saved
    if progress.committed_by_attempt > job.attempt:
        return  # such an attempt was never issued: the daemon is faulty or of another cluster
    if job.abandoned(progress.committed_step, progress.committed_by_attempt):
        return
    if (
        progress.committed_by_attempt == job.attempt
        and progress.committed_step in job.refused_steps
        and not job.went_back(job.attempt)
    ):
        # The step is a new state: an earlier attempt wrote the refused one.
        rest = tuple(step for step in job.refused_steps if step != progress.committed_step)
        job = draft.put_job(replace(draft.jobs[job.name], refused_steps=rest))
    # Only a rollback lowers the committed step (checkpoints.roll_back).
    if (progress.committed_step, progress.committed_by_attempt) <= (
        job.committed_step,
        job.committed_by_attempt,
    ):
        return
    draft.put_job(
        replace(
            draft.jobs[job.name],
            committed_step=progress.committed_step,
            committed_by_attempt=progress.committed_by_attempt,
            committed_at_s=draft.now_s,
            manifest_uri=progress.manifest_uri,
            conditions=save.without_failing(job),
        )
    )
    draft.log_job(
        job,
        reasons.CHECKPOINT_COMMITTED,
        f"the checkpoint of step {progress.committed_step} is complete",
        actor=f"nodes/{node}",
        attempt=progress.committed_by_attempt,
    )


def dispose(
    draft: Draft, name: str, disposition: Disposition, reason: str = "", policy: str = ""
) -> None:
    """Set whether the node can be given work; ``policy``: the rule that decided it."""
    draft.put_node(
        replace(
            draft.nodes[name],
            disposition=disposition,
            disposition_reason=reason,
            disposition_policy=policy,
        )
    )


def set_disposition(draft: Draft, event: CordonRequested | UncordonRequested) -> None:
    """Carry out an operator's request; nothing happens if the node is in that state already."""
    node = draft.nodes.get(event.node)
    if node is None:
        draft.refusal = "NODE_NOT_FOUND"
    elif isinstance(event, CordonRequested):
        _cordon(draft, node, event)
    else:
        _uncordon(draft, node, event)


def _cordon(draft: Draft, node: Node, event: CordonRequested) -> None:
    """Keep new work off the node; its attempt continues. The scheduler replaces it as a spare."""
    if node.disposition in (Disposition.QUARANTINED, Disposition.DRAINING):
        draft.refusal = "NODE_QUARANTINED"
        return
    if node.disposition is Disposition.CORDONED:
        return
    job = draft.holder_of(node.name)
    dispose(draft, node.name, Disposition.CORDONED, event.reason, "manual")
    draft.log_node(
        node.name,
        job,
        reasons.NODE_CORDONED,
        f"node {node.name} gets no new work: {event.reason}",
        actor=event.actor,
        policy="manual",
        outcome=f"attempt {job.attempt} of job {job.name} continues" if job else "it runs nothing",
    )


def _uncordon(draft: Draft, node: Node, event: UncordonRequested) -> None:
    """Let the node have work again; from a quarantine, also for the jobs that left it."""
    if node.slow_checks:
        draft.put_node(replace(draft.nodes[node.name], slow_checks=()))
    if node.disposition is Disposition.SCHEDULABLE:
        return
    before = node.disposition
    dispose(draft, node.name, Disposition.SCHEDULABLE)
    if before is Disposition.QUARANTINED:
        _readmit(draft, node.name)
    holder = draft.holder_of(node.name)
    draft.log_node(
        node.name,
        holder,
        reasons.NODE_UNCORDONED,
        f"node {node.name} can get work again: {event.reason}",
        actor=event.actor,
        policy="manual",
        outcome=f"it was {before.lower()}: {node.disposition_reason}",
    )


def quarantine(
    draft: Draft,
    name: str,
    reason: str,
    *,
    actor: str = "driver",
    policy: str,
    evidence: tuple[Evidence, ...] = (),
) -> None:
    """Keep all work off the node, and have its job leave it; counts as an eviction."""
    if draft.nodes[name].disposition is Disposition.QUARANTINED:
        return
    job = draft.holder_of(name)
    dispose(draft, name, Disposition.QUARANTINED, reason, policy)
    if actor == "driver":
        breaker.count(draft, name)
    if job is not None and name not in job.evicted:
        draft.put_job(replace(draft.jobs[job.name], evicted=(*job.evicted, name)))
    if unread := unreadable_job_on(draft.unreadable, draft.nodes[name]):
        draft.command(name)  # an order to stop; it is sent only after a manual eviction
    draft.log_node(
        name,
        job,
        reasons.NODE_EVICTED,
        f"node {name} is quarantined: {reason}",
        actor=actor,
        policy=policy,
        evidence=evidence,
        outcome=f"job {job.name} leaves it" if job else _left_behind(unread),
    )


def _left_behind(unread: str) -> str:
    """The work on a node that no readable job held."""
    return f"it ran job {unread}, which cannot be read" if unread else "it ran nothing"


REPEATED_CHECK: Final = "repeated-check"
_MAX_DETAIL = 400


def check_compared(draft: Draft, event: CheckCompared) -> None:
    """Count FAILs in a row; log what is advised, or quarantine if the rule is enforced."""
    node = draft.nodes.get(event.node)
    if node is None:
        return
    others = tuple(
        each
        for each in node.slow_checks
        if (each.check, each.target) != (event.check, event.target)
    )
    if not event.failed:
        if others != node.slow_checks:
            draft.put_node(replace(draft.nodes[event.node], slow_checks=others))
        return
    before = next((each for each in node.slow_checks if each not in others), None)
    if before is not None and event.origin and before.origin == event.origin:
        return  # the same measurement, reported again to a new leader
    times = before.times + 1 if before is not None else 1
    newest = SlowCheck(event.check, event.target, times, event.origin)
    draft.put_node(replace(draft.nodes[event.node], slow_checks=(*others, newest)[-MAX_SLOW:]))
    if times >= REPEATS and node.disposition is not Disposition.QUARANTINED:
        _advise(draft, event, times)


def _advise(draft: Draft, event: CheckCompared, times: int) -> None:
    detail = event.detail[:_MAX_DETAIL]
    reason = (
        f"check {event.check} of {event.target} failed {counted(times, 'time')} in a row: {detail}"
    )
    evidence = (Evidence("check", f"nodes/{event.node}", event.check),)
    enforced = draft.enforced(REPEATED_CHECK)
    if enforced and breaker.allows(draft, event.node, REPEATED_CHECK):
        quarantine(draft, event.node, reason, policy=REPEATED_CHECK, evidence=evidence)
        return
    draft.log_node(
        event.node,
        None,
        reasons.CHECK_REPEATED,
        f"node {event.node}: {reason}",
        policy=REPEATED_CHECK,
        mode="OBSERVE",
        evidence=evidence,
        outcome="too many nodes were evicted recently: it keeps its work"
        if enforced
        else "the rule is observed: evicting the node is advised",
    )


# Scan interval for departed nodes; a scan visits every node.
LOOK_S = 3600.0
LOOK_MIN_S = 60.0
MAX_AT_ONCE = 64  # nodes forgotten in one decision; their keys are deleted together
AGAIN_S = 1.0
MAX_NAMED = 8


def forget_dead(draft: Draft) -> None:
    """Forget the nodes that the policy no longer keeps, the longest dead first, a few at a time."""
    if draft.now_s < draft.forget_due_s:
        return
    limit_s = draft.policy.forget_dead_s
    draft.forget_due_s = draft.now_s + max(LOOK_MIN_S, min(LOOK_S, limit_s / 4))
    oldest_s = draft.now_s - limit_s
    gone = [node for node in draft.nodes.values() if _may_go(node) and node.last_seen_s < oldest_s]
    if not gone:
        return
    wanted = {
        name
        for job in draft.jobs.values()
        if not job.terminal
        for name in (*(slot.node for slot in job.slots), *job.spares)
    }
    gone = [node for node in gone if node.name not in wanted]
    gone.sort(key=lambda node: (node.last_seen_s, node.name))
    if len(gone) > MAX_AT_ONCE:
        draft.forget_due_s = draft.now_s + AGAIN_S
    if gone:
        _forget(draft, [node.name for node in gone[:MAX_AT_ONCE]], limit_s)


def _may_go(node: Node) -> bool:
    return (
        node.liveness is Liveness.DEAD
        and not node.connected
        and node.disposition is Disposition.SCHEDULABLE
    )


def _forget(draft: Draft, names: list[str], limit_s: float) -> None:
    for name in names:
        del draft.nodes[name]
    one = len(names) == 1
    what = f"node {names[0]} is" if one else f"nodes {listed(names, MAX_NAMED)} are"
    draft.log(
        reasons.NODE_FORGOTTEN,
        f"{what} forgotten: dead for more than {counted(limit_s / 3600, 'hour')}, and no job needs "
        f"{'it' if one else 'them'}",
        subject=f"nodes/{names[0]}" if one else "cluster",
        policy="retention",
        evidence=tuple(Evidence("silence", f"nodes/{name}", "dead") for name in names),
        outcome="a node that comes back joins as a new one",
    )
