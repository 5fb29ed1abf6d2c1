"""The HTTP side of metrics: what it answers, what it refuses, and that nobody can hold it up."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from tests.harness.waiting import CALL_TIMEOUT_S

from megascale_common.service import metrics
from megascale_common.service.errors import OptionError
from megascale_common.service.metrics import MetricsServer, bind_option, registry_of


class Answer(Collector):
    """One gauge, which can be made to fail, or to take long."""

    def __init__(self) -> None:
        self.fails, self.takes_s, self.collected = False, 0.0, 0

    def collect(self) -> Iterator[Metric]:
        self.collected += 1
        time.sleep(self.takes_s)
        if self.fails:
            raise RuntimeError("no figure")
        yield GaugeMetricFamily("megascale_answer", "Of everything.", value=42.0)


ANSWER = Answer()


@pytest_asyncio.fixture
async def address(tmp_path: Path) -> AsyncIterator[tuple[str, int]]:
    """A server of one gauge, found through its address file."""
    ANSWER.fails = False
    server = MetricsServer(registry_of("test", ANSWER))
    served = await server.start("127.0.0.1:0", tmp_path / "address")
    assert (tmp_path / "address").read_text() == served + "\n"
    host, _, port = served.rpartition(":")
    yield host, int(port)
    await server.stop()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(host, int(port))


async def ask(address: tuple[str, int], request: bytes) -> tuple[bytes, bytes]:
    """Status line and body."""
    reader, writer = await asyncio.open_connection(*address)
    writer.write(request)
    async with asyncio.timeout(CALL_TIMEOUT_S):
        answer = await reader.read()
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return head.partition(b"\r\n")[0], body


async def test_a_scrape_parses_and_names_the_build(address: tuple[str, int]) -> None:
    status, body = await ask(address, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    assert status == b"HTTP/1.1 200 OK"
    samples = {
        s.name: s
        for family in text_string_to_metric_families(body.decode())
        for s in family.samples
    }
    assert samples["megascale_answer"].value == 42.0
    assert samples["megascale_build_info"].labels["service"] == "test"
    assert samples["process_resident_memory_bytes"].value > 1 << 20


async def test_openmetrics_is_spoken_when_asked_for(address: tuple[str, int]) -> None:
    request = (
        b"GET /metrics HTTP/1.1\r\nAccept: application/openmetrics-text; version=1.0.0\r\n\r\n"
    )
    assert (await ask(address, request))[1].endswith(b"# EOF\n")


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"POST /metrics HTTP/1.1\r\n\r\n", b"405"),
        (b"GET / HTTP/1.1\r\n\r\n", b"404"),
        (b"\x16\x03\x01 nonsense\r\n\r\n", b"405"),
        (b"GET /metrics HTTP/1.1\r\nX: " + b"a" * 10_000 + b"\r\n\r\n", b"431"),
    ],
)
async def test_other_requests_are_refused(
    address: tuple[str, int], request_bytes: bytes, status: bytes
) -> None:
    assert (await ask(address, request_bytes))[0].split()[1] == status


async def test_a_figure_that_cannot_be_had_is_an_error_of_this_scrape_only(
    address: tuple[str, int],
) -> None:
    ANSWER.fails = True
    assert (await ask(address, b"GET /metrics HTTP/1.1\r\n\r\n"))[0].split()[1] == b"500"
    ANSWER.fails = False
    assert (await ask(address, b"GET /metrics HTTP/1.1\r\n\r\n"))[0].split()[1] == b"200"


async def test_a_silent_peer_is_cut_off(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "REQUEST_TIMEOUT_S", 0.2)
    reader, writer = await asyncio.open_connection(*address)
    async with asyncio.timeout(CALL_TIMEOUT_S):
        assert await reader.read() == b""
    writer.close()


async def test_silent_peers_keep_no_scraper_out(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "REQUEST_TIMEOUT_S", CALL_TIMEOUT_S)
    silent = [await asyncio.open_connection(*address) for _ in range(4 * metrics.MAX_CONNECTIONS)]
    assert (await ask(address, b"GET /metrics HTTP/1.1\r\n\r\n"))[0].split()[1] == b"200"
    async with asyncio.timeout(CALL_TIMEOUT_S):
        with suppress(ConnectionResetError):
            assert await silent[0][0].read() == b"", "the oldest gave way"
    for _, writer in silent:
        writer.close()


async def test_scrapes_without_end_take_a_share_of_the_time(address: tuple[str, int]) -> None:
    ANSWER.takes_s, ANSWER.collected = 0.05, 0
    began_s = time.monotonic()
    try:
        for _ in range(40):
            status, _ = await ask(address, b"GET /metrics HTTP/1.1\r\n\r\n")
            assert status.split()[1] == b"200"
    finally:
        ANSWER.takes_s = 0.0
    most = 1 + (time.monotonic() - began_s) / (0.05 * (1 + metrics.GIVEN_AGAIN))
    assert 1 <= ANSWER.collected <= most + 1


@pytest.mark.parametrize("text", ["9090", "host:", ":9090", "host:port", "host:70000"])
def test_a_bad_address_is_refused_by_the_option(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not HOST:PORT"):
        bind_option(text)
    assert bind_option("") == "" and bind_option("[::1]:0") == "[::1]:0"


async def test_a_taken_port_is_an_error() -> None:
    first, second = MetricsServer(CollectorRegistry()), MetricsServer(CollectorRegistry())
    address = await first.start("127.0.0.1:0")
    with pytest.raises(OptionError, match=r"--metrics-bind.*the port is in use"):
        await second.start(address)
    await first.stop()
    await second.stop()
