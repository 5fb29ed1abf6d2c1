"""Measures the cost of heartbeats for a driver: CPU, acknowledgement times, memory.

A real driver on a real etcd, one job on all nodes, and nodes with real gRPC streams, each on a TCP
connection of its own, in helper processes (`heartbeat_nodes.py`). The echo answers the same
messages of the same nodes (:class:`Echo`). CPU is that of the process and its children, from
/proc; the share is CPU seconds per wall second, the median of the windows. With --reconnect the
driver is killed and started again, and the time until it sees every node counts. The longest stall
is the longest time within a window for which the driver's event loop stood still, by its own
measurement; the stalls while nodes join and the job starts are shown as well.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import uvloop

from megascale.v1 import driver_pb2, driver_pb2_grpc, job_pb2, link_pb2, link_pb2_grpc, types_pb2
from megascale_common.etcd.errors import EtcdError
from megascale_common.etcd.server import EtcdServer
from megascale_common.node.process import arm_parent_death, child_environment, stat_fields
from megascale_common.service.channel import open_channel
from megascale_common.service.identity.peers import read_or_create_token
from megascale_common.service.server import RpcServer
from megascale_common.service.start import read_token, write_address
from megascale_driver.shell.loop import THRESHOLDS, freeze_all

RANKS = 8
JOB = "bench"
START_S = 30.0  # for a server to listen
FULL_S = 300.0  # for all nodes to be linked, or to run
POLL_S_PER_NODE = 4e-5  # half a second at 12,500
MAX_RATIO = 1.4
MAX_P99_MS = 10.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_HERE = Path(__file__).resolve().parent


class Failed(Exception):
    """A measurement that could not be made."""


class Helpers:
    """The processes that hold the nodes."""

    def __init__(self, processes: list[asyncio.subprocess.Process]) -> None:
        self._processes = processes

    async def ask(self, **order: Any) -> list[dict[str, Any]]:
        """The answers of all to one order."""
        return list(await asyncio.gather(*(self._ask(each, order) for each in self._processes)))

    async def _ask(self, each: asyncio.subprocess.Process, order: Any) -> dict[str, Any]:
        assert each.stdin is not None and each.stdout is not None
        each.stdin.write(json.dumps(order).encode() + b"\n")
        line = await each.stdout.readline()
        if not line:
            raise Failed("a helper process has ended")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextlib.asynccontextmanager
async def helpers(options: argparse.Namespace, **common: Any) -> AsyncIterator[Helpers]:
    """Start the nodes in ``options.helpers`` processes."""
    processes = []
    try:
        for index in range(options.helpers):
            first = options.nodes * index // options.helpers
            count = options.nodes * (index + 1) // options.helpers - first
            process = await asyncio.create_subprocess_exec(
                sys.executable, str(_HERE / "heartbeat_nodes.py"), env=child_environment(),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, limit=1 << 28,
            )  # fmt: skip
            processes.append(process)
            assert process.stdin is not None
            start = {"first": first, "count": count, "nodes": options.nodes, "ranks": RANKS,
                     "interval_s": options.interval, **common}  # fmt: skip
            process.stdin.write(json.dumps(start).encode() + b"\n")
        yield Helpers(processes)
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


class Server:
    """A driver or the echo, as a process that writes its address to a file."""

    def __init__(
        self, command: Sequence[str], address_file: Path, log: Path, metrics: Path | None = None
    ) -> None:
        self._command, self.address_file, self._log = command, address_file, log
        self._metrics = metrics
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        """Start it and wait until it serves."""
        self.address_file.unlink(missing_ok=True)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: ASYNC220 - the parent-death signal needs it
                self._command, env=child_environment(), stdout=log, stderr=log
            )
        async with asyncio.timeout(START_S):
            while not self.address_file.exists():
                if self._process.poll() is not None:
                    tail = self._log.read_text()[-2000:]
                    raise Failed(f"{' '.join(self._command[1:3])} has ended:\n{tail}")
                await asyncio.sleep(0.02)

    def address(self) -> str:
        """Its address."""
        return self.address_file.read_text().strip()

    def kill(self) -> None:
        """End it at once."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def cpu_s(self) -> float:
        """CPU seconds of the process and its children so far."""
        assert self._process is not None
        pids = [self._process.pid, *_children(self._process.pid)]
        fields = [stat_fields(pid) for pid in pids]
        return sum(int(each[11]) + int(each[12]) for each in fields if each) / _TICKS_PER_S

    def rss_mib(self) -> float:
        """Resident memory of the process."""
        assert self._process is not None
        text = Path(f"/proc/{self._process.pid}/status").read_text()
        line = next(line for line in text.splitlines() if line.startswith("VmRSS:"))
        return int(line.split()[1]) / 1024

    async def longest_stall_ms(self) -> float:
        """The longest stall of the driver's event loop within the last minute; 0 of an echo."""
        if self._metrics is None:
            return 0.0
        address = self._metrics.read_text().strip()

        def page() -> str:
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=10.0) as answer:
                return str(answer.read(), "utf-8")

        name = "megascale_event_loop_longest_stall_seconds "
        lines = (await asyncio.to_thread(page)).splitlines()
        return 1e3 * next(float(line[len(name) :]) for line in lines if line.startswith(name))


