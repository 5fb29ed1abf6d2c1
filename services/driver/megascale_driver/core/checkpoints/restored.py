"""What an attempt really restored, where the planned checkpoint turned out to be damaged.

The ranks take the next older one that the plan names, all together, and their nodes report it with
the start of training. From then on the attempt's plan is the one that was carried out, and the
damaged steps are refused to later attempts.
"""

from __future__ import annotations

from megascale_driver.core.draft import Draft
from megascale_driver.core.values.events import Evidence
from megascale_driver.core.values.state import Report

MAX_PROBLEM = 500


def report(draft: Draft, node: str, after: Report) -> None:
    """Take in what the workers of ``node`` have restored in place of the planned step."""
    job = draft.jobs.get(after.job)
    if job is None or job.terminal or after.attempt != job.attempt:
        return
    found = next((w for w in after.workers if w.restored_step >= 0), None)
    planned = job.current.restore
    if found is None or planned is None or planned.step == found.restored_step:
        return
    candidates = planned.candidates()
    number = next((n for n, p in enumerate(candidates) if p.step == found.restored_step), 0)
    if not number:
        return  # no such step was planned: the worker is of another build, or faulty
    refused = tuple(plan.step for plan in candidates[:number] if plan.step)
    draft.attempt(job.name, restore=candidates[number])
    draft.job(job.name, refused_steps=tuple(dict.fromkeys((*job.refused_steps, *refused))))
    problem = found.restore_problem[:MAX_PROBLEM]
    draft.log(
        "CHECKPOINT_REFUSED",
        f"the checkpoint of step {planned.step} is damaged: {problem}",
        subject=f"jobs/{job.name}", job=job.name, actor=f"nodes/{node}", attempt=job.attempt,
        policy="checksum", evidence=(Evidence("checksum", f"nodes/{node}", problem),),
        outcome=f"the same attempt goes on from step {found.restored_step}",
    )  # fmt: skip


def differs(draft: Draft, node: str, before: Report | None, after: Report) -> None:
    """Write to the audit log, once, what differs from the run that wrote the checkpoint."""
    job = draft.jobs.get(after.job)
    if before is None or job is None or job.terminal or after.attempt != job.attempt:
        return
    known = (before.job, before.attempt) == (after.job, after.attempt)
    said = {each.restore_notes for each in before.workers} if known else set()
    notes = next((each.restore_notes for each in after.workers if each.rank == 0), "")
    if notes and notes not in said:
        draft.log(
            "RESUME_DIFFERS",
            notes[:MAX_PROBLEM],
            subject=f"jobs/{job.name}", job=job.name, actor=f"nodes/{node}", attempt=job.attempt,
            outcome="the job continues with the new values",
        )  # fmt: skip
