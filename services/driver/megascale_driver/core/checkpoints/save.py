"""Whether a job has saved what it computed: the checkpoint of its last step, and failures before.

A job with checkpoints succeeds only when the checkpoint of its last step is complete. Troubles on
the way become as many lines of the job's log as people can read: one for each step that was not
saved, and one for each power of ten of skipped snapshots.
"""

from __future__ import annotations

from dataclasses import replace

from megascale_driver.core.checkpoints import replicas
from megascale_driver.core.draft import Draft
from megascale_driver.core.values import reasons
from megascale_driver.core.values.cluster import CheckpointFailure, Node, Progress, Report
from megascale_driver.core.values.events import Evidence, utc
from megascale_driver.core.values.job import Condition, ConditionType, Job, JobPhase
from megascale_job.restore import RestorePlan, RestoreSource
from megascale_job.sizes.parameter_table import checkpoint_bytes

# The author of checkpoints that are older than the first attempt of the job.
EARLIER = "an earlier job of this name (or a run by hand)"
MAX_CAUSE = 500  # characters of an error in a reason
# Failed steps in a row with a line each; after that one for each power of ten.
FIRST_FAILURES = 10
# Texts in the errors of a full storage: ENOSPC, EDQUOT.
_FULL = ("No space left", "quota exceeded")
KEPT_DAMAGED = 256  # damaged snapshots that are remembered as logged


def ending(draft: Draft, job: Job) -> tuple[JobPhase, str] | None:
    """The end of a job whose nodes have all finished; None while that is not known."""
    steps = job.config.training.steps
    done = _all_done(steps)
    if (restore := job.current.restore) and restore.step >= steps and is_earlier(job, restore):
        done = _nothing_left(job)  # its workers have committed what was in memory
    if not job.config.checkpoint.uri or _saved(job):
        return JobPhase.SUCCEEDED, done
    awaited = awaits_commit(draft, job)
    reports = [draft.nodes[slot.node].report for slot in job.slots if slot.node in draft.nodes]
    if any(report is not None and not report.failure for report in reports):
        if awaited:
            return None
        take_as_committed(draft, job, steps)
        return JobPhase.SUCCEEDED, done
    why = f"the checkpoint of step {steps} was not saved: {_cause(job, reports)}"
    if job.config.checkpoint.require_final:
        # No condition: the reason has everything.
        draft.put_job(replace(draft.jobs[job.name], conditions=without_failing(job)))
        return JobPhase.FAILED, f"{done}, but {why}"
    condition = Condition(ConditionType.NOT_SAVED, "FINAL_CHECKPOINT_FAILED", why, draft.now_s)
    draft.put_job(replace(draft.jobs[job.name], conditions=(*without_failing(job), condition)))
    return JobPhase.SUCCEEDED, f"{done}, but {why}"


def awaits_commit(draft: Draft, job: Job) -> bool:
    """True while nodes may still report the commit that the workers saw before they ended.

    The progress of a node shows the commit with its next heartbeat. After a while it is taken as
    known: a daemon that was restarted meanwhile has no record of it.
    """
    if not job.current.finished_at_s:
        job = draft.put_attempt(
            job.name, replace(draft.jobs[job.name].current, finished_at_s=draft.now_s)
        )
    return draft.now_s - job.current.finished_at_s < draft.policy.commit_report_s


def take_as_committed(draft: Draft, job: Job, step: int) -> None:
    """Take the checkpoint of ``step`` as complete, because its workers saw the commit."""
    draft.put_job(
        replace(
            draft.jobs[job.name],
            committed_step=step,
            committed_by_attempt=job.attempt,
            committed_at_s=draft.now_s,
            conditions=without_failing(job),
        )
    )


def ending_of_restored(draft: Draft, job: Job, restore: RestorePlan) -> tuple[JobPhase, str] | None:
    """The end of a job that restores its last step or a later one; None if steps remain."""
    steps = job.config.training.steps
    if restore.source is RestoreSource.NONE or restore.step < steps:
        return None
    if restore.step > steps or not restore.written_by_attempt:
        text = (
            f"restored step {restore.step} is not below trainer.training.steps {steps}: "
            "give more steps, or start from an earlier checkpoint"
        )
        return JobPhase.FAILED, text
    if restore.source is RestoreSource.MEMORY:
        return None  # its workers still have to commit it
    draft.put_job(
        replace(
            draft.jobs[job.name],
            committed_step=restore.step,
            committed_by_attempt=restore.written_by_attempt,
            manifest_uri=restore.manifest_uri,
        )
    )
    text = f"{_all_done(steps)}: attempt {restore.written_by_attempt} has saved the last"
    return JobPhase.SUCCEEDED, _nothing_left(job) if is_earlier(job, restore) else text


def _all_done(steps: int) -> str:
    return f"all {steps} steps are done" if steps > 1 else "the one step is done"


