"""One dashboard process: a client of the cluster, the application, uvicorn on one socket."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from megascale_client import AsyncClient, InvalidRequest
from megascale_client.run_folder import find_run_folder, read_token
from megascale_dashboard.access import Access
from megascale_dashboard.cluster_reader import ClusterReader
from megascale_dashboard.live import LiveStreams
from megascale_dashboard.server import build

RETRY_FOR_S = 2.0  # a page reports that the driver is away sooner than a command would give up
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "::1", "[::1]")
STOP_TIMEOUT_S = 2
REQUEST_TIMEOUT_S = 10.0  # for a browser to send a complete request, or the next one
MAX_WAITING = 128  # connections without a complete request; further ones replace them
MAX_CONNECTIONS = 512  # including those being answered; beyond, "unavailable"


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Cluster, address and certificate of the server.

    ``run_folder`` None: the client's default. ``port`` 0: a free one. ``certificate`` and
    ``key`` are PEM files; without them only loopback is served. ``end_with_stdin``: end when
    standard input ends, as it does with the process that started this one.
    """

    run_folder: Path | None = None
    host: str = "127.0.0.1"
    port: int = 0
    certificate: Path | None = None
    key: Path | None = None
    end_with_stdin: bool = False


async def serve(options: Options, report: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM; ``report`` gets the address, with the link's key.

    Raises:
        ClusterNotFound, NotAllowed: no cluster in the run folder, or not this user's.
        InvalidRequest: the address cannot be served, or would be served without TLS.
    """
    folder = find_run_folder(options.run_folder)
    secure = options.certificate is not None and options.key is not None
    listener = _listen(options, secure)
    access = Access(read_token(folder))
    async with AsyncClient.from_run_folder(folder, retry_for_s=RETRY_FOR_S) as client:
        hosts = [*LOOPBACK_NAMES] if not secure else ["*"]
        app = build(ClusterReader(client), access, LiveStreams(), hosts=hosts, secure=secure)
        config = uvicorn.Config(
            app,
            http=BoundedProtocol,
            log_level="error",  # warnings are about malformed requests of strangers
            access_log=False,  # the first URL has the link's key
            server_header=False,
            timeout_graceful_shutdown=STOP_TIMEOUT_S,
            limit_concurrency=MAX_CONNECTIONS,
            ssl_certfile=options.certificate,
            ssl_keyfile=options.key,
        )
        server = uvicorn.Server(config)
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        report(f"{'https' if secure else 'http'}://{shown}:{port}/?token={access.key}")
        if options.end_with_stdin:
            _end_with_stdin(server)
        await server.serve(sockets=[listener])


class BoundedProtocol(H11Protocol):
    """A connection of a browser that is dropped if its request is not complete in time.

    uvicorn waits without limit for the rest of a head or a body, and counts such connections like
    those that are being answered: a few hundred idle ones would keep everybody else out.
    """

    _waiting_since_s = 0.0
    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a new connection, in the place of an older one where too many wait."""
        # The caller with the most waiting connections loses its oldest: one attacker does not push
        # out the others.
        waiting = [each for each in self.connections if _waits(each)]
        if len(waiting) >= MAX_WAITING:
            [(worst, _)] = Counter(each.address for each in waiting).most_common(1)
            of_worst = (each for each in waiting if each.address == worst)
            min(of_worst, key=lambda each: each._waiting_since_s).give_way()
        super().connection_made(transport)
        self._wait_or_not()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take a part of a request, and begin to answer it once its head is whole."""
        super().data_received(data)
        self._wait_or_not()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        self._wait_or_not()

    @property
    def address(self) -> str:
        """The address of the browser, without its port."""
        return self.client[0] if self.client else ""

    def give_way(self) -> None:
        """Drop the connection without an answer."""
        self._stop_waiting()
        self.transport.abort()

    def _wait_or_not(self) -> None:
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete and not cycle.more_body:
            self._stop_waiting()
        elif self._late is None and not self.transport.is_closing():
            self._waiting_since_s = self.loop.time()
            self._late = self.loop.call_later(REQUEST_TIMEOUT_S, self.give_way)

    def _stop_waiting(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


def _waits(connection: object) -> TypeGuard[BoundedProtocol]:
    return isinstance(connection, BoundedProtocol) and connection._late is not None


def _listen(options: Options, secure: bool) -> socket.socket:
    try:
        loopback = ipaddress.ip_address(options.host).is_loopback
    except ValueError:
        raise InvalidRequest(
            f"--host: {options.host!r} is not an IP address; give one, such as 127.0.0.1"
        ) from None
    if not loopback and not secure:
        raise InvalidRequest(
            f"--host: {options.host} is reached from other machines: give --certificate and --key, "
            "or keep 127.0.0.1 and forward the port with ssh -L"
        )
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((options.host, options.port))
    except OSError as error:
        listener.close()
        raise InvalidRequest(
            f"--port: {options.host}:{options.port}: {error.strerror}; "
            "give another, or 0 for a free one"
        ) from None
    listener.listen(128)
    return listener


def _end_with_stdin(server: uvicorn.Server) -> None:
    """End the server once standard input ends: it has no writer, so it is readable only then."""
    loop, descriptor = asyncio.get_running_loop(), sys.stdin.fileno()

    def ended() -> None:
        if not os.read(descriptor, 1):
            loop.remove_reader(descriptor)
            server.should_exit = True

    loop.add_reader(descriptor, ended)
