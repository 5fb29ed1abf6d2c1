"""What a stranger on the host finds at each port and socket, and what servers do with strangers."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.harness.waiting import CALL_TIMEOUT_S

from megascale_common.service import server
from megascale_common.service.channel import open_channel

TOKEN = "token-of-the-tests"
CHECK = "/grpc.health.v1.Health/Check"
# The preface of HTTP/2 and an empty frame of settings: a connection that may make calls.
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))


@asynccontextmanager
async def serving() -> AsyncIterator[str]:
    """The address of a server as each service has one."""
    found = server.RpcServer(TOKEN)
    try:
        yield await found.start("127.0.0.1:0", [])
    finally:
        await found.stop(0)


async def check(address: str) -> None:
    async with open_channel(address, TOKEN) as channel:
        request = health_pb2.HealthCheckRequest()
        stub = health_pb2_grpc.HealthStub(channel)
        await stub.Check(request, timeout=CALL_TIMEOUT_S, wait_for_ready=True)


async def until_closed(address: str, sent: bytes) -> None:
    """Connect, send, and wait until the server ends the connection."""
    host, port = address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(sent)
    async with asyncio.timeout(CALL_TIMEOUT_S):
        with suppress(ConnectionResetError):
            while await reader.read(1 << 16):
                pass
    writer.close()


@pytest.mark.parametrize("sent", [b"", HTTP2[:20], HTTP2], ids=["nothing", "a part", "a preface"])
async def test_connections_without_a_call_end(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HANDSHAKE_TIMEOUT_S", 0.5)
    monkeypatch.setattr(server, "IDLE_TIMEOUT_S", 0.5)
    async with serving() as address:
        await until_closed(address, sent)


async def test_idle_connections_leave_a_process_its_own_descriptors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With more of them than there are places: those above are closed at once, calls come later."""
    monkeypatch.setattr(server, "HANDSHAKE_TIMEOUT_S", 1.0)
    monkeypatch.setattr(server, "most_connections", lambda people: 8)
    async with serving() as address:
        host, port = address.rsplit(":", 1)
        before = descriptors()
        idle = [await asyncio.open_connection(host, int(port)) for _ in range(40)]
        async with asyncio.timeout(CALL_TIMEOUT_S):
            with suppress(ConnectionResetError):
                assert await idle[-1][0].read() == b"", "above the bound"
        # Of this process too, which has both ends: those of the clients, and 8 of the server.
        assert descriptors() - before <= 40 + 8 + 4
        await check(address)
        for _, writer in idle:
            writer.close()


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize(
    ("soft", "hard", "limit"),
    [
        (1024, 20_000, 20_000),
        (1024, 1 << 20, server.WANTED_DESCRIPTORS),
        (1024, resource.RLIM_INFINITY, server.WANTED_DESCRIPTORS),
        (256, 256, 256),
        (1 << 20, 1 << 20, 1 << 20),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, server.WANTED_DESCRIPTORS),
    ],
)
def test_a_server_takes_fewer_connections_than_its_process_has_descriptors(
    soft: int, hard: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = [(soft, hard)]
    monkeypatch.setattr(resource, "setrlimit", lambda which, pair: limits.append(pair))
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits[-1])
    both = server.most_connections(people=False) + server.most_connections(people=True)
    assert both == limit - min(server.OWN_DESCRIPTORS, limit // 2)
    assert limits[-1] in ((limit, hard), (soft, hard))
    assert limits[-1][0] in (limit, resource.RLIM_INFINITY)


async def test_a_stranger_who_sends_no_request_is_refused() -> None:
    """A call that has begun is no idle connection: it must not wait for what never comes."""
    async with serving() as address, grpc.aio.insecure_channel(address) as channel:
        call: grpc.aio.StreamUnaryCall[bytes, bytes] = channel.stream_unary(CHECK)()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                await call
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
