"""Channels to the members of one etcd cluster: selection, fail-over and retries.

A read can be sent twice, a write must not. So a write waits until a channel is connected and is
sent once; if no answer comes, its outcome is unknown. A read tries one member after the other until
its time is up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import grpc
import grpc.aio

from megascale_common.etcd import rpc_pb2_grpc
from megascale_common.etcd.errors import (
    EtcdUnavailable,
    InvalidEtcdRequest,
    UnknownOutcome,
    answer_of,
    refusal,
)
from megascale_common.service.tasks import Backoff

T = TypeVar("T")

# etcd closes connections (GOAWAY too_many_pings) that ping more often than every 5 s
# (--grpc-keepalive-min-time), and those that ping more than twice while no call is open.
KEEPALIVE_INTERVAL_S = 10.0
KEEPALIVE_TIMEOUT_S = 5.0
# A page of large values, or a watch response; etcd itself caps one request at 1.5 MiB.
MAX_RECEIVE_BYTES = 64 * 1024 * 1024
SOCKET = "unix:///"  # prefix of an endpoint that is the absolute path of a unix socket
# With it a member that lost its cluster answers "no leader". Without it, it would keep a watch open
# without events forever, and a read until its time is up.
REQUIRE_LEADER = (("hasleader", "true"),)
RECONNECT_BACKOFF_MIN_S = 0.1
RECONNECT_BACKOFF_MAX_S = 1.0
RETRY_BACKOFF_MIN_S = 0.05
RETRY_BACKOFF_MAX_S = 1.0

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", int(KEEPALIVE_INTERVAL_S * 1000)),
    ("grpc.keepalive_timeout_ms", int(KEEPALIVE_TIMEOUT_S * 1000)),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", int(RECONNECT_BACKOFF_MIN_S * 1000)),
    # Despite its name, the timeout of one attempt to connect.
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", int(RECONNECT_BACKOFF_MAX_S * 1000)),
    ("grpc.max_receive_message_length", MAX_RECEIVE_BYTES),
    # Each client has its own sockets and back-off, so that closing one does not disturb another.
    ("grpc.use_local_subchannel_pool", 1),
)


Stamp = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """PEM files for a TLS connection: the authority to trust and, for mutual TLS, our own pair.

    Replaced files are used from the next connection on.
    """

    ca_path: Path
    certificate_path: Path | None = None
    key_path: Path | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """The files as gRPC's credentials.

        Raises InvalidEtcdRequest if one of the pair is missing, OSError if a file cannot be read.
        """
        if (self.certificate_path is None) != (self.key_path is None):
            raise InvalidEtcdRequest(
                "tls: certificate_path and key_path are given together or not at all"
            )
        key = None if self.key_path is None else self.key_path.read_bytes()
        chain = None if self.certificate_path is None else self.certificate_path.read_bytes()
        return grpc.ssl_channel_credentials(self.ca_path.read_bytes(), key, chain)

    def stamp(self) -> Stamp:
        """A value that changes when a file is replaced; empty while one of them is missing."""
        try:
            found = [
                path.stat()
                for path in (self.ca_path, self.certificate_path, self.key_path)
                if path is not None
            ]
        except OSError:
            return ()
        return tuple((each.st_mtime_ns, each.st_size, each.st_ino) for each in found)


class Member:
    """One endpoint: its channel and the stubs on it."""

    def __init__(self, endpoint: str, tls: TlsConfig | None) -> None:
        self.endpoint = endpoint
        self._tls = tls
        self._stamp = () if tls is None else tls.stamp()
        self.channel = (
            grpc.aio.insecure_channel(endpoint, options=CHANNEL_OPTIONS)
            if tls is None
            else grpc.aio.secure_channel(endpoint, tls.credentials(), options=CHANNEL_OPTIONS)
        )
        self.kv: rpc_pb2_grpc.KVAsyncStub = rpc_pb2_grpc.KVStub(self.channel)
        self.lease: rpc_pb2_grpc.LeaseAsyncStub = rpc_pb2_grpc.LeaseStub(self.channel)
        self.watch: rpc_pb2_grpc.WatchAsyncStub = rpc_pb2_grpc.WatchStub(self.channel)
        self.maintenance: rpc_pb2_grpc.MaintenanceAsyncStub = rpc_pb2_grpc.MaintenanceStub(
            self.channel
        )

    @property
    def outdated(self) -> bool:
        """Whether the files were replaced since, and all of them exist."""
        found = () if self._tls is None else self._tls.stamp()
        return found not in ((), self._stamp)

    async def connected(self) -> bool:
        """Wait until the current attempt to connect ends; returns whether it succeeded."""
        state = self.channel.get_state(try_to_connect=True)
        while state in (grpc.ChannelConnectivity.IDLE, grpc.ChannelConnectivity.CONNECTING):
            await self.channel.wait_for_state_change(state)
            state = self.channel.get_state(try_to_connect=True)
        return state is grpc.ChannelConnectivity.READY


class EtcdMembers:
    """The members of a cluster. Calls stay with one until it fails, then use the next."""

    def __init__(self, endpoints: Sequence[str], tls: TlsConfig | None) -> None:
        if not endpoints:
            raise InvalidEtcdRequest("endpoints: at least one host:port is needed")
        for endpoint in endpoints:
            if not endpoint.startswith(SOCKET) and ("://" in endpoint or ":" not in endpoint):
                raise InvalidEtcdRequest(
                    f"endpoints: {endpoint!r} must be host:port without a scheme, or {SOCKET}PATH"
                )
        self._members = [Member(endpoint, tls) for endpoint in endpoints]
        self._tls = tls
        self._current = 0
        self.endpoints = tuple(endpoints)

    async def close(self) -> None:
        """Close every channel; calls in flight fail."""
        await asyncio.gather(*(member.channel.close() for member in self._members))

    def avoid(self, member: Member) -> None:
        """Use the next member from now on, unless another call has switched already."""
        if self._members[self._current] is member:
            self._current = (self._current + 1) % len(self._members)

    async def member(self, timeout_s: float) -> Member:
        """A connected member. Raises EtcdUnavailable when none connects within ``timeout_s``."""
        member = self._members[self._current]
        if member.channel.get_state() is grpc.ChannelConnectivity.READY:
            return member  # the common case, without a task and a timer per call
        backoff = retry_backoff()
        share_s = timeout_s / len(self._members)
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    for _ in self._members:
                        member = await self._fresh()
                        # A member that drops packets must not take the time of the others.
                        if await _within(member.connected(), share_s):
                            return member
                        self.avoid(member)
                    await backoff.sleep()
        except TimeoutError:
            names = ", ".join(self.endpoints)
            raise EtcdUnavailable(
                f"no etcd endpoint of {names} could be reached in {timeout_s:g} s"
            ) from None

    async def _fresh(self) -> Member:
        """The current member, which is not connected; on a new channel if its files changed."""
        number = self._current
        before = self._members[number]
        if not before.outdated:
            return before
        try:
            member = Member(before.endpoint, self._tls)
        except OSError:  # a file is just being replaced
            return before
        self._members[number] = member
        await before.channel.close()
        return member

    async def read(
        self, what: str, timeout_s: float, send: Callable[[Member, float], Awaitable[T]]
    ) -> T:
        """Send an idempotent call, and after each failure send it again to the next member.

        Raises EtcdUnavailable when ``timeout_s`` is up, or the typed refusal.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        backoff = retry_backoff()
        failure: grpc.aio.AioRpcError | None = None
        while (remaining_s := deadline - loop.time()) > 0:
            try:
                member = await self.member(remaining_s)
            except EtcdUnavailable:
                if failure is None:
                    raise
                break  # an earlier answer of a member is the better reason
            try:
                # Only a share of the time, so that a silent member leaves some for the next.
                return await send(member, min(remaining_s, timeout_s / len(self._members)))
            except grpc.aio.AioRpcError as error:
                if (refused := refusal(error, what)) is not None:
                    raise refused from error
                if failure is None or answer_of(error) != error.code().name:
                    failure = error  # an answer of etcd is a better reason than silence
                self.avoid(member)
            await backoff.sleep()
        said = answer_of(failure) if failure else "not sent"
        raise EtcdUnavailable(f"{what}: no answer within {timeout_s:g} s: {said}") from failure

    async def write(
        self, what: str, timeout_s: float, send: Callable[[Member, float], Awaitable[T]]
    ) -> T:
        """Send a call once, on an open connection.

        Raises EtcdUnavailable if it was never sent, UnknownOutcome if no answer came, or the
        refusal.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        member = await self.member(timeout_s)
        try:
            return await send(member, max(deadline - loop.time(), RETRY_BACKOFF_MIN_S))
        except grpc.aio.AioRpcError as error:
            if (refused := refusal(error, what)) is not None:
                raise refused from error
            # Not sent again here, because it may have been applied before the connection broke.
            self.avoid(member)
            raise UnknownOutcome(
                f"{what}: sent to {member.endpoint}, no answer: {answer_of(error)}"
            ) from error


def retry_backoff() -> Backoff:
    """The waits between retries of calls to etcd."""
    return Backoff(RETRY_BACKOFF_MIN_S, RETRY_BACKOFF_MAX_S)


async def _within(answer: Awaitable[bool], timeout_s: float) -> bool:
    # Not wait_for: before Python 3.12 it swallows a cancellation that arrives together with the
    # answer. With one member the caller's own time limit ends at that moment, and its cancellation
    # would be lost.
    try:
        async with asyncio.timeout(timeout_s):
            return await answer
    except TimeoutError:
        return False
