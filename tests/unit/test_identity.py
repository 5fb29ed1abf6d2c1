"""Identities in certificates, the table of roles, and files that are replaced."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor import FileDescriptor
from grpc_health.v1 import health_pb2, health_pb2_grpc
from structlog.testing import capture_logs
from tests.harness.waiting import CALL_TIMEOUT_S

from megascale.v1 import checkpoint_pb2, driver_pb2, executor_pb2, link_pb2
from megascale_common.service import status
from megascale_common.service.channel import open_channel, present
from megascale_common.service.errors import (
    ExistsError,
    ForbiddenError,
    NotFoundError,
    OptionError,
)
from megascale_common.service.identity import authority, gate
from megascale_common.service.identity.certificates import Certificates, in_folder
from megascale_common.service.identity.gate import CallRate
from megascale_common.service.identity.peers import Peer, Role, peer_of, spiffe_id
from megascale_common.service.server import RpcServer

TOKEN = "a-token-of-enough-characters"
SAN = "x509_subject_alternative_name"
FILES: tuple[FileDescriptor, ...] = (
    driver_pb2.DESCRIPTOR, link_pb2.DESCRIPTOR, executor_pb2.DESCRIPTOR, checkpoint_pb2.DESCRIPTOR
)  # fmt: skip


def methods() -> set[str]:
    """The full names of all RPCs of the protos."""
    return {
        f"/{service.full_name}/{method.name}"
        for file in FILES
        for service in file.services_by_name.values()
        for method in service.methods
    }


def test_every_rpc_has_its_roles() -> None:
    ours = {name for name in gate.ALLOWED if name.startswith("/megascale.v1.")}
    assert ours == methods(), "megascale_common.service.identity.gate has the table"
    assert all(gate.ALLOWED.values()), "an RPC that nobody may call"


def test_nobody_who_looks_may_order() -> None:
    viewer = {name for name in methods() if gate.allows(name, Role.VIEWER)}
    operator = {name for name in methods() if gate.allows(name, Role.OPERATOR)}
    assert viewer < operator
    assert not gate.allows("/megascale.v1.DriverService/SubmitJob", Role.VIEWER)
    assert not gate.allows("/megascale.v1.CheckpointService/OpenAttempt", Role.EXECUTOR)
    assert not gate.allows("/megascale.v1.DriverService/NoSuchRpc", Role.OPERATOR)


def test_the_last_two_segments_of_a_spiffe_id_are_role_and_name() -> None:
    found = peer_of({SAN: [b"n7.example.org", b"spiffe://example.org/ns/a/executor/n7"]})
    assert found == Peer(Role.EXECUTOR, "n7")
    own = spiffe_id("example.org", "prod", Role.OPERATOR, "ada").encode()
    assert peer_of({SAN: [own]}) == Peer(Role.OPERATOR, "ada")


@pytest.mark.parametrize(
    ("names", "why"),
    [
        ([], "0 SPIFFE IDs"),
        ([b"n7.example.org"], "0 SPIFFE IDs"),
        ([b"spiffe://a/executor/n1", b"spiffe://a/executor/n2"], "2 SPIFFE IDs"),
        ([b"spiffe://a/root/n1"], "ROLE/NAME"),
        ([b"spiffe://executor"], "ROLE/NAME"),
        ([b"spiffe://a/executor/"], "ROLE/NAME"),
        ([b"spiffe://a/executor/N 1"], "ROLE/NAME"),
    ],
)
def test_a_certificate_without_a_usable_id_is_nobody(names: list[bytes], why: str) -> None:
    with pytest.raises(ForbiddenError, match=why) as found:
        peer_of({SAN: names})
    assert found.value.reason == "NO_IDENTITY"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority with a driver, an operator and a viewer."""
    found = tmp_path_factory.mktemp("tls")
    authority.create(found, "test")
    for role in (Role.DRIVER, Role.OPERATOR, Role.VIEWER):
        authority.issue(found, "test", role, "one")
    return found


def test_keys_are_for_their_owner_alone(folder: Path) -> None:
    keys = [*folder.glob("*.key")]
    assert len(keys) == 4 and {key.stat().st_mode & 0o777 for key in keys} == {0o600}


def test_an_authority_is_made_once(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ExistsError, match="has an authority already"):
        authority.create(folder, "test")
    with pytest.raises(NotFoundError, match="megascale certs init"):
        authority.issue(tmp_path, "test", Role.VIEWER, "ada")
    with pytest.raises(OptionError, match="--name"):
        authority.issue(folder, "test", Role.VIEWER, "Ada Lovelace")


def test_files_that_do_not_fit_are_refused(folder: Path, tmp_path: Path) -> None:
    ours = in_folder(folder, Role.DRIVER, "one")
    ours.check()
    other = in_folder(folder, Role.VIEWER, "one")
    with pytest.raises(OptionError, match="--tls-key"):
        Certificates(other.key, ours.certificate, ours.ca).check()
    with pytest.raises(OptionError, match="cannot be read"):
        Certificates(tmp_path / "absent", ours.certificate).check()


@pytest.fixture
async def server(folder: Path, tmp_path: Path) -> AsyncIterator[tuple[str, Certificates]]:
    """A server with certificates of its own, whose folder may be changed."""
    here = tmp_path / "server"
    shutil.copytree(folder, here)
    files = in_folder(here, Role.DRIVER, "one")
    running = RpcServer(TOKEN, tls=files)
    address = await running.start("127.0.0.1:0", [])
    yield address, files
    present(None)
    await running.stop(0)


