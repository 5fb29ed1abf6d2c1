"""Going back to an earlier step: what was written after it is restored no more."""

from __future__ import annotations

from megascale_driver.core.draft import Draft
from megascale_driver.core.values.state import Job, Rollback
from megascale_job.restore import RestorePlan

MAX_ROLLBACKS = 8
MAX_REFUSED = 10_000  # steps of abandoned branches that are kept from being restored


def roll_back(
    draft: Draft,
    job: Job,
    step: int,
    *,
    written_by: int,
    later: tuple[int, ...],
    committed: int | None = None,
) -> Job:
    """Nothing above ``step`` that earlier attempts wrote is restored any more.

    ``written_by``: the attempt whose checkpoint of ``step`` is meant; 0: not known. ``later`` are
    steps whose checkpoints are refused. ``committed``: the newest step up to ``step`` that is known
    to be committed, 0: none; by default ``step`` itself.
    """
    back = Rollback(step, job.attempt, written_by)
    kept = step if committed is None else committed
    refused = tuple(dict.fromkeys((*job.refused_steps, *later)))[-MAX_REFUSED:]
    return draft.job(
        job.name,
        rollbacks=(*job.rollbacks, back)[-MAX_ROLLBACKS:],
        refused_steps=tuple(item for item in refused if item != step),
        committed_step=kept,
        committed_by_attempt=min(job.committed_by_attempt, job.attempt) if kept else 0,
        best_step=step,
        progress_mark=step,
    )


def refuse_late(draft: Draft, job: Job, offered: RestorePlan) -> bool:
    """Refuse a checkpoint that was committed while its attempt stopped to go back; if it is one.

    The job then opens another attempt. What was refused before is a fault of the committer.
    """
    known = offered.step in job.refused_steps
    if known or not job.abandoned(offered.step, offered.written_by_attempt):
        return False
    draft.job(job.name, refused_steps=(*job.refused_steps, offered.step)[-MAX_REFUSED:])
    return True
