"""What follows from a run that diverges: a line in the audit log, and, by the job, its end.

The facts come from :mod:`megascale_driver.analysis.divergence`. An episode, the steps in a row of
one kind, is logged once. Checkpoints stay as they are.
"""

from __future__ import annotations

from megascale_driver.analysis.divergence import Divergence, DivergenceKind
from megascale_driver.core import jobs
from megascale_driver.core.draft import Draft
from megascale_driver.core.events import Evidence, LossDiverged
from megascale_driver.core.state import Job, JobPhase

_AT_WORK = (JobPhase.STARTING, JobPhase.RUNNING)


def diverged(draft: Draft, event: LossDiverged) -> None:
    """Log the episode; stop the job for good where its specification asks for it."""
    job, found = draft.jobs.get(event.job), event.found
    if job is None or job.attempt != found.sample.attempt or job.phase not in _AT_WORK:
        return
    if job.current.diverged_from == found.first_step:
        return  # of this episode there is a line
    recovery = job.config.recovery
    rise = found.kind is DivergenceKind.LOSS_RISE
    stops = (recovery.on_loss_rise if rise else recovery.on_non_finite) == "stop"
    message = _message(job, found)
    draft.attempt(job.name, diverged_from=found.first_step, suspects_devices=stops and not rise)
    draft.log(
        "LOSS_DIVERGED", message, subject=f"jobs/{job.name}", job=job.name, attempt=job.attempt,
        policy="recovery.on_loss_rise" if rise else "recovery.on_non_finite",
        mode="ENFORCE" if stops else "OBSERVE", evidence=_evidence(job, found),
        outcome="the job ends; its checkpoints stay" if stops else "the job goes on",
    )  # fmt: skip
    if stops:
        jobs.stop(draft, draft.jobs[job.name], JobPhase.FAILED, f"{message}; {_remedy(job, found)}")


def _message(job: Job, found: Divergence) -> str:
    at = found.sample
    steps = f"{found.count} steps in a row, {found.first_step} to {at.step}"
    figures = f"(loss {at.loss:.6g}, gradient norm {at.gradient_norm:.4g})"
    if found.kind is DivergenceKind.NON_FINITE:
        return f"the loss or the gradient norm was not finite in {steps} {figures}"
    factor = job.config.recovery.loss_rise_factor
    return (
        f"the loss was above {factor:g} times its start of {found.start_loss:.6g} in {steps} "
        f"{figures}"
    )


def _remedy(job: Job, found: Divergence) -> str:
    """What to do, with the newest checkpoint that was committed before the divergence."""
    advice = "lower trainer.optimizer.learning_rate or check the data of these steps"
    if 0 < job.committed_step < found.first_step:
        return (
            f"the last good checkpoint is that of step {job.committed_step}: {advice}, and start a "
            f"new job from it with checkpoint.load_uri: {job.config.checkpoint.uri}"
        )
    if job.committed_step:
        return (
            f"the newest checkpoint, of step {job.committed_step}, is not older than the "
            f"divergence (`megascale checkpoint list {job.name}` shows the others): {advice}"
        )
    return f"there is no checkpoint: {advice}"


def _evidence(job: Job, found: Divergence) -> tuple[Evidence, ...]:
    at, source = found.sample, f"jobs/{job.name}"
    return (
        Evidence(
            "step-record",
            source,
            f"step {at.step}: loss {at.loss:.6g}, gradient norm {at.gradient_norm:.6g}, "
            f"{at.skipped_updates} updates skipped so far",
        ),
        Evidence("start", source, f"mean loss of the first steps {found.start_loss:.6g}"),
    )
