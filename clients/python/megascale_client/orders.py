"""Calls of the asyncio client that order something: jobs that stop, start, move; nodes; rules."""

from __future__ import annotations

from megascale.v1 import driver_pb2, job_pb2, types_pb2
from megascale_client.connection import Connection
from megascale_client.errors import InvalidJob, InvalidRequest
from megascale_client.messages import (
    CordonNodeResponse,
    DrainNodeResponse,
    EvictNodeResponse,
    Job,
    PolicyMode,
    RestartJobResponse,
    ResumeJobResponse,
    SetPolicyResponse,
    SuspendJobResponse,
    UncordonNodeResponse,
    UpdateJobResponse,
)
from megascale_client.repetition import request_id


class OrderCalls:
    """The part of :class:`megascale_client.AsyncClient` that changes something."""

    _connection: Connection

    async def cancel(self, name: str, reason: str) -> Job:
        """Stop a job's workers; its committed checkpoints stay. Raises NotFound, NotPossible."""
        request = driver_pb2.CancelJobRequest(name=name, reason=reason, request_id=request_id())
        answer = await self._connection.unary("CancelJob", request, driver_pb2.CancelJobResponse)
        return Job(answer.job)

    async def suspend(
        self, name: str, reason: str, *, validate_only: bool = False
    ) -> SuspendJobResponse:
        """Save a job's state, then stop it and free its nodes until :meth:`resume`.

        Returns at once: a running job is SUSPENDED when it has saved (:meth:`wait`). With
        ``validate_only`` nothing changes. Raises NotFound, NotPossible (it has no checkpoints, or
        has ended).
        """
        request = driver_pb2.SuspendJobRequest(
            name=name, reason=reason, request_id=request_id(), validate_only=validate_only
        )
        answer = await self._connection.unary("SuspendJob", request, driver_pb2.SuspendJobResponse)
        return SuspendJobResponse(answer)

    async def resume(
        self, name: str, reason: str, *, validate_only: bool = False
    ) -> ResumeJobResponse:
        """Let a suspended job have nodes again. Raises NotFound, NotPossible (it has ended)."""
        request = driver_pb2.ResumeJobRequest(
            name=name, reason=reason, request_id=request_id(), validate_only=validate_only
        )
        answer = await self._connection.unary("ResumeJob", request, driver_pb2.ResumeJobResponse)
        return ResumeJobResponse(answer)

    async def delete(
        self, name: str, reason: str, *, validate_only: bool = False
    ) -> driver_pb2.DeleteJobResponse:
        """Forget an ended job; its checkpoints stay. Raises NotFound, NotPossible (it runs)."""
        request = driver_pb2.DeleteJobRequest(
            name=name, reason=reason, request_id=request_id(), validate_only=validate_only
        )
        return await self._connection.unary("DeleteJob", request, driver_pb2.DeleteJobResponse)

    async def restart(
        self,
        name: str,
        reason: str,
        *,
        from_step: int | None = None,
        now: bool = False,
        validate_only: bool = False,
    ) -> RestartJobResponse:
        """Begin a new attempt of a job, also of one that has failed.

        A running job saves first, unless ``now``. With ``from_step`` it goes back to that
        checkpoint, and what came after it is not restored any more. Raises NotFound (the job or the
        checkpoint), NotPossible (it has succeeded), InvalidRequest.
        """
        request = driver_pb2.RestartJobRequest(
            name=name, reason=reason, request_id=request_id(), validate_only=validate_only,
            from_step=from_step, now=now,
        )  # fmt: skip
        answer = await self._connection.unary("RestartJob", request, driver_pb2.RestartJobResponse)
        return RestartJobResponse(answer)

    async def update(
        self,
        spec: job_pb2.JobSpec,
        reason: str,
        *,
        restart: bool = False,
        validate_only: bool = False,
    ) -> UpdateJobResponse:
        """Give the job of the spec's name a new configuration for its next attempt.

        With ``restart`` that attempt begins as soon as the present one has saved. Raises
        InvalidJob, NotFound, NotPossible (it has succeeded).
        """
        request = driver_pb2.UpdateJobRequest(
            spec=spec, reason=reason, request_id=request_id(), validate_only=validate_only,
            restart=restart,
        )  # fmt: skip
        try:
            answer = await self._connection.unary(
                "UpdateJob", request, driver_pb2.UpdateJobResponse
            )
        except InvalidRequest as error:
            if not error.problems:
                raise
            raise InvalidJob(error.problems, reason=error.reason) from None
        return UpdateJobResponse(answer)

    async def evict(
        self, node: str, reason: str, *, now: bool = False, validate_only: bool = False
    ) -> EvictNodeResponse:
        """Quarantine a node: its work moves to a spare.

        Its job saves first if it can, unless ``now``. With ``validate_only`` nothing changes, and
        the answer has the consequence. Raises NotFound, NotPossible.
        """
        request = driver_pb2.EvictNodeRequest(
            name=node,
            reason=reason,
            request_id=request_id(),
            validate_only=validate_only,
            now=now,
        )
        answer = await self._connection.unary("EvictNode", request, driver_pb2.EvictNodeResponse)
        return EvictNodeResponse(answer)

    async def cordon(
        self, node: str, reason: str, *, validate_only: bool = False
    ) -> CordonNodeResponse:
        """Keep new work off a node; what runs there continues. Raises NotFound, NotPossible."""
        request = driver_pb2.CordonNodeRequest(
            name=node, reason=reason, request_id=request_id(), validate_only=validate_only
        )
        answer = await self._connection.unary("CordonNode", request, driver_pb2.CordonNodeResponse)
        return CordonNodeResponse(answer)

    async def uncordon(
        self, node: str, reason: str, *, validate_only: bool = False
    ) -> UncordonNodeResponse:
        """Make a cordoned or quarantined node schedulable again. Raises NotFound, NotPossible."""
        request = driver_pb2.UncordonNodeRequest(
            name=node, reason=reason, request_id=request_id(), validate_only=validate_only
        )
        answer = await self._connection.unary(
            "UncordonNode", request, driver_pb2.UncordonNodeResponse
        )
        return UncordonNodeResponse(answer)

    async def drain(
        self, node: str, reason: str, *, validate_only: bool = False
    ) -> DrainNodeResponse:
        """Empty a node: its job saves, leaves it and goes on elsewhere. Raises NotFound."""
        request = driver_pb2.DrainNodeRequest(
            name=node, reason=reason, request_id=request_id(), validate_only=validate_only
        )
        answer = await self._connection.unary("DrainNode", request, driver_pb2.DrainNodeResponse)
        return DrainNodeResponse(answer)

    async def set_policy(
        self, rule: str, mode: PolicyMode | str, reason: str, *, validate_only: bool = False
    ) -> SetPolicyResponse:
        """Have a rule of the driver observed or enforced. Raises InvalidRequest."""
        request = driver_pb2.SetPolicyRequest(
            rule=rule, reason=reason, request_id=request_id(), validate_only=validate_only,
            mode=types_pb2.PolicyMode.ValueType(PolicyMode.of(mode)),
        )  # fmt: skip
        answer = await self._connection.unary("SetPolicy", request, driver_pb2.SetPolicyResponse)
        return SetPolicyResponse(answer)

    async def set_quota(
        self, tenant: str, devices: int | None, reason: str, *, validate_only: bool = False
    ) -> driver_pb2.SetQuotaResponse:
        """Bound the devices that a tenant's jobs hold at once; None: the driver's default.

        Jobs that run go on. Raises InvalidRequest.
        """
        request = driver_pb2.SetQuotaRequest(
            tenant=tenant, devices=devices, reason=reason, request_id=request_id(),
            validate_only=validate_only,
        )  # fmt: skip
        return await self._connection.unary("SetQuota", request, driver_pb2.SetQuotaResponse)

    async def reset_breaker(
        self, reason: str, *, validate_only: bool = False
    ) -> driver_pb2.ResetBreakerResponse:
        """Have the driver enforce inferred verdicts again, after its breaker has tripped."""
        request = driver_pb2.ResetBreakerRequest(
            reason=reason, request_id=request_id(), validate_only=validate_only
        )
        return await self._connection.unary(
            "ResetBreaker", request, driver_pb2.ResetBreakerResponse
        )
