"""Keys, transactions, failover and settled outcomes, against a real etcd that fails."""

import asyncio
import os
import shutil
import signal
import ssl
import stat
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.harness.etcd import CuttableProxy, etcd, etcd_prefix, etcd_server, make_server
from tests.harness.ha_cluster import Trio
from tests.harness.processes import ended, free_port, until_gone
from tests.harness.waiting import CALL_TIMEOUT_S, eventually

from megascale_common.etcd import connection
from megascale_common.etcd.client import EtcdClient
from megascale_common.etcd.connection import TlsConfig
from megascale_common.etcd.errors import (
    EtcdError,
    EtcdUnavailable,
    InvalidEtcdRequest,
    LeaseNotFound,
    UnknownOutcome,
)
from megascale_common.etcd.operations import (
    ModRevisionEquals,
    Put,
    prefix_end,
)
from megascale_common.etcd.server import EtcdServer
from megascale_common.etcd.settled import Rejected, txn_settled
from megascale_common.node.process import child_environment

__all__ = ["etcd", "etcd_prefix", "etcd_server"]  # fixtures

# --- keys, values, transactions


async def test_put_get_delete(etcd: EtcdClient, etcd_server: EtcdServer, etcd_prefix: str) -> None:
    first = await etcd.put("a", b"1")
    second = await etcd.put("a", b"2")
    stored = await etcd.get("a")
    assert stored is not None
    assert (stored.key, stored.value, stored.version) == ("a", b"2", 2)
    assert (stored.create_revision, stored.mod_revision, stored.lease_id) == (first, second, 0)
    async with EtcdClient([etcd_server.endpoint]) as whole:
        seen = await whole.get(etcd_prefix + "a")
        assert seen is not None and seen.value == b"2"
    assert await etcd.delete("a") == 1
    assert await etcd.delete("a") == 0
    assert await etcd.get("a") is None


