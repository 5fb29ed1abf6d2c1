"""Consequences of a diverging run: a line in the audit log and, if the job asks for it, its end.

The findings come from :mod:`megascale_driver.analysis.divergence`. An episode, consecutive steps of
one kind, is logged once. Checkpoints are not touched: a job that is taken back to one restores no
later one, and its configuration skips the data since then.
"""

from __future__ import annotations

from dataclasses import replace

from megascale_driver.analysis.divergence import Divergence, DivergenceKind
from megascale_driver.core.checkpoints import roll_back
from megascale_driver.core.draft import Draft
from megascale_driver.core.jobs import jobs
from megascale_driver.core.values import reasons
from megascale_driver.core.values.events import Evidence, LossDiverged
from megascale_driver.core.values.job import Job, JobPhase
from megascale_job import loading
from megascale_job.sections.data import skipping
from megascale_job.visible import counted

_AT_WORK = (JobPhase.STARTING, JobPhase.RUNNING)


def diverged(draft: Draft, event: LossDiverged) -> None:
    """Log the episode; stop the job for good, or take it back, as its specification asks."""
    job, found = draft.jobs.get(event.job), event.found
    if job is None or job.attempt != found.sample.attempt or job.phase not in _AT_WORK:
        return
    if job.current.diverged_from == found.first_step:
        return  # already logged
    recovery = job.config.recovery
    rise = found.kind is DivergenceKind.LOSS_RISE
    policy = "recovery.on_loss_rise" if rise else "recovery.on_non_finite"
    action = recovery.on_loss_rise if rise else recovery.on_non_finite
    message, back_to = _message(job, found), _good_step(job, found)
    cannot = _cannot_go_back(job, back_to) if action == "roll_back" else ""
    ends = action == "stop" or bool(cannot)
    draft.put_attempt(
        job.name,
        replace(
            draft.jobs[job.name].current,
            diverged_from=found.first_step,
            suspects_devices=action != "continue" and not rise,
        ),
    )
    outcome = "the job ends; its checkpoints stay" if ends else "the job continues"
    if action == "roll_back":
        outcome = f"{cannot}: {outcome}" if cannot else _going_back(found, back_to)
    draft.log_job(
        job,
        reasons.LOSS_DIVERGED,
        message,
        policy=policy,
        mode="OBSERVE" if action == "continue" else "ENFORCE",
        evidence=_evidence(job, found),
        outcome=outcome,
    )
    job = draft.jobs[job.name]
    if ends:
        why = "; ".join(filter(None, (message, cannot, _remedy(job, found))))
        jobs.stop(draft, job, JobPhase.FAILED, why)
    elif action == "roll_back":
        _go_back(draft, job, found, back_to)
        jobs.stop(draft, draft.jobs[job.name], JobPhase.QUEUED, f"{message}; {outcome}")


def _good_step(job: Job, found: Divergence) -> int:
    """The newest step before the divergence that should have a checkpoint; 0 if none has.

    The driver learns of a commit later than of steps, so the checkpoint that is due counts as well.
    In fact the newest checkpoint up to the last step before the divergence is restored.
    """
    before, interval = found.first_step - 1, job.config.checkpoint.interval_steps
    due = before // interval * interval if interval else 0
    return max(due, job.committed_step if job.committed_step <= before else 0)


def _cannot_go_back(job: Job, back_to: int) -> str:
    """Why the job ends although it asks to be taken back; "" if it can be taken back."""
    if not back_to:
        return "there is no checkpoint to go back to"
    limit = job.config.recovery.max_roll_backs
    if len(job.rollbacks) >= limit:
        return (
            f"the job was taken back {counted(len(job.rollbacks), 'time')} "
            "(recovery.max_roll_backs)"
        )
    return ""


def _going_back(found: Divergence, back_to: int) -> str:
    return (
        f"the next attempt begins from the newest checkpoint up to step {found.first_step - 1} and "
        f"leaves out the data of steps {back_to + 1} to {found.sample.step}"
    )


def _go_back(draft: Draft, job: Job, found: Divergence, back_to: int) -> None:
    """Refuse what was committed since, and let the next attempt skip the data since."""
    before = found.first_step - 1
    config = loading.from_json(job.pending_spec) if job.pending_spec else job.config
    skips = skipping(config.data.skips, back_to, found.sample.step)
    config = replace(config, data=replace(config.data, skips=skips))
    roll_back.roll_back(
        draft,
        job,
        before,
        written_by=0,
        later=_committed_since(job, found),
        committed=job.committed_step if job.committed_step <= before else 0,
    )
    draft.put_job(replace(draft.jobs[job.name], pending_spec=loading.to_json(config)))


def _committed_since(job: Job, found: Divergence) -> tuple[int, ...]:
    """Steps since the divergence that may have a checkpoint, whether its commit is known or not.

    A checkpoint that is committed even later is refused when offered
    (:func:`roll_back.refuse_late`).
    """
    interval = job.config.checkpoint.interval_steps or found.sample.step
    ahead = range(found.first_step, found.sample.step + interval + 1)
    steps = {step for step in ahead if step % interval == 0} | {job.committed_step}
    return tuple(sorted(step for step in steps if step >= found.first_step))


def _message(job: Job, found: Divergence) -> str:
    at = found.sample
    steps = f"{counted(found.count, 'step')} in a row, {found.first_step} to {at.step}"
    figures = f"(loss {at.loss:.6g}, gradient norm {at.gradient_norm:.4g})"
    if found.kind is DivergenceKind.NON_FINITE:
        return f"the loss or the gradient norm was not finite in {steps} {figures}"
    factor = job.config.recovery.loss_rise_factor
    return (
        f"the loss was above {counted(factor, 'time')} its start of {found.start_loss:.6g} "
        f"in {steps} "
        f"{figures}"
    )


def _remedy(job: Job, found: Divergence) -> str:
    """What to do, naming the newest checkpoint that was committed before the divergence."""
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
            f"{counted(at.skipped_updates, 'update')} skipped so far",
        ),
        Evidence("start", source, f"mean loss of the first steps {found.start_loss:.6g}"),
    )
