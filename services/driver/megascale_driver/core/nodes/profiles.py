"""Profiles: which steps are traced, and the final state of each rank's trace.

The command names steps ahead, far enough that it reaches every rank before the first of them. So
all ranks trace the same steps without a message between them. The command is part of the nodes'
desired state until each trace is settled: a node whose link was broken gets it with the next
desired state. A new attempt does not inherit it.

The form of a request is checked earlier, in :mod:`megascale_driver.service.job_requests`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import PurePosixPath

from megascale_common.node.files import trace_file
from megascale_driver.core.draft import Draft
from megascale_driver.core.values import reasons
from megascale_driver.core.values.cluster import Report, TraceReport
from megascale_driver.core.values.events import Evidence, ProfileCancelRequested, ProfileRequested
from megascale_driver.core.values.job import Job, JobPhase, Profile, Trace, TraceState
from megascale_job.visible import counted

# The newest record is from the step before the current one, and on GPUs the kernels of the step
# after that are already launched.
STEPS_IN_PROGRESS = 2
SLACK = 4.0  # factor by which steps can become slower before a rank skips the trace
NO_REPORT = "the node reported nothing about it in time"


def request(draft: Draft, event: ProfileRequested) -> None:
    """Choose the steps, or refuse the request."""
    job = draft.known_job(event.job)
    if job is None:
        return
    if job.phase is not JobPhase.RUNNING:
        draft.refuse(
            "JOB_NOT_RUNNING",
            f"job {job.name} is {job.phase.lower()}; only a running job can be profiled",
        )
    elif job.profile is not None and job.profile.pending:
        steps = f"{job.profile.first_step} to {job.profile.last_step}"
        draft.refuse(
            "PROFILE_PENDING",
            f"a profile of steps {steps} is still in progress; ask again after it, or cancel it",
        )
    else:
        _request(draft, job, event)


def cancel(draft: Draft, event: ProfileCancelRequested) -> None:
    """Give up the missing traces; a rank that has begun still writes its trace, unreported."""
    job = draft.known_job(event.job)
    if job is None:
        return
    if job.profile is None or not job.profile.pending:
        draft.refuse("NO_PROFILE", f"no profile of job {job.name} is in progress")
        return
    why = f": {event.reason}" if event.reason else ""
    missing = _without(draft, job, job.profile, TraceState.SKIPPED, f"cancelled by {event.actor}")
    draft.log_job(
        job,
        reasons.PROFILE_CANCELLED,
        f"{event.actor} cancels the profile of steps {job.profile.first_step} to "
        f"{job.profile.last_step} on {_names(missing)}{why}",
        actor=event.actor,
    )


def _request(draft: Draft, job: Job, event: ProfileRequested) -> None:
    policy, newest = draft.policy, max(event.newest_step, job.current.step)
    # The shorter of the two: after a step that took longer than usual (warm-up, evaluation), the
    # lead would be too few steps.
    step_times = [
        time_s for time_s in (event.step_time_s, job.current.step_interval_s) if time_s > 0
    ]
    if not newest or not step_times:
        draft.refuse(
            "NO_STEP_YET",
            f"attempt {job.attempt} has not reported enough steps yet; ask again in a moment",
        )
        return
    step_s = min(step_times)
    earliest = newest + STEPS_IN_PROGRESS + math.ceil(policy.profile_lead_s / step_s)
    first = event.first_step or earliest
    last = first + event.steps - 1
    expected_s = (last - newest) * step_s
    if first < earliest:
        draft.refuse(
            "FIRST_STEP_PASSED",
            f"step {first} has passed or is too near: step {newest} is done, "
            f"and the request reaches all ranks in time from step {earliest} on",
        )
    elif last > job.config.training.steps:
        draft.refuse(
            "STEPS_BEYOND_END",
            f"step {last} does not exist: the job ends with step {job.config.training.steps}",
        )
    elif expected_s > policy.profile_ahead_s:
        draft.refuse(
            "STEPS_TOO_FAR",
            f"step {last} is {counted(round(expected_s / 60), 'minute')} ahead; "
            f"name steps within {policy.profile_ahead_s / 60:.0f}",
        )
    else:
        not_after_s = draft.now_s + policy.profile_patience_s + SLACK * expected_s
        _accept(draft, job, event, Profile("", job.attempt, first, last, not_after_s))


def _accept(draft: Draft, job: Job, event: ProfileRequested, profile: Profile) -> None:
    nodes = {rank: slot.node for slot in job.slots for rank in slot.ranks}
    traces = tuple(_planned(draft, job, profile, rank, nodes[rank]) for rank in event.ranks)
    own_id = f"{job.name}.{job.attempt}.{job.log_seq + 1}"
    profile = replace(
        profile, id=event.request.request_id if event.request else own_id, traces=traces
    )
    draft.put_job(replace(draft.jobs[job.name], profile=profile))
    why = f": {event.reason}" if event.reason else ""
    draft.log_job(
        job,
        reasons.PROFILE_REQUESTED,
        f"{event.actor} requests a profile of steps {profile.first_step} to {profile.last_step} on "
        f"{_names(profile.traces)}{why}",
        actor=event.actor,
    )


def _planned(draft: Draft, job: Job, profile: Profile, rank: int, node: str) -> Trace:
    file = trace_file(job.name, profile.attempt, profile.first_step, profile.last_step, rank)
    return Trace(rank, node, str(PurePosixPath(draft.nodes[node].identity.folder, file)))


def report(draft: Draft, node: str, found: Report) -> None:
    """Take in a node's report about its ranks' traces; heartbeats repeat it."""
    for item in found.traces:
        job = draft.jobs.get(found.job)
        if (
            job is None
            or job.attempt != found.attempt
            or job.profile is None
            or job.profile.id != item.profile
        ):
            return
        trace = next((t for t in job.profile.traces if (t.rank, t.node) == (item.rank, node)), None)
        if (
            trace is not None
            and trace.state is TraceState.PENDING
            and item.state is not TraceState.PENDING
        ):
            _settle(draft, job, job.profile, trace, item)


def _settle(draft: Draft, job: Job, profile: Profile, trace: Trace, item: TraceReport) -> None:
    settled = replace(trace, state=item.state, size_bytes=item.size_bytes, detail=item.detail)
    traces = tuple(settled if t is trace else t for t in profile.traces)
    draft.put_job(replace(draft.jobs[job.name], profile=replace(profile, traces=traces)))
    who, node = f"rank {trace.rank} on node {trace.node}", f"nodes/{trace.node}"
    if item.state is not TraceState.WRITTEN:
        _missed(draft, job, profile, who, item.detail, node)
        return
    steps = f"steps {profile.first_step} to {profile.last_step}"
    draft.log_job(
        job,
        reasons.PROFILE_WRITTEN,
        f"{who} has written {steps} to {trace.path} ({item.size_bytes} bytes)",
        actor=node,
        evidence=(Evidence("trace", node, f"{item.size_bytes} bytes", trace.path),),
    )


def expire(draft: Draft, job: Job) -> None:
    """Give up traces that no node has reported in time.

    A rank that has not begun by ``not_after_s`` never begins. It should report so, but its process
    may be stopped, and then no report comes.
    """
    profile = job.profile
    if profile is None or not profile.pending:
        return
    overdue_s = draft.now_s - profile.not_after_s
    if overdue_s >= draft.policy.profile_write_s:
        _drop(draft, job, profile, TraceState.LOST, NO_REPORT)
    elif overdue_s >= draft.policy.profile_grace_s and job.current.step + 1 < profile.first_step:
        why = f"step {profile.first_step} was not reached in time: step {job.current.step} is done"
        _drop(draft, job, profile, TraceState.SKIPPED, why)


def attempt_ends(draft: Draft, job: Job) -> None:
    """Give up on the missing traces: the workers that would write them end with the attempt."""
    if job.profile is not None and job.profile.pending:
        _drop(draft, job, job.profile, TraceState.LOST, f"attempt {job.attempt} ended first")


def _drop(draft: Draft, job: Job, profile: Profile, state: TraceState, why: str) -> None:
    missing = _without(draft, job, profile, state, why)
    _missed(draft, job, profile, _names(missing), why, "driver")


def _without(
    draft: Draft, job: Job, profile: Profile, state: TraceState, why: str
) -> tuple[Trace, ...]:
    """Settle the missing traces as ``state``; returns them."""
    missing = tuple(trace for trace in profile.traces if trace.state is TraceState.PENDING)
    traces = tuple(
        replace(t, state=state, detail=why) if t in missing else t for t in profile.traces
    )
    draft.put_job(replace(draft.jobs[job.name], profile=replace(profile, traces=traces)))
    return missing


def _missed(draft: Draft, job: Job, profile: Profile, who: str, why: str, actor: str) -> None:
    draft.log_job(
        job,
        reasons.PROFILE_MISSED,
        f"no trace of steps {profile.first_step} to {profile.last_step} from {who}: {why}",
        actor=actor,
    )


def _names(traces: tuple[Trace, ...]) -> str:
    return f"rank{'s' if len(traces) > 1 else ''} {', '.join(str(trace.rank) for trace in traces)}"
