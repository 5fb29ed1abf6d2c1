"""DriverService: requests become events for the engine, its state becomes the responses.

The methods on jobs and on the cluster are here; those on nodes and those that read logs, events
and checkpoints are in the two classes that :class:`DriverService` inherits.
"""

from __future__ import annotations

from dataclasses import replace

from megascale.v1 import driver_pb2, driver_pb2_grpc
from megascale_common.service.build import build_version
from megascale_common.service.handlers import answers
from megascale_driver.core.queue.demand import demand
from megascale_driver.core.queue.explain import explanation
from megascale_driver.core.values.events import (
    CancelRequested,
    JobSubmitted,
    ProfileCancelRequested,
)
from megascale_driver.core.values.state import JobPhase, Liveness
from megascale_driver.service import admission, profile_request, storage_reach
from megascale_driver.service.base import (
    MAX_REASON,
    Context,
    actor_of,
    checked_spec,
    first_page,
    request_key,
    required_reason,
)
from megascale_driver.service.nodes import NodeMethods
from megascale_driver.service.orders import OrderMethods
from megascale_driver.service.queue import QueueMethods
from megascale_driver.service.spans import SpanMethods
from megascale_driver.service.topology import TopologyMethods
from megascale_driver.wire import messages as wire
from megascale_job.wire import spec as job_spec


class DriverService(
    NodeMethods,
    QueueMethods,
    OrderMethods,
    SpanMethods,
    TopologyMethods,
    driver_pb2_grpc.DriverServiceServicer,
):
    """Jobs, nodes, audit log: everything that clients may ask of the driver."""

    @answers
    async def SubmitJob(
        self, request: driver_pb2.SubmitJobRequest, context: Context
    ) -> driver_pb2.SubmitJobResponse:
        """Validate the specification; unless ``validate_only``, store the job."""
        self._require_state()
        config = checked_spec(request)
        key = request_key(request, request.request_id)
        # A job that is there already is refused for its name, or the request was carried out.
        known = config.name in self.engine.state.jobs
        warnings = (
            []
            if known
            else await admission.examine(config, self.engine.state, self.engine.orders.network)
        )
        if not known:
            warnings += await storage_reach.check(
                config, self.engine.state, self.engine.node_calls.check_storage
            )
            warnings += await storage_reach.earlier(
                config, self.engine.state, self.engine.node_calls.list_commits
            )
        if request.validate_only:
            return driver_pb2.SubmitJobResponse(
                job=driver_pb2.Job(spec=job_spec.to_proto(config)), warnings=warnings
            )
        await self._call(JobSubmitted(self.engine.clock.now_s(), config, actor_of(context), key))
        return driver_pb2.SubmitJobResponse(
            job=self._message(self._job(config.name)), warnings=warnings
        )

    @answers
    async def GetJob(
        self, request: driver_pb2.GetJobRequest, context: Context
    ) -> driver_pb2.GetJobResponse:
        """One job, as it is now."""
        job = self._job(request.name)
        message = self._message(job)
        if (plan := self._plan_message(job)) is not None:
            message.plan.CopyFrom(plan)
        return driver_pb2.GetJobResponse(job=message)

    @answers
    async def ListJobs(
        self, request: driver_pb2.ListJobsRequest, context: Context
    ) -> driver_pb2.ListJobsResponse:
        """All jobs by name."""
        self._require_state()
        names = sorted(name for name in self.engine.state.jobs if name > request.page_token)
        page, token = first_page(names, request.page_size)
        jobs = [self._message(self.engine.state.jobs[name]) for name in page]
        return driver_pb2.ListJobsResponse(jobs=jobs, next_page_token=token)

    @answers
    async def CancelJob(
        self, request: driver_pb2.CancelJobRequest, context: Context
    ) -> driver_pb2.CancelJobResponse:
        """Stop a job for good; one that is or will be cancelled is returned as it is."""
        reason = required_reason(request.reason)
        job = self._job(request.name)
        key, now_s = request_key(request, request.request_id), self.engine.clock.now_s()
        await self._call(CancelRequested(now_s, job.name, reason, actor_of(context), key))
        return driver_pb2.CancelJobResponse(job=self._message(self._job(request.name)))

    @answers
    async def ProfileJob(
        self, request: driver_pb2.ProfileJobRequest, context: Context
    ) -> driver_pb2.ProfileJobResponse:
        """Order a trace of some steps ahead from chosen ranks."""
        job = self._job(request.job)
        key, record = (
            request_key(request, request.request_id),
            self.engine.feeds.record_of(job.name),
        )
        now_s, reason = self.engine.clock.now_s(), request.reason[:MAX_REASON]
        await self._call(
            profile_request.parse(request, job, record, now_s, reason, actor_of(context), key)
        )
        profile = profile_request.answer(self._job(request.job), request.request_id)
        return driver_pb2.ProfileJobResponse(profile=profile)

    @answers
    async def CancelProfile(
        self, request: driver_pb2.CancelProfileRequest, context: Context
    ) -> driver_pb2.CancelProfileResponse:
        """Give up the profile in progress; workers that have not begun write no trace."""
        name, now_s = self._job(request.job).name, self.engine.clock.now_s()
        key, reason = request_key(request, request.request_id), request.reason.strip()[:MAX_REASON]
        await self._call(ProfileCancelRequested(now_s, name, reason, actor_of(context), key))
        profile = self._job(name).profile
        assert profile is not None  # a job keeps its newest profile
        return driver_pb2.CancelProfileResponse(profile=wire.profile_message(profile))

    @answers
    async def ExplainJob(
        self, request: driver_pb2.ExplainJobRequest, context: Context
    ) -> driver_pb2.ExplainJobResponse:
        """Why the job is where it is: the cause, what was done, what may be done."""
        job = self._job(request.name)
        log = [line for line in self.engine.audit if line.log == job.name]
        now_s = self.engine.clock.now_s()
        if self.note:  # nothing came in since: a job that trains on would seem to stand still
            now_s = min(now_s, self.engine.term_ended_s)
        found = explanation(self.engine.state, job.name, log, now_s, self.engine.policy)
        if self.note:
            found = replace(found, sentence=f"{self.note}. By then {found.sentence}")
        message = wire.explanation_message(found, self._epoch())
        if (plan := self._plan_message(job)) is not None:
            message.plan.CopyFrom(plan)
        return message

    @answers
    async def GetClusterInfo(
        self, request: driver_pb2.GetClusterInfoRequest, context: Context
    ) -> driver_pb2.GetClusterInfoResponse:
        """Who leads, and how many nodes are alive and jobs running."""
        self._require_state()
        state, term = self.engine.state, self.engine.term
        tripped_s = state.breaker.tripped_at_s
        asked = demand(state, self.engine.policy)
        return driver_pb2.GetClusterInfoResponse(
            rules=self._rules(),
            tenants=wire.tenant_messages(state, self.engine.policy),
            breaker_tripped_at=wire.timestamp(tripped_s) if tripped_s else None,
            cluster=self._cluster,
            leader=self.engine.address if term is not None else "",
            epoch=self._epoch(),
            leader_since=wire.timestamp(state.leader_since_s),
            build=build_version(),
            nodes_alive=sum(node.liveness is Liveness.ALIVE for node in state.nodes.values()),
            jobs_running=sum(job.phase is JobPhase.RUNNING for job in state.jobs.values()),
            nodes_wanted=asked.wanted,
            nodes_missing=asked.missing,
            nodes_missing_reason=asked.why,
        )
