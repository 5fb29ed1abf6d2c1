"""Diagnostics of the node's network ports: RDMA loopback and port to port, TCP between interfaces.

RDMA is measured with perftest's ib_write_bw if that and /dev/infiniband are present. Between
addresses of one host the kernel moves TCP data through memory. So `interface_pairs` shows that each
interface has a usable address and accepts connections, but not the rate of a cable.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import re
import shutil
import socket
import struct
import time
from collections.abc import Sequence
from pathlib import Path

from megascale_common.node.process import armed_command, child_environment
from megascale_executor.counters.network import ports
from megascale_executor.counters.reading import folders
from megascale_executor.diagnostics.diagnostic import Diagnostic, NodeView
from megascale_executor.diagnostics.finding import Finding
from megascale_job.visible import counted

TCP_BYTES, TCP_TIMEOUT_S = 64 << 20, 5.0
MAX_PAIRS = 56  # of 8 ports, in both directions
PERFTEST = "ib_write_bw"
PERFTEST_BYTES, PERFTEST_S, PERFTEST_TIMEOUT_S = 8 << 20, 1, 8.0
_SIOCGIFADDR = 0x8915
# The row that ib_write_bw prints: bytes, iterations, peak, average in Gb/s (with --report_gbits).
_ROW = re.compile(r"^\s*\d+\s+\d+\s+[\d.]+\s+([\d.]+)\s+[\d.]+\s*$", re.MULTILINE)


class RdmaPairs(Diagnostic):
    """Gb/s of every RDMA port to itself (loopback) and to every other of the node."""

    name = "rdma_pairs"
    before_attempts = False
    quick = False
    stage = 2
    timeout_s = 60.0

    async def run(self, node: NodeView) -> Sequence[Finding]:
        """One finding per ordered pair of RDMA devices; as many as the time allows."""
        devices = [path.name for path in folders(Path("/sys/class/infiniband"))]
        missing = ""
        if not devices or not Path("/dev/infiniband").exists():
            missing = "the node shows no RDMA device"
        elif shutil.which(PERFTEST) is None:
            missing = f"{PERFTEST} is not installed: install perftest"
        if missing:
            return [Finding(self.name, "node", "SKIPPED", missing)]
        pairs = [(a, b) for a in devices for b in devices][:MAX_PAIRS]
        end_s = time.monotonic() + self.timeout_s - PERFTEST_TIMEOUT_S
        found: list[Finding] = []
        for pair in pairs:
            if time.monotonic() > end_s:
                detail = (
                    f"{counted(len(pairs) - len(found), 'pair')}: the time of this test is over"
                )
                found.append(Finding(self.name, "node", "SKIPPED", detail))
                break
            found.append(await self._pair(*pair))
        return found

    async def _pair(self, server: str, client: str) -> Finding:
        target, begin = f"{client}>{server}", time.monotonic()
        try:
            async with asyncio.timeout(PERFTEST_TIMEOUT_S):
                output = await _perftest(server, client)
        except TimeoutError:
            detail = f"no result within {PERFTEST_TIMEOUT_S:g} s"
            return Finding(self.name, target, "FAIL", detail, time.monotonic() - begin)
        rate = parse_rate(output)
        elapsed_s = time.monotonic() - begin
        if rate is None:
            last = (output.strip().splitlines() or ["no output"])[-1]
            return Finding(self.name, target, "FAIL", f"{PERFTEST}: {last[:300]}", elapsed_s)
        return Finding(
            self.name,
            target,
            "PASS",
            f"{PERFTEST_BYTES >> 20} MiB writes",
            elapsed_s,
            value=rate,
            unit="Gb/s",
            target_class="loopback" if server == client else "port-port",
        )


def parse_rate(output: str) -> float | None:
    """The average of ib_write_bw's row in Gb/s; None without one."""
    match = _ROW.search(output)
    return float(match.group(1)) if match else None


async def _perftest(server: str, client: str) -> str:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    options = ["--report_gbits", "-s", str(PERFTEST_BYTES), "-D", str(PERFTEST_S), "-p", str(port)]
    listening = await _start("-d", server, *options)
    calling = None
    try:
        await asyncio.sleep(0.3)  # for it to listen, which it does not report
        calling = await _start("-d", client, *options, "127.0.0.1")
        output, _ = await calling.communicate()
        return output.decode(errors="replace")
    finally:
        for process in (listening, calling):
            if process is not None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()


async def _start(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *armed_command([PERFTEST, *arguments]),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=child_environment(),
    )


class InterfacePairs(Diagnostic):
    """The addresses of every two interfaces of the node reach each other by TCP."""

    name = "interface_pairs"
    before_attempts = False
    quick = False
    stage = 2

    async def run(self, node: NodeView) -> Sequence[Finding]:
        """One finding per pair of interfaces."""
        return await asyncio.to_thread(measure_pairs, addresses())


def addresses(root: Path = Path("/")) -> dict[str, str]:
    """IPv4 address by interface; those without one are left out."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for port in ports(root):
            request = struct.pack("256s", port.name.encode()[:15])
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(asked.fileno(), _SIOCGIFADDR, request)
                found[port.name] = socket.inet_ntoa(answer[20:24])
    return found


def measure_pairs(hosts: dict[str, str], size: int = TCP_BYTES) -> list[Finding]:
    """Send ``size`` bytes from each address to each other one, or to itself if it is the only."""
    if not hosts:
        return [Finding("interface_pairs", "node", "SKIPPED", "no interface has an address")]
    pairs = [(a, b) for a in hosts for b in hosts if a != b or len(hosts) == 1][:MAX_PAIRS]
    end_s = time.monotonic() + 15.0
    found: list[Finding] = []
    for source, target in pairs:
        if time.monotonic() > end_s:
            detail = f"{counted(len(pairs) - len(found), 'pair')}: the time of this test is over"
            return [*found, Finding("interface_pairs", "node", "SKIPPED", detail)]
        found.append(_tcp(f"{source}>{target}", hosts[source], hosts[target], size))
    return found


def _tcp(name: str, source: str, target: str, size: int) -> Finding:
    begin = time.monotonic()
    try:
        with socket.create_server((target, 0)) as listener:
            listener.settimeout(TCP_TIMEOUT_S)
            with socket.create_connection(
                listener.getsockname(), TCP_TIMEOUT_S, source_address=(source, 0)
            ) as sender:
                receiver, _ = listener.accept()
                with receiver:
                    receiver.settimeout(TCP_TIMEOUT_S)
                    elapsed_s = _send(sender, receiver, size)
    except OSError as error:
        return Finding("interface_pairs", name, "FAIL", f"{error}", time.monotonic() - begin)
    return Finding(
        "interface_pairs",
        name,
        "PASS",
        "through the kernel, not the cable",
        time.monotonic() - begin,
        value=size / elapsed_s / 1e9,
        unit="GB/s",
    )


def _send(sender: socket.socket, receiver: socket.socket, size: int) -> float:
    """Seconds for ``size`` bytes, which this thread sends and receives in turn."""
    block = bytes(64 << 10)
    begin = time.monotonic()
    sent = 0
    while sent < size:
        # A block fits the socket's buffers, so sending does not wait for the receiver below.
        sender.sendall(block)
        sent += len(block)
        rest = len(block)
        while rest:
            got = len(receiver.recv(rest))
            if got == 0:
                raise OSError("the connection was closed")
            rest -= got
    return time.monotonic() - begin
