"""The link to the driver. The node opens it, and opens it again whenever it is lost.

A lost link never affects the workers. Each session begins with a hello in both directions. Then the
driver sends desired states, and the node sends heartbeats: one per interval that the driver asks
for, and one at once on a change, but at most 20 per second.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable
from dataclasses import dataclass

import grpc
from google.protobuf.timestamp_pb2 import Timestamp

from megascale.v1 import link_pb2, link_pb2_grpc
from megascale_common.node.link_limits import HELLO_S, MAX_RETRY_S
from megascale_common.service import logs, status
from megascale_common.service.channel import open_channel
from megascale_common.service.errors import LinkError, StaleStateError
from megascale_common.service.tasks import Backoff
from megascale_executor.agent.attempt import EpochNumber
from megascale_executor.agent.reports.span_reports import SpanReports
from megascale_executor.agent.reports.step_reports import StepReports

_log = logs.get(__name__)

PROTOCOL = (1, 5)  # lowest and highest version of the link protocol that this agent speaks
MIN_BEAT_GAP_S = 0.05
DEFAULT_INTERVAL_S = 5.0
_BACKOFF_S = (0.2, 2.0)
_AROUND = (0.75, 1.25)  # jitter: factors on the wait that a driver asks for
# The driver acknowledges every heartbeat. After so many intervals without any message the node
# connects again, possibly to another driver.
_SILENT_INTERVALS = 6
MAX_HEARTBEAT_BYTES = 64 * 1024
_SHORT_SAMPLE_CHARS = 160
_FEW_LOGS = 8


@dataclass(frozen=True, slots=True)
class Ack:
    """Times of one acknowledgement, by the driver's clock and by ours, for the clock offset."""

    driver_received_at: Timestamp
    driver_sent_at: Timestamp
    received_at: Timestamp


@dataclass(frozen=True, slots=True)
class NodeSide:
    """Callbacks of the node: sources of the link's messages, and receivers of the driver's."""

    hello: Callable[[], link_pb2.ExecutorHello]
    heartbeat: Callable[[], link_pb2.Heartbeat]  # everything but seq and clock
    see_epoch: Callable[[EpochNumber], None]  # raises StaleStateError
    desired: Callable[[link_pb2.DesiredState], None]  # raises StaleStateError or ValueError


