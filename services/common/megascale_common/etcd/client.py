"""The asyncio client of etcd's v3 API: the verbs of `protocol.Etcd`, over gRPC.

Leases and elections stand on it in modules of their own. Reads are linearizable and
retried. A write is sent once: on `UnknownOutcome` the caller decides what to do, and
`settled.txn_settled` is the way to do it.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import grpc.aio

from megascale_common.etcd import rpc_pb2
from megascale_common.etcd.connection import REQUIRE_LEADER, EtcdMembers, Member, TlsConfig
from megascale_common.etcd.errors import (
    EtcdUnavailable,
    InvalidEtcdRequest,
    ResourceExhausted,
)
from megascale_common.etcd.operations import (
    Compare,
    GrantedLease,
    KeySpace,
    KeyValue,
    Listing,
    Operation,
    Page,
    TxnResult,
)
from megascale_common.etcd.watch import Watch

PAGE_KEYS = 512  # keys per range request; halved when a page is too large to receive


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """Status of the member that answered; `leader_id` 0 means that it has no leader."""

    version: str
    leader_id: int
    database_size_bytes: int
    revision: int
    member_id: int = 0


class EtcdClient:
    """One client of one cluster, for use as `async with EtcdClient(["127.0.0.1:2379"]) as etcd:`.

    `endpoints` are host:port or unix:///PATH; calls fail over among them. `prefix` (empty, or
    ending with "/") is put before every key and removed from results. `timeout_s` bounds each call,
    retries of reads included. Every call may raise `EtcdUnavailable`, writes also `UnknownOutcome`;
    see `errors`.
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
        """Close the connections, after leases and watches. A closed client stays closed."""
        members = self._members
        self._members = None
        if members is not None:
            await members.close()

    @property
    def members(self) -> EtcdMembers:
        """The connections. Raises InvalidEtcdRequest outside the `async with` block."""
        if self._members is None:
            raise InvalidEtcdRequest("the etcd client is not open: use it in an `async with` block")
        return self._members

    async def get(self, key: str) -> KeyValue | None:
        """The key as stored now, or None."""
        reply = await self._range(rpc_pb2.RangeRequest(key=self.keys.full(key)))
        return self.keys.key_value(reply.kvs[0]) if reply.kvs else None

    async def get_range(self, start: str, end: str, *, limit: int = 0, revision: int = 0) -> Page:
        """Keys from `start` to before `end`, ascending: at most `limit` (0: all), in one request.

        `revision` 0 is now. Raises ResourceExhausted when the answer is too large to receive,
        Compacted if the revision is gone.
        """
        key, range_end = self.keys.between(start, end)
        request = rpc_pb2.RangeRequest(key=key, range_end=range_end, limit=limit, revision=revision)
        reply = await self._range(request)
        items = tuple(self.keys.key_value(kv) for kv in reply.kvs)
        return Page(items, reply.more, revision or reply.header.revision)

    async def get_prefix(self, prefix: str, *, page_keys: int = PAGE_KEYS) -> Listing:
        """Every key that starts with `prefix`, all at one revision, read in pages.

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
        """Delete every key that starts with `prefix`; returns their number."""
        return await self._delete(f"delete prefix {prefix!r}", *self.keys.range_of(prefix))

    async def txn(
        self,
        *,
        compare: Sequence[Compare] = (),
        success: Sequence[Operation] = (),
        failure: Sequence[Operation] = (),
    ) -> TxnResult:
        """All of `success` if every compare holds, else all of `failure`, atomically.

        A key may be put or deleted once per transaction.
        Raises InvalidEtcdRequest for a bad request.
        """
        request = self.keys.txn_request(compare, success, failure)

        async def send(member: Member, timeout_s: float) -> rpc_pb2.TxnResponse:
            return await member.kv.Txn(request, timeout=timeout_s)

        return self.keys.txn_result(await self.members.write("txn", self.timeout_s, send))

    async def grant_lease(self, ttl_s: int) -> GrantedLease:
        """A lease that is gone `ttl_s` whole seconds after it was last kept alive.

        Raises UnknownOutcome when no answer comes: a lease that nobody knows expires by itself.
        """
        request = rpc_pb2.LeaseGrantRequest(TTL=ttl_s)

        async def send(member: Member, timeout_s: float) -> rpc_pb2.LeaseGrantResponse:
            return await member.lease.LeaseGrant(request, timeout=timeout_s)

        reply = await self.members.write("lease grant", self.timeout_s, send)
        return GrantedLease(reply.ID, reply.TTL)

    async def keep_alive(self, lease_id: int, timeout_s: float) -> int:
        """Renew a lease; its time to live from now in seconds, 0 for one that is gone.

        Each renewal has a stream of its own, so it can go to another member than the one before.
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
        """The changes of a key, or of all keys that start with it, from `start_revision` on."""
        return Watch(self, key, start_revision, prefix=prefix)

    async def compact(self, revision: int) -> None:
        """Discard history before `revision`. Raises Compacted if that has happened already."""
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
