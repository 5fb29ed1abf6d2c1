"""Logs once when a job becomes slower than its plan, and once when it recovers.

The verdict comes from :mod:`megascale_planner.job_plan`, based on spans that the core never sees.
Nothing follows from it: the remedy depends on the term, and a plan is a model.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from megascale_driver.core.draft import Draft
from megascale_driver.core.values import reasons
from megascale_driver.core.values.attempt import PlanVerdict
from megascale_driver.core.values.events import Evidence, PlanCompared

PLAN: Final = "plan"
MAX_CHANGES = 16  # in an attempt; more changes indicate noise in the job's steps


def compared(draft: Draft, event: PlanCompared) -> None:
    """Log that a job is slower than planned, by another term, or as planned again."""
    job = draft.running(event)
    if job is None:
        return
    known = job.current.plan
    if event.slower_by == known.slower_by or known.changes >= MAX_CHANGES:
        return
    changes = known.changes + 1
    draft.put_attempt(
        job.name,
        replace(
            draft.jobs[job.name].current, plan=PlanVerdict(event.slower_by, event.sentence, changes)
        ),
    )
    draft.log_job(
        job,
        reasons.SLOWER_THAN_PLAN if event.slower_by else reasons.AS_PLANNED,
        event.sentence,
        policy=PLAN,
        mode="OBSERVE",
        evidence=(
            Evidence(
                "spans",
                f"jobs/{job.name}/steps/{event.first_step}-{event.last_step}",
                event.slower_by,
                event.hardware,
            ),
        ),
        outcome="the job continues: the plan is a model, and nothing is decided from it",
    )


# The handlers of findings, by type.
HANDLERS: Final = {PlanCompared: compared}
