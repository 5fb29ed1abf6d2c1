"""What a stranger on the host finds at each port and socket, and what servers do with strangers.

The table of doors in docs/security.md has the same names.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.harness.bad_jobs import good_job
from tests.harness.corpus import random_documents, write_corpus
from tests.harness.local_cluster import UpProcess, megascale
from tests.harness.waiting import CALL_TIMEOUT_S, until

from megascale_client import Client, parse_job
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


# --- the doors of a cluster

CLUSTER = ("--nodes", "2", "--devices-per-node", "1", "--device", "cpu", "--nodes-per-switch", "1")
NODES = ("n1", "n2")
STRANGER = 65534
SECURITY = Path(__file__).resolve().parents[2] / "docs" / "security.md"
# The doors that this cluster does not have: what opens them is tested where they are.
ELSEWHERE = {"people", "sidecar", "group checks", "by hand"}
# Runs as the stranger: its arguments are the doors as JSON, and what it finds is JSON, too.
ATTEMPTS = """
import encodings.idna, json, os, socket, sys  # all of it: what lies here is not for strangers
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
drop, doors = json.loads(sys.argv[1])
if drop:
    os.setgroups([]), os.setgid(drop), os.setuid(drop)

def call(address):
    found = []
    for metadata in ((), (("authorization", "Bearer of-nobody-at-all"),)):
        with grpc.insecure_channel(address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest()
            try:
                stub.Check(request, metadata=metadata, timeout=30)
                found.append("OK")
            except grpc.RpcError as error:
                found.append(error.code().name)
    return found

def talk(address, sent):
    host, port = address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), 30) as sock:
        sock.sendall(sent)
        with sock.makefile("rb") as reader:
            try:
                return reader.read(64).decode(errors="replace")
            except OSError:
                return ""

def refused(answer):
    return "refused" if not answer or '"verb":"refused"' in answer else answer

def dial(path):
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(path)
        return "OK"
    except OSError as error:
        return type(error).__name__

def connects(address):
    host, port = address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), 30):
        return "OK"

