"""Random and broken requests to real servers: no crash, no traceback, no leak, and clear errors.

The short form runs with all tests; `make test-slow` sends a hundred times as many. A failure names
the number from which its request is made again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from google.protobuf.descriptor import FileDescriptor, MethodDescriptor
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tests.harness import fuzzing
from tests.harness.agent_process import TOKEN as AGENT_TOKEN
from tests.harness.agent_process import start_agent
from tests.harness.bad_jobs import good_job
from tests.harness.checkpoint_node import TOKEN as DAEMON_TOKEN
from tests.harness.checkpoint_node import DaemonProcess
from tests.harness.driver import DriverProcess
from tests.harness.etcd import etcd_server
from tests.harness.fuzzing import Held, Maker
from tests.harness.waiting import until

from megascale.v1 import checkpoint_pb2, driver_pb2, executor_pb2, link_pb2, types_pb2
from megascale_client import parse_job
from megascale_common.etcd.server import EtcdServer

__all__ = ["etcd_server"]  # a fixture
COUNTS = [pytest.param(60, id="short"), pytest.param(6000, id="long", marks=pytest.mark.slow)]
MOST_GROWTH_BYTES = 96 << 20
MOST_MORE_DESCRIPTORS, MOST_MORE_THREADS = 16, 24
TRACES = ("Traceback (most recent call last)", "a call failed", "Task exception was never")


@dataclass(frozen=True, slots=True)
class Served:
    """A real server: where it is, what it serves, its process, and its log."""

    address: str
    token: str
    files: tuple[FileDescriptor, ...]
    pid: int
    log: Callable[[], str]
    maker: Maker
    left_out: tuple[str, ...] = ()

    def methods(self) -> list[MethodDescriptor]:
        return [
            method
            for file in self.files
            for service in file.services_by_name.values()
            for method in service.methods
            if method.name not in self.left_out
        ]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where paths of requests lie."""
    return tmp_path_factory.mktemp("paths")


@pytest.fixture
def driver(etcd_server: EtcdServer, tmp_path: Path, paths: Path) -> Iterator[Served]:
    import asyncio

    process = DriverProcess(tmp_path, etcd_server.endpoint)

    async def start() -> None:
        await process.start()
        await process._close_channel()

    asyncio.run(start())
    spec = parse_job(good_job("fuzzed", paths / "corpus"))
    hello = link_pb2.ExecutorHello(
        protocol=link_pb2.ProtocolRange(lowest=1, highest=2), node="n1", incarnation="i",
        devices=[types_pb2.Device(kind=types_pb2.DEVICE_KIND_CPU)],
    )  # fmt: skip
    samples = [
        driver_pb2.SubmitJobRequest(spec=spec), driver_pb2.UpdateJobRequest(spec=spec),
        link_pb2.ConnectRequest(hello=hello),
        link_pb2.ConnectRequest(heartbeat=link_pb2.Heartbeat(seq=1)),
        driver_pb2.SetQuotaRequest(tenant="t", devices=1, reason="r"),
    ]  # fmt: skip
    files = (driver_pb2.DESCRIPTOR, link_pb2.DESCRIPTOR)
    yield Served(
        process.address(), process.token, files, process.pid, process.log, _maker(paths, samples)
    )
    asyncio.run(process.close())


@pytest.fixture
def agent(tmp_path: Path, paths: Path) -> Iterator[Served]:
    process = start_agent(tmp_path)
    address = process.node_folder / "executor.address"
    until(address.exists, "the agent's address", story=process.log)
    checks = executor_pb2.RunNodeDiagnosticsRequest(checks=["clock"])
    # A group check without a name waits for ranks that never come, for a minute.
    yield Served(
        address.read_text().strip(), AGENT_TOKEN, (executor_pb2.DESCRIPTOR,), process.process.pid,
        process.log, _maker(paths, [checks]), left_out=("CheckGroup",),
    )  # fmt: skip
    process.end()


@pytest.fixture
def daemon(tmp_path: Path, paths: Path) -> Iterator[Served]:
    with DaemonProcess(tmp_path, "n1") as process:
        opened = checkpoint_pb2.OpenAttemptRequest(
            job="fuzzed", uri=str(paths / "checkpoints"), attempt=1, world_size=1
        )
        prepared = checkpoint_pb2.ReportPreparedRequest(job="fuzzed", attempt=1, step=1)
        yield Served(
            process.address, DAEMON_TOKEN, (checkpoint_pb2.DESCRIPTOR,), process.process.pid,
            process.log.read_text, _maker(paths, [opened, prepared]),
        )  # fmt: skip


def _maker(paths: Path, samples: Sequence[object]) -> Maker:
    found: dict[str, list[object]] = {}
    for sample in samples:
        found.setdefault(sample.DESCRIPTOR.full_name, []).append(sample)  # type: ignore[attr-defined]
    return Maker(paths, found)  # type: ignore[arg-type]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("which", ["driver", "agent", "daemon"])
def test_no_request_breaks_a_server(which: str, count: int, request: pytest.FixtureRequest) -> None:
    served: Served = request.getfixturevalue(which)
    methods, token = served.methods(), served.token
    with grpc.insecure_channel(served.address) as channel:

        def send(number: int) -> None:
            chance = random.Random(number)
            method = chance.choice(methods)
            sent = [served.maker.request(method, chance) for _ in range(chance.randint(1, 3))]
            wrong = fuzzing.call(channel, method, sent, token)
            assert not wrong, f"{method.full_name}, number {number}: {wrong}"

        for number in range(20):  # what is made at the first calls is no leak
            send(number)
        before = Held.of(served.pid)
        settled = settings(
            max_examples=count, database=None, phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        settled(given(st.integers(0, 2**32))(send))()
    _is_well(served, before)


def _is_well(served: Served, before: Held) -> None:
    """The server still answers, holds no more than before, and has logged no defect."""

    def no_more() -> bool:
        after = Held.of(served.pid)
        return (
            after.descriptors <= before.descriptors + MOST_MORE_DESCRIPTORS
            and after.threads <= before.threads + MOST_MORE_THREADS
        )

    until(no_more, "descriptors and threads of before", story=lambda: str(Held.of(served.pid)))
    growth = Held.of(served.pid).memory_bytes - before.memory_bytes
    assert growth < MOST_GROWTH_BYTES, f"{growth >> 20} MiB more"
    log = served.log()
    found = next((line for line in log.splitlines() if any(text in line for text in TRACES)), "")
    assert not found, found[:2000]