def serial_at(address: str, shown: Certificates) -> str:
    """The number of the certificate that a server shows now."""
    context = ssl.create_default_context(cafile=str(shown.ca))
    context.load_cert_chain(shown.certificate, shown.key)
    context.set_alpn_protocols(["h2"])
    host, _, port = address.rpartition(":")
    with (
        socket.create_connection((host, int(port)), timeout=CALL_TIMEOUT_S) as plain,
        context.wrap_socket(plain, server_hostname=host) as encrypted,
    ):
        return str((encrypted.getpeercert() or {})["serialNumber"])


async def check_health(channel: grpc.aio.Channel) -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    return int((await stub.Check(health_pb2.HealthCheckRequest(), timeout=CALL_TIMEOUT_S)).status)


async def test_new_files_count_and_open_connections_go_on(
    server: tuple[str, Certificates], folder: Path
) -> None:
    address, files = server
    viewer = in_folder(folder, Role.VIEWER, "one")
    present(viewer)
    async with open_channel(address, TOKEN) as before:
        serving = await check_health(before)
        old = await asyncio.to_thread(serial_at, address, viewer)
        authority.issue(files.key.parent, "test", Role.DRIVER, "one")
        assert await asyncio.to_thread(serial_at, address, viewer) != old
        async with open_channel(address, TOKEN) as after:
            assert await check_health(after) == serving
        assert await check_health(before) == serving


async def test_half_replaced_files_do_not_stop_a_server(
    server: tuple[str, Certificates], folder: Path
) -> None:
    address, files = server
    present(in_folder(folder, Role.VIEWER, "one"))
    files.key.write_text("half of a")
    with capture_logs() as lines:
        async with open_channel(address, TOKEN) as channel:
            assert await check_health(channel)
    assert "keeping the old ones" in lines[0]["event"]


async def test_a_caller_that_calls_too_often_waits_and_the_others_do_not(folder: Path) -> None:
    rate = CallRate(calls_per_s=0.001, burst_calls=20)
    running = RpcServer(TOKEN, tls=in_folder(folder, Role.DRIVER, "one"), rate=rate)
    address = await running.start("127.0.0.1:0", [])

    async def outcomes(role: Role) -> list[str]:
        present(in_folder(folder, role, "one"))
        found = []
        async with open_channel(address, TOKEN) as channel:
            for _ in range(22):
                try:
                    await check_health(channel)
                    found.append("answered")
                except grpc.aio.AioRpcError as error:
                    found.append(status.read(error).reason)
        return found

    try:
        for role in (Role.VIEWER, Role.OPERATOR):
            assert await outcomes(role) == ["answered"] * 20 + ["TOO_MANY_CALLS"] * 2
    finally:
        present(None)
        await running.stop(0)


@pytest.mark.parametrize("bind", ["0.0.0.0:0", "[::]:0", ":::0", "10.255.255.1:0", "n7:0"])
async def test_beyond_loopback_no_server_starts_without_tls(bind: str) -> None:
    running = RpcServer(TOKEN)
    with pytest.raises(OptionError, match=r"refusing to listen on .* without TLS"):
        await running.start(bind, [])
    await running.stop(0)


async def test_a_message_and_metadata_are_bounded() -> None:
    """The figures of docs/limits.md; gRPC itself refuses."""
    running = RpcServer(TOKEN)
    address = await running.start("127.0.0.1:0", [])
    present(None)

    async def refusal(size: int, header: int) -> grpc.StatusCode | None:
        async with open_channel(address, TOKEN) as channel:
            call = channel.unary_unary("/grpc.health.v1.Health/Check")
            try:
                # A field that the message does not have, and a name of a service that is unknown.
                field = b"\x7a" + _varint(size) + bytes(size)
                await call(field, metadata=(("x-long", "y" * header),), timeout=CALL_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                return error.code()
        return None

    try:
        assert await refusal(3 << 20, 4096) is None
        assert await refusal(5 << 20, 0) is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await refusal(10, 64 << 10) is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await refusal(10, 0) is None, "others are served as before"
    finally:
        await running.stop(0)


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes([*found, number])


@pytest.mark.parametrize("shape", ["unary_unary", "unary_stream", "stream_stream"])
async def test_a_request_that_cannot_be_read_gets_a_clear_answer(shape: str) -> None:
    name = {
        "unary_unary": "/grpc.health.v1.Health/Check",
        "unary_stream": "/grpc.health.v1.Health/Watch",
        "stream_stream": "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    }[shape]
    running = RpcServer(TOKEN)
    address = await running.start("127.0.0.1:0", [])
    present(None)
    try:
        async with open_channel(address, TOKEN) as channel:
            sent = iter([b"\xff"]) if shape == "stream_stream" else b"\xff"
            call = getattr(channel, shape)(name)(sent, timeout=CALL_TIMEOUT_S)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                if shape == "unary_unary":
                    await call
                async for _ in call:
                    pass
    finally:
        await running.stop(0)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert status.read(refused.value).reason == "BAD_MESSAGE"


async def test_who_shows_no_certificate_gets_no_connection(
    server: tuple[str, Certificates], folder: Path, tmp_path: Path
) -> None:
    address, files = server
    assert files.ca is not None
    trusting = grpc.ssl_channel_credentials(files.ca.read_bytes())
    authority.create(tmp_path / "other", "test")
    other = authority.issue(tmp_path / "other", "test", Role.OPERATOR, "one")
    expired = authority.issue(
        shutil.copytree(folder, tmp_path / "late"), "test", Role.OPERATOR, "one", days=-1
    )
    strangers = {
        "no certificate": trusting,
        "of another authority": grpc.ssl_channel_credentials(
            files.ca.read_bytes(), other.key.read_bytes(), other.certificate.read_bytes()
        ),
        "expired": expired.channel_credentials(),
    }
    for credentials in strangers.values():
        async with grpc.aio.secure_channel(address, credentials) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await check_health(channel)
            assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
