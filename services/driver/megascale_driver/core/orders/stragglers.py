"""Slow nodes that spans reveal, and what follows (MegaScale section 5.1).

The verdict comes from :mod:`megascale_driver.analysis.spans.outliers`, based on spans that the core
never sees. It is an inference, so it is observed unless an operator has the rule enforced; then the
job leaves the node, if a spare stands by. At most one line is logged per node and attempt.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from megascale_driver.core.draft import DRIVER, Draft
from megascale_driver.core.faults import job_faults
from megascale_driver.core.jobs import jobs
from megascale_driver.core.nodes import departures
from megascale_driver.core.orders.orders import can_save
from megascale_driver.core.values import reasons
from megascale_driver.core.values.attempt import Fault, FaultKind, LeaveKind
from megascale_driver.core.values.events import Evidence, StragglerFound
from megascale_driver.core.values.job import Job, JobPhase

STRAGGLER: Final = "straggler"
MAX_NAMED = 8  # in an attempt; more slow nodes than this indicate that the rule is at fault


def found(draft: Draft, event: StragglerFound) -> None:
    """Log the slow node, and leave it if the rule is enforced."""
    job = draft.running(event)
    if job is None:
        return
    slow = job.current.slow_nodes
    if event.node in slow or len(slow) >= MAX_NAMED or job.slot_of(event.node) is None:
        return
    draft.put_attempt(
        job.name, replace(draft.jobs[job.name].current, slow_nodes=(*slow, event.node))
    )
    enforced = draft.enforced(STRAGGLER)
    leaves = enforced and bool(job.spares)
    draft.log_node(
        event.node,
        job,
        reasons.STRAGGLER,
        event.sentence,
        policy=STRAGGLER,
        mode="ENFORCE" if enforced else "OBSERVE",
        evidence=(
            Evidence(
                "spans",
                f"nodes/{event.node}/ranks/{event.rank}",
                event.operation,
                f"{event.ratio:.3f}",
            ),
        ),
        outcome=_outcome(job, enforced=enforced),
    )
    if not leaves:
        return
    fault = Fault(FaultKind.NODE_EVICTED, event.node, draft.now_s, event.sentence, event.rank)
    job_faults.leave(draft, draft.jobs[job.name], fault, STRAGGLER, job_faults.left_by(job))
    job = draft.jobs[job.name]
    if not can_save(job):
        jobs.stop(draft, job, JobPhase.QUEUED, event.sentence)
    elif job.current.leaving is None:
        departures.order(draft, job, LeaveKind.RESTART, reason=event.sentence, actor=DRIVER)


def _outcome(job: Job, *, enforced: bool) -> str:
    if not enforced:
        return "the rule is observed: the job keeps the node"
    if not job.spares:
        return "no spare stands by: the job keeps the node"
    return "the job leaves the node for a spare"
