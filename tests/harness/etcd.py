"""A real etcd for tests, a client with a key space per test, and a way to cut the two apart.

Use the fixtures by importing them into the test module or its conftest.
"""

import asyncio
import contextlib
import ssl
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Self

import pytest
import pytest_asyncio
from tests.harness.waiting import CALL_TIMEOUT_S

from megascale_common.etcd.client import EtcdClient, Watch
from megascale_common.etcd.connection import SOCKET
from megascale_common.etcd.operations import Event
from megascale_common.etcd.server import EtcdServer
from megascale_common.service.identity.certificates import Certificates

# Elections ten times faster than by default: starts, restarts and short leases take less time (the
# shortest lease TTL is 1.5 election timeouts, rounded up to a second).
_QUICK = ("--heartbeat-interval", "20", "--election-timeout", "200")
_PROGRESS = ("--experimental-watch-progress-notify-interval", "200ms")


def make_server(data_dir: Path) -> EtcdServer:
    """A server for tests, not yet started."""
    return EtcdServer(data_dir, unsafe_no_fsync=True, extra_arguments=(*_QUICK, *_PROGRESS))


@pytest.fixture(scope="module")
def etcd_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """One running server per test module. A test may kill it, if it starts it again."""
    server = make_server(tmp_path_factory.mktemp("etcd") / "data")
    asyncio.run(server.start())
    yield server
    server.kill()


@pytest.fixture
def etcd_prefix() -> str:
    """A key space that no other test uses."""
    return f"test/{uuid.uuid4().hex}/"


@pytest_asyncio.fixture
async def etcd(etcd_server: EtcdServer, etcd_prefix: str) -> AsyncIterator[EtcdClient]:
    """A client straight to the server, in the test's key space."""
    async with EtcdClient([etcd_server.endpoint], prefix=etcd_prefix) as client:
        yield client


async def take(watch: Watch, count: int) -> list[Event]:
    """The next `count` events of a watch."""
    async with asyncio.timeout(CALL_TIMEOUT_S):
        return [await anext(watch) for _ in range(count)]


async def revision_of(client: EtcdClient) -> int:
    """The store's present revision."""
    return (await client.get_prefix("nothing")).revision


def etcd_side(files: Certificates) -> ssl.SSLContext:
    """What etcd shows, and whom it believes: certificates of its own authority."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(files.ca))
    context.load_cert_chain(files.certificate, files.key)
    context.verify_mode = ssl.CERT_REQUIRED
    context.set_alpn_protocols(["h2"])
    return context


async def _dial(endpoint: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if endpoint.startswith(SOCKET):
        return await asyncio.open_unix_connection(endpoint.removeprefix("unix://"))
    host, port = endpoint.rsplit(":", 1)
    return await asyncio.open_connection(host, int(port))


class CuttableProxy:
    """A TCP proxy to one endpoint that can swallow either direction and reset its connections.

    `swallow_replies`: requests arrive and take effect, answers are lost. `swallow_requests`:
    nothing arrives. Both keep connections open, as a network partition does; `reset` breaks them.
    With `tls` the proxy speaks TLS to the client and plain text to the server. `port` 0: any.
    """

    def __init__(self, endpoint: str, *, tls: ssl.SSLContext | None = None, port: int = 0) -> None:
        self._tls, self._port = tls, port
        self._target = endpoint
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._pumps: set[asyncio.Task[None]] = set()
        self.swallow_replies = False
        self.swallow_requests = False
        self.swallowed = 0  # pieces of data

    @property
    def endpoint(self) -> str:
        """host:port to dial instead of the server's."""
        assert self._server is not None
        host, port = self._server.sockets[0].getsockname()
        return f"{host}:{port}"

    def reset(self) -> None:
        """Break every connection and let new ones through whole."""
        self.swallow_replies = self.swallow_requests = False
        for writer in self._writers:
            writer.transport.abort()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(
            self._accept, "127.0.0.1", self._port, ssl=self._tls
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.reset()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            upstream_reader, upstream_writer = await _dial(self._target)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, upstream_writer}
        for pump in (
            self._pump(reader, upstream_writer, "swallow_requests"),
            self._pump(upstream_reader, writer, "swallow_replies"),
        ):
            task = asyncio.create_task(pump)
            self._pumps.add(task)
            task.add_done_callback(self._pumps.discard)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, swallow: str
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                if getattr(self, swallow):
                    self.swallowed += 1
                    continue
                writer.write(data)
                await writer.drain()
        writer.close()
        self._writers.discard(writer)
