"""DriverService, the methods on where jobs stand: suspend, resume, delete."""

from __future__ import annotations

from megascale.v1 import driver_pb2
from megascale_common.service.handlers import answers
from megascale_driver.core.events import DeleteRequested, ResumeRequested, SuspendRequested
from megascale_driver.service_base import (
    Context,
    ServiceBase,
    actor_of,
    request_key,
    required_reason,
)


class QueueMethods(ServiceBase):
    """Orders about whether a job runs, waits or is kept at all."""

    @answers
    async def SuspendJob(
        self, request: driver_pb2.SuspendJobRequest, context: Context
    ) -> driver_pb2.SuspendJobResponse:
        """Have a job save and free its nodes, until it is resumed."""
        reason, key = required_reason(request.reason), request_key(request, request.request_id)
        self._require_state()
        now_s = self.engine.clock.now_s()
        event = SuspendRequested(now_s, request.name, reason, actor_of(context), key)
        consequence = self._preview(event, "SUSPEND_REQUESTED", "job")
        if not request.validate_only:
            await self._call(event)
        return driver_pb2.SuspendJobResponse(
            job=self._message(self._job(request.name)), consequence=consequence
        )

    @answers
    async def ResumeJob(
        self, request: driver_pb2.ResumeJobRequest, context: Context
    ) -> driver_pb2.ResumeJobResponse:
        """Let a suspended job have nodes again."""
        reason, key = required_reason(request.reason), request_key(request, request.request_id)
        self._require_state()
        now_s = self.engine.clock.now_s()
        event = ResumeRequested(now_s, request.name, reason, actor_of(context), key)
        consequence = self._preview(event, "JOB_RESUMED", "job")
        if not request.validate_only:
            await self._call(event)
        return driver_pb2.ResumeJobResponse(
            job=self._message(self._job(request.name)), consequence=consequence
        )

    @answers
    async def DeleteJob(
        self, request: driver_pb2.DeleteJobRequest, context: Context
    ) -> driver_pb2.DeleteJobResponse:
        """Forget an ended job; a repetition under the same request_id succeeds as well."""
        reason, key = required_reason(request.reason), request_key(request, request.request_id)
        self._require_state()
        now_s = self.engine.clock.now_s()
        event = DeleteRequested(now_s, request.name, reason, actor_of(context), key)
        consequence = self._preview(event, "JOB_DELETED", "job")
        if not request.validate_only:
            await self._call(event)
        return driver_pb2.DeleteJobResponse(consequence=consequence)
