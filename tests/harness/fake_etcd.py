"""Connections to an etcd in memory: the client's own code runs on them, unchanged.

:class:`FakeEtcdClient` is the client with other stubs beneath it. Each client has a
:class:`Connection` of its own, on which requests and replies can be delayed, held back, lost or
reset. A request that is on its way arrives even if its sender is gone by then, as on a network.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Self

import grpc
import grpc.aio
from tests.harness.fake_etcd_store import FakeEtcdStore, rpc_error

from megascale_common.etcd import rpc_pb2
from megascale_common.etcd.client import EtcdClient
from megascale_common.etcd.connection import EtcdMembers, Member


class FakeEtcd:
    """The server: a store, its disk, and what is still on the way to it."""

    def __init__(self, progress_s: float = 0.0) -> None:
        self.store = FakeEtcdStore()
        self.up = True
        self.disk_s = 0.0  # that a write takes
        self.progress_s = progress_s  # interval of progress notifications; 0: none
        # Called around each write with the connection that it came on; for faults and invariants.
        self.before_write: Callable[[Connection, Any], None] = lambda connection, request: None
        self.after_write: Callable[[Connection, Any, Any], None] = lambda connection, request, r: (
            None
        )
        self.connections: list[Connection] = []
        self.watches: list[FakeWatchCall] = []
        self.store.changed.append(self._feed)
        self._disk_free_at_s = 0.0

    def stop(self) -> None:
        """The server is gone: connections break, the state stays."""
        self.up = False
        for connection in self.connections:
            connection.reset()

    def start(self) -> None:
        """The server is back; every lease gets its full time again, as with a new etcd leader."""
        self.up = True
        now_s = asyncio.get_running_loop().time()
        for lease_id, lease in self.store.leases.items():
            lease.expires_at_s = now_s + lease.ttl_s
            self._expire_later(lease_id)

    def write_done_at_s(self, now_s: float) -> float:
        """When the disk has taken the next write: writes are done one after the other."""
        self._disk_free_at_s = max(now_s, self._disk_free_at_s) + self.disk_s
        return self._disk_free_at_s

    def grant(self, ttl_s: int) -> rpc_pb2.LeaseGrantResponse:
        """A lease that expires by itself unless it is renewed."""
        lease_id = self.store.grant(ttl_s, asyncio.get_running_loop().time())
        self._expire_later(lease_id)
        return rpc_pb2.LeaseGrantResponse(ID=lease_id, TTL=ttl_s)

    def _expire_later(self, lease_id: int) -> None:
        lease = self.store.leases[lease_id]
        loop = asyncio.get_running_loop()
        delay_s = max(0.0, lease.expires_at_s - loop.time())
        loop.call_later(delay_s, self._expire, lease_id, context=contextvars.Context())

    def _expire(self, lease_id: int) -> None:
        lease = self.store.leases.get(lease_id)
        if lease is None or not self.up:
            return
        if lease.expires_at_s > asyncio.get_running_loop().time():
            self._expire_later(lease_id)
        else:
            self.store.end_lease(lease_id)

    def _feed(self, revision: int, events: list[rpc_pb2.Event]) -> None:
        for watch in list(self.watches):
            watch.offer(revision, events)


class Connection:
    """One client's connection. The faults are attributes that a test sets."""

    def __init__(self, etcd: FakeEtcd, owner: str = "") -> None:
        self.etcd = etcd
        self.owner = owner
        self.delay_s: Callable[[], float] = lambda: 0.0
        self.reachable = True
        self.swallow_requests = False
        self.swallow_replies = False
        self.swallowed = 0
        self._waiting: dict[asyncio.Future[Any], None] = {}
        self._streams: dict[_Stream, None] = {}
        etcd.connections.append(self)

    @property
    def up(self) -> bool:
        """Whether a new connection would be opened."""
        return self.reachable and self.etcd.up

    def reset(self) -> None:
        """Break the connection: calls in flight fail, though what they sent may have arrived."""
        self.swallow_requests = self.swallow_replies = False
        waiting, self._waiting = self._waiting, {}
        for reply in waiting:
            if not reply.done():
                reply.set_exception(
                    rpc_error(grpc.StatusCode.UNAVAILABLE, "connection reset by peer")
                )
        for stream in list(self._streams):
            stream.break_off()

    async def call(
        self, request: Any, apply: Callable[[Any], Any], timeout_s: float | None, *, write: bool
    ) -> Any:
        """Send a request, have it applied when it arrives, wait for the reply."""
        if not self.up:
            raise rpc_error(grpc.StatusCode.UNAVAILABLE, "connection refused")
        loop = asyncio.get_running_loop()
        reply: asyncio.Future[Any] = loop.create_future()
        self._waiting[reply] = None
        self._later(self.delay_s(), self._arrive, request, apply, reply, write)
        try:
            async with asyncio.timeout(timeout_s):
                return await reply
        except TimeoutError:
            raise rpc_error(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded") from None
        finally:
            self._waiting.pop(reply, None)

    def _later(self, delay_s: float, work: Callable[..., object], *arguments: Any) -> None:
        loop = asyncio.get_running_loop()
        # In a context of its own: it belongs to no process, so it happens whoever dies.
        loop.call_later(delay_s, work, *arguments, context=contextvars.Context())

    def _arrive(
        self, request: Any, apply: Callable[[Any], Any], reply: asyncio.Future[Any], write: bool
    ) -> None:
        if self.swallow_requests or not self.etcd.up:
            self.swallowed += 1
            return
        if not write or not self.etcd.disk_s:
            self._apply(request, apply, reply, write)
            return
        now_s = asyncio.get_running_loop().time()
        wait_s = self.etcd.write_done_at_s(now_s) - now_s
        self._later(wait_s, self._apply, request, apply, reply, write)

    def _apply(
        self, request: Any, apply: Callable[[Any], Any], reply: asyncio.Future[Any], write: bool
    ) -> None:
        if not self.etcd.up:
            return
        if write:
            self.etcd.before_write(self, request)
        try:
            answer = apply(request)
        except grpc.aio.AioRpcError as error:
            answer = error
        if write:
            self.etcd.after_write(self, request, answer)
        self._later(self.delay_s(), self._reply, answer, reply)

    def _reply(self, answer: Any, reply: asyncio.Future[Any]) -> None:
        if self.swallow_replies:
            self.swallowed += 1
        elif not reply.done():
            if isinstance(answer, Exception):
                reply.set_exception(answer)
            else:
                reply.set_result(answer)


class _Stream:
    """What keep-alives and watches have in common: messages to the client, or the end."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._inbox: deque[Any] = deque()
        self._arrived = asyncio.Event()
        self._ended = not connection.up
        connection._streams[self] = None

    def break_off(self) -> None:
        """The connection broke."""
        self._end()

    def cancel(self) -> None:
        """The client ends the call."""
        self._end()

    async def read(self) -> Any:
        """The next message; EOF after the end, as gRPC has it, or its error."""
        while not self._inbox:
            if self._ended:
                raise rpc_error(grpc.StatusCode.UNAVAILABLE, "the stream broke")
            self._arrived.clear()
            await self._arrived.wait()
        return self._inbox.popleft()

    def push(self, message: Any) -> None:
        """Deliver a message to the client."""
        if not self._ended and not self.connection.swallow_replies:
            self._inbox.append(message)
            self._arrived.set()

    def _end(self) -> None:
        self._ended = True
        self.connection._streams.pop(self, None)
        self._arrived.set()


class FakeKeepAliveCall(_Stream):
    """LeaseKeepAlive: one request, one reply."""

    def __init__(self, connection: Connection, timeout_s: float | None) -> None:
        super().__init__(connection)
        self._timeout_s = timeout_s

    async def write(self, request: rpc_pb2.LeaseKeepAliveRequest) -> None:
        """Send the keep-alive."""
        connection = self.connection
        if self._ended:
            raise rpc_error(grpc.StatusCode.UNAVAILABLE, "connection refused")
        connection._later(connection.delay_s(), self._arrive, request.ID)

    async def read(self) -> Any:
        """The reply, within the call's time."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await super().read()
        except TimeoutError:
            raise rpc_error(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded") from None

    def _arrive(self, lease_id: int) -> None:
        etcd = self.connection.etcd
        if self.connection.swallow_requests or not etcd.up:
            return
        ttl_s = etcd.store.renew(lease_id, asyncio.get_running_loop().time())
        reply = rpc_pb2.LeaseKeepAliveResponse(ID=lease_id, TTL=ttl_s)
        self.connection._later(self.connection.delay_s(), self.push, reply)


class FakeWatchCall(_Stream):
    """Watch: the history from a revision on, then every change."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._range: tuple[bytes, bytes] | None = None
        self._next = 0

    async def write(self, request: rpc_pb2.WatchRequest) -> None:
        """Create the watch."""
        connection = self.connection
        if self._ended:
            raise rpc_error(grpc.StatusCode.UNAVAILABLE, "connection refused")
        connection._later(connection.delay_s(), self._create, request.create_request)

    def _create(self, wanted: rpc_pb2.WatchCreateRequest) -> None:
        etcd = self.connection.etcd
        if self._ended or self.connection.swallow_requests or not etcd.up:
            return
        store = etcd.store
        self.push(rpc_pb2.WatchResponse(header=store.header(), created=True))
        if 0 < wanted.start_revision < store.compacted:
            self.push(
                rpc_pb2.WatchResponse(
                    header=store.header(),
                    canceled=True,
                    compact_revision=store.compacted,
                    cancel_reason="mvcc: required revision has been compacted",
                )
            )
            return
        self._range = (wanted.key, wanted.range_end)
        self._next = wanted.start_revision or store.revision + 1
        for revision, events in store.events_since(self._next):
            self.offer(revision, events)
        etcd.watches.append(self)
        if etcd.progress_s and wanted.progress_notify:
            self.connection._later(etcd.progress_s, self._progress)

    def offer(self, revision: int, events: list[rpc_pb2.Event]) -> None:
        """A change of the store, of which the watch delivers its keys."""
        if self._range is None or revision < self._next:
            return
        key, end = self._range
        mine = [
            event
            for event in events
            if (event.kv.key == key if not end else key <= event.kv.key)
            and (not end or end == b"\0" or event.kv.key < end)
        ]
        self._next = revision + 1
        if mine:
            header = rpc_pb2.ResponseHeader(revision=revision)
            message = rpc_pb2.WatchResponse(header=header, events=mine)
            self.connection._later(self.connection.delay_s(), self.push, message)

    def _progress(self) -> None:
        etcd = self.connection.etcd
        if self._ended or not etcd.up:
            return
        notification = rpc_pb2.WatchResponse(header=etcd.store.header())
        # On the way behind the events that were sent before: it says that they have arrived.
        self.connection._later(self.connection.delay_s(), self.push, notification)
        self.connection._later(etcd.progress_s, self._progress)

    def _end(self) -> None:
        super()._end()
        if self in self.connection.etcd.watches:
            self.connection.etcd.watches.remove(self)


class _Channel:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        up = self._connection.up
        states = grpc.ChannelConnectivity
        return states.READY if up else states.TRANSIENT_FAILURE

    async def wait_for_state_change(self, state: grpc.ChannelConnectivity) -> None:
        await asyncio.sleep(0)

    async def close(self) -> None:
        self._connection.reset()


class _Stubs:
    """All four services of one member."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def Range(
        self, request: Any, timeout: float | None = None, metadata: Any = None
    ) -> Awaitable[Any]:
        return self._call(request, self._store.range, timeout, write=False)

    def Put(self, request: Any, timeout: float | None = None) -> Awaitable[Any]:
        return self._call(request, self._store.put, timeout)

    def DeleteRange(self, request: Any, timeout: float | None = None) -> Awaitable[Any]:
        return self._call(request, self._store.delete, timeout)

    def Txn(self, request: Any, timeout: float | None = None) -> Awaitable[Any]:
        return self._call(request, self._store.txn, timeout)

    def Compact(self, request: Any, timeout: float | None = None) -> Awaitable[Any]:
        def compact(wanted: rpc_pb2.CompactionRequest) -> rpc_pb2.CompactionResponse:
            self._store.compact(wanted.revision)
            return rpc_pb2.CompactionResponse(header=self._store.header())

        return self._call(request, compact, timeout)

    def Status(self, request: Any, timeout: float | None = None) -> Awaitable[Any]:
        def status(_: Any) -> rpc_pb2.StatusResponse:
            return rpc_pb2.StatusResponse(
                header=self._store.header(), version="fake", leader=1, dbSize=1
            )

        return self._call(request, status, timeout, write=False)

    def LeaseGrant(self, request: Any, timeout: float | None = None) -> Awaitable[Any]:
        def grant(wanted: rpc_pb2.LeaseGrantRequest) -> rpc_pb2.LeaseGrantResponse:
            return self._connection.etcd.grant(wanted.TTL)

        return self._call(request, grant, timeout)

    def LeaseRevoke(self, request: Any, timeout: float | None = None) -> Awaitable[Any]:
        def revoke(wanted: rpc_pb2.LeaseRevokeRequest) -> rpc_pb2.LeaseRevokeResponse:
            if not self._store.end_lease(wanted.ID):
                raise rpc_error(grpc.StatusCode.NOT_FOUND, "etcdserver: requested lease not found")
            return rpc_pb2.LeaseRevokeResponse(header=self._store.header())

        return self._call(request, revoke, timeout)

    def LeaseKeepAlive(self, timeout: float | None = None) -> FakeKeepAliveCall:
        return FakeKeepAliveCall(self._connection, timeout)

    def Watch(self, metadata: Any = None) -> FakeWatchCall:
        return FakeWatchCall(self._connection)

    @property
    def _store(self) -> FakeEtcdStore:
        return self._connection.etcd.store

    def _call(
        self,
        request: Any,
        apply: Callable[[Any], Any],
        timeout: float | None,
        *,
        write: bool = True,
    ) -> Awaitable[Any]:
        return self._connection.call(request, apply, timeout, write=write)


class _FakeMember(Member):
    def __init__(self, connection: Connection) -> None:
        stubs: Any = _Stubs(connection)
        channel: Any = _Channel(connection)
        self.endpoint, self._tls, self._stamp = "fake:2379", None, ()
        self.channel = channel
        self.kv = self.lease = self.watch = self.maintenance = stubs

    async def connected(self) -> bool:
        """Whether the member can be reached now."""
        return self.channel.get_state() is grpc.ChannelConnectivity.READY


class _FakeMembers(EtcdMembers):
    def __init__(self, connections: Sequence[Connection]) -> None:
        self._members = [_FakeMember(connection) for connection in connections]
        self._current, self._tls = 0, None
        self.endpoints = tuple("fake:2379" for _ in connections)


class FakeEtcdClient(EtcdClient):
    """The etcd client of the services, on connections to an etcd in memory."""

    def __init__(
        self, connections: Sequence[Connection], *, prefix: str = "", timeout_s: float = 5.0
    ) -> None:
        super().__init__(["fake:2379"], prefix=prefix, timeout_s=timeout_s)
        self._connections = connections

    async def __aenter__(self) -> Self:
        self._members = _FakeMembers(self._connections)
        return self