def is_earlier(job: Job, restore: RestorePlan | None) -> bool:
    """True if the state in the folder of the job is older than its first step."""
    if restore is None or not restore.written_by_attempt:
        return False  # no state, or that of the job that checkpoint.load_uri names
    return not max(job.best_step, job.progress_mark)


def _nothing_left(job: Job) -> str:
    steps = job.config.training.steps
    return (
        f"nothing was left to train: {job.config.checkpoint.uri} holds step {steps}, the last one, "
        f"of {EARLIER}; to start over, give checkpoint.uri another folder"
    )


def restore_problem(job: Job, restore: RestorePlan, refused: tuple[str, ...]) -> str | None:
    """The problem of a restore of an older step than the committed one; None if it is legitimate.

    It is legitimate if the committer found newer checkpoints damaged, or if a step was refused.
    Otherwise the storage has changed: an older copy of the folder, or another mount. Training would
    repeat steps that are done, and overwrite the contents of the real folder.
    """
    if restore.source is not RestoreSource.NONE:
        if restore.written_by_attempt and job.abandoned(restore.step, restore.written_by_attempt):
            back = job.rollbacks[-1]
            return (
                f"the committer offers step {restore.step} of attempt "
                f"{restore.written_by_attempt}, and the order was to go back to step {back.step}"
            )
        if restore.step >= job.committed_step:
            return None
    if not job.committed_step or refused or job.committed_step in job.refused_steps:
        return None
    found = f"step {restore.step}" if restore.source is not RestoreSource.NONE else "none"
    return (
        f"the checkpoint of step {job.committed_step} was complete, and "
        f"{job.config.checkpoint.uri} now has {found}: an older copy of the folder, or another "
        f"mount; make it whole, or accept the loss with `megascale restart {job.name} "
        f"--from-step {restore.step} --reason REASON`"
    )


def without_failing(job: Job) -> tuple[Condition, ...]:
    """The job's conditions without CHECKPOINT_FAILING, after a commit."""
    failing = ConditionType.CHECKPOINT_FAILING
    return tuple(item for item in job.conditions if item.type is not failing)


def report(draft: Draft, node: Node, after: Report) -> None:
    """Log what a heartbeat of ``node`` reports about checkpoints that its last one did not."""
    before = node.report
    for progress in after.progress:
        job = draft.jobs.get(progress.job)
        if job is None or job.terminal:
            continue
        _damaged(draft, node.name, job, progress)
        _failed(draft, node.name, draft.jobs[job.name], progress)
        replicas.report(draft, node.name, draft.jobs[job.name], progress)
        if before is not None:
            old = next((item for item in before.progress if item.job == job.name), None)
            _skipped(draft, node.name, draft.jobs[job.name], old, progress)
    if before is not None and after.daemon_restarts > before.daemon_restarts:
        _daemon_restarted(draft, node.name, after)


def _saved(job: Job) -> bool:
    steps = job.config.training.steps
    return job.committed_step >= steps and job.committed_step not in job.refused_steps


def _cause(job: Job, reports: list[Report | None]) -> str:
    """The error of a daemon about the last step, else that of a worker."""
    found = [report for report in reports if report is not None]
    last = (job.attempt, job.config.training.steps)
    failures = (
        progress.failure
        for report in found
        for progress in report.progress
        if progress.job == job.name and progress.failure is not None
    )
    errors = [failure.error for failure in failures if (failure.attempt, failure.step) == last]
    errors += [report.failure for report in found if report.failure]
    return errors[0][:MAX_CAUSE] if errors else "no node reports it"


def _failed(draft: Draft, node: str, job: Job, progress: Progress) -> None:
    failure = progress.failure
    if failure is None or failure.attempt != job.attempt:
        return
    if (failure.attempt, failure.step) <= job.failed_checkpoint:
        return  # another rank of the same step, or a repetition
    in_a_row = job.failed_checkpoints + 1 if job.failed_since_step == job.committed_step else 1
    draft.put_job(
        replace(
            draft.jobs[job.name],
            conditions=_failing(draft, job, failure),
            failed_checkpoint=(failure.attempt, failure.step),
            failed_checkpoints=in_a_row,
            failed_since_step=job.committed_step,
        )
    )
    if in_a_row > FIRST_FAILURES and not _power_of_ten(in_a_row - 1, in_a_row):
        return
    last = failure.step >= job.config.training.steps
    draft.log_job(
        job,
        reasons.CHECKPOINT_FAILED,
        f"the checkpoint of step {failure.step} was not saved by rank {failure.rank} on {node}: "
        f"{failure.error[:MAX_CAUSE]} ({in_a_row} in a row)",
        actor=f"nodes/{node}",
        evidence=(Evidence("persist-error", f"nodes/{node}", failure.error[:MAX_CAUSE]),),
        outcome=_what_follows(job, last),
    )


