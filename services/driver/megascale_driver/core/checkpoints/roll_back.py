"""Rolls a job back to an earlier step, and takes in what its ranks really restored.

A rollback invalidates the checkpoints of later steps. Damage does the same for single steps: when
the planned checkpoint turns out to be damaged, all ranks together restore the next older one that
the plan names, and their nodes report it when training starts. From then on that is the attempt's
plan, and later attempts refuse the damaged steps.
"""

from __future__ import annotations

from dataclasses import replace

from megascale_driver.core.draft import Draft
from megascale_driver.core.values import reasons
from megascale_driver.core.values.cluster import Report
from megascale_driver.core.values.events import Evidence
from megascale_driver.core.values.job import Job, Rollback
from megascale_job.restore import RestorePlan

MAX_ROLLBACKS = 8
MAX_REFUSED = 10_000  # refused steps that are kept per job


def roll_back(
    draft: Draft,
    job: Job,
    step: int,
    *,
    written_by: int,
    later: tuple[int, ...],
    committed: int | None = None,
) -> Job:
    """Invalidate everything above ``step`` that earlier attempts wrote.

    ``written_by``: the attempt whose checkpoint of ``step`` is meant; 0: not known. ``later``:
    steps whose checkpoints are refused. ``committed``: the newest step up to ``step`` that is known
    to be committed, 0: none; by default ``step`` itself.
    """
    back = Rollback(step, job.attempt, written_by)
    kept = step if committed is None else committed
    refused = tuple(dict.fromkeys((*job.refused_steps, *later)))[-MAX_REFUSED:]
    return draft.put_job(
        replace(
            draft.jobs[job.name],
            rollbacks=(*job.rollbacks, back)[-MAX_ROLLBACKS:],
            refused_steps=tuple(item for item in refused if item != step),
            committed_step=kept,
            committed_by_attempt=min(job.committed_by_attempt, job.attempt) if kept else 0,
            best_step=step,
            progress_mark=step,
        )
    )


def refuse_late(draft: Draft, job: Job, offered: RestorePlan) -> bool:
    """Refuse a checkpoint that was committed while its attempt stopped to go back; True if so.

    The job then opens another attempt. An offer of a step that was refused before is a fault of the
    committer.
    """
    known = offered.step in job.refused_steps
    if known or not job.abandoned(offered.step, offered.written_by_attempt):
        return False
    draft.put_job(
        replace(
            draft.jobs[job.name], refused_steps=(*job.refused_steps, offered.step)[-MAX_REFUSED:]
        )
    )
    return True


MAX_PROBLEM = 500


def report_restored(draft: Draft, node: str, after: Report) -> None:
    """Take in that the workers of ``node`` restored another step than the planned one."""
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
        return  # such a step was not planned: the worker is of another build, or faulty
    refused = tuple(plan.step for plan in candidates[:number] if plan.step)
    draft.put_attempt(job.name, replace(draft.jobs[job.name].current, restore=candidates[number]))
    draft.put_job(
        replace(
            draft.jobs[job.name], refused_steps=tuple(dict.fromkeys((*job.refused_steps, *refused)))
        )
    )
    problem = found.restore_problem[:MAX_PROBLEM]
    draft.log_job(
        job,
        reasons.CHECKPOINT_REFUSED,
        f"the checkpoint of step {planned.step} is damaged: {problem}",
        actor=f"nodes/{node}",
        policy="checksum",
        evidence=(Evidence("checksum", f"nodes/{node}", problem),),
        outcome=f"the same attempt continues from step {found.restored_step}",
    )


def report_differences(draft: Draft, node: str, before: Report | None, after: Report) -> None:
    """Log once what differs from the run that wrote the checkpoint."""
    job = draft.jobs.get(after.job)
    if before is None or job is None or job.terminal or after.attempt != job.attempt:
        return
    known = (before.job, before.attempt) == (after.job, after.attempt)
    said = {each.restore_notes for each in before.workers} if known else set()
    notes = next((each.restore_notes for each in after.workers if each.rank == 0), "")
    if notes and notes not in said:
        draft.log_job(
            job,
            reasons.RESUME_DIFFERS,
            notes[:MAX_PROBLEM],
            actor=f"nodes/{node}",
            outcome="the job continues with the new values",
        )