async def test_an_idle_connection_is_not_closed_for_its_pings(
    etcd_server: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = {**dict(connection.CHANNEL_OPTIONS), "grpc.keepalive_time_ms": 1000}
    monkeypatch.setattr(connection, "CHANNEL_OPTIONS", tuple(fast.items()))
    async with EtcdClient([etcd_server.endpoint]) as client:
        await client.status()
        channel = (await client.members.member(CALL_TIMEOUT_S)).channel
        # etcd warns twice: with pings while it is idle the connection ends after 3 s.
        left = asyncio.ensure_future(channel.wait_for_state_change(grpc.ChannelConnectivity.READY))
        await asyncio.wait({left}, timeout=4.0)
        assert not left.done(), "the connection was closed"
        left.cancel()


async def test_prefixes_are_listed_and_deleted_alone(etcd: EtcdClient) -> None:
    for key in ("jobs/1", "jobs/2", "jobs0", "job"):
        await etcd.put(key, key.encode())
    assert [kv.key for kv in (await etcd.get_prefix("jobs/")).items] == ["jobs/1", "jobs/2"]
    assert await etcd.delete_prefix("jobs/") == 2
    assert [kv.key for kv in (await etcd.get_prefix("")).items] == ["job", "jobs0"]


async def test_pages_too_large_to_receive_are_halved(etcd: EtcdClient) -> None:
    for index in range(70):
        await etcd.put(f"big/{index:02}", bytes(1_000_000))
    listing = await etcd.get_prefix("big/")
    assert [len(kv.value) for kv in listing.items] == [1_000_000] * 70
    await etcd.delete_prefix("big/")


async def test_bad_requests_name_the_field(etcd: EtcdClient, etcd_server: EtcdServer) -> None:
    with pytest.raises(InvalidEtcdRequest, match="success: 129 entries"):
        await etcd.txn(success=[Put(str(index), b"") for index in range(129)])
    with pytest.raises(InvalidEtcdRequest, match="duplicate key"):
        await etcd.txn(success=[Put("k", b"1"), Put("k", b"2")])
    with pytest.raises(InvalidEtcdRequest, match="must end with '/'"):
        EtcdClient([etcd_server.endpoint], prefix="megascale")
    with pytest.raises(InvalidEtcdRequest, match="endpoints"):
        await EtcdClient(["http://localhost:2379"]).__aenter__()
    with pytest.raises(InvalidEtcdRequest, match="key"):
        await etcd.get("")
    with pytest.raises(InvalidEtcdRequest, match="not open"):
        await EtcdClient([etcd_server.endpoint]).get("k")
    with pytest.raises(LeaseNotFound):
        await etcd.put("k", b"", lease_id=4711)


@given(st.binary(min_size=1, max_size=4), st.binary(max_size=6))
def test_prefix_end_bounds_exactly_the_prefix(prefix: bytes, key: bytes) -> None:
    end = prefix_end(prefix)
    inside = key >= prefix and (end == b"\0" or key < end)
    assert inside == key.startswith(prefix)


# --- endpoints that fail


async def test_failover_past_a_dead_and_a_silent_endpoint(
    etcd_server: EtcdServer, etcd_prefix: str
) -> None:
    dead = f"127.0.0.1:{free_port('127.0.0.1')}"
    async with CuttableProxy(etcd_server.endpoint) as silent:
        endpoints = [dead, silent.endpoint, etcd_server.endpoint]
        # Each of them gets a third of it.
        async with EtcdClient(endpoints, prefix=etcd_prefix, timeout_s=6.0) as client:
            await client.put("k", b"1")
            silent.swallow_replies = True
            stored = await client.get("k")
            assert stored is not None and stored.value == b"1"
            swallowed = silent.swallowed
            await client.put("k", b"2")
            assert silent.swallowed == swallowed, "the client stays with the endpoint that answers"


async def test_failover_past_an_endpoint_that_never_finishes_connecting(
    etcd_server: EtcdServer, etcd_prefix: str
) -> None:
    async with CuttableProxy(etcd_server.endpoint) as silent:
        silent.swallow_requests = silent.swallow_replies = True
        endpoints = [silent.endpoint, etcd_server.endpoint]
        # An attempt to connect ends after two seconds, and leaves the other endpoint the rest.
        async with EtcdClient(endpoints, prefix=etcd_prefix, timeout_s=20.0) as client:
            await client.put("k", b"1")
        async with EtcdClient([silent.endpoint], prefix=etcd_prefix, timeout_s=0.3) as client:
            with pytest.raises(EtcdUnavailable):
                await client.put("k", b"2")
    async with EtcdClient([etcd_server.endpoint], prefix=etcd_prefix) as client:
        stored = await client.get("k")
        assert stored is not None and stored.value == b"1"


async def test_nothing_sent_is_another_error_than_no_answer(
    etcd_server: EtcdServer, etcd_prefix: str
) -> None:
    async with EtcdClient([f"127.0.0.1:{free_port('127.0.0.1')}"], timeout_s=0.3) as client:
        with pytest.raises(EtcdUnavailable):
            await client.put("k", b"")
        with pytest.raises(EtcdUnavailable):
            await client.get("k")
    async with CuttableProxy(etcd_server.endpoint) as proxy:
        async with EtcdClient([proxy.endpoint], prefix=etcd_prefix) as client:
            await client.get("k")
            proxy.swallow_replies = True
            client.timeout_s = 0.5
            with pytest.raises(UnknownOutcome):
                await client.put("k", b"")


async def test_members_without_a_leader_say_so_at_once(tmp_path: Path) -> None:
    """A read waits for a leader to be elected, a while; then the error has etcd's words."""
    trio = Trio(tmp_path)
    try:
        await trio.start()
        async with EtcdClient(trio.endpoints) as client:
            await client.put("k", b"1")
            trio.members["m1"].kill()
            trio.members["m2"].kill()
            # Until then it still takes one of those that are gone for the leader.
            async with EtcdClient([trio.members["m0"].endpoint]) as left:

                async def alone() -> bool:
                    return (await left.status()).leader_id == 0

                await eventually(alone, "the last member without a leader")
            client.timeout_s = 1.0
            with pytest.raises(EtcdUnavailable, match="etcdserver: no leader"):
                await client.get("k")
    finally:
        trio.close()


@pytest.mark.parametrize(
    "words", ["request timed out", "request timed out, possibly due to connection lost"]
)
async def test_what_etcd_says_when_it_is_slow_is_in_the_error(words: str) -> None:
    """Real etcd says so after 5 s and two election timeouts; here something says it at once."""

    async def refuse(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        await context.abort(grpc.StatusCode.UNAVAILABLE, f"etcdserver: {words}")

    handler: Any = grpc.unary_unary_rpc_method_handler(refuse)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        [
            grpc.method_handlers_generic_handler(
                "etcdserverpb.KV", {"Range": handler, "Put": handler}
            )
        ]
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with EtcdClient([f"127.0.0.1:{port}"], timeout_s=0.3) as client:
            with pytest.raises(EtcdUnavailable, match=f"etcdserver: {words}$"):
                await client.get("k")
            with pytest.raises(UnknownOutcome, match=f"etcdserver: {words}$"):
                await client.put("k", b"")
    finally:
        await server.stop(None)


async def test_mutual_tls(etcd_server: EtcdServer, etcd_prefix: str, tmp_path: Path) -> None:
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl program to make a certificate with")
    maker = await asyncio.create_subprocess_exec(
        *(
            openssl,
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:P-256",
            "-nodes",
        ),
        *("-days", "1", "-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1"),
        *("-keyout", key, "-out", certificate),
        stderr=subprocess.DEVNULL,
    )
    assert await maker.wait() == 0
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(certificate))
    context.load_cert_chain(certificate, key)
    context.verify_mode = ssl.CERT_REQUIRED
    context.set_alpn_protocols(["h2"])
    async with CuttableProxy(etcd_server.endpoint, tls=context) as proxy:
        tls = TlsConfig(certificate, certificate, key)
        async with EtcdClient([proxy.endpoint], prefix=etcd_prefix, tls=tls) as client:
            await client.put("k", b"1")
        for wrong in (None, TlsConfig(certificate)):
            async with EtcdClient([proxy.endpoint], timeout_s=0.5, tls=wrong) as client:
                with pytest.raises(EtcdUnavailable):
                    await client.get("k")
    with pytest.raises(InvalidEtcdRequest, match="tls"):
        TlsConfig(certificate, certificate).credentials()


# --- outcomes settled by sending again


async def test_a_refused_write_reports_what_stands_there(etcd: EtcdClient) -> None:
    theirs = await etcd.put("head", b"theirs")
    txn_id = str(uuid.uuid4())
    outcome = await txn_settled(
        etcd,
        compare=[ModRevisionEquals("head", 0)],
        success=[Put("head", txn_id.encode())],
        marker_key="head",
        txn_id=txn_id,
    )
    assert isinstance(outcome, Rejected)
    assert outcome.current["head"].value == b"theirs"
    assert outcome.current["head"].mod_revision == theirs


async def test_an_overwritten_marker_leaves_the_outcome_unknown(
    etcd: EtcdClient, etcd_server: EtcdServer, etcd_prefix: str
) -> None:
    """Applied, reply lost, then overwritten: the outcome cannot be known, and none is reported."""
    before = await etcd.put("head", b"old")
    txn_id = str(uuid.uuid4())
    async with CuttableProxy(etcd_server.endpoint) as proxy:
        async with EtcdClient([proxy.endpoint], prefix=etcd_prefix, timeout_s=20.0) as client:
            await client.get("head")
            proxy.swallow_replies = True
            settling = asyncio.create_task(
                txn_settled(
                    client,
                    compare=[ModRevisionEquals("head", before)],
                    success=[Put("head", txn_id.encode())],
                    marker_key="head",
                    txn_id=txn_id,
                )
            )

            async def applied() -> bool:
                head = await etcd.get("head")
                return head is not None and head.mod_revision > before

            await eventually(applied, "the write")
            await etcd.put("head", b"another leader's")
            proxy.reset()
            with pytest.raises(UnknownOutcome, match="overwritten"):
                await asyncio.wait_for(settling, CALL_TIMEOUT_S)


async def test_a_write_that_could_not_be_settled_is_refused_beforehand(etcd: EtcdClient) -> None:
    txn_id = str(uuid.uuid4())
    put = Put("head", txn_id.encode())
    for compare, success, an_id, field in (
        ([], [put], txn_id, "compare"),
        ([ModRevisionEquals("head", 0)], [Put("head", b"no id")], txn_id, "marker_key"),
        ([ModRevisionEquals("head", 0)], [put], "short", "txn_id"),
    ):
        with pytest.raises(InvalidEtcdRequest, match=field):
            await txn_settled(
                etcd, compare=compare, success=success, marker_key="head", txn_id=an_id
            )


# --- the server


def test_only_its_owner_comes_to_the_sockets_of_etcd(etcd_server: EtcdServer) -> None:
    """Whoever writes to etcd runs code as the owner of the nodes, and etcd asks nobody."""
    assert etcd_server.pid is not None
    inodes = {
        os.readlink(descriptor).removeprefix("socket:[").rstrip("]")
        for descriptor in Path(f"/proc/{etcd_server.pid}/fd").iterdir()
        if os.readlink(descriptor).startswith("socket:")
    }
    tables = [Path(f"/proc/net/{name}") for name in ("tcp", "tcp6")]
    rows = [row.split() for table in tables for row in table.read_text().splitlines()[1:]]
    assert not [row for row in rows if row[9] in inodes], "etcd has a port"
    folder = Path(etcd_server.endpoint.removeprefix("unix://")).parent
    listening = {
        Path(words[7]).name
        for words in map(str.split, Path("/proc/net/unix").read_text().splitlines()[1:])
        if words[6] in inodes and words[3] == "00010000"  # it accepts connections
    }
    assert listening == {entry.name for entry in folder.iterdir() if entry.is_socket()}
    assert len(listening) == 2, "for clients and for members"
    found = folder.stat()
    assert (stat.S_IMODE(found.st_mode), found.st_uid) == (0o700, os.getuid())


async def test_an_ended_server_leaves_no_socket_and_returns_to_its_endpoint(
    tmp_path: Path,
) -> None:
    server = make_server(tmp_path / ("a" * 150) / "data")  # a socket's path has 107 bytes at most
    server.data_dir.parent.mkdir()
    await server.start()
    endpoint, folder = server.endpoint, Path(server.endpoint.removeprefix("unix://")).parent
    async with EtcdClient([endpoint], timeout_s=CALL_TIMEOUT_S) as client:
        await client.put("k", b"1")
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)
        # Its first thread is a zombie before its last one has ended: only then can it be reaped.
        while server.pid is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await server.start()
        assert server.endpoint == endpoint
        stored = await client.get("k")
        assert stored is not None and stored.value == b"1"
    await server.stop()
    assert not folder.exists()


async def test_a_server_that_cannot_start_gives_the_reason(tmp_path: Path) -> None:
    server = EtcdServer(tmp_path / "data", extra_arguments=["--no-such-flag"])
    with pytest.raises(EtcdError, match="no-such-flag"):
        await server.start()
    assert server.pid is None


async def test_the_server_dies_with_whoever_started_it(tmp_path: Path) -> None:
    script = (
        "import asyncio, sys, time; from pathlib import Path\n"
        "from tests.harness.etcd import make_server\n"
        "server = make_server(Path(sys.argv[1])); asyncio.run(server.start())\n"
        "print(server.pid, flush=True); time.sleep(60)"
    )
    starter = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        script,
        tmp_path / "data",
        stdout=subprocess.PIPE,
        env=child_environment(),
    )
    assert starter.stdout is not None
    async with asyncio.timeout(CALL_TIMEOUT_S):
        pid = int(await starter.stdout.readline())
    assert not ended(pid)
    starter.kill()
    await starter.wait()
    await asyncio.to_thread(until_gone, [pid], "etcd")
