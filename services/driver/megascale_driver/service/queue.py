"""DriverService, the methods on where jobs stand: suspend, resume, delete."""

from __future__ import annotations

from megascale.v1 import driver_pb2
from megascale_common.service.handlers import answers
from megascale_driver.core.values.events import DeleteRequested, ResumeRequested, SuspendRequested
from megascale_driver.service.base import Context, ServiceBase


class QueueMethods(ServiceBase):
    """Orders about whether a job runs, waits or is kept at all."""

    @answers
    async def SuspendJob(
        self, request: driver_pb2.SuspendJobRequest, context: Context
    ) -> driver_pb2.SuspendJobResponse:
        """Have a job save and free its nodes, until it is resumed."""
        event = SuspendRequested(job=request.name, **self._asked(request, context))
        consequence = await self._carried_out(
            event, "SUSPEND_REQUESTED", "job", dry=request.validate_only
        )
        return driver_pb2.SuspendJobResponse(
            job=self._message(self._job(request.name)), consequence=consequence
        )

    @answers
    async def ResumeJob(
        self, request: driver_pb2.ResumeJobRequest, context: Context
    ) -> driver_pb2.ResumeJobResponse:
        """Let a suspended job have nodes again."""
        event = ResumeRequested(job=request.name, **self._asked(request, context))
        consequence = await self._carried_out(
            event, "JOB_RESUMED", "job", dry=request.validate_only
        )
        return driver_pb2.ResumeJobResponse(
            job=self._message(self._job(request.name)), consequence=consequence
        )

    @answers
    async def DeleteJob(
        self, request: driver_pb2.DeleteJobRequest, context: Context
    ) -> driver_pb2.DeleteJobResponse:
        """Forget an ended job; a repetition under the same request_id succeeds as well."""
        event = DeleteRequested(job=request.name, **self._asked(request, context))
        consequence = await self._carried_out(
            event, "JOB_DELETED", "job", dry=request.validate_only
        )
        return driver_pb2.DeleteJobResponse(consequence=consequence)