def _failing(draft: Draft, job: Job, failure: CheckpointFailure) -> tuple[Condition, ...]:
    if job.committed_by_attempt == job.attempt and failure.step <= job.committed_step:
        return job.conditions  # another node has reported a newer commit before
    kind = ConditionType.CHECKPOINT_FAILING
    since_s = next((item.since_s for item in job.conditions if item.type is kind), draft.now_s)
    message = (
        f"the checkpoint of step {failure.step} is not saved by rank {failure.rank}: "
        f"{failure.error[:MAX_CAUSE]}{_remedy(job, failure)}"
    )
    return (*without_failing(job), Condition(kind, "PERSIST_FAILED", message, since_s))


def _remedy(job: Job, failure: CheckpointFailure) -> str:
    """The remedy and, if nothing is left to train, the deadline for it."""
    checkpoint = job.config.checkpoint
    full = any(word in failure.error for word in _FULL)
    room = "repair its storage"
    if full:
        size_mib = checkpoint_bytes(job.config) / 2**20
        room = f"make room for {size_mib:,.1f} MiB (a whole checkpoint) below {checkpoint.uri}"
    if failure.step < job.config.training.steps:
        return f"; {room}" if full else ""
    ends = "fails" if checkpoint.require_final else "ends without it"
    return (
        f". {_all_done(job.config.training.steps).capitalize()}, and the save is tried again until "
        f"{utc(_deadline_s(job))}: {room} before that, or the job {ends}"
    )


def _deadline_s(job: Job) -> float:
    """When the workers give up the checkpoint of the last step."""
    done_s = job.current.last_step_at_s or job.last_record.get("completed_at", job.timer_s)
    return done_s + job.config.checkpoint.final_timeout_s


def _damaged(draft: Draft, node: str, job: Job, progress: Progress) -> None:
    """Log each damaged snapshot once, also when a new leader gets the report again."""
    known = job.damaged_snapshots
    for found in progress.damaged:
        key = (found.attempt, found.step, found.rank)
        if key in known or found.attempt > job.attempt:
            continue
        known = (*known, key)[-KEPT_DAMAGED:]
        draft.log_job(
            job,
            reasons.SNAPSHOT_DAMAGED,
            f"the snapshot of step {found.step} in the memory of {node} is damaged (rank "
            f"{found.rank}): {found.error[:MAX_CAUSE]}",
            actor=f"nodes/{node}",
            policy="checksum",
            evidence=(Evidence("checksum", f"nodes/{node}", found.error[:MAX_CAUSE]),),
            outcome="nothing restores from it: the stored copy of the step is used, else an older "
            "checkpoint",
        )
    if known != job.damaged_snapshots:
        draft.put_job(replace(draft.jobs[job.name], damaged_snapshots=known))


def _what_follows(job: Job, last: bool) -> str:
    if last:
        return f"the last step: it is tried again until {utc(_deadline_s(job))}"
    return f"training continues; the newest complete checkpoint is that of {job.committed_step}"


def _skipped(draft: Draft, node: str, job: Job, old: Progress | None, new: Progress) -> None:
    # All ranks skip a step together, so the first node that reports it counts it. The last step is
    # waited for instead of skipped.
    if new.skipped_by_attempt != job.attempt:
        return
    if not job.current.skipped_step < new.skipped_step < job.config.training.steps:
        return
    since = old.skipped_snapshots if old is not None else 0
    count = max(1, new.skipped_snapshots - since)
    if job.current.skipped_step:
        # The last report of this node may be old, and another node's was counted since. No step
        # counts twice.
        count = min(count, new.skipped_step - job.current.skipped_step)
    before = job.current.skipped_snapshots
    draft.put_attempt(
        job.name,
        replace(
            draft.jobs[job.name].current,
            skipped_step=new.skipped_step,
            skipped_snapshots=before + count,
        ),
    )
    if _power_of_ten(before, before + count):
        draft.log_job(
            job,
            reasons.CHECKPOINT_SKIPPED,
            f"{before + count} snapshots of attempt {job.attempt} were skipped, the newest after "
            f"step {new.skipped_step}: no slot was free on {node}, because the snapshots before "
            "are still being written",
            actor=f"nodes/{node}",
            outcome="training continues; the next line comes at ten times as many",
        )


def _power_of_ten(before: int, after: int) -> bool:
    """True if a count that rises from ``before`` to ``after`` reaches 1, 10, 100, ..."""
    return after > 0 and (before == 0 or len(str(after)) > len(str(before)))


def _daemon_restarted(draft: Draft, node: str, after: Report) -> None:
    job = draft.holder_of(node)
    draft.log_node(
        node,
        job,
        reasons.CHECKPOINT_DAEMON_RESTARTED,
        f"the checkpoint daemon of node {node} ended with status {after.daemon_exit_status} and "
        "was restarted; the snapshots and replicas in its memory are lost",
        actor=f"nodes/{node}",
        outcome="training continues; the next snapshot is taken as usual" if job else "",
    )
