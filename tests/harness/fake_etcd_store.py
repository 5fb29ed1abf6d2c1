"""The state of an etcd in memory: revisions, history, transactions, leases, compaction.

It takes and gives etcd's own messages and refuses what etcd refuses, with its codes and words;
tests/integration/test_etcd_conformance.py holds it to the behaviour of the real server. Time comes
from outside: whoever drives it ends the leases.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import grpc
import grpc.aio

from megascale_common.etcd import rpc_pb2

MAX_OPERATIONS = 128  # etcd's default --max-txn-ops
MAX_REQUEST_BYTES = 3 << 19  # etcd's default --max-request-bytes: 1.5 MiB
RANGE_FIELDS = frozenset({"key", "range_end", "limit", "revision"})
KEPT_REVISIONS = 50_000  # compacted by itself beyond, so that long runs stay small


def rpc_error(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    """The error that a call to etcd ends with."""
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=details)


@dataclass(slots=True)
class FakeLease:
    """One lease: its keys are deleted when it ends."""

    ttl_s: int
    expires_at_s: float
    keys: set[bytes] = field(default_factory=set)


@dataclass(slots=True)
class _Key:
    # Every version since the last compaction: (mod revision, value), None where it was deleted.
    versions: list[tuple[int, rpc_pb2.KeyValue | None]] = field(default_factory=list)

    @property
    def now(self) -> rpc_pb2.KeyValue | None:
        return self.versions[-1][1] if self.versions else None

    def at(self, revision: int) -> rpc_pb2.KeyValue | None:
        place = bisect.bisect_right(self.versions, revision, key=lambda item: item[0])
        return self.versions[place - 1][1] if place else None


class FakeEtcdStore:
    """One cluster's state. ``changed`` is called with each new revision and its events."""

    def __init__(self) -> None:
        self.revision = 1
        self.compacted = 0
        self.leases: dict[int, FakeLease] = {}
        self.changed: list[Callable[[int, list[rpc_pb2.Event]], None]] = []
        self._keys: dict[bytes, _Key] = {}
        self._sorted: list[bytes] = []
        self._history: list[tuple[int, list[rpc_pb2.Event]]] = []
        self._next_lease = 7_000
        # The events of the transaction in progress, at revision + 1.
        self._events: list[rpc_pb2.Event] | None = None

    def get(self, key: bytes) -> rpc_pb2.KeyValue | None:
        """The key as stored now."""
        stored = self._keys.get(key)
        return stored.now if stored is not None else None

    def header(self) -> rpc_pb2.ResponseHeader:
        """The header of an answer now."""
        return rpc_pb2.ResponseHeader(revision=self.revision)

    def range(self, request: rpc_pb2.RangeRequest) -> rpc_pb2.RangeResponse:
        """Keys of a range, at a revision, up to a limit."""
        if not request.key:
            raise rpc_error(grpc.StatusCode.INVALID_ARGUMENT, "etcdserver: key is not provided")
        at = request.revision or self.revision
        if at > self.revision:
            raise rpc_error(
                grpc.StatusCode.OUT_OF_RANGE,
                "etcdserver: mvcc: required revision is a future revision",
            )
        if at < self.compacted:
            raise _compacted()
        unknown = {field.name for field, _ in request.ListFields()} - RANGE_FIELDS
        if unknown:
            raise rpc_error(grpc.StatusCode.UNIMPLEMENTED, f"not built: {sorted(unknown)}")
        found: list[rpc_pb2.KeyValue] = []
        for key in self._matching(request.key, request.range_end):
            value = self._keys[key].at(at) if request.revision else self._keys[key].now
            if value is not None:
                found.append(value)
            if 0 < request.limit < len(found):
                break
        more = bool(request.limit) and len(found) > request.limit
        kvs = found[: request.limit] if more else found
        return rpc_pb2.RangeResponse(header=self.header(), kvs=kvs, more=more)

    def put(self, request: rpc_pb2.PutRequest) -> rpc_pb2.PutResponse:
        """Store one key."""
        _limit(request)
        with _Transaction(self):
            self._put(request)
        return rpc_pb2.PutResponse(header=self.header())

    def delete(self, request: rpc_pb2.DeleteRangeRequest) -> rpc_pb2.DeleteRangeResponse:
        """Delete a range of keys."""
        with _Transaction(self):
            deleted = self._delete(request)
        return rpc_pb2.DeleteRangeResponse(header=self.header(), deleted=deleted)

    def txn(self, request: rpc_pb2.TxnRequest) -> rpc_pb2.TxnResponse:
        """One branch of a transaction, whole or not at all."""
        _limit(request)
        _check_txn(request)
        holds = all(self.holds(item) for item in request.compare)
        operations = request.success if holds else request.failure
        for item in operations:
            if item.WhichOneof("request") == "request_put":
                self._check_lease(item.request_put.lease)
        responses = []
        with _Transaction(self):
            for item in operations:
                responses.append(self._operate(item))
        return rpc_pb2.TxnResponse(header=self.header(), succeeded=holds, responses=responses)

    def compact(self, revision: int) -> None:
        """Forget history before a revision."""
        if revision <= self.compacted:
            raise _compacted()
        if revision > self.revision:
            raise rpc_error(
                grpc.StatusCode.OUT_OF_RANGE,
                "etcdserver: mvcc: required revision is a future revision",
            )
        self.compacted = revision
        self._history = [item for item in self._history if item[0] >= revision]
        for key in list(self._keys):
            stored = self._keys[key]
            place = bisect.bisect_right(stored.versions, revision, key=lambda item: item[0])
            del stored.versions[: max(0, place - 1)]
            if stored.now is None and stored.versions[-1][0] <= revision:
                del self._keys[key]
                del self._sorted[bisect.bisect_left(self._sorted, key)]

    def events_since(self, revision: int) -> Iterator[tuple[int, list[rpc_pb2.Event]]]:
        """Revisions from ``revision`` on with their events."""
        place = bisect.bisect_left(self._history, revision, key=lambda item: item[0])
        yield from self._history[place:]

    def grant(self, ttl_s: int, now_s: float) -> int:
        """A new lease; returns its id."""
        self._next_lease += 1
        self.leases[self._next_lease] = FakeLease(ttl_s, now_s + ttl_s)
        return self._next_lease

    def renew(self, lease_id: int, now_s: float) -> int:
        """Keep a lease alive; returns its TTL, 0 if it is gone."""
        lease = self.leases.get(lease_id)
        if lease is None:
            return 0
        lease.expires_at_s = now_s + lease.ttl_s
        return lease.ttl_s

    def end_lease(self, lease_id: int) -> bool:
        """Revoke or expire a lease, which deletes its keys in one revision."""
        lease = self.leases.pop(lease_id, None)
        if lease is None:
            return False
        with _Transaction(self):
            for key in sorted(lease.keys):
                self._delete(rpc_pb2.DeleteRangeRequest(key=key))
        return True

    def _matching(self, key: bytes, end: bytes) -> list[bytes]:
        if not end:
            return [key] if key in self._keys else []
        first = bisect.bisect_left(self._sorted, key) if key != b"\0" else 0
        last = len(self._sorted) if end == b"\0" else bisect.bisect_left(self._sorted, end)
        return self._sorted[first:last]

    def holds(self, item: rpc_pb2.Compare) -> bool:
        """Whether a compare holds now."""
        stored = self.get(item.key)
        if item.target == rpc_pb2.Compare.CREATE:
            have, want = stored.create_revision if stored else 0, item.create_revision
        elif item.target == rpc_pb2.Compare.MOD:
            have, want = stored.mod_revision if stored else 0, item.mod_revision
        elif item.target == rpc_pb2.Compare.VERSION:
            have, want = stored.version if stored else 0, item.version
        else:
            raise rpc_error(grpc.StatusCode.UNIMPLEMENTED, "this compare is not built")
        if item.result == rpc_pb2.Compare.EQUAL:
            return have == want
        if item.result == rpc_pb2.Compare.NOT_EQUAL:
            return have != want
        return have > want if item.result == rpc_pb2.Compare.GREATER else have < want

    def _operate(self, item: rpc_pb2.RequestOp) -> rpc_pb2.ResponseOp:
        kind = item.WhichOneof("request")
        if kind == "request_put":
            self._put(item.request_put)
            return rpc_pb2.ResponseOp(response_put=rpc_pb2.PutResponse(header=self.header()))
        if kind == "request_range":
            return rpc_pb2.ResponseOp(response_range=self.range(item.request_range))
        deleted = self._delete(item.request_delete_range)
        return rpc_pb2.ResponseOp(
            response_delete_range=rpc_pb2.DeleteRangeResponse(header=self.header(), deleted=deleted)
        )

    def _check_lease(self, lease: int) -> None:
        if lease and lease not in self.leases:
            raise rpc_error(grpc.StatusCode.NOT_FOUND, "etcdserver: requested lease not found")

    def _put(self, request: rpc_pb2.PutRequest) -> None:
        if not request.key:
            raise rpc_error(grpc.StatusCode.INVALID_ARGUMENT, "etcdserver: key is not provided")
        self._check_lease(request.lease)
        old = self.get(request.key)
        revision = self.revision + 1
        stored = rpc_pb2.KeyValue(
            key=request.key,
            value=request.value,
            create_revision=old.create_revision if old else revision,
            mod_revision=revision,
            version=old.version + 1 if old else 1,
            lease=request.lease,
        )
        if old is not None and old.lease in self.leases:
            self.leases[old.lease].keys.discard(request.key)
        if request.lease:
            self.leases[request.lease].keys.add(request.key)
        self._write(request.key, stored)
        assert self._events is not None
        self._events.append(rpc_pb2.Event(type=rpc_pb2.Event.PUT, kv=stored))

    def _delete(self, request: rpc_pb2.DeleteRangeRequest) -> int:
        deleted = 0
        for key in self._matching(request.key, request.range_end):
            old = self._keys[key].now
            if old is None:
                continue
            deleted += 1
            if old.lease in self.leases:
                self.leases[old.lease].keys.discard(key)
            self._write(key, None)
            gone = rpc_pb2.KeyValue(key=key, mod_revision=self.revision + 1)
            assert self._events is not None
            self._events.append(rpc_pb2.Event(type=rpc_pb2.Event.DELETE, kv=gone))
        return deleted

    def _write(self, key: bytes, value: rpc_pb2.KeyValue | None) -> None:
        stored = self._keys.get(key)
        if stored is None:
            stored = self._keys[key] = _Key()
            bisect.insort(self._sorted, key)
        stored.versions.append((self.revision + 1, value))

    def begin(self) -> None:
        """Collect the changes of one revision."""
        self._events = []

    def finish(self) -> None:
        """Make the collected changes the next revision, if there are any."""
        events, self._events = self._events, None
        if not events:
            return
        self.revision += 1
        self._history.append((self.revision, events))
        for listener in self.changed:
            listener(self.revision, events)
        if self.revision - self.compacted > 2 * KEPT_REVISIONS:
            self.compact(self.revision - KEPT_REVISIONS)