GET = "GET {} HTTP/1.1\\r\\nHost: 127.0.0.1\\r\\nConnection: close\\r\\n\\r\\n"
ways = {
    "grpc": call,
    "metrics": lambda at: talk(at, GET.format("/metrics").encode())[:12],
    "dashboard": lambda at: talk(at, GET.format("/now.json").encode())[:12],
    "replicas": lambda at: refused(talk(at, b"not a frame of the protocol, and no TLS")),
    "socket": dial,
    "connects": connects,
}
print(json.dumps({door: [ways[way](at) for at in places] for door, (way, places) in doors.items()}))
"""


@dataclass(frozen=True, slots=True)
class Listening:
    """What a process of the cluster listens on."""

    pid: int
    command: str
    tcp: tuple[str, ...]
    unix: tuple[str, ...]


def listening(pid: int) -> Listening:
    links = [os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir() if each.is_symlink()]
    inodes = {link[8:-1] for link in links if link.startswith("socket:[")}
    tcp, unix = [], []
    for table in ("tcp", "tcp6"):
        for row in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = row.split()
            if fields[3] == "0A" and fields[9] in inodes:
                host, port = fields[1].split(":")
                four = bytes.fromhex(host[-8:])[::-1]
                assert table == "tcp" or host[:-8] in ("0" * 16 + "FFFF0000", "0" * 24), host
                tcp.append(f"{socket.inet_ntoa(four)}:{int(port, 16)}")
    for row in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]:
        fields = row.split()
        if fields[3] == "00010000" and fields[6] in inodes:
            cwd = os.readlink(f"/proc/{pid}/cwd")
            unix.append(fields[7] if fields[7].startswith("@") else os.path.join(cwd, fields[7]))
    command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return Listening(pid, command, tuple(tcp), tuple(unix))


def everything(up: UpProcess) -> list[Listening]:
    found = []
    for pid in up.processes():
        with suppress(OSError):  # it has ended since
            found.append(listening(pid))
    return found


def known_doors(up: UpProcess) -> dict[str, tuple[str, list[str]]]:
    """Each door by its name, with the way in which a stranger tries it."""
    nodes = [up.folder / "nodes" / name for name in NODES]

    def at(folders: Sequence[Path], name: str) -> list[str]:
        return [(folder / name).read_text().strip() for folder in folders]

    metrics = at([up.folder], "metrics.address")
    targets = json.loads((up.folder / "prometheus.json").read_text())
    metrics = sorted({*metrics, *(place for each in targets for place in each["targets"])})
    dashboard = urlsplit(up.seen("dashboard_ready")[0]["url"]).netloc
    processes = everything(up)
    ranks = [each for each in processes if "megascale rank" in each.command]
    etcd = [path for each in processes if "--data-dir" in each.command for path in each.unix]
    sockets = [path for each in processes for path in each.unix if path not in etcd]
    return {
        "driver": ("grpc", at([up.folder], "driver.address")),
        "agent": ("grpc", at(nodes, "executor.address")),
        "daemon": ("grpc", at(nodes, "checkpoint.address")),
        "replicas": ("replicas", at(nodes, "checkpoint.replicas")),
        "metrics": ("metrics", metrics),
        "dashboard": ("dashboard", [dashboard]),
        "etcd": ("socket", etcd),
        "node's sockets": ("socket", sockets),
        "ranks": ("connects", [place for each in ranks for place in each.tcp]),
    }


def expected(door: str, tls: bool) -> object:
    """What a stranger finds there."""
    return {
        "driver": ["UNAVAILABLE"] * 2 if tls else ["UNAUTHENTICATED"] * 2,
        "agent": ["UNAVAILABLE"] * 2 if tls else ["UNAUTHENTICATED"] * 2,
        "daemon": ["UNAVAILABLE"] * 2 if tls else ["UNAUTHENTICATED"] * 2,
        "replicas": "refused",
        "metrics": "HTTP/1.1 200",
        "dashboard": "HTTP/1.1 401",
        "etcd": "PermissionError",
        "node's sockets": "PermissionError",
        "ranks": "OK",
    }[door]


def try_as_stranger(doors: dict[str, tuple[str, list[str]]]) -> dict[str, list[object]]:
    """What another user finds at the doors; where this one is not root, sockets are left out."""
    drop = STRANGER if os.geteuid() == 0 else 0
    tried = {name: door for name, door in doors.items() if drop or door[0] != "socket"}
    done = subprocess.run(
        [sys.executable, "-c", ATTEMPTS, json.dumps([drop, tried])],
        capture_output=True, text=True, timeout=CALL_TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, list[object]] = json.loads(done.stdout)
    return found


def rows_of_the_page() -> set[str]:
    """The names in the first column of the table of doors."""
    text = SECURITY.read_text().partition("## Doors")[2].partition("\n## ")[0]
    rows = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| ")]
    return set(rows) - {"door"}


@pytest.mark.parametrize(
    "options", [(), pytest.param(("--tls",), marks=pytest.mark.slow)], ids=["token", "tls"]
)
def test_a_stranger_tries_every_door_of_a_cluster(options: tuple[str, ...], tmp_path: Path) -> None:
    job = good_job("doors", steps=100_000)
    job["trainer"]["parallelism"] = {"dp": 2}
    uri = f"file://{tmp_path / 'checkpoints'}"
    job["checkpoint"] = {"uri": uri, "interval_steps": 5, "replicas": 1}
    corpus = write_corpus(tmp_path / "corpus", random_documents(seed=3, count=40, longest=100))
    job["trainer"]["data"]["sources"] = [{"prefix": str(corpus)}]
    with UpProcess(tmp_path / "cluster", *CLUSTER, *options, dashboard=True) as up:
        until(lambda: up.seen("dashboard_ready"), "the dashboard's link", up.processes)
        with Client.from_run_folder(up.folder) as client:
            client.submit(parse_job(job))
            until(lambda: client.get("doors").step > 1, "a job that trains", up.processes)
            doors = known_doors(up)
            known = {place for _, places in doors.values() for place in places}
            for each in everything(up):
                assert {*each.tcp, *each.unix} <= known, f"a door that is in no table: {each}"
                assert all(place.startswith("127.") for place in each.tcp), each
                for path in each.unix:  # also where nobody else can be tried as
                    folder = Path(path).parent.stat()
                    assert not path.startswith("@"), "an abstract socket is open to everybody"
                    assert (stat.S_IMODE(folder.st_mode), folder.st_uid) == (0o700, os.getuid())
            found = try_as_stranger(doors)
            for door, answers in found.items():
                assert answers, f"no {door} was tried"
                assert answers == [expected(door, bool(options))] * len(answers), door
            assert client.get("doors").phase.name == "RUNNING"
    assert set(doors) | ELSEWHERE == rows_of_the_page()
    if os.geteuid():
        pytest.skip("sockets were judged by their modes: only root can try them as another user")


def test_a_run_folder_that_everybody_writes_to_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    done = megascale("up", "--no-dashboard", "--nodes", "1", "--run-folder", str(folder))
    assert done.returncode and "chmod o-w" in " ".join((done.stdout + done.stderr).split())
