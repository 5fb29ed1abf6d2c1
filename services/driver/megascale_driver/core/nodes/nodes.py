"""Nodes: hello, heartbeat, and their disposition (cordon, quarantine, back to schedulable)."""

from __future__ import annotations

from megascale_driver.core import unreadable
from megascale_driver.core.checkpoints import restored, saving
from megascale_driver.core.draft import Draft
from megascale_driver.core.faults import breaker
from megascale_driver.core.nodes import profiles
from megascale_driver.core.signs import kernel_faults
from megascale_driver.core.values import plausible
from megascale_driver.core.values.checkpoint_progress import Progress
from megascale_driver.core.values.events import (
    CordonRequested,
    Evidence,
    NodeHello,
    NodeReport,
    UncordonRequested,
)
from megascale_driver.core.values.state import Disposition, Job, Liveness, Node, Report
from megascale_job.visible import counted

SELF_CHECK = "self-check"  # the policy of a quarantine after a failed self-check
GROUP_CHECK = "group-check"  # and after failed checks with other nodes


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
    draft.node(
        event.node,
        identity=event.identity,
        liveness=Liveness.ALIVE,
        connected=True,
        last_seen_s=draft.now_s,
        heard_at_s=draft.now_s,
        reset_at_s=0.0,
        probe_failed_at_s=0.0,
        mute_at_s=0.0,
    )
    # In any case: the node may have missed what was sent while its link was broken, and has nothing
    # of this leader's epoch yet.
    draft.command(event.node)
    if fresh:
        draft.node(event.node, report=None, checks=())
        draft.log(
            "NODE_JOINED",
            f"node {event.node} has joined with {counted(len(event.identity.devices), 'device')}",
            subject=f"nodes/{event.node}",
        )


def _extend_grace(draft: Draft) -> None:
    """A fleet is linking to a new leader: its other nodes may stand in the same queue."""
    policy = draft.policy
    until_s = min(
        draft.now_s + policy.leader_grace_s / 2, draft.leader_since_s + policy.leader_grace_max_s
    )
    draft.grace_until_s = max(draft.grace_until_s, until_s)


def _lift_self_check_quarantine(draft: Draft, node: Node) -> None:
    """Lift a quarantine by self-check: the restart may have fixed what failed.

    The next PREPARE checks the node again.
    """
    draft.node(
        node.name, disposition=Disposition.SCHEDULABLE, disposition_reason="", disposition_policy=""
    )
    _readmit(draft, node.name)
    draft.log(
        "NODE_UNCORDONED", f"node {node.name} was restarted and may get work again",
        subject=f"nodes/{node.name}", policy=node.disposition_policy,
        outcome=f"it was quarantined: {node.disposition_reason}",
    )  # fmt: skip


def _readmit(draft: Draft, name: str) -> None:
    """Jobs that left the node when it was quarantined may return to it."""
    for job in list(draft.jobs.values()):
        if not job.terminal and name in job.evicted:
            draft.job(job.name, evicted=tuple(other for other in job.evicted if other != name))


def report(draft: Draft, event: NodeReport) -> Job | None:
    """Take in a heartbeat; the job that it may move on, or None if nothing relevant has changed."""
    node = draft.nodes.get(event.node)
    # Events queue up: this heartbeat may be from before a restart of the agent, or from a link that
    # has broken since.
    if node is None or node.identity.incarnation != event.incarnation or not node.connected:
        return None
    if problem := plausible.report(draft.jobs, event.report):
        message_refused(draft, f"nodes/{node.name}", problem)
        return None
    draft.node(
        node.name,
        report=event.report,
        beat_at_s=event.now_s,
        checks=event.report.checks or node.checks,
        liveness=Liveness.ALIVE,
        last_seen_s=max(node.last_seen_s, event.now_s),
        heard_at_s=max(node.heard_at_s, event.now_s),
        probe_failed_at_s=0.0,
        mute_at_s=0.0,
    )
    if node.report is None and draft.unreadable:
        draft.command(node.name)  # withheld until it was known what the node runs
    for progress in event.report.progress:
        _committed(draft, node.name, progress)
    restored.report(draft, node.name, event.report)
    restored.differs(draft, node.name, node.report, event.report)
    saving.report(draft, node, event.report)
    profiles.report(draft, node.name, event.report)
    before = node.report
    if (
        before is not None
        and node.liveness is Liveness.ALIVE
        and _relevant(before) == _relevant(event.report)
    ):
        return None
    return draft.holder_of(node.name)


def message_refused(draft: Draft, subject: str, problem: str) -> None:
    """Write down that a message was refused: it cannot be true, or this build cannot read it."""
    draft.log(
        "MESSAGE_REFUSED", f"a message of {subject} is refused: {problem}",
        subject=subject, policy="plausible", outcome="it is dropped as a whole",
    )  # fmt: skip


