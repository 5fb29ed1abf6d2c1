"""Probes of a node: is the agent at this address alive, and is it the same incarnation?

A refused connection is evidence that the process is gone. No answer at all proves little: the host
may be slow or unreachable. The core orders probes and decides on their results.
"""

from __future__ import annotations

import asyncio
import contextlib

import grpc

from megascale.v1 import executor_pb2, executor_pb2_grpc
from megascale_common.service.channel import open_channel
from megascale_driver.core.events import Probe

DEADLINE_S = 2.0
REFUSALS = 2  # in a row, before the process counts as gone
TRIES = 4
PAUSE_S = 0.5


async def probe(wanted: Probe, token: str) -> str:
    """``alive``, ``refused`` (or another incarnation answers) or ``timeout``, within about 4 s.

    A process that is being killed may still accept a connection and reset it, so the outcome of one
    try is not trusted: a reset is tried again, and only two refusals in a row count.
    """
    refusals = 0
    for attempt in range(TRIES):
        if attempt:
            await asyncio.sleep(PAUSE_S)
        if await refuses(wanted.endpoint):
            refusals += 1
            if refusals == REFUSALS:
                return "refused"
            continue
        refusals = 0
        answer = await _ask(wanted, token)
        if answer:
            return answer
    return "timeout"


async def refuses(endpoint: str) -> bool:
    """Whether the port (host:port) refuses a connection: no process listens there."""
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


async def _ask(wanted: Probe, token: str) -> str:
    """``alive``, ``refused``, ``timeout``; empty if the connection broke, which proves nothing."""
    channel = open_channel(wanted.endpoint, token)
    try:
        stub = executor_pb2_grpc.ExecutorServiceStub(channel)
        reply = await stub.GetNodeStatus(executor_pb2.GetNodeStatusRequest(), timeout=DEADLINE_S)
    except grpc.aio.AioRpcError as error:
        return "" if error.code() is grpc.StatusCode.UNAVAILABLE else "timeout"
    finally:
        await channel.close()
    return "alive" if reply.hello.incarnation == wanted.incarnation else "refused"
