"""A real driver process on a real etcd, and the calls of tests to it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

import grpc
from tests.harness import program_start
from tests.harness.processes import cpu_ticks
from tests.harness.waiting import CALL_TIMEOUT_S, eventually

from megascale.v1 import driver_pb2, driver_pb2_grpc, job_pb2, types_pb2
from megascale_common.node.process import child_environment
from megascale_common.service.channel import open_channel
from megascale_common.service.identity.peers import read_or_create_token

# A driver logs this when it takes over from a leader that is gone without waiting for the lease.
KEY_REMOVED = "removing the leader key of a term that has ended"


class DriverProcess:
    """One ``python -m megascale_driver``; several with one ``prefix``: a leader and standbys."""

    def __init__(
        self,
        folder: Path,
        etcd_endpoint: str,
        prefix: str | None = None,
        name: str = "driver",
        *options: str,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = folder
        self.prefix = prefix or f"/test/{uuid.uuid4().hex}/v1"
        self.token_file = folder / "token"
        self.token = read_or_create_token(self.token_file)
        self.address_file = folder / f"{name}.address"
        self.metrics_file = folder / f"{name}.metrics"
        self._log = folder / f"{name}.log"
        self._options = options
        self._environment = dict(environment or {})
        self._etcd = etcd_endpoint
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: grpc.aio.Channel | None = None

    @property
    def pid(self) -> int:
        """Process id of the running driver."""
        assert self._process is not None
        return self._process.pid

    def address(self) -> str:
        """The driver's address, from its address file."""
        return self.address_file.read_text().strip()

    def log(self) -> str:
        """The driver's log."""
        return self._log.read_text()

    async def start(self, *, leads: bool = True) -> None:
        """Start it and wait until it serves and, unless it is to be a standby, leads."""
        self.address_file.unlink(missing_ok=True)
        command = [
            sys.executable, "-m", "megascale_driver", "--cluster", "test", "--etcd", self._etcd,
            "--prefix", self.prefix, "--token-file", str(self.token_file),
            "--address-file", str(self.address_file),
            "--metrics-bind", "127.0.0.1:0", "--metrics-address-file", str(self.metrics_file),
            *self._options,
        ]  # fmt: skip
        with self._log.open("ab") as log:
            # From the main thread, though it blocks: the parent-death signal is sent when the
            # thread that spawned the process ends.
            environment = child_environment(self._environment)
            # Other code can only be executed.
            starts = subprocess.Popen if "PYTHONPATH" in self._environment else program_start.start
            self._process = starts(command, env=environment, stdout=log, stderr=log)
        await eventually(self._serves, "the driver's address", self._starts, story=self.log)
        await self._close_channel()
        self._channel = open_channel(self.address(), self.token)
        if leads:
            await eventually(self.leads, "the driver leads", self._starts, story=self.log)

    def _serves(self) -> bool:
        assert self._process is not None and self._process.poll() is None, self.log()
        return self.address_file.exists()

    def _starts(self) -> tuple[int, int]:
        """What changes while it starts."""
        return self._log.stat().st_size, cpu_ticks([self.pid])

    async def leads(self) -> bool:
        """Whether it reports that it leads."""
        try:
            info = await self.stub.GetClusterInfo(
                driver_pb2.GetClusterInfoRequest(), timeout=CALL_TIMEOUT_S
            )
        except grpc.aio.AioRpcError:
            return False
        return bool(info.leader)

    @property
    def channel(self) -> grpc.aio.Channel:
        """The open channel to the driver."""
        assert self._channel is not None
        return self._channel

    @property
    def stub(self) -> driver_pb2_grpc.DriverServiceAsyncStub:
        """The driver's service."""
        return driver_pb2_grpc.DriverServiceStub(self.channel)

    async def kill(self) -> None:
        """SIGKILL."""
        assert self._process is not None
        self._process.kill()
        await asyncio.to_thread(self._process.wait)

    async def stop(self) -> int:
        """SIGTERM; the exit status."""
        assert self._process is not None
        self._process.terminate()
        return await asyncio.to_thread(self._process.wait, CALL_TIMEOUT_S)

    async def close(self) -> None:
        """Leave no process and no channel."""
        await self._close_channel()
        if self._process is not None and self._process.poll() is None:
            await self.kill()

    async def submit(self, spec: job_pb2.JobSpec, request_id: str = "") -> driver_pb2.Job:
        """Submit a job."""
        request = driver_pb2.SubmitJobRequest(spec=spec, request_id=request_id)
        return (await self.stub.SubmitJob(request, timeout=CALL_TIMEOUT_S)).job

    async def job(self, name: str) -> driver_pb2.Job:
        """A job now."""
        return (
            await self.stub.GetJob(driver_pb2.GetJobRequest(name=name), timeout=CALL_TIMEOUT_S)
        ).job

    async def events(self, subject: str) -> list[types_pb2.Event]:
        """The audit log of a subject."""
        request = driver_pb2.ListEventsRequest(subject=subject, page_size=1000)
        return list((await self.stub.ListEvents(request, timeout=CALL_TIMEOUT_S)).events)

    async def until_job(self, name: str, condition: Callable[[driver_pb2.Job], bool]) -> None:
        """Wait for ``condition``, as long as the job or the driver's log changes."""
        job = await self.job(name)

        async def met() -> bool:
            nonlocal job
            job = await self.job(name)
            return condition(job)

        await eventually(
            met,
            f"job {name}",
            lambda: (job.SerializeToString(deterministic=True), len(self.log())),
            story=lambda: f"{job}\n{self.log()[-6000:]}",
        )

    async def until_nodes(self, count: int) -> None:
        """Wait until ``count`` nodes are alive."""

        async def there() -> bool:
            nodes = (
                await self.stub.ListNodes(driver_pb2.ListNodesRequest(), timeout=CALL_TIMEOUT_S)
            ).nodes
            return sum(node.liveness == types_pb2.NODE_LIVENESS_ALIVE for node in nodes) >= count

        await eventually(there, f"{count} nodes alive", lambda: len(self.log()), story=self.log)

    async def _close_channel(self) -> None:
        if self._channel is not None:
            await self._channel.close()
            self._channel = None


@contextlib.asynccontextmanager
async def running_driver(folder: Path, etcd_endpoint: str) -> AsyncIterator[DriverProcess]:
    """A driver that leads, ended with the block."""
    driver = DriverProcess(folder, etcd_endpoint)
    try:
        await driver.start()
        yield driver
    finally:
        await driver.close()


def small_job(name: str, **changes: object) -> job_pb2.JobSpec:
    """TP2 x PP2 x DP2 over 8 ranks; ``changes`` are set by dotted path with ``__`` for dots."""
    spec = job_pb2.JobSpec(name=name)
    trainer = spec.trainer
    trainer.model.layers, trainer.model.hidden_size, trainer.model.heads = 4, 64, 4
    trainer.model.vocab_size, trainer.model.sequence_length = 257, 64
    trainer.parallelism.tp, trainer.parallelism.pp, trainer.parallelism.dp = 2, 2, 2
    trainer.training.steps, trainer.training.global_batch_size = 20, 8
    trainer.data.sources.add(prefix="/data/corpus")
    for path, value in changes.items():
        *parents, last = path.split("__")
        target: object = spec
        for parent in parents:
            target = getattr(target, parent)
        setattr(target, last, value)
    return spec


def here() -> Path:
    """The repository's root, from which ``tests`` is importable."""
    return Path(os.path.abspath(__file__)).parents[2]