def _relevant(report: Report) -> tuple[object, ...]:
    """The part of a report that can move a job on or free a node."""
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
        tuple((report.logs_of, one.finding.fingerprint) for one in kernel_faults.fatal(report)),
    )


def _committed(draft: Draft, node: str, progress: Progress) -> None:
    job = draft.jobs.get(progress.job)
    if job is None or not progress.committed_step:
        return
    if job.slots and job.slot_of(node) is None:
        return  # another job's node does not say what this one has saved
    if progress.committed_by_attempt > job.attempt:
        return  # no such attempt was ever issued: the daemon is faulty or of another cluster
    if job.abandoned(progress.committed_step, progress.committed_by_attempt):
        return
    if (
        progress.committed_by_attempt == job.attempt
        and progress.committed_step in job.refused_steps
        and not job.went_back(job.attempt)
    ):
        # This step is another state now: the refused one was written by an earlier attempt.
        rest = tuple(step for step in job.refused_steps if step != progress.committed_step)
        job = draft.job(job.name, refused_steps=rest)
    # Only an order makes a committed step go back (core.orders).
    if (progress.committed_step, progress.committed_by_attempt) <= (
        job.committed_step,
        job.committed_by_attempt,
    ):
        return
    draft.job(
        job.name,
        committed_step=progress.committed_step,
        committed_by_attempt=progress.committed_by_attempt,
        committed_at_s=draft.now_s,
        manifest_uri=progress.manifest_uri,
        conditions=saving.without_failing(job),
    )
    draft.log(
        "CHECKPOINT_COMMITTED",
        f"the checkpoint of step {progress.committed_step} is complete",
        subject=f"jobs/{job.name}",
        job=job.name,
        actor=f"nodes/{node}",
        attempt=progress.committed_by_attempt,
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
    draft.node(
        node.name,
        disposition=Disposition.CORDONED,
        disposition_reason=event.reason,
        disposition_policy="manual",
    )
    draft.log(
        "NODE_CORDONED", f"node {node.name} gets no new work: {event.reason}",
        subject=f"nodes/{node.name}", job=job.name if job else "",
        attempt=job.attempt if job else 0, actor=event.actor, policy="manual",
        outcome=f"attempt {job.attempt} of job {job.name} continues" if job else "it runs nothing",
    )  # fmt: skip


def _uncordon(draft: Draft, node: Node, event: UncordonRequested) -> None:
    """Let the node have work again; from a quarantine, also for the jobs that left it."""
    if node.slow_checks:
        draft.node(node.name, slow_checks=())
    if node.disposition is Disposition.SCHEDULABLE:
        return
    before = node.disposition
    draft.node(
        node.name, disposition=Disposition.SCHEDULABLE, disposition_reason="", disposition_policy=""
    )
    if before is Disposition.QUARANTINED:
        _readmit(draft, node.name)
    holder = draft.holder_of(node.name)
    draft.log(
        "NODE_UNCORDONED", f"node {node.name} may get work again: {event.reason}",
        subject=f"nodes/{node.name}", job=holder.name if holder else "",
        attempt=holder.attempt if holder else 0, actor=event.actor, policy="manual",
        outcome=f"it was {before.lower()}: {node.disposition_reason}",
    )  # fmt: skip


def quarantine(
    draft: Draft,
    name: str,
    reason: str,
    *,
    actor: str = "driver",
    policy: str,
    evidence: tuple[Evidence, ...] = (),
) -> None:
    """Give the node no more work; its job leaves it. Counts as an eviction by hard fact."""
    if draft.nodes[name].disposition is Disposition.QUARANTINED:
        return
    job = draft.holder_of(name)
    draft.node(
        name,
        disposition=Disposition.QUARANTINED,
        disposition_reason=reason,
        disposition_policy=policy,
    )
    if actor == "driver":
        breaker.count(draft, name)
    if job is not None and name not in job.evicted:
        draft.job(job.name, evicted=(*job.evicted, name))
    if unread := unreadable.job_on(draft.unreadable, draft.nodes[name]):
        draft.command(name)  # to stop, if an operator says so
    draft.log(
        "NODE_EVICTED",
        f"node {name} is quarantined: {reason}",
        subject=f"nodes/{name}",
        job=job.name if job else "",
        attempt=job.attempt if job else 0,
        actor=actor,
        policy=policy,
        evidence=evidence,
        outcome=f"job {job.name} leaves it" if job else _left_behind(unread),
    )


def _left_behind(unread: str) -> str:
    """What was on a node that no readable job held."""
    return f"it ran job {unread}, which cannot be read" if unread else "it ran nothing"
