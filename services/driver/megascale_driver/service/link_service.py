"""ExecutorLinkService: the API for agents: their node's link, step records and spans.

Nodes dial the driver, so the driver needs no node's address to send it orders. Orders for a node
wait in :mod:`megascale_driver.nodes.open_links`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any, Protocol

import grpc
from google.protobuf.message import DecodeError

from megascale.v1 import link_pb2
from megascale_common.node.link_limits import BEGINNING_S, DIALS_PER_S, MAX_RETRY_S
from megascale_common.service import logs
from megascale_common.service.errors import (
    ForbiddenError,
    NotFoundError,
    RequestError,
    ServiceError,
    StateError,
    UnavailableError,
)
from megascale_common.service.identity.gate import caller
from megascale_common.service.start import build_version
from megascale_common.service.status import abort
from megascale_driver.core import draft
from megascale_driver.core.values.cluster import Identity
from megascale_driver.nodes.open_links import Link
from megascale_driver.nodes.orders import PROTOCOL
from megascale_driver.presence import arrival
from megascale_driver.shell.engine import Engine
from megascale_driver.shell.leadership import Leader
from megascale_driver.shell.loop import LongLived
from megascale_driver.wire import messages as wire
from megascale_job.names import is_dns_label

HELLO_TIMEOUT_S = 10.0  # for the node's hello, from its call on
# Open links, those that still wait for their hello included; each takes about 55 KiB of memory.
MAX_LINKS = 32_768
MAX_HEARTBEAT_BYTES = 64 << 10
MAX_BATCH_BYTES = 64 << 10
MAX_BATCH_SPANS = 1024

_log = logs.get(__name__)


class SpanSink(Protocol):
    """Receiver of spans: :class:`megascale_driver.telemetry.intake.SpanIntake`."""

    def take(self, batch: link_pb2.ReportSpansRequest) -> bool:
        """Take a batch without waiting; False if there is no room for it."""


class LinkService:
    """Turns messages of nodes into events for the engine, and sends the orders of their links.

    Without ``spans``, spans from nodes are dropped. ``topology`` has labels by node; they override
    the labels that the node reports.
    """

    def __init__(
        self,
        engine: Engine,
        leader: Leader,
        cluster: str,
        spans: SpanSink | None = None,
        topology: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        self._engine = engine
        self._topology = topology or {}
        self._spans = spans
        self._leader = leader
        self._cluster = cluster
        self._long_lived = LongLived()
        self._greeting = 0  # links that still wait for their hello
        self._pace = DialPace()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register the service with a server; requests of Connect arrive as bytes."""
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Connect": grpc.stream_stream_rpc_method_handler(
                self.Connect,
                response_serializer=link_pb2.ConnectResponse.SerializeToString,
            ),
            "ReportSteps": grpc.stream_unary_rpc_method_handler(
                self.ReportSteps,
                request_deserializer=link_pb2.ReportStepsRequest.FromString,
                response_serializer=link_pb2.ReportStepsResponse.SerializeToString,
            ),
            "ReportSpans": grpc.stream_unary_rpc_method_handler(
                self.ReportSpans,
                request_deserializer=link_pb2.ReportSpansRequest.FromString,
                response_serializer=link_pb2.ReportSpansResponse.SerializeToString,
            ),
        }
        name = link_pb2.DESCRIPTOR.services_by_name["ExecutorLinkService"].full_name
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))

    def _identity(self, hello: link_pb2.ExecutorHello) -> Identity:
        found = wire.identity(hello)
        labels = self._topology.get(hello.node, {})
        return replace(found, topology={**found.topology, **labels}) if labels else found

    async def Connect(
        self,
        request_iterator: AsyncIterator[bytes],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        """Serve one node's link, from its hello until either side ends it."""
        try:
            hello = await self._hello(request_iterator)
        except ServiceError as error:
            await abort(context, error)
        term = self._engine.term
        if term is None:  # the term can end while this call waits for the hello
            await abort(context, self._later(self._leader.not_leading()))
        now_s = self._engine.clock.now_s()
        protocol = min(hello.protocol.highest, PROTOCOL.highest)
        link = Link(hello.node, self._identity(hello), now_s, context.write, protocol)
        self._engine.node_calls.learn(hello.node, link.identity, hello.measured)
        greeting = link_pb2.DriverHello(
            protocol=PROTOCOL,
            build=build_version(),
            cluster=self._cluster,
            epoch=term.epoch,
            heartbeat_interval=wire.duration(self._engine.policy.heartbeat_interval_s),
        )
        # Register the link before sending the driver's hello: a new term that starts in between
        # then finds the link and introduces the node to the core again.
        self._engine.links.add(link)
        self._long_lived.linked(len(self._engine.links))
        reader: asyncio.Task[None] | None = None
        try:
            await link.greet(link_pb2.ConnectResponse(hello=greeting))
            self._engine.heartbeats.opened(link)
            reader = asyncio.create_task(self._read(request_iterator, link))
            await link.ended.wait()
        finally:
            link.close()
            if reader is not None:
                reader.cancel()
            # If the node has dialled again meanwhile, its new link is open: report nothing.
            if self._engine.links.remove(link):
                self._engine.heartbeats.closed(link)

    async def ReportSteps(
        self,
        request_iterator: AsyncIterator[link_pb2.ReportStepsRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> link_pb2.ReportStepsResponse:
        """Receive one node's step records; records that are known already are dropped."""
        accepted = 0
        async for request in request_iterator:
            if not self._leader.shows_state:
                await abort(context, self._leader.not_leading())
            state = self._engine.state
            if (problem := state.unreadable.get(draft.unreadable_key(request.job))) is not None:
                # Refused, so that the agent keeps them for a build that can read the job.
                text = draft.unreadable_sentence(request.job, problem)
                await abort(context, UnavailableError(text, reason="JOB_UNREADABLE"))
            if request.job not in state.jobs:
                await abort(
                    context,
                    NotFoundError(f"no job {request.job!r}", reason="JOB_NOT_FOUND"),
                )
            job = state.jobs[request.job]
            if (peer := caller()) is not None and job.slot_of(peer.name) is None:
                text = f"node {peer.name} runs no rank of job {request.job}"
                await abort(context, ForbiddenError(text, reason="NOT_ITS_JOB"))
            for record in request.records:
                self._engine.step_done(request.job, record)
                accepted += 1
        return link_pb2.ReportStepsResponse(accepted=accepted)

    async def ReportSpans(
        self,
        request_iterator: AsyncIterator[link_pb2.ReportSpansRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> link_pb2.ReportSpansResponse:
        """Receive spans measured by one node's ranks; spans of other attempts are ignored."""
        accepted = 0
        async for batch in request_iterator:
            if not self._leader.shows_state:
                await abort(context, self._leader.not_leading())
            if (peer := caller()) is not None and peer.name != batch.node:
                text = f"the certificate is that of node {peer.name}, and the spans {batch.node}'s"
                await abort(context, ForbiddenError(text, reason="NOT_ITS_NODE"))
            if batch.ByteSize() > MAX_BATCH_BYTES or not 0 <= batch.count <= MAX_BATCH_SPANS:
                text = f"a batch has at most {MAX_BATCH_SPANS} spans in {MAX_BATCH_BYTES} bytes"
                await abort(context, RequestError(text, reason="BAD_SPANS"))
            job = self._engine.state.jobs.get(batch.job)
            if job is None or job.attempt != batch.attempt:
                continue
            slot = job.slot_of(batch.node)
            if slot is None or batch.rank not in slot.ranks:
                continue
            if self._spans is not None and self._spans.take(batch):
                accepted += batch.count
        return link_pb2.ReportSpansResponse(accepted=accepted)

    def _later(self, error: ServiceError) -> ServiceError:
        """The error, with the time after which the node can dial again."""
        error.retry_after_s = self._pace.next_s(self._engine.clock.now_s())
        return error

    async def _hello(self, requests: AsyncIterator[bytes]) -> link_pb2.ExecutorHello:
        beginning = self._leader.beginning
        if self._engine.term is None and beginning is None:
            raise self._later(self._leader.not_leading())
        if len(self._engine.links) + self._greeting >= MAX_LINKS:
            text = f"{MAX_LINKS} links are open or being opened; dial again later"
            raise self._later(UnavailableError(text, reason="TOO_MANY_LINKS"))
        self._greeting += 1
        try:
            if beginning is not None:
                # The new leader still reads its state: if refused, thousands of nodes would dial
                # again and again meanwhile.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(BEGINNING_S):
                        await beginning.wait()
                if self._engine.term is None:
                    raise self._later(self._leader.not_leading())
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                raw = await anext(requests)
            if not self._engine.heartbeats.turns.take():
                await self._engine.heartbeats.turns.wait()
            first = link_pb2.ConnectRequest.FromString(raw)
        except (TimeoutError, StopAsyncIteration, DecodeError) as error:
            text = f"no hello arrived within {HELLO_TIMEOUT_S:g} s"
            raise RequestError(text, reason="HELLO_MISSING") from error
        finally:
            self._greeting -= 1
        hello = first.hello
        if first.WhichOneof("message") != "hello":
            raise RequestError("the first message must be a hello", reason="HELLO_MISSING")
        if hello.protocol.lowest > PROTOCOL.highest or hello.protocol.highest < PROTOCOL.lowest:
            raise StateError(
                f"the executor uses link protocol {hello.protocol.lowest} to "
                f"{hello.protocol.highest}, the driver {PROTOCOL.lowest} to {PROTOCOL.highest}: "
                "install builds of the same release",
                reason="PROTOCOL_MISMATCH",
            )
        problems = [
            (f"hello.{name}", problem)
            for name, wrong, problem in (
                (
                    "node",
                    not is_dns_label(hello.node),
                    "not a DNS-1123 label: 1 to 63 of a-z, 0-9 and '-'",
                ),
                (
                    "incarnation",
                    not 0 < len(hello.incarnation) <= wire.MAX_LABEL,
                    f"give one id per start of the agent, of at most {wire.MAX_LABEL} characters",
                ),
                (
                    "devices",
                    not 0 < len(hello.devices) <= wire.MAX_DEVICES,
                    f"give 1 to {wire.MAX_DEVICES} devices",
                ),
            )
            if wrong
        ]
        if problems:
            text = "; ".join(f"{field}: {problem}" for field, problem in problems)
            raise RequestError(text, reason="BAD_HELLO", fields=problems)
        _require_node(hello.node)
        self._refuse_rival(hello)
        return hello

    def _refuse_rival(self, hello: link_pb2.ExecutorHello) -> None:
        """Refuse a second agent with the same node name while the first one is alive.

        Otherwise the two would replace each other's link for ever.
        """
        received_since_s = self._engine.clock.now_s() - self._engine.policy.suspect_after_s
        rival = self._engine.links.rival(hello.node, hello.incarnation, received_since_s)
        if rival is not None:
            where = rival.identity.hostname or "another host"
            raise StateError(
                f"node {hello.node} has a link already, to the agent on {where} at "
                f"{rival.identity.executor_endpoint}: stop that agent, or start this one with "
                "another --node",
                reason="NODE_NAME_IN_USE",
            )

    async def _read(self, requests: AsyncIterator[bytes], link: Link) -> None:
        """Acknowledge each heartbeat and hand it to the engine, until the stream ends."""
        clock = self._engine.clock
        heard = self._engine.heartbeats.heard
        turns = self._engine.heartbeats.turns
        try:
            async for request in requests:
                if not turns.take():
                    await turns.wait()
                received_s = clock.now_s()
                beat = arrival.parsed(request)
                if beat is None:
                    continue
                # Acknowledge first, so that no decision or commit delays it: agents take a late
                # acknowledgement for a lost link.
                await link.acknowledge(_ack(beat.seq, received_s, clock.now_s()))
                # An oversized heartbeat is dropped, but proves that the agent is alive. Closing the
                # link would not help, because the agent would send the same heartbeat again.
                if len(request) > MAX_HEARTBEAT_BYTES:
                    _log.warning(
                        "a heartbeat of more than 64 KiB is dropped",
                        node=link.node,
                        bytes=len(request),
                    )
                    heard(link, None, received_s)
                else:
                    heard(link, beat, received_s)
        except DecodeError as error:
            _log.warning("a message of a node cannot be read", node=link.node, error=str(error))
        finally:
            link.close()


def _require_node(name: str) -> None:
    """Refuse an agent whose certificate is another node's."""
    peer = caller()
    if peer is not None and peer.name != name:
        raise ForbiddenError(
            f"the certificate is that of node {peer.name}, and the hello that of node {name}: "
            f"issue one with `megascale certs issue --role executor --name {name}`",
            reason="NOT_ITS_NODE",
        )


def _ack(seq: int, received_s: float, sent_s: float) -> link_pb2.ConnectResponse:
    # Set field by field: constructors with keywords take three times as long.
    response = link_pb2.ConnectResponse()
    ack = response.heartbeat_ack
    ack.seq = seq
    stamp = ack.received_at
    stamp.seconds, stamp.nanos = divmod(int(received_s * 1e9), 1_000_000_000)
    stamp = ack.sent_at
    stamp.seconds, stamp.nanos = divmod(int(sent_s * 1e9), 1_000_000_000)
    return response


class DialPace:
    """Spreads the next dials of refused nodes over time; ``now_s`` is from any one clock.

    While no driver leads, a standby refuses every node of the fleet, and each node dials again with
    its own back-off of at most two seconds. Ten thousand nodes then open thousands of connections a
    second, just when a standby is taking over.
    """

    def __init__(self) -> None:
        self._taken_s = float("-inf")  # time of the latest dial that was assigned

    def next_s(self, now_s: float) -> float:
        """Seconds until this node can dial again, at most MAX_RETRY_S."""
        after_s = max(now_s, self._taken_s) + 1.0 / DIALS_PER_S
        self._taken_s = min(after_s, now_s + MAX_RETRY_S)
        return self._taken_s - now_s
