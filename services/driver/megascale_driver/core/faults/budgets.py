"""Restart budgets of a job: per cause and window, with back-off, and in a row without progress.

A run of months loses many nodes, so restarts are counted within a window, and each cause has its
own budget. Lost nodes count in the window only: the job has left them, and the next attempt runs on
others. If another node stands by, the job leaves the node that failed last before it ends.

The next attempt waits only if the last one is likely to be repeated: after the same failure as
before, without progress in between, and longer each time. It does not wait if the job has left the
node that broke the attempt, nor if hosts are restarted one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from megascale_driver.core.draft import Draft
from megascale_driver.core.faults import blame
from megascale_driver.core.values.attempt import Fault, FaultKind
from megascale_driver.core.values.job import Job, JobPhase
from megascale_driver.core.values.policy import Policy
from megascale_job.visible import counted

# Faults that are not caused by the job: they do not count against its budgets.
FREE_OF_CHARGE = frozenset({FaultKind.NODE_EVICTED})
# from this many attempts in a row without a new step on, the job counts as failing repeatedly
REPEATED = 2
MAX_REPEATS = 8  # different failures counted per job; the oldest are forgotten
# Faults that take the node away from the job.
_NODE_GONE = frozenset({FaultKind.NODE_DEAD, FaultKind.CHECK_FAILED, FaultKind.NODE_EVICTED})


def charge(draft: Draft, job: Job) -> Job:
    """Count the restart; a new highest step since the last restart clears the counts in a row."""
    faults = job.current.faults
    if faults and all(fault.kind in FREE_OF_CHARGE for fault in faults):
        return job
    mark = max(job.best_step, job.committed_step, job.progress_mark)
    progressed = mark > job.progress_mark
    # A refused checkpoint counts as progress: the next attempt restores another one.
    corrupt = any(fault.kind is FaultKind.CHECKPOINT_CORRUPT for fault in faults)
    in_a_row = job.restarts_without_progress + (0 if corrupt or _node_gone(job) else 1)
    return draft.put_job(
        replace(
            draft.jobs[job.name],
            restarts=job.restarts + 1,
            restart_times=_counted(job, cause_of(faults), draft.now_s, draft.policy),
            restarts_without_progress=0 if progressed else in_a_row,
            node_failures={} if progressed else job.node_failures,
            roots={} if progressed else job.roots,
            repeats={} if progressed else job.repeats if corrupt else _repeated(job),
            progress_mark=mark,
        )
    )


def check(draft: Draft, job: Job) -> Job:
    """Fail the job if no restart is left; otherwise set when its next attempt can begin."""
    if job.after_stop is not JobPhase.QUEUED:
        return job
    recovery, cause = job.config.recovery, cause_of(job.current.faults)
    recent = len(job.restart_times.get(cause, ()))
    allowed = recovery.max_restarts_without_progress
    if recent > recovery.max_restarts:
        window_h = draft.policy.restart_window_s / 3600
        spent = (
            f"recovery.max_restarts = {recovery.max_restarts} is spent: "
            f"{counted(recent, 'restart')} for {cause} within {counted(window_h, 'hour')}"
        )
        return _end(draft, job, spent)
    if job.restarts_without_progress > allowed:
        if not allowed or not blame.leave_for_another(draft, job):
            spent = f"recovery.max_restarts_without_progress = {allowed} is spent"
            return _end(draft, job, spent)
        job = draft.put_job(replace(draft.jobs[job.name], restarts_without_progress=allowed))
    delay_s = 0.0 if _left(job) else backoff(failed_alike(job), draft.policy)
    return draft.put_job(
        replace(draft.jobs[job.name], not_before_s=draft.now_s + delay_s if delay_s else 0.0)
    )


@dataclass(frozen=True, slots=True)
class Setback:
    """A job without a new step since attempts of it failed.

    ``failures``: failed attempts in a row. ``step``: the newest step of all attempts. ``why``: what
    ended the newest one.
    """

    failures: int
    step: int
    why: str

    def __str__(self) -> str:
        if self.failures < REPEATED:
            return f"it has not come past step {self.step} again since an attempt failed"
        return (
            f"{counted(self.failures, 'attempt')} in a row came no further than step "
            f"{self.step}; the newest "
            f"failed because {self.why}"
        )


def setback(job: Job) -> Setback | None:
    """The setback that the job is in; None once it has a new step, or without a fault."""
    newest = max(job.best_step, job.committed_step, job.progress_mark)
    if not job.restarts or job.terminal or (job.current.step and newest > job.progress_mark):
        return None
    # The attempt that reached the mark was the first to fail there, and does not count as one in a
    # row.
    failures = job.restarts_without_progress + (1 if job.progress_mark else 0)
    return Setback(max(1, failures), newest, job.stop_reason)


def why_queued(job: Job, now_s: float) -> str:
    """Why a job whose attempt has stopped is queued."""
    if job.not_before_s <= now_s:
        return f"waiting for nodes after: {job.stop_reason}"
    return (
        f"the next attempt begins in {job.not_before_s - now_s:g} s, since "
        f"{failed_alike(job)} attempts failed in the same way without progress: {job.stop_reason}"
    )


def cause_of(faults: tuple[Fault, ...]) -> str:
    """The budget that a restart counts against: the kind of the fault that explains it."""
    found = blame.culprit(faults)
    if found is None or found.kind is FaultKind.WORKER_SYMPTOM:
        return FaultKind.WORKER_EXITED
    return found.kind


def failed_alike(job: Job) -> int:
    """Number of attempts since the last progress that failed as the newest one did."""
    return job.repeats.get(_failure_of(job), 0)


def backoff(alike: int, policy: Policy) -> float:
    """Seconds to wait before the next attempt, after ``alike`` that failed in the same way."""
    if alike < 2:
        return 0.0
    return min(policy.backoff_s * 2.0 ** min(alike - 2, 30), policy.backoff_max_s)


def _counted(job: Job, cause: str, now_s: float, policy: Policy) -> Mapping[str, tuple[float, ...]]:
    """The restarts within the window by cause, with this one; only as many as can matter."""
    since_s = now_s - policy.restart_window_s
    times = {**job.restart_times, cause: (*job.restart_times.get(cause, ()), round(now_s, 1))}
    kept = job.config.recovery.max_restarts + 1
    recent = {key: tuple(t for t in all_ if t > since_s)[-kept:] for key, all_ in times.items()}
    return {key: found for key, found in recent.items() if found}


def _repeated(job: Job) -> Mapping[str, int]:
    """The failures since the last progress, including that of the newest attempt."""
    failure = _failure_of(job)
    others = [(key, count) for key, count in job.repeats.items() if key != failure]
    return dict([*others, (failure, failed_alike(job) + 1)][-MAX_REPEATS:])


def _failure_of(job: Job) -> str:
    """Fingerprint of what broke the newest attempt; a restart is about one host."""
    found = blame.culprit(job.current.faults)
    if found is None:
        return ""
    host = f" {found.node}" if found.kind is FaultKind.NODE_RESTARTED else ""
    return blame.root_of(found) + host


def _left(job: Job) -> bool:
    """True if the next attempt will not run on the node that broke this one."""
    found = blame.culprit(job.current.faults)
    return _node_gone(job) or (found is not None and found.node in job.evicted)


def _node_gone(job: Job) -> bool:
    """True if the attempt was lost with a node that the job has left."""
    return any(f.kind in _NODE_GONE and f.node in job.evicted for f in job.current.faults)


def _end(draft: Draft, job: Job, spent: str) -> Job:
    cause = blame.culprit(job.current.faults)
    last = f"; last failure: {cause.message}" if cause else ""
    alike = blame.seen_alike(draft, job, cause) if cause else ()
    if alike:
        last += f" (the same on nodes {', '.join(alike)}: a matter of software, not of the nodes)"
    return draft.put_job(
        replace(draft.jobs[job.name], after_stop=JobPhase.FAILED, stop_reason=spent + last)
    )
