"""The asyncio client of etcd's v3 API: the verbs of ``operations.Etcd``, over gRPC.

Leases and elections build on it in modules of their own. Reads are linearizable and retried. A
write is sent once; after ``UnknownOutcome`` the caller settles it with ``settled.txn_settled``.

Note [Resuming a watch]
~~~~~~~~~~~~~~~~~~~~~~~
A watch survives lost connections: it delivers each change from a revision on, in order and once. A
revision can change many keys, and etcd can split its events over several messages. So the position
of a watch is a revision and the number of its events already delivered. To resume, the watch
requests that revision again and skips that number of events.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import grpc
import grpc.aio

from megascale_common.etcd import rpc_pb2
from megascale_common.etcd.connection import (
    REQUIRE_LEADER,
    EtcdMembers,
    Member,
    TlsConfig,
    retry_backoff,
)
from megascale_common.etcd.errors import (
    AccessDenied,
    Compacted,
    EtcdUnavailable,
    InvalidEtcdRequest,
    ResourceExhausted,
    refusal,
)
from megascale_common.etcd.operations import (
    Compare,
    Event,
    GrantedLease,
    KeySpace,
    KeyValue,
    Listing,
    Operation,
    Page,
    TxnResult,
)
from megascale_common.service import logs
from megascale_common.service.tasks import Backoff

PAGE_KEYS = 512  # keys per range request; halved when a page is too large to receive
# When so many events wait for a slow consumer, reading stops, and flow control stops the server.
QUEUE_EVENTS = 1024

_log = logs.get(__name__)


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """Status of the member that answered; ``leader_id`` 0 means that there is no leader."""

    version: str
    leader_id: int
    database_size_bytes: int
    revision: int
    member_id: int = 0


class EtcdClient:
    """One client of one cluster, for use as ``async with EtcdClient(["127.0.0.1:2379"]) as etcd:``.

    ``endpoints`` are host:port or unix:///PATH; calls fail over among them. ``prefix`` (empty, or
    ending with "/") is added before every key and removed from results. ``timeout_s`` bounds each
    call, including retries of reads. Every call can raise ``EtcdUnavailable``, writes also
    ``UnknownOutcome``; see ``errors``.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        prefix: str = "",
        timeout_s: float = 5.0,
        tls: TlsConfig | None = None,
    ) -> None:
        if timeout_s <= 0:
            raise InvalidEtcdRequest(f"timeout_s: {timeout_s} must be positive")
        self.keys = KeySpace(prefix)
        self.timeout_s = timeout_s
        self.endpoints = tuple(endpoints)
        self.tls = tls
        self._members: EtcdMembers | None = None

    async def __aenter__(self) -> Self:
        self._members = EtcdMembers(self.endpoints, self.tls)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; close leases and watches before. A closed client stays closed."""
        members = self._members
        self._members = None
        if members is not None:
            await members.close()

    @property
    def members(self) -> EtcdMembers:
        """The connections. Raises InvalidEtcdRequest outside the ``async with`` block."""
        if self._members is None:
            raise InvalidEtcdRequest("the etcd client is not open: use it in an `async with` block")
        return self._members

    async def get(self, key: str) -> KeyValue | None:
        """The key as stored now, or None."""
        reply = await self._range(rpc_pb2.RangeRequest(key=self.keys.full(key)))
        return self.keys.key_value(reply.kvs[0]) if reply.kvs else None

    async def get_range(self, start: str, end: str, *, limit: int = 0, revision: int = 0) -> Page:
        """Keys from ``start`` to before ``end``, in order: at most ``limit`` (0: all), in one call.

        ``revision`` 0 is now. Raises ResourceExhausted when the answer is too large to receive,
        Compacted if the revision is gone.
        """
        key, range_end = self.keys.between(start, end)
        request = rpc_pb2.RangeRequest(key=key, range_end=range_end, limit=limit, revision=revision)
        reply = await self._range(request)
        items = tuple(self.keys.key_value(kv) for kv in reply.kvs)
        return Page(items, reply.more, revision or reply.header.revision)

    async def get_prefix(self, prefix: str, *, page_keys: int = PAGE_KEYS) -> Listing:
        """Every key that starts with ``prefix``, all at one revision, read in pages.

        Raises Compacted if that revision was compacted away between two pages: call again.
        """
        if page_keys < 1:
            raise InvalidEtcdRequest(f"page_keys: {page_keys} must be at least 1")
        key, end = self.keys.range_of(prefix)
        items: list[KeyValue] = []
        revision = 0
        while True:
            request = rpc_pb2.RangeRequest(
                key=key, range_end=end, limit=page_keys, revision=revision
            )
            try:
                reply = await self._range(request)
            except ResourceExhausted:
                if page_keys == 1:
                    raise
                page_keys //= 2
                continue
            items.extend(self.keys.key_value(kv) for kv in reply.kvs)
            revision = revision or reply.header.revision
            if not reply.more:
                return Listing(tuple(items), revision)
            key = reply.kvs[-1].key + b"\0"

    async def put(self, key: str, value: bytes, *, lease_id: int = 0) -> int:
        """Store the value; returns the revision of the change.

        Raises LeaseNotFound when the lease has expired or was revoked.
        """
        request = rpc_pb2.PutRequest(key=self.keys.full(key), value=value, lease=lease_id)

        async def send(member: Member, timeout_s: float) -> rpc_pb2.PutResponse:
            return await member.kv.Put(request, timeout=timeout_s)

        return (await self.members.write(f"put {key}", self.timeout_s, send)).header.revision

    async def delete(self, key: str) -> int:
        """Delete the key; returns the number of keys deleted (0 or 1)."""
        return await self._delete(f"delete {key}", self.keys.full(key), b"")

    async def delete_prefix(self, prefix: str) -> int:
        """Delete every key that starts with ``prefix``; returns their number."""
        return await self._delete(f"delete prefix {prefix!r}", *self.keys.range_of(prefix))

    async def txn(
        self,
        *,
        compare: Sequence[Compare] = (),
        success: Sequence[Operation] = (),
        failure: Sequence[Operation] = (),
    ) -> TxnResult:
        """All of ``success`` if every compare holds, else all of ``failure``, atomically.

        A key can be put or deleted once per transaction. Raises InvalidEtcdRequest for a bad
        request.
        """
        request = self.keys.txn_request(compare, success, failure)

        async def send(member: Member, timeout_s: float) -> rpc_pb2.TxnResponse:
            return await member.kv.Txn(request, timeout=timeout_s)

        return self.keys.txn_result(await self.members.write("txn", self.timeout_s, send))

    async def grant_lease(self, ttl_s: int) -> GrantedLease:
        """A lease that ends ``ttl_s`` whole seconds after its last renewal.

        Raises UnknownOutcome if no answer comes; a lease that was granted then expires by itself.
        """
        request = rpc_pb2.LeaseGrantRequest(TTL=ttl_s)

        async def send(member: Member, timeout_s: float) -> rpc_pb2.LeaseGrantResponse:
            return await member.lease.LeaseGrant(request, timeout=timeout_s)

        reply = await self.members.write("lease grant", self.timeout_s, send)
        return GrantedLease(reply.ID, reply.TTL)

    async def keep_alive(self, lease_id: int, timeout_s: float) -> int:
        """Renew a lease; returns its time to live from now in seconds, 0 if it is gone.

        Each renewal has a stream of its own, so that it can go to another member than the last one.
        """

        async def send(member: Member, call_timeout_s: float) -> int:
            call = member.lease.LeaseKeepAlive(timeout=call_timeout_s)
            try:
                await call.write(rpc_pb2.LeaseKeepAliveRequest(ID=lease_id))
                reply = await call.read()
            except asyncio.InvalidStateError:  # raised by a write to a call that has just ended
                reply = grpc.aio.EOF
            finally:
                call.cancel()
            if not isinstance(reply, rpc_pb2.LeaseKeepAliveResponse):
                raise EtcdUnavailable("the keep-alive stream ended without a reply")
            return reply.TTL

        return await self.members.read("lease keep-alive", timeout_s, send)

    async def revoke_lease(self, lease_id: int, timeout_s: float) -> None:
        """End a lease and delete its keys. Raises LeaseNotFound if it is gone."""
        request = rpc_pb2.LeaseRevokeRequest(ID=lease_id)

        async def send(member: Member, call_timeout_s: float) -> rpc_pb2.LeaseRevokeResponse:
            return await member.lease.LeaseRevoke(request, timeout=call_timeout_s)

        await self.members.write("lease revoke", timeout_s, send)

    def watch(self, key: str, start_revision: int, *, prefix: bool = True) -> Watch:
        """The changes of a key, or of all keys that start with it, from ``start_revision`` on."""
        return Watch(self, key, start_revision, prefix=prefix)

    async def compact(self, revision: int) -> None:
        """Discard history before ``revision``. Raises Compacted if that has happened already."""
        request = rpc_pb2.CompactionRequest(revision=revision, physical=True)

        async def send(member: Member, timeout_s: float) -> rpc_pb2.CompactionResponse:
            return await member.kv.Compact(request, timeout=timeout_s)

        await self.members.write(f"compact {revision}", self.timeout_s, send)

    async def status(self) -> MemberStatus:
        """The status of the member in use."""

        async def send(member: Member, timeout_s: float) -> rpc_pb2.StatusResponse:
            return await member.maintenance.Status(rpc_pb2.StatusRequest(), timeout=timeout_s)

        reply = await self.members.read("status", self.timeout_s, send)
        return MemberStatus(
            reply.version,
            reply.leader,
            reply.dbSize,
            reply.header.revision,
            reply.header.member_id,
        )

    async def _range(self, request: rpc_pb2.RangeRequest) -> rpc_pb2.RangeResponse:
        async def send(member: Member, timeout_s: float) -> rpc_pb2.RangeResponse:
            return await member.kv.Range(request, timeout=timeout_s, metadata=REQUIRE_LEADER)

        return await self.members.read(f"get {request.key!r}", self.timeout_s, send)

    async def _delete(self, what: str, key: bytes, end: bytes) -> int:
        request = rpc_pb2.DeleteRangeRequest(key=key, range_end=end)

        async def send(member: Member, timeout_s: float) -> rpc_pb2.DeleteRangeResponse:
            return await member.kv.DeleteRange(request, timeout=timeout_s)

        return (await self.members.write(what, self.timeout_s, send)).deleted


@dataclass(slots=True)
class Position:
    """Progress of a watch; see Note [Resuming a watch].

    Delivered are all events before ``revision``, and the first ``delivered`` ones of it.
    ``repeated`` events of ``revision`` will come again on the present stream before new ones.
    """

    revision: int
    delivered: int = 0
    repeated: int = 0

    def restart(self) -> int:
        """The revision to request on a new stream."""
        self.repeated = self.delivered
        return self.revision

    def take(self, revision: int) -> bool:
        """Move past the next event of the stream, at ``revision``; returns whether it is new."""
        if revision < self.revision:
            return False
        if revision > self.revision:
            self.revision = revision
            self.delivered = 0
            self.repeated = 0
        if self.repeated:
            self.repeated -= 1
            return False
        self.delivered += 1
        return True

    def complete(self, revision: int) -> None:
        """Everything up to and with ``revision`` has been delivered."""
        if revision >= self.revision:
            self.revision = revision + 1
            self.delivered = 0
            self.repeated = 0


class Watch:
    """``async with Watch(client, prefix, start_revision) as watch: async for event in watch: ...``

    Delivers the changes of every key that starts with ``key`` (``prefix=False``: of that key
    alone), from ``start_revision`` on, which is included: read a Listing first and start at its
    revision + 1. While no member answers, it waits without limit; a call of the client shows
    whether etcd is away. Iteration raises AccessDenied, or Compacted if history that was still to
    be delivered was discarded (then list again), and ends after ``close``. At most ``queue_events``
    are held ahead of the consumer.
    """

    def __init__(
        self,
        client: EtcdClient,
        key: str,
        start_revision: int,
        *,
        prefix: bool = True,
        queue_events: int = QUEUE_EVENTS,
    ) -> None:
        if start_revision < 1:
            raise InvalidEtcdRequest(
                f"start_revision: {start_revision} must be at least 1: start right behind a read, "
                "so that no change is missed between the two"
            )
        self.position = Position(start_revision)
        self._client = client
        self._key = key
        self._range = client.keys.range_of(key) if prefix else (client.keys.full(key), b"")
        self._room = asyncio.Semaphore(queue_events)
        # Bounded by _room, not by a size, so that the end (None) always finds a place in it.
        self._queue: asyncio.Queue[Event | None] = asyncio.Queue()
        self._failure: Exception | None = None
        self._reader: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._reader = asyncio.create_task(self._run(), name=f"etcd-watch-{self._key}")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        event = await self._queue.get()
        if event is not None:
            self._room.release()
            return event
        self._queue.put_nowait(None)  # so that every later call finds the end too
        if self._failure is not None:
            raise self._failure
        raise StopAsyncIteration

    async def close(self) -> None:
        """Stop watching. Events already in the queue are delivered, then the iteration ends."""
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.wait([self._reader])

    async def _run(self) -> None:
        """Follow one stream after another until the watch is refused or closed."""
        backoff = retry_backoff()
        members = self._client.members
        try:
            while True:
                with contextlib.suppress(EtcdUnavailable):
                    member = await members.member(self._client.timeout_s)
                    call = member.watch.Watch(metadata=REQUIRE_LEADER)
                    try:
                        await self._follow(call, backoff)
                    except grpc.aio.AioRpcError as error:
                        if (refused := refusal(error, f"watch {self._key}")) is not None:
                            raise refused from error
                    except asyncio.InvalidStateError:
                        pass  # raised by a write to a call that has just ended
                    finally:
                        call.cancel()
                    members.avoid(member)
                _log.info("watch resumes", key=self._key, revision=self.position.revision)
                await backoff.sleep()
        except Exception as error:  # raised again where the consumer iterates
            self._failure = error
        finally:
            self._queue.put_nowait(None)

    async def _follow(
        self,
        call: grpc.aio.StreamStreamCall[rpc_pb2.WatchRequest, rpc_pb2.WatchResponse],
        backoff: Backoff,
    ) -> None:
        """Deliver one stream's events; returns when the server ends the stream."""
        key, end = self._range
        create = rpc_pb2.WatchCreateRequest(
            key=key,
            range_end=end,
            start_revision=self.position.restart(),
            progress_notify=True,
            fragment=True,
        )
        await call.write(rpc_pb2.WatchRequest(create_request=create))
        while True:
            response = await call.read()
            if not isinstance(response, rpc_pb2.WatchResponse):
                return
            if response.canceled:
                return self._canceled(response)
            if not response.created:
                backoff.reset()
                await self._deliver(response)

    async def _deliver(self, response: rpc_pb2.WatchResponse) -> None:
        """Queue the new events of a message and move the position past it."""
        for event in response.events:
            if self.position.take(event.kv.mod_revision):
                await self._room.acquire()
                deleted = event.type == rpc_pb2.Event.DELETE
                self._queue.put_nowait(Event(self._client.keys.key_value(event.kv), deleted))
        if not response.fragment:
            # Without events it is a progress notification: there are none up to its revision. With
            # events the header's revision can be ahead of them, so only their own counts. A
            # fragment completes no revision, because more events of its last one follow.
            last = (
                response.events[-1].kv.mod_revision if response.events else response.header.revision
            )
            self.position.complete(last)

    def _canceled(self, response: rpc_pb2.WatchResponse) -> None:
        """Raise if the server will never serve this watch; return if a new stream can help."""
        reason = response.cancel_reason or "no reason given"
        if response.compact_revision:
            raise Compacted(
                f"watch {self._key}: revision {self.position.revision} is gone",
                response.compact_revision,
            )
        if "permission denied" in reason:
            raise AccessDenied(f"watch {self._key}: {reason}")
        _log.warning("watch canceled by the server", key=self._key, reason=reason)