def _children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            found += [int(child) for child in (task / "children").read_text().split()]
    return found


async def measure(server: Server, nodes: Helpers, options: argparse.Namespace) -> dict[str, float]:
    """Medians over the windows: CPU share of the server, p50 and p99 from send to answer."""
    await asyncio.sleep(options.warmup)
    await nodes.ask(latencies=True)
    shares, middles, tails, counts, stalls = [], [], [], [], []
    for _ in range(options.windows):
        cpu_s, since_s = server.cpu_s(), time.monotonic()
        await asyncio.sleep(options.window)
        share = (server.cpu_s() - cpu_s) / (time.monotonic() - since_s)
        answers = await nodes.ask(latencies=True)
        took_s = sorted(value for answer in answers for value in answer["latencies_s"])
        if not took_s:
            raise Failed("no heartbeat was acknowledged")
        shares.append(share)
        middles.append(1e3 * took_s[len(took_s) // 2])
        tails.append(1e3 * took_s[min(len(took_s) - 1, int(0.99 * len(took_s)))])
        counts.append(len(took_s) / options.window)
        stalls.append(await server.longest_stall_ms())
        _say(f"  share {share:.3f}, p50 {middles[-1]:.2f} ms, p99 {tails[-1]:.2f} ms, "
             f"{counts[-1]:.0f} heartbeats/s, longest stall {stalls[-1]:.1f} ms")  # fmt: skip
    return {
        "share": statistics.median(shares),
        "p50_ms": statistics.median(middles),
        "p99_ms": statistics.median(tails),
        "stall_ms": max(stalls),
        "rss_mib": server.rss_mib(),
    }


async def until_greeted(nodes: Helpers, count: int) -> None:
    """Wait until all nodes are linked."""
    async with asyncio.timeout(FULL_S):
        while sum(answer["greeted"] for answer in await nodes.ask()) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.25)


async def measure_echo(options: argparse.Namespace, folder: Path, token: Path) -> dict[str, float]:
    """The echo's figures."""
    address_file = folder / "echo.address"
    command = [sys.executable, str(Path(__file__)), "--echo", str(token), str(address_file)]
    server = Server(command, address_file, folder / "echo.log")
    try:
        await server.start()
        common = {"token": token.read_text().strip(), "address_file": str(address_file)}
        async with helpers(options, running=True, **common) as nodes:
            since_s = time.monotonic()
            await until_greeted(nodes, options.nodes)
            _say(f"  all {options.nodes} nodes greeted after {time.monotonic() - since_s:.1f} s")
            return await measure(server, nodes, options)
    finally:
        server.kill()


async def measure_driver(
    options: argparse.Namespace, folder: Path, token: Path
) -> dict[str, float]:
    """The driver's figures, with a job on all nodes."""
    address_file = folder / "driver.address"
    async with EtcdServer(folder / "etcd", unsafe_no_fsync=True) as etcd:
        command = [
            sys.executable, "-m", "megascale_driver", "--cluster", "bench",
            "--etcd", etcd.endpoint, "--token-file", str(token),
            "--address-file", str(address_file),
            "--heartbeat-interval-s", str(options.interval),
            "--metrics-bind", "127.0.0.1:0", "--metrics-address-file", str(folder / "metrics"),
        ]  # fmt: skip
        server = Server(command, address_file, folder / "driver.log", folder / "metrics")
        try:
            await server.start()
            common = {"token": token.read_text().strip(), "address_file": str(address_file)}
            async with helpers(options, running=False, **common) as nodes:
                return await _measure_driver(server, nodes, options, common["token"])
        finally:
            server.kill()


@contextlib.asynccontextmanager
async def _phase(what: str, server: Server) -> AsyncIterator[None]:
    """Report how long the driver took for this, and what it cost it."""
    since_s, cpu_s = time.monotonic(), server.cpu_s()
    yield
    took_s, cpu_s = time.monotonic() - since_s, server.cpu_s() - cpu_s
    stall_ms = await server.longest_stall_ms()
    _say(
        f"  {what} after {took_s:.1f} s, with {cpu_s:.1f} s of CPU; longest stall {stall_ms:.0f} ms"
    )


async def _measure_driver(
    server: Server, nodes: Helpers, options: argparse.Namespace, token: str
) -> dict[str, float]:
    async with _phase(f"all {options.nodes} nodes are alive", server):
        await _until_alive(server, options.nodes, token)
    async with _phase("the job runs on all of them", server):
        await _run_job(server, options.nodes, token)
    found = await measure(server, nodes, options)
    if options.reconnect:
        server.kill()
        await server.start()
        since_s = time.monotonic()
        async with _phase("a new driver sees all nodes", server):
            await _until_alive(server, options.nodes, token)
        found["reconnect_s"] = time.monotonic() - since_s
        answers = await nodes.ask()
        # Since the first start: which of the two took longer does not matter.
        found["hello_max_s"] = max(answer["hello_max_s"] for answer in answers)
        found["gave_up"] = sum(answer["gave_up"] for answer in answers)
        found["rss_mib"] = max(found["rss_mib"], server.rss_mib())
    return found


async def _until_alive(server: Server, count: int, token: str) -> None:
    async with open_channel(server.address(), token) as channel:
        stub = driver_pb2_grpc.DriverServiceStub(channel)
        alive, last_s = 0, time.monotonic() + FULL_S
        while alive < count:
            if time.monotonic() > last_s:
                raise Failed(f"only {alive} of {count} nodes are alive after {FULL_S:g} s")
            with contextlib.suppress(Exception):
                request = driver_pb2.GetClusterInfoRequest()
                alive = (await stub.GetClusterInfo(request, timeout=10.0)).nodes_alive
            # Each question goes through all nodes: asked too often it would be a load of its own.
            await asyncio.sleep(max(0.1, count * POLL_S_PER_NODE))


async def _run_job(server: Server, nodes: int, token: str) -> None:
    spec = job_pb2.JobSpec(name=JOB)
    trainer = spec.trainer
    trainer.model.layers, trainer.model.hidden_size, trainer.model.heads = 8, 128, RANKS
    trainer.model.vocab_size, trainer.model.sequence_length = 1024, 64
    trainer.parallelism.tp, trainer.parallelism.pp, trainer.parallelism.dp = RANKS, 1, nodes
    trainer.training.steps, trainer.training.global_batch_size = 1_000_000, nodes
    trainer.data.sources.add(prefix="/data/corpus")
    async with asyncio.timeout(FULL_S), open_channel(server.address(), token) as channel:
        stub = driver_pb2_grpc.DriverServiceStub(channel)
        await stub.SubmitJob(driver_pb2.SubmitJobRequest(spec=spec), timeout=30.0)
        while True:
            job = (await stub.GetJob(driver_pb2.GetJobRequest(name=JOB), timeout=30.0)).job
            if job.phase == types_pb2.JOB_PHASE_RUNNING:
                return
            await asyncio.sleep(0.25)


async def run(options: argparse.Namespace) -> int:
    """Measure; prints the figures and returns the exit status."""
    with tempfile.TemporaryDirectory(prefix="heartbeats-") as path:
        folder = Path(path)
        token = folder / "token"
        read_or_create_token(token)
        _say(f"the echo, {options.nodes} nodes every {options.interval:g} s:")
        echo = await measure_echo(options, folder, token)
        _say("the driver:")
        driver = await measure_driver(options, folder, token)
    figures: dict[str, Any] = {
        "nodes": options.nodes,
        "interval_s": options.interval,
        "core_share": round(driver["share"], 4),
        "echo_share": round(echo["share"], 4),
        "p99_ms": round(driver["p99_ms"], 2),
        "rss_mib": round(driver["rss_mib"], 1),
        "longest_stall_ms": round(driver["stall_ms"], 1),
    }
    for name, value in (("echo_p99_ms", echo["p99_ms"]), ("p50_ms", driver["p50_ms"])):
        _say(f"  {name}: {value:.2f}")
    holds = figures["core_share"] <= MAX_RATIO * figures["echo_share"]
    holds = holds and figures["p99_ms"] < options.max_p99_ms
    if "reconnect_s" in driver:
        figures["reconnect_s"] = round(driver["reconnect_s"], 1)
        figures["hello_max_s"] = round(driver["hello_max_s"], 3)
        figures["gave_up"] = driver["gave_up"]  # nodes that dialled anew: a herd
        holds = holds and figures["reconnect_s"] < options.max_reconnect_s
        holds = holds and not figures["gave_up"]
    print(json.dumps(figures), flush=True)
    return 0 if holds else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=1536)
    parser.add_argument("--interval", type=float, default=1.0, metavar="S", help="of heartbeats")
    parser.add_argument("--window", type=float, default=60.0, metavar="S", help="of a measurement")
    parser.add_argument("--windows", type=int, default=3, help="of which the median counts")
    parser.add_argument("--warmup", type=float, default=15.0, metavar="S")
    parser.add_argument("--helpers", type=int, default=2, help="processes that hold the nodes")
    parser.add_argument("--reconnect", action="store_true", help="also kill the driver once")
    parser.add_argument("--max-p99-ms", type=float, default=MAX_P99_MS)
    parser.add_argument("--max-reconnect-s", type=float, default=30.0)
    options = parser.parse_args(arguments)
    if min(options.nodes, options.interval, options.window, options.windows, options.helpers) <= 0:
        parser.error("give positive numbers")
    options.helpers = min(options.helpers, options.nodes)
    # Of this process and of all that it starts: a descriptor per node.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    try:
        return asyncio.run(run(options))
    except (Failed, TimeoutError) as error:
        print(f"heartbeats.py: {str(error) or 'it took too long'}", file=sys.stderr)
        return 2
    except (OSError, EtcdError) as error:
        print(f"heartbeats.py: {error}", file=sys.stderr)
        return 2


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Echo(link_pb2_grpc.ExecutorLinkServiceServicer):
    """Answers a hello with a hello, a heartbeat with its acknowledgement."""

    async def Connect(
        self, request_iterator: AsyncIterator[link_pb2.ConnectRequest], context: Any
    ) -> AsyncIterator[link_pb2.ConnectResponse]:
        """One node's stream."""
        async for request in request_iterator:
            if request.HasField("heartbeat"):
                ack = link_pb2.HeartbeatAck(seq=request.heartbeat.seq)
                yield link_pb2.ConnectResponse(heartbeat_ack=ack)
            else:
                yield link_pb2.ConnectResponse(hello=link_pb2.DriverHello(cluster="echo"))

    async def ReportSteps(self, request_iterator: Any, context: Any) -> Any:
        """Nothing reports steps to an echo."""
        raise NotImplementedError


async def _serve_echo(token_file: Path, address_file: Path) -> None:
    server = RpcServer(read_token(token_file))
    link_pb2_grpc.add_ExecutorLinkServiceServicer_to_server(Echo(), server.server)
    address = await server.start("127.0.0.1:0", ["megascale.v1.ExecutorLinkService"])
    freeze_all()
    gc.set_threshold(*THRESHOLDS)
    write_address("--address-file", address_file, address)
    await asyncio.Event().wait()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--echo"]:
        arm_parent_death()
        uvloop.run(_serve_echo(Path(sys.argv[2]), Path(sys.argv[3])))
    sys.exit(main())