class DriverLink:
    """Keeps one session with a driver.

    Args:
        cluster: name that the driver's hello must have.
        token: cluster token.
        addresses: called for each round of attempts to connect; ``host:port`` of drivers, in order.
    """

    def __init__(
        self,
        cluster: str,
        token: str,
        addresses: Callable[[], list[str]],
        node: NodeSide,
        reports: StepReports,
        spans: SpanReports,
    ) -> None:
        self._cluster = cluster
        self._token = token
        self._addresses = addresses
        self._node = node
        self._reports = reports
        self._spans = spans
        self._change = asyncio.Event()
        self._hello_change = asyncio.Event()
        self._greeted = asyncio.Event()
        self._interval_s = DEFAULT_INTERVAL_S
        self._seq = 0
        self._ack: Ack | None = None
        self._received_at_s = 0.0

    @property
    def seq(self) -> int:
        """Number of the last heartbeat."""
        return self._seq

    @property
    def connected(self) -> bool:
        """Whether a session is open, that is, a driver has sent its hello."""
        return self._greeted.is_set()

    def changed(self) -> None:
        """The content of the heartbeat has changed: send one at once."""
        self._change.set()

    def hello_changed(self) -> None:
        """The content of the hello has changed: connect again."""
        self._hello_change.set()

    async def run(self) -> None:
        """Connect, serve, connect again, with a jittered back-off that doubles from 0.2 to 2 s.

        If a driver asks for a longer wait, the pause is about that long, so that the many nodes of
        a fleet do not return at once.
        """
        backoff = Backoff(*_BACKOFF_S)
        while True:
            asked_s = 0.0
            for address in self._addresses():
                try:
                    await self._session(address)
                except asyncio.CancelledError:
                    # When the iterator of requests raises, gRPC cancels its call, and the session
                    # sees a CancelledError although this task was not cancelled: a lost link.
                    task = asyncio.current_task()
                    if task is None or task.cancelling():
                        raise
                    _log.error(
                        "the link was cancelled from within; connecting again", driver=address
                    )
                except StaleStateError as error:
                    _log.warning(
                        "refused a driver with a lower epoch than one that this node has accepted. "
                        "It is an old leader, or etcd was restored from a backup without raising "
                        "its generation",
                        driver=address,
                        reason=str(error),
                    )
                except (grpc.aio.AioRpcError, LinkError, OSError) as error:
                    reason: str | None = str(error)
                    if isinstance(error, grpc.aio.AioRpcError):
                        reason = error.details()
                        asked_s = max(asked_s, status.read(error).retry_after_s)
                    _log.info("no link to the driver", driver=address, reason=reason)
                except Exception:
                    # A defect of the agent. Without a link the node is useless, so connect again.
                    _log.exception("the link failed; connecting again", driver=address)
                if self._greeted.is_set():
                    backoff.reset()
                    self._greeted.clear()
                    asked_s = 0.0
            # Jitter spreads the nodes of a fleet over the interval when a driver returns.
            await asyncio.sleep(pause_s(backoff.next_s(), asked_s))

    async def _session(self, address: str) -> None:
        self._greeted.clear()
        self._hello_change.clear()
        channel = open_channel(address, self._token)
        tasks: list[asyncio.Task[None]] = []
        try:
            stub: link_pb2_grpc.ExecutorLinkServiceAsyncStub = (
                link_pb2_grpc.ExecutorLinkServiceStub(channel)
            )
            call = stub.Connect(self._outgoing())
            tasks.append(asyncio.create_task(self._listen(address, call), name="link-listen"))
            tasks.append(asyncio.create_task(self._await_hello(), name="link-hello-timeout"))
            await _first_of(tasks)
            tasks.append(asyncio.create_task(self._reports.send_forever(stub), name="link-steps"))
            sending = self._spans.send_forever(
                lambda: open_channel(address, self._token, shares=False)
            )
            tasks.append(asyncio.create_task(sending, name="link-spans"))
            tasks.append(asyncio.create_task(self._await_end(), name="link-watch"))
            await _first_of([task for task in tasks if not task.done()])
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await channel.close()

    async def _await_hello(self) -> None:
        try:
            async with asyncio.timeout(HELLO_S):
                await self._greeted.wait()
        except TimeoutError as error:
            raise LinkError(f"the driver sent no hello within {HELLO_S:.0f} s") from error

    async def _await_end(self) -> None:
        """Return when the hello has changed; raise LinkError when the driver is silent."""
        limit_s = _SILENT_INTERVALS * self._interval_s
        while True:
            try:
                async with asyncio.timeout(self._interval_s):
                    await self._hello_change.wait()
                return
            except TimeoutError:
                silent_s = time.monotonic() - self._received_at_s
                if silent_s > limit_s:
                    raise LinkError(f"no message from the driver for {silent_s:.0f} s") from None

    async def _outgoing(self) -> AsyncIterator[link_pb2.ConnectRequest]:
        yield link_pb2.ConnectRequest(hello=self._node.hello())
        await self._greeted.wait()
        while True:
            # Cleared before the heartbeat is built, so that a later change causes another one.
            self._change.clear()
            try:
                beat = self._next_heartbeat()
            except Exception:
                # Raising here would end the stream and with it all heartbeats, so only this one is
                # skipped.
                _log.exception("a heartbeat cannot be built")
            else:
                yield link_pb2.ConnectRequest(heartbeat=beat)
            await asyncio.sleep(MIN_BEAT_GAP_S)
            try:
                async with asyncio.timeout(self._interval_s - MIN_BEAT_GAP_S):
                    await self._change.wait()
            except TimeoutError:
                pass

    def _next_heartbeat(self) -> link_pb2.Heartbeat:
        beat = self._node.heartbeat()
        self._seq += 1
        beat.seq = self._seq
        if self._ack is not None:
            beat.ack_driver_received_at.CopyFrom(self._ack.driver_received_at)
            beat.ack_driver_sent_at.CopyFrom(self._ack.driver_sent_at)
            beat.ack_received_at.CopyFrom(self._ack.received_at)
        return fit(beat)

    async def _listen(self, address: str, call: AsyncIterable[link_pb2.ConnectResponse]) -> None:
        async for response in call:
            self._received_at_s = time.monotonic()
            kind = response.WhichOneof("message")
            if kind == "hello":
                self._greet(address, response.hello)
            elif not self._greeted.is_set():
                raise LinkError(f"the driver's first message is {kind} instead of a hello")
            elif kind == "desired_state":
                self._obey(response.desired_state)
            elif kind == "heartbeat_ack":
                ack = response.heartbeat_ack
                received_at = Timestamp()
                received_at.GetCurrentTime()
                self._ack = Ack(ack.received_at, ack.sent_at, received_at)
        raise LinkError("the driver closed the link")

    def _greet(self, address: str, hello: link_pb2.DriverHello) -> None:
        if hello.cluster != self._cluster:
            raise LinkError(
                f"the driver serves cluster {hello.cluster!r}; "
                f"this node belongs to {self._cluster!r}"
            )
        lowest, highest = PROTOCOL
        if hello.protocol.lowest > highest or hello.protocol.highest < lowest:
            raise LinkError(
                f"the driver has link protocol {hello.protocol.lowest} to "
                f"{hello.protocol.highest}, this node {lowest} to {highest}; update the older side"
            )
        self._node.see_epoch(EpochNumber.of(hello.epoch))
        asked_s = hello.heartbeat_interval.ToNanoseconds() / 1e9
        self._interval_s = (
            min(max(asked_s, 2 * MIN_BEAT_GAP_S), 60.0) if asked_s > 0 else DEFAULT_INTERVAL_S
        )
        self._greeted.set()
        _log.info(
            "linked to the driver",
            driver=address,
            build=hello.build,
            heartbeat_interval_s=self._interval_s,
        )

    def _obey(self, desired: link_pb2.DesiredState) -> None:
        """Pass a desired state on; an invalid one is logged and changes nothing.

        A stale one raises StaleStateError and thereby ends the session: its driver is superseded.
        """
        try:
            self._node.desired(desired)
        except ValueError as error:
            _log.error("invalid desired state", error=str(error))


