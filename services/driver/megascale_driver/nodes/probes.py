"""Probes of a node: is the agent at this address alive, and is it the same incarnation?

A refused connection is evidence that the process is gone. No answer at all proves little: the host
may be slow or unreachable. The core orders probes and decides on their results.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from megascale.v1 import executor_pb2, executor_pb2_grpc
from megascale_common.service import logs
from megascale_common.service.channel import open_channel
from megascale_driver.core.values.cluster import AttemptPhase
from megascale_driver.core.values.events import Probe
from megascale_driver.presence.reports import phase_of

# concurrent probes: a silent fleet must not take all descriptors, nor all time of the driver
AT_ONCE = 128
DEADLINE_S = 2.0
REFUSALS = 2  # refusals in a row before the process counts as gone
TRIES = 4
PAUSE_S = 0.5

_log = logs.get(__name__)


@dataclass(frozen=True, slots=True)
class Probed:
    """The outcome of a probe: ``alive``, ``refused`` (or another incarnation answers), ``timeout``.

    ``job``, ``attempt``, ``phase``: the work that an agent that is alive reports; None: not known.
    """

    outcome: str
    job: str = ""
    attempt: int = 0
    phase: AttemptPhase | None = None


class Prober:
    """Carries out probes, AT_ONCE at a time; at most one per node waits.

    A newer probe replaces a waiting one of the same node. So the number of waiting probes is
    bounded by the nodes, however long a fleet is silent and however slow probes are.
    """

    def __init__(self, token: str, done: Callable[[Probe, Probed], None]) -> None:
        self._token = token
        self._done = done
        self._waiting: dict[str, Probe] = {}
        self._running: dict[str, asyncio.Task[None]] = {}

    def order(self, wanted: Probe) -> None:
        """Probe the node as soon as there is room, after its running probe if there is one.

        A running probe may have been answered before the reason for this one.
        """
        self._waiting[wanted.node] = wanted
        self._fill()

    def close(self) -> None:
        """Cancel all probes."""
        self._waiting.clear()
        for task in self._running.values():
            task.cancel()

    @property
    def pending(self) -> int:
        """Number of probes that run or wait."""
        return len(self._running) + len(self._waiting)

    def _fill(self) -> None:
        for node in list(itertools.islice(self._waiting, AT_ONCE)):
            if len(self._running) >= AT_ONCE:
                return
            if node not in self._running:
                self._running[node] = asyncio.create_task(self._run(self._waiting.pop(node)))

    async def _run(self, wanted: Probe) -> None:
        try:
            self._done(wanted, await probe(wanted, self._token))
        except Exception:
            _log.exception("a probe failed; the core orders it again", node=wanted.node)
        finally:
            del self._running[wanted.node]
            self._fill()


async def probe(wanted: Probe, token: str) -> Probed:
    """Probe a node, within about 4 s.

    A process that is being killed may still accept a connection and reset it, so a single try is
    not trusted: after a reset it is tried again, and only two refusals in a row count.
    """
    refusals = 0
    for attempt in range(TRIES):
        if attempt:
            await asyncio.sleep(PAUSE_S)
        if await refuses(wanted.endpoint):
            refusals += 1
            if refusals == REFUSALS:
                return Probed("refused")
            continue
        refusals = 0
        answer = await _ask(wanted, token)
        if answer is not None:
            return answer
    return Probed("timeout")


async def refuses(endpoint: str) -> bool:
    """True if the port (host:port) refuses a connection: no process listens there."""
    host, _, port = endpoint.rpartition(":")
    try:
        async with asyncio.timeout(DEADLINE_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except ConnectionRefusedError:
        return True
    except (OSError, ValueError, TimeoutError):
        return False  # unreachable or slow: no evidence about the process
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return False


async def _ask(wanted: Probe, token: str) -> Probed | None:
    """The outcome of one call; None if the connection broke, which proves nothing."""
    channel = open_channel(wanted.endpoint, token)
    try:
        stub = executor_pb2_grpc.ExecutorServiceStub(channel)
        reply = await stub.GetNodeStatus(executor_pb2.GetNodeStatusRequest(), timeout=DEADLINE_S)
    except grpc.aio.AioRpcError as error:
        return None if error.code() is grpc.StatusCode.UNAVAILABLE else Probed("timeout")
    finally:
        await channel.close()
    if reply.hello.incarnation != wanted.incarnation:
        return Probed("refused")
    if not reply.HasField("heartbeat"):
        return Probed("alive")
    beat = reply.heartbeat
    return Probed("alive", beat.job, beat.attempt, phase_of(beat.phase))
