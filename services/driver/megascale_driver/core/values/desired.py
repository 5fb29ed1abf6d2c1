"""The desired state of each node: a pure function of its job.

Level-triggered: it says what should be, not what has happened. Sending it again is always correct,
and a node that missed ten versions needs only the newest.
"""

from __future__ import annotations

from megascale_driver.core.values.state import (
    Desired,
    DesiredPhase,
    Job,
    JobPhase,
    Node,
    ProfileCommand,
    TraceState,
)

IDLE = Desired()


def desired_of(node: Node, job: Job | None) -> Desired:
    """The desired state of ``node``, held by an attempt of ``job`` or idle.

    A node whose agent restarted since the attempt was placed is IDLE: its workers are gone, and the
    attempt is about to end.
    """
    slot = job.slot_of(node.name) if job is not None else None
    if job is None or slot is None or job.phase is JobPhase.STOPPING:
        return IDLE
    if node.identity.incarnation != slot.incarnation:
        return IDLE
    if job.phase is JobPhase.PREPARING:
        return Desired(DesiredPhase.PREPARE, job.name, job.attempt, checks=job.current.checks)
    return Desired(
        DesiredPhase.START, job.name, job.attempt, job.current.store_endpoint, job.current.restore,
        job.current.committer_endpoint, _profile_on(node.name, job),
        job.current.replica_orders.of(node.name, slot.ranks), job.current.failure_count,
        leave_id(job),
    )  # fmt: skip


def leave_id(job: Job) -> str:
    """Id of the order to save and end, while it stands."""
    leaving = job.current.leaving
    return f"{leaving.kind.lower()}-{leaving.since_s:.3f}" if leaving is not None else ""


def _profile_on(node: str, job: Job) -> ProfileCommand | None:
    """The node's part in the attempt's profile, while traces of its ranks are pending."""
    profile = job.profile
    if profile is None or profile.attempt != job.attempt:
        return None
    ranks = tuple(
        t.rank for t in profile.traces if t.node == node and t.state is TraceState.PENDING
    )
    if not ranks:
        return None
    return ProfileCommand(
        profile.id, profile.first_step, profile.last_step, ranks, profile.not_after_s
    )
