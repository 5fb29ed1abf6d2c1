"""A whole cluster on mutual TLS: a job trains; every RPC of every server is called by everybody.

Everybody is each role, another node, and those without a certificate that counts. All answers are
one table, which is printed (`-s`) and written to the file that ``MEGASCALE_ROLE_TABLE`` names.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor import FileDescriptor, MethodDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from tests.harness.chaos_cluster import ChaosCluster, chaos_cluster
from tests.harness.paced import paced, release
from tests.harness.waiting import CALL_TIMEOUT_S

from megascale.v1 import (
    checkpoint_pb2,
    checkpoint_pb2_grpc,
    driver_pb2,
    executor_pb2,
    link_pb2,
    link_pb2_grpc,
    types_pb2,
)
from megascale_client import AsyncClient, JobPhase, NotAllowed
from megascale_common.service import status
from megascale_common.service.identity import authority, gate
from megascale_common.service.identity.certificates import FOLDER, Certificates, in_folder
from megascale_common.service.identity.peers import Role

UNREACHED = ("UNAVAILABLE", "UNKNOWN")  # no service has answered
NO_CONNECTION = ("UNAVAILABLE", "DEADLINE_EXCEEDED")
STREAM_S = 1.0  # for a stream that may be without events, since its caller is allowed
OTHER_NODE = "n2"
OF_EVERY_SERVER = (health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR)
SERVED: dict[str, tuple[FileDescriptor, ...]] = {
    "driver": (driver_pb2.DESCRIPTOR, link_pb2.DESCRIPTOR, *OF_EVERY_SERVER),
    "agent": (executor_pb2.DESCRIPTOR, *OF_EVERY_SERVER),
    "daemon": (checkpoint_pb2.DESCRIPTOR, *OF_EVERY_SERVER),
}


def methods(place: str) -> list[MethodDescriptor]:
    """All RPCs of a server."""
    return [
        method
        for file in SERVED[place]
        for service in file.services_by_name.values()
        for method in service.methods
    ]


def full_name(method: MethodDescriptor) -> str:
    return f"/{method.containing_service.full_name}/{method.name}"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChaosCluster]:
    with chaos_cluster(tmp_path_factory.mktemp("identity"), "--nodes", "2", "--tls") as running:
        yield running


@pytest.fixture
def folder(cluster: ChaosCluster) -> Path:
    """The certificates of the cluster."""
    return cluster.up.folder / FOLDER


@pytest.fixture
async def addresses(cluster: ChaosCluster) -> dict[str, str]:
    """Where driver, agent and daemon of node n1 serve."""
    async with cluster.client() as client:
        (node,) = [node async for node in client.nodes() if node.name == "n1"]
    return {
        "driver": cluster.up.state["driver"]["address"],
        "agent": node.executor_endpoint,
        "daemon": node.checkpoint_endpoint,
    }


async def outcome(
    channel: grpc.aio.Channel, method: MethodDescriptor, stream_s: float = STREAM_S
) -> tuple[str, str]:
    """Call an RPC with an empty request; the code and the reason of its answer.

    ``stream_s``: how long the first answer of a stream is waited for; CALL_TIMEOUT_S for a refusal.

    A client that still writes to a stream which the server has ended may see INTERNAL in place of
    the server's answer: it asks again, after a pause, since on a busy machine three in a row did.
    """
    for pause_s in (0.0, 0.05, 0.1, 0.2, 0.4, 0.8):
        await asyncio.sleep(pause_s)
        found = await _answer(channel, method, stream_s)
        if found != ("INTERNAL", "UNKNOWN"):
            break
    return found


async def _answer(
    channel: grpc.aio.Channel, method: MethodDescriptor, stream_s: float
) -> tuple[str, str]:
    shape = f"{_side(method.client_streaming)}_{_side(method.server_streaming)}"
    answer = message_factory.GetMessageClass(method.output_type)
    call = getattr(channel, shape)(
        full_name(method),
        request_serializer=lambda request: request.SerializeToString(),
        response_deserializer=answer.FromString,
    )
    request = message_factory.GetMessageClass(method.input_type)()
    sent: Any = _one(request) if method.client_streaming else request
    try:
        if method.server_streaming:
            async for _ in call(sent, timeout=stream_s):
                break
        else:
            await call(sent, timeout=20.0)
    except grpc.aio.AioRpcError as error:
        return error.code().name, status.read(error).reason
    return "OK", ""


def _side(streams: bool) -> str:
    return "stream" if streams else "unary"


async def _one(request: Any) -> AsyncIterator[Any]:
    yield request


def test_every_rpc_of_the_table_is_served_and_called_here() -> None:
    called = {full_name(method) for place in SERVED for method in methods(place)}
    assert called == set(gate.ALLOWED)


SHORT = {
    "PERMISSION_DENIED ROLE_NOT_ALLOWED": "refused",
    "PERMISSION_DENIED NOT_ITS_NODE": "NOT_ITS_NODE",
    "DEADLINE_EXCEEDED UNKNOWN": "OK",  # a stream without an event
}


class Outcomes:
    """What every caller has got for every RPC: OK, or how it was answered."""

    def __init__(self) -> None:
        self._found: dict[str, dict[str, str]] = {}

    def add(self, caller: str, method: MethodDescriptor, code: str, reason: str) -> None:
        rpc = full_name(method).rpartition(".")[2].replace("/", " ")
        answer = f"{code} {reason}".strip()
        self._found.setdefault(rpc, {})[caller] = SHORT.get(answer, reason or code)

    def table(self) -> str:
        """In Markdown, one row for each RPC."""
        callers = list(dict.fromkeys(who for row in self._found.values() for who in row))
        lines = [f"| RPC | {' | '.join(callers)} |", "|---" * (len(callers) + 1) + "|"]
        for rpc, row in self._found.items():
            lines.append(f"| {rpc} | {' | '.join(row.get(who, '') for who in callers)} |")
        return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def outcomes() -> Iterator[Outcomes]:
    found = Outcomes()
    yield found
    print(f"\n{found.table()}")
    if file := os.environ.get("MEGASCALE_ROLE_TABLE"):
        Path(file).write_text(found.table())


CALLERS = [
    *((role, "somebody") for role in (Role.VIEWER, Role.OPERATOR, Role.DRIVER)),
    *((role, name) for name in ("n1", OTHER_NODE) for role in (Role.EXECUTOR, Role.CHECKPOINT)),
]


@pytest.mark.parametrize(("role", "name"), CALLERS)
async def test_every_rpc_asks_for_the_role(
    role: Role,
    name: str,
    addresses: dict[str, str],
    folder: Path,
    cluster: ChaosCluster,
    outcomes: Outcomes,
) -> None:
    """The servers called are the driver and n1's: n2's certificate is that of another node."""
    files = in_folder(folder, role, name)
    if name == "somebody":
        files = authority.issue(folder, cluster.name, role, name)
    wrong = []
    for place, address in addresses.items():
        async with grpc.aio.secure_channel(address, files.channel_credentials()) as channel:
            for method in methods(place):
                allowed = gate.allows(full_name(method), role)
                limit_s = STREAM_S if allowed else CALL_TIMEOUT_S
                code, reason = await outcome(channel, method, limit_s)
                outcomes.add(f"{role} {name}", method, code, reason)
                refused = (code, reason) == ("PERMISSION_DENIED", "ROLE_NOT_ALLOWED")
                if refused == allowed or (code, reason) == UNREACHED:
                    wrong.append((full_name(method), code, reason))
    assert not wrong


def strangers(folder: Path, elsewhere: Path) -> dict[str, grpc.ChannelCredentials | None]:
    """How those would connect who have no certificate that counts; None: without TLS."""
    ca = (folder / "ca.pem").read_bytes()
    authority.create(elsewhere / "another", "another")
    foreign = authority.issue(elsewhere / "another", "another", Role.OPERATOR, "ada")
    late = authority.issue(
        shutil.copytree(folder, elsewhere / "late"), "any", Role.OPERATOR, "ada", days=-1
    )
    return {
        "no certificate": grpc.ssl_channel_credentials(ca),
        "of another authority": grpc.ssl_channel_credentials(
            ca, foreign.key.read_bytes(), foreign.certificate.read_bytes()
        ),
        "expired": late.channel_credentials(),
        "no TLS": None,
    }


@pytest.mark.parametrize("place", [*SERVED])
async def test_a_stranger_gets_no_connection_for_any_rpc(
    place: str, addresses: dict[str, str], folder: Path, tmp_path: Path, outcomes: Outcomes
) -> None:
    wrong = []
    for who, credentials in strangers(folder, tmp_path).items():
        address = addresses[place]
        opened = (
            grpc.aio.insecure_channel(address)
            if credentials is None
            else grpc.aio.secure_channel(address, credentials)
        )
        async with opened as channel:
            for method in methods(place):
                code, reason = await outcome(channel, method)
                outcomes.add(who, method, code, "no connection")
                if code not in NO_CONNECTION or reason != "UNKNOWN":
                    wrong.append((who, full_name(method), code, reason))
    assert not wrong


async def test_a_node_speaks_for_itself_alone(addresses: dict[str, str], folder: Path) -> None:
    files = in_folder(folder, Role.EXECUTOR, OTHER_NODE)
    hello = link_pb2.ExecutorHello(
        protocol=link_pb2.ProtocolRange(lowest=1, highest=2), node="n1", incarnation="mine",
        devices=[types_pb2.Device(index=0, kind=types_pb2.DEVICE_KIND_CPU)],
    )  # fmt: skip
    async with grpc.aio.secure_channel(addresses["driver"], files.channel_credentials()) as channel:
        connect = channel.stream_stream(
            "/megascale.v1.ExecutorLinkService/Connect",
            request_serializer=link_pb2.ConnectRequest.SerializeToString,
            response_deserializer=link_pb2.ConnectResponse.FromString,
        )
        with pytest.raises(grpc.aio.AioRpcError, match="certificate is that of node n2") as found:
            async for _ in connect(_one(link_pb2.ConnectRequest(hello=hello)), timeout=20.0):
                break
        assert status.read(found.value).reason == "NOT_ITS_NODE"
        link: link_pb2_grpc.ExecutorLinkServiceAsyncStub
        link = link_pb2_grpc.ExecutorLinkServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError, match="spans n1's") as found:
            await link.ReportSpans(_one(link_pb2.ReportSpansRequest(node="n1")), timeout=20.0)
        assert status.read(found.value).reason == "NOT_ITS_NODE"
    # What another node's daemon has, and what it may write, is not for this node's agent.
    async with grpc.aio.secure_channel(addresses["daemon"], files.channel_credentials()) as channel:
        (watch,) = [each for each in methods("daemon") if each.name == "WatchProgress"]
        found_there = await outcome(channel, watch, CALL_TIMEOUT_S)
        assert found_there == ("PERMISSION_DENIED", "NOT_ITS_NODE")
        (check,) = [each for each in methods("daemon") if each.name == "CheckStorage"]
        assert await outcome(channel, check) == ("PERMISSION_DENIED", "ROLE_NOT_ALLOWED")


def replace_all(folder: Path, cluster: str) -> int:
    """Give every process of the cluster a new certificate; how many there were."""
    held = [file.stem.split("-", 1) for file in folder.glob("*-*.key")]
    for role, name in held:
        authority.issue(folder, cluster, Role(role), name)
    return len(held)


async def test_a_job_trains_and_only_its_nodes_report_its_steps(
    cluster: ChaosCluster, addresses: dict[str, str], folder: Path
) -> None:
    """And all certificates are replaced under it."""
    stranger = authority.issue(folder, cluster.name, Role.EXECUTOR, "n9")
    async with cluster.client() as client:
        # Slow until a copy has come with the new certificates, so that the job does not end before.
        # The watch shows copies with the next commit, which is of step 20.
        held = paced(held_from_step=12, held_s=0.3)
        spec = cluster.job("private", steps=40, interval_steps=10, optimizer=held)
        spec.checkpoint.replicas = 1  # which the daemons send to each other, by new connections
        spec.checkpoint.snapshot_interval_steps = 1
        replicated, replaced_at = set(), 0
        async with cluster.follow(client, spec) as run:

            def ended() -> bool:
                nonlocal replaced_at
                if not replaced_at and run.step >= 5:
                    assert replace_all(folder, cluster.name) >= 6, "driver, nodes, daemons, people"
                    replaced_at = run.step
                replicated.add(run.job.replicated_step)
                if 0 < replaced_at < max(replicated):
                    release(cluster.up.site)
                return run.job.phase == JobPhase.SUCCEEDED

            await run.until(ended, "the end of the job")
            assert (run.job.committed_step, run.job.attempt, run.job.restarts) == (40, 1, 0)
        assert 5 <= replaced_at < max(replicated), "copies went on with new certificates"
        events = [event async for event in client.events("jobs/private")]
        submitted = [event.actor for event in events if event.reason == "SUBMITTED"]
        assert submitted == ["operator"], "the audit log has the name of the certificate"
    async with grpc.aio.secure_channel(
        addresses["driver"], stranger.channel_credentials()
    ) as channel:
        report = channel.stream_unary(
            "/megascale.v1.ExecutorLinkService/ReportSteps",
            request_serializer=link_pb2.ReportStepsRequest.SerializeToString,
            response_deserializer=link_pb2.ReportStepsResponse.FromString,
        )
        record = types_pb2.StepRecord(attempt=1, step=19)
        request = link_pb2.ReportStepsRequest(job="private", records=[record])
        with pytest.raises(grpc.aio.AioRpcError) as found:
            await report(_one(request), timeout=20.0)
    assert status.read(found.value).reason == "NOT_ITS_JOB"
    first = run.job.nodes[0]  # whose daemon commits, and which holds rank 0
    committer = (cluster.up.folder / "nodes" / first / "checkpoint.address").read_text().strip()
    other = in_folder(folder, Role.CHECKPOINT, "n2" if first == "n1" else "n1")
    for files in (other, authority.issue(folder, cluster.name, Role.CHECKPOINT, "n9")):
        assert await _prepared(committer, files) == "NOT_ITS_JOB", f"{files} commits for a rank"


async def _prepared(address: str, files: Certificates) -> str:
    """The reason for which a daemon refuses that rank 0 has saved, said with these certificates."""
    async with grpc.aio.secure_channel(address, files.channel_credentials()) as channel:
        stub = checkpoint_pb2_grpc.CheckpointServiceStub(channel)
        request = checkpoint_pb2.ReportPreparedRequest(job="private", attempt=1, step=41, rank=0)
        with pytest.raises(grpc.aio.AioRpcError) as found:
            await stub.ReportPrepared(request, timeout=20.0)
    return status.read(found.value).reason


async def test_a_viewer_sees_and_orders_nothing(
    cluster: ChaosCluster, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    viewer = authority.issue(folder, cluster.name, Role.VIEWER, "grace")
    monkeypatch.setenv("MEGASCALE_TLS_CERTIFICATE", str(viewer.certificate))
    monkeypatch.setenv("MEGASCALE_TLS_KEY", str(viewer.key))
    async with AsyncClient.from_run_folder(cluster.up.folder) as client:
        assert {node.name async for node in client.nodes()} == {"n1", "n2"}
        with pytest.raises(NotAllowed, match="viewer/grace may not call CordonNode"):
            await client.cordon("n1", reason="to see whether I may")
