"""Calls of the asyncio client that change something: jobs, nodes, rules."""

from __future__ import annotations

import uuid
from collections.abc import Mapping

from megascale.v1 import driver_pb2, job_pb2, types_pb2
from megascale_client.connection import Answer, Connection
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


class Seen:
    """The newest event and step that a watch has yielded, to skip repetitions after a reconnect."""

    def __init__(self) -> None:
        self._event = 0
        self._step = (0, 0)

    def is_new(self, update: driver_pb2.WatchJobResponse) -> bool:
        """Record an update; False when it was yielded before. The job's state is always new."""
        # Both numbers only rise: events by their place in the log, steps because an attempt that
        # repeats steps has a higher number.
        kind = update.WhichOneof("update")
        if kind == "event":
            new = update.event.seq > self._event
            self._event = max(self._event, update.event.seq)
        elif kind == "step":
            place = (update.step.attempt, update.step.step)
            new = place > self._step
            self._step = max(self._step, place)
        else:
            new = kind is not None
        return new


def request_id() -> str:
    """A new id, made once per call, by which the driver recognises its repetitions.

    See Note [Repeated calls] in :mod:`megascale_client.connection`.
    """
    return str(uuid.uuid4())


Order = (
    driver_pb2.CancelJobRequest
    | driver_pb2.SuspendJobRequest
    | driver_pb2.ResumeJobRequest
    | driver_pb2.DeleteJobRequest
    | driver_pb2.RestartJobRequest
    | driver_pb2.UpdateJobRequest
    | driver_pb2.EvictNodeRequest
    | driver_pb2.CordonNodeRequest
    | driver_pb2.UncordonNodeRequest
    | driver_pb2.DrainNodeRequest
    | driver_pb2.SetPolicyRequest
    | driver_pb2.SetQuotaRequest
    | driver_pb2.ResetBreakerRequest
)


class OrderCalls:
    """The part of :class:`megascale_client.AsyncClient` that changes something."""

    _connection: Connection

    async def _order(self, request: Order, answer: type[Answer]) -> Answer:
        """Send an order, under an id by which the driver recognises a repetition."""
        request.request_id = request_id()  # here and not in the loop of retries
        method = request.DESCRIPTOR.name.removesuffix("Request")
        return await self._connection.unary(method, request, answer)

    async def cancel(self, name: str, reason: str) -> Job:
        """Stop a job's workers; its committed checkpoints stay. Raises NotFound, NotPossible."""
        request = driver_pb2.CancelJobRequest(name=name, reason=reason)
        answer = await self._order(request, driver_pb2.CancelJobResponse)
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
            name=name, reason=reason, validate_only=validate_only
        )
        return SuspendJobResponse(await self._order(request, driver_pb2.SuspendJobResponse))

    async def resume(
        self, name: str, reason: str, *, validate_only: bool = False
    ) -> ResumeJobResponse:
        """Let a suspended job have nodes again. Raises NotFound, NotPossible (it has ended)."""
        request = driver_pb2.ResumeJobRequest(name=name, reason=reason, validate_only=validate_only)
        return ResumeJobResponse(await self._order(request, driver_pb2.ResumeJobResponse))

    async def delete(
        self, name: str, reason: str, *, validate_only: bool = False
    ) -> driver_pb2.DeleteJobResponse:
        """Forget an ended job; its checkpoints stay. Raises NotFound, NotPossible (it runs)."""
        request = driver_pb2.DeleteJobRequest(name=name, reason=reason, validate_only=validate_only)
        return await self._order(request, driver_pb2.DeleteJobResponse)

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
        checkpoint, and later ones are no longer restored. Raises NotFound (the job or the
        checkpoint), NotPossible (it has succeeded), InvalidRequest.
        """
        request = driver_pb2.RestartJobRequest(
            name=name, reason=reason, validate_only=validate_only, from_step=from_step, now=now
        )
        return RestartJobResponse(await self._order(request, driver_pb2.RestartJobResponse))

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
            spec=spec, reason=reason, validate_only=validate_only, restart=restart
        )
        try:
            answer = await self._order(request, driver_pb2.UpdateJobResponse)
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
            validate_only=validate_only,
            now=now,
        )
        return EvictNodeResponse(await self._order(request, driver_pb2.EvictNodeResponse))

    async def cordon(
        self, node: str, reason: str, *, validate_only: bool = False
    ) -> CordonNodeResponse:
        """Keep new work off a node; what runs there continues. Raises NotFound, NotPossible."""
        request = driver_pb2.CordonNodeRequest(
            name=node, reason=reason, validate_only=validate_only
        )
        return CordonNodeResponse(await self._order(request, driver_pb2.CordonNodeResponse))

    async def uncordon(
        self, node: str, reason: str, *, validate_only: bool = False
    ) -> UncordonNodeResponse:
        """Make a cordoned or quarantined node schedulable again. Raises NotFound, NotPossible."""
        request = driver_pb2.UncordonNodeRequest(
            name=node, reason=reason, validate_only=validate_only
        )
        return UncordonNodeResponse(await self._order(request, driver_pb2.UncordonNodeResponse))

    async def report_unreachable(
        self, nodes: Mapping[str, str]
    ) -> driver_pb2.ReportUnreachableNodesResponse:
        """Report all nodes that their platform does not reach, each with its condition there.

        A node that is silent as well then counts as dead sooner. Repeat it within ``valid_for``.
        Raises InvalidRequest.
        """
        request = driver_pb2.ReportUnreachableNodesRequest()
        for name, condition in nodes.items():
            request.nodes.add(name=name, condition=condition)
        response = driver_pb2.ReportUnreachableNodesResponse
        return await self._connection.unary("ReportUnreachableNodes", request, response)

    async def drain(
        self, node: str, reason: str, *, validate_only: bool = False
    ) -> DrainNodeResponse:
        """Empty a node: its job saves, leaves it and continues elsewhere. Raises NotFound."""
        request = driver_pb2.DrainNodeRequest(name=node, reason=reason, validate_only=validate_only)
        return DrainNodeResponse(await self._order(request, driver_pb2.DrainNodeResponse))

    async def set_policy(
        self, rule: str, mode: PolicyMode | str, reason: str, *, validate_only: bool = False
    ) -> SetPolicyResponse:
        """Have a rule of the driver observed or enforced. Raises InvalidRequest."""
        request = driver_pb2.SetPolicyRequest(
            rule=rule,
            reason=reason,
            validate_only=validate_only,
            mode=types_pb2.PolicyMode.ValueType(PolicyMode.of(mode)),
        )
        return SetPolicyResponse(await self._order(request, driver_pb2.SetPolicyResponse))

    async def set_quota(
        self, tenant: str, devices: int | None, reason: str, *, validate_only: bool = False
    ) -> driver_pb2.SetQuotaResponse:
        """Limit the devices that a tenant's jobs hold at once; None: the driver's default.

        Running jobs continue. Raises InvalidRequest.
        """
        request = driver_pb2.SetQuotaRequest(
            tenant=tenant,
            devices=devices,
            reason=reason,
            validate_only=validate_only,
        )
        return await self._order(request, driver_pb2.SetQuotaResponse)

    async def reset_breaker(
        self, reason: str, *, validate_only: bool = False
    ) -> driver_pb2.ResetBreakerResponse:
        """Have the driver enforce inferred verdicts again, after its breaker has tripped."""
        request = driver_pb2.ResetBreakerRequest(reason=reason, validate_only=validate_only)
        return await self._order(request, driver_pb2.ResetBreakerResponse)
