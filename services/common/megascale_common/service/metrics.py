"""Metrics of a service for Prometheus: a registry, and a small HTTP server for ``GET /metrics``.

Scrapes are answered on the service's event loop, so a collector can read the service's state
without locks. Names follow Prometheus: base units (seconds, bytes, ratio), ``_total`` on counters,
never a step or a rank as a label. The page needs no token, because scrapers send none: it shows
only names and numbers, and is bound to loopback unless the operator binds it elsewhere. A client
that requests it endlessly takes a bounded share of the loop's time and a few connections.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from prometheus_client import CollectorRegistry, Info, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from megascale_common.node.addresses import joined, split
from megascale_common.service import logs
from megascale_common.service.start import build_version, require_bindable, write_address

PATH = "/metrics"
MAX_REQUEST_BYTES = 8192
MAX_CONNECTIONS = 16
REQUEST_TIMEOUT_S = 5.0
# A page is reused for this many times the time that it took to make, so that scrapes take at most a
# tenth of the loop's time.
GIVEN_AGAIN = 9.0

_log = logs.get(__name__)


def registry_of(service: str, *collectors: Collector) -> CollectorRegistry:
    """A registry with the process's own figures, the build, and ``collectors``."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    Info("megascale_build", "Which build of which service this is.", registry=registry).info(
        {"service": service, "build": build_version()}
    )
    for collector in collectors:
        registry.register(collector)
    return registry


def bind_option(text: str) -> str:
    """argparse's type of ``--metrics-bind``: HOST:PORT, or "" for no metrics."""
    if not text:
        return ""
    try:
        return joined(*split(text))
    except ValueError:
        message = f"{text!r} is not HOST:PORT, such as 127.0.0.1:0"
        raise argparse.ArgumentTypeError(message) from None


class MetricsServer:
    """Serves one registry. Use: ``await start(bind)``, ``await stop()``."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._server: asyncio.Server | None = None
        self._open: dict[asyncio.StreamWriter, None] = {}  # the oldest first
        self._pages: dict[str, tuple[bytes, float]] = {}  # by content type: page, valid until

    async def start(self, bind: str, address_file: Path | None = None) -> str:
        """Listen on ``bind`` ("host:port", port 0 picks one); returns the address with its port.

        ``address_file`` gets the same address.

        Raises:
            OptionError: the address is taken or not of this host, or the file cannot be written.
        """
        require_bindable("--metrics-bind", bind)
        host, port = split(bind)
        self._server = await asyncio.start_server(
            self._serve,
            host,
            port,
            limit=MAX_REQUEST_BYTES,
            backlog=MAX_CONNECTIONS,
        )
        address = joined(host, self._server.sockets[0].getsockname()[1])
        if address_file is not None:
            write_address("--metrics-address-file", address_file, address)
        _log.info("metrics are served", url=f"http://{address}{PATH}")
        return address

    async def stop(self) -> None:
        """Close the port and every connection."""
        if self._server is not None:
            self._server.close()
            for writer in list(self._open):
                writer.close()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request; slow peers and long requests are cut off."""
        self._open[writer] = None
        if len(self._open) > MAX_CONNECTIONS:  # end the oldest, as a scraper takes milliseconds
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.transport.abort()
        try:
            with contextlib.suppress(TimeoutError, ConnectionError, asyncio.IncompleteReadError):
                async with asyncio.timeout(REQUEST_TIMEOUT_S):
                    writer.write(await self._answer(reader))
                    await writer.drain()
        finally:
            self._open.pop(writer, None)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader) -> bytes:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        except asyncio.LimitOverrunError:
            return _response(
                "431 Request Header Fields Too Large", b"the request's head is too long\n"
            )
        first, *lines = head.split("\r\n")
        method, _, rest = first.partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        if method != "GET":
            return _response("405 Method Not Allowed", b"only GET is served\n")
        if path != PATH:
            return _response("404 Not Found", f"only {PATH} is served\n".encode())
        headers = {
            name.lower(): value.strip()
            for name, _, value in (line.partition(":") for line in lines)
        }
        encode, content_type = choose_encoder(headers.get("accept", ""))
        try:
            body = self._page(encode, content_type)
        except Exception:
            # A collector that fails must not end the service's loop; the log has its traceback.
            _log.exception("metrics cannot be collected")
            return _response("500 Internal Server Error", b"see the service's log\n")
        return _response("200 OK", body, content_type)

    def _page(self, encode: Callable[[CollectorRegistry], bytes], content_type: str) -> bytes:
        began_s = time.monotonic()
        body, counts_until_s = self._pages.get(content_type, (b"", 0.0))
        if began_s >= counts_until_s:
            body = encode(self._registry)
            now_s = time.monotonic()
            self._pages[content_type] = (body, now_s + GIVEN_AGAIN * (now_s - began_s))
        return body


def _response(status: str, body: bytes, content_type: str = "text/plain; charset=utf-8") -> bytes:
    lines = (
        f"HTTP/1.1 {status}",
        f"Content-Type: {content_type}",
        f"Content-Length: {len(body)}",
        "Connection: close",
    )
    return "\r\n".join((*lines, "", "")).encode() + body