def pause_s(own_s: float, asked_s: float) -> float:
    """Seconds before the next attempt: the own back-off, or about what a driver asked for."""
    return max(own_s, min(asked_s, MAX_RETRY_S) * random.uniform(*_AROUND))


def fit(beat: link_pb2.Heartbeat) -> link_pb2.Heartbeat:
    """Shorten a heartbeat that is over the limit, least important content first.

    First log samples are cut, then lines that only follow from others are dropped, then error texts
    are cut (the logs have them in full), then checkpoints without a sealed snapshot are dropped.
    """
    if beat.ByteSize() > MAX_HEARTBEAT_BYTES:
        for log in beat.logs:
            log.sample_line = log.sample_line[:_SHORT_SAMPLE_CHARS]
    if beat.ByteSize() > MAX_HEARTBEAT_BYTES:
        roots = [log for log in beat.logs if log.role == "root"][:_FEW_LOGS]
        del beat.logs[:]
        beat.logs.extend(roots)
    if beat.ByteSize() > MAX_HEARTBEAT_BYTES:
        for worker in beat.workers:
            worker.error = worker.error[-200:]
        for check in beat.checks:
            check.detail = check.detail[:200]
    if beat.ByteSize() > MAX_HEARTBEAT_BYTES:
        beat.failure = beat.failure[:200]
        sealed = [item for item in beat.checkpoints if item.sealed]
        del beat.checkpoints[:]
        beat.checkpoints.extend(sealed)
        for item in beat.checkpoints:
            item.persist_error = item.persist_error[:200]
            if item.HasField("failure"):
                item.failure.error = item.failure.error[:200]
    return beat


async def _first_of(tasks: list[asyncio.Task[None]]) -> None:
    """Wait until one task is done; raises its exception."""
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()