class _Transaction:
    def __init__(self, store: FakeEtcdStore) -> None:
        self._store = store

    def __enter__(self) -> None:
        self._store.begin()

    def __exit__(self, *_: object) -> None:
        self._store.finish()


def _limit(request: rpc_pb2.PutRequest | rpc_pb2.TxnRequest) -> None:
    if request.ByteSize() > MAX_REQUEST_BYTES:
        raise rpc_error(grpc.StatusCode.INVALID_ARGUMENT, "etcdserver: request is too large")


def _check_txn(request: rpc_pb2.TxnRequest) -> None:
    sizes = (len(request.compare), len(request.success), len(request.failure))
    if max(sizes) > MAX_OPERATIONS:
        raise rpc_error(
            grpc.StatusCode.INVALID_ARGUMENT, "etcdserver: too many operations in txn request"
        )
    for branch in (request.success, request.failure):
        puts = [op.request_put.key for op in branch if op.WhichOneof("request") == "request_put"]
        ranges = [
            op.request_delete_range
            for op in branch
            if op.WhichOneof("request") == "request_delete_range"
        ]
        clash = any(
            key == gone.key or (gone.range_end and gone.key <= key < gone.range_end)
            for key in puts
            for gone in ranges
        )
        if len(set(puts)) != len(puts) or clash:
            raise rpc_error(
                grpc.StatusCode.INVALID_ARGUMENT, "etcdserver: duplicate key given in txn request"
            )


def _compacted() -> grpc.aio.AioRpcError:
    return rpc_error(
        grpc.StatusCode.OUT_OF_RANGE,
        "etcdserver: mvcc: required revision has been compacted",
    )
