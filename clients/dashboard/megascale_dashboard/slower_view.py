"""Why a job is slower: the parts of a step beside the plan, and why steps take longer than before.

MegaScale, section 6.3: the decline of MFU and its cause.
"""

from __future__ import annotations

from megascale.v1 import driver_pb2
from megascale_client import Job
from megascale_dashboard.shown import Page


def slower(job: Job, decline: driver_pb2.GetMfuDeclineResponse | None, problem: str = "") -> Page:
    """The page; ``decline`` None: the driver cannot say, for the reason ``problem``."""
    return {
        "name": job.spec.name,
        "phase": job.phase.name.lower(),
        "plan": plan(job),
        "decline": None if decline is None else _decline(decline),
        "problem": problem,
        "command": f"megascale why {job.spec.name}",
    }


def plan(job: Job) -> Page | None:
    """The running attempt beside its plan; None while the driver has not compared them."""
    if not job.proto.HasField("plan"):
        return None
    found = job.proto.plan
    return {
        "attempt": found.attempt,
        "first_step": found.first_step,
        "last_step": found.last_step,
        "measured_s": found.measured_step_s,
        "planned_s": found.predicted_step_s or None,
        "low_s": found.low_s,
        "high_s": found.high_s,
        "slower_by": found.slower_by,
        "sentence": found.sentence,
        "hardware": found.hardware,
        "problem": found.problem,
        "terms": [
            {"term": term.name, "measured_s": term.measured_s, "planned_s": term.predicted_s}
            for term in found.terms
        ],
    }


def _decline(found: driver_pb2.GetMfuDeclineResponse) -> Page:
    return {
        "cause": found.cause,
        "sentence": found.sentence,
        "before_ms": found.step_before_ms,
        "after_ms": found.step_after_ms,
        "first_step": found.first_step,
        "split_step": found.split_step,
        "last_step": found.last_step,
        "node": found.node,
        "rank": found.rank if found.rank >= 0 else None,
        "shares": dict(sorted(found.shares.items(), key=lambda each: (-each[1], each[0]))),
    }
