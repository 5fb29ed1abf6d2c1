"""DriverService calls about jobs: submit, read, change and end them."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from megascale.v1 import driver_pb2
from megascale_common.service.errors import NotFoundError, invalid
from megascale_common.service.status import answers
from megascale_driver.core.queue.explain import explanation
from megascale_driver.core.values.events import (
    CancelRequested,
    DeleteRequested,
    JobSubmitted,
    ProfileCancelRequested,
    RestartRequested,
    ResumeRequested,
    SuspendRequested,
    UpdateRequested,
)
from megascale_driver.core.values.job import Job
from megascale_driver.service import admission, job_requests
from megascale_driver.service.driver import (
    MAX_REASON,
    Calls,
    Context,
    Driver,
    actor_of,
    checked_spec,
    first_page,
    request_key,
    required_reason,
)
from megascale_driver.wire import messages as wire
from megascale_job.wire import spec as job_spec

SHOWN = 8  # most checkpoints that an error lists


class Plans(Protocol):
    """Comparisons of jobs with their plans: :class:`~megascale_driver.telemetry.watches`."""

    def message(self, job: Job) -> driver_pb2.PlanComparison | None:
        """The newest comparison of the job's attempt while it runs; None before the first."""


class JobCalls(Calls):
    """Submit, read, change and end jobs."""

    def __init__(self, driver: Driver, plans: Plans | None = None) -> None:
        super().__init__(driver)
        self._plans = plans

    @answers
    async def SubmitJob(
        self, request: driver_pb2.SubmitJobRequest, context: Context
    ) -> driver_pb2.SubmitJobResponse:
        """Validate the specification, and store the job unless ``validate_only`` is set."""
        self._driver.require_state()
        config = checked_spec(request)
        key = request_key(request, request.request_id)
        # For a known name the core decides: a repeated request succeeds, another is refused.
        warnings: list[str] = []
        if config.name not in self._engine.state.jobs:
            state, calls = self._engine.state, self._engine.node_calls
            warnings += await admission.examine(config, state, self._engine.orders.network)
            warnings += await admission.check_storage(config, state, calls.check_storage)
            warnings += await admission.earlier_checkpoints(config, state, calls.list_commits)
        if request.validate_only:
            return driver_pb2.SubmitJobResponse(
                job=driver_pb2.Job(spec=job_spec.to_proto(config)), warnings=warnings
            )
        await self._driver.call(
            JobSubmitted(self._engine.clock.now_s(), config, actor_of(context), key)
        )
        return driver_pb2.SubmitJobResponse(
            job=self._driver.job_message(config.name), warnings=warnings
        )

    @answers
    async def GetJob(
        self, request: driver_pb2.GetJobRequest, context: Context
    ) -> driver_pb2.GetJobResponse:
        """The current state of one job."""
        job = self._driver.job(request.name)
        message = self._driver.message(job)
        if (plan := self._plan_message(job)) is not None:
            message.plan.CopyFrom(plan)
        return driver_pb2.GetJobResponse(job=message)

    @answers
    async def ListJobs(
        self, request: driver_pb2.ListJobsRequest, context: Context
    ) -> driver_pb2.ListJobsResponse:
        """All jobs by name."""
        self._driver.require_state()
        names = sorted(name for name in self._engine.state.jobs if name > request.page_token)
        page, token = first_page(names, request.page_size)
        jobs = [self._driver.message(self._engine.state.jobs[name]) for name in page]
        return driver_pb2.ListJobsResponse(jobs=jobs, next_page_token=token)

    @answers
    async def CancelJob(
        self, request: driver_pb2.CancelJobRequest, context: Context
    ) -> driver_pb2.CancelJobResponse:
        """Stop a job for good; does nothing if that was requested before."""
        reason = required_reason(request.reason)
        job = self._driver.job(request.name)
        key, now_s = request_key(request, request.request_id), self._engine.clock.now_s()
        await self._driver.call(CancelRequested(now_s, job.name, reason, actor_of(context), key))
        return driver_pb2.CancelJobResponse(job=self._driver.job_message(request.name))

    @answers
    async def ProfileJob(
        self, request: driver_pb2.ProfileJobRequest, context: Context
    ) -> driver_pb2.ProfileJobResponse:
        """Request a trace of some future steps from the chosen ranks."""
        job = self._driver.job(request.job)
        key = request_key(request, request.request_id)
        record = self._engine.feeds.record_of(job.name)
        now_s, reason = self._engine.clock.now_s(), request.reason[:MAX_REASON]
        await self._driver.call(
            job_requests.profile(request, job, record, now_s, reason, actor_of(context), key)
        )
        profile = job_requests.profiled(self._driver.job(request.job), request.request_id)
        return driver_pb2.ProfileJobResponse(profile=profile)

    @answers
    async def CancelProfile(
        self, request: driver_pb2.CancelProfileRequest, context: Context
    ) -> driver_pb2.CancelProfileResponse:
        """Cancel the profile in progress; workers that have not begun write no trace."""
        name, now_s = self._driver.job(request.job).name, self._engine.clock.now_s()
        key, reason = request_key(request, request.request_id), request.reason.strip()[:MAX_REASON]
        await self._driver.call(ProfileCancelRequested(now_s, name, reason, actor_of(context), key))
        profile = self._driver.job(name).profile
        assert profile is not None  # a job keeps its newest profile
        return driver_pb2.CancelProfileResponse(profile=wire.profile_message(profile))

    @answers
    async def ExplainJob(
        self, request: driver_pb2.ExplainJobRequest, context: Context
    ) -> driver_pb2.ExplainJobResponse:
        """Explain the job's state: the cause, what was done, what an operator can do."""
        job = self._driver.job(request.name)
        log = [line for line in self._engine.audit if line.log == job.name]
        now_s = self._engine.clock.now_s()
        if self._driver.note:
            # Without a term no news arrives: by the clock a job that trains would seem hung.
            now_s = min(now_s, self._engine.term_ended_s)
        found = explanation(self._engine.state, job.name, log, now_s, self._engine.policy)
        if self._driver.note:
            found = replace(found, sentence=f"{self._driver.note}. By then {found.sentence}")
        message = wire.explanation_message(found, self._driver.epoch())
        if (plan := self._plan_message(job)) is not None:
            message.plan.CopyFrom(plan)
        return message

    @answers
    async def SuspendJob(
        self, request: driver_pb2.SuspendJobRequest, context: Context
    ) -> driver_pb2.SuspendJobResponse:
        """Make a job save and free its nodes until it is resumed."""
        event = SuspendRequested(job=request.name, **self._driver.asked(request, context))
        consequence = await self._driver.carried_out(request, event, "SUSPEND_REQUESTED", "job")
        job = self._driver.job_message(request.name)
        return driver_pb2.SuspendJobResponse(job=job, consequence=consequence)

    @answers
    async def ResumeJob(
        self, request: driver_pb2.ResumeJobRequest, context: Context
    ) -> driver_pb2.ResumeJobResponse:
        """Queue a suspended job for nodes again."""
        event = ResumeRequested(job=request.name, **self._driver.asked(request, context))
        consequence = await self._driver.carried_out(request, event, "JOB_RESUMED", "job")
        job = self._driver.job_message(request.name)
        return driver_pb2.ResumeJobResponse(job=job, consequence=consequence)

    @answers
    async def DeleteJob(
        self, request: driver_pb2.DeleteJobRequest, context: Context
    ) -> driver_pb2.DeleteJobResponse:
        """Delete an ended job; repeating the request with the same request_id succeeds."""
        event = DeleteRequested(job=request.name, **self._driver.asked(request, context))
        consequence = await self._driver.carried_out(request, event, "JOB_DELETED", "job")
        return driver_pb2.DeleteJobResponse(consequence=consequence)

    @answers
    async def RestartJob(
        self, request: driver_pb2.RestartJobRequest, context: Context
    ) -> driver_pb2.RestartJobResponse:
        """Start a new attempt, from the newest state or from a given step."""
        required_reason(request.reason)
        job = self._driver.job(request.name)
        step: int | None = None
        written_by = 0
        later: tuple[int, ...] = ()
        if request.HasField("from_step"):
            step = request.from_step
            written_by, later = await self._checkpoint_of(job, step)
        event = RestartRequested(
            job=job.name,
            from_step=step,
            from_attempt=written_by,
            later_steps=later,
            now=request.now,
            **self._driver.asked(request, context),
        )
        consequence = await self._driver.carried_out(request, event, "RESTART_REQUESTED", "job")
        message = self._driver.job_message(request.name)
        return driver_pb2.RestartJobResponse(job=message, consequence=consequence)

    async def _checkpoint_of(self, job: Job, step: int) -> tuple[int, tuple[int, ...]]:
        """The attempt that wrote the checkpoint of ``step``, and the steps that become invalid."""
        if step < 0:
            raise invalid("from_step", f"{step} is negative", "give the step of a checkpoint")
        commits = await self._driver.commits(job) if job.config.checkpoint.uri else []
        steps = sorted({commit.step for commit in commits}, reverse=True)
        if step not in steps and (step or steps):
            newest = ", ".join(map(str, steps[:SHOWN])) or "none"
            raise NotFoundError(
                f"job {job.name} has no complete checkpoint of step {step}; it has {newest} "
                "(`megascale checkpoint list` has all)",
                reason="CHECKPOINT_NOT_FOUND",
            )
        # Restores take the newest valid commit, whatever its step: after an earlier rollback the
        # newest commit can have a lower step than the one requested now. So all newer commits
        # become invalid, and all higher steps too.
        at = next((n for n, commit in enumerate(commits) if commit.step == step), len(commits))
        newer = {commit.step for commit in commits[:at]} | {
            found for found in steps if found > step
        }
        written_by = commits[at].attempt if at < len(commits) else 0
        return written_by, tuple(sorted(newer - {step}, reverse=True))

    @answers
    async def UpdateJob(
        self, request: driver_pb2.UpdateJobRequest, context: Context
    ) -> driver_pb2.UpdateJobResponse:
        """Store a new configuration for the job's next attempt."""
        required_reason(request.reason)
        config = checked_spec(request)
        job = self._driver.job(config.name)
        changed = job_requests.changed_fields(job.config, config)
        warnings = await admission.examine(config, self._engine.state, self._engine.orders.network)
        asked = self._driver.asked(request, context)
        event = UpdateRequested(config=config, restart=request.restart, **asked)
        consequence = await self._driver.carried_out(request, event, "UPDATE_REQUESTED", "job")
        return driver_pb2.UpdateJobResponse(
            job=self._driver.job_message(config.name),
            consequence=consequence,
            changed_fields=changed,
            warnings=warnings,
        )

    def _plan_message(self, job: Job) -> driver_pb2.PlanComparison | None:
        return self._plans.message(job) if self._plans is not None else None
