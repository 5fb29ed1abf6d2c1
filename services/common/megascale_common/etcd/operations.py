"""The interface to etcd: the verbs that the driver needs. ``client.EtcdClient`` implements them.

The journal, the election and the leases use only these verbs, so that a simulation can replace the
implementation. It must keep the promises of etcd on which the callers rely:

- ``txn`` is atomic; reads and transactions are strictly serializable. Every call can raise
  ``EtcdUnavailable`` (nothing happened), a write also ``UnknownOutcome`` (it may have happened, or
  happen later). All other errors mean that nothing happened.
- Revisions count the transactions that changed something, from 2 on; a transaction has one.
- A lease that is not renewed for its time to live ends, not earlier, and its keys are deleted.
- A watch delivers every change from its start revision on, in order and once, however late. It
  raises ``Compacted`` if that revision is gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self, TypeAlias

from megascale_common.etcd import rpc_pb2
from megascale_common.etcd.errors import InvalidEtcdRequest
from megascale_job.visible import counted

# etcd's default --max-txn-ops; it applies to compares, success and failure operations separately.
MAX_TXN_OPERATIONS = 128


@dataclass(frozen=True, slots=True)
class KeyValue:
    """One key as stored.

    Revisions count the transactions of the whole store; ``version`` counts the puts of this key
    since it was created.
    """

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    version: int
    lease_id: int


@dataclass(frozen=True, slots=True)
class Listing:
    """All keys under a prefix at one revision, in key order. Watch from ``revision + 1`` on."""

    items: tuple[KeyValue, ...]
    revision: int


@dataclass(frozen=True, slots=True)
class Page:
    """Keys of a range at one revision, in key order. ``more``: the range has further keys."""

    items: tuple[KeyValue, ...]
    more: bool
    revision: int


@dataclass(frozen=True, slots=True)
class GrantedLease:
    """A lease as etcd granted it: ``ttl_s`` is raised if it was below etcd's shortest."""

    lease_id: int
    ttl_s: int


@dataclass(frozen=True, slots=True)
class Event:
    """One change seen by a watch. For a deleted key only ``key`` and ``mod_revision`` are set."""

    kv: KeyValue
    deleted: bool


@dataclass(frozen=True, slots=True)
class CreateRevisionEquals:
    """True if ``key`` was created at ``revision``; 0 means that the key is absent."""

    key: str
    revision: int


@dataclass(frozen=True, slots=True)
class ModRevisionEquals:
    """True if ``key`` was last changed at ``revision``; 0 means that the key is absent."""

    key: str
    revision: int


@dataclass(frozen=True, slots=True)
class Put:
    """Store ``value`` under ``key``; with a lease id, the key is deleted when the lease ends."""

    key: str
    value: bytes
    lease_id: int = 0


@dataclass(frozen=True, slots=True)
class Get:
    """Read ``key`` within a transaction."""

    key: str


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete ``key``, or every key that starts with it."""

    key: str
    prefix: bool = False


@dataclass(frozen=True, slots=True)
class DeleteRange:
    """Delete every key from ``start`` to before ``end``."""

    start: str
    end: str


Compare: TypeAlias = CreateRevisionEquals | ModRevisionEquals
Operation: TypeAlias = Put | Get | Delete | DeleteRange


@dataclass(frozen=True, slots=True)
class TxnResult:
    """The outcome: ``succeeded`` if all compares held, and the keys that the ``Get``s found.

    An absent key has no entry in ``found``.
    """

    succeeded: bool
    revision: int
    found: dict[str, KeyValue] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class KeySpace:
    """Translates between the caller's keys and etcd's.

    ``prefix`` is empty or ends with "/", so that one cluster's keys are never another's.
    """

    prefix: str = ""

    def __post_init__(self) -> None:
        if self.prefix and not self.prefix.endswith("/"):
            raise InvalidEtcdRequest(
                f"prefix: {self.prefix!r} must end with '/': write {self.prefix + '/'!r}"
            )

    def full(self, key: str) -> bytes:
        """The stored key. Raises InvalidEtcdRequest for an empty one, which etcd does not allow."""
        if not key:
            raise InvalidEtcdRequest("key: must not be empty")
        return (self.prefix + key).encode(errors="surrogateescape")

    def range_of(self, prefix: str) -> tuple[bytes, bytes]:
        """First key and exclusive end of all keys that start with ``prefix`` ("" is every key)."""
        start = (self.prefix + prefix).encode(errors="surrogateescape")
        return (start, prefix_end(start)) if start else (b"\0", b"\0")

    def between(self, start: str, end: str) -> tuple[bytes, bytes]:
        """First key and exclusive end of a range. Raises InvalidEtcdRequest for an empty range."""
        if not start < end:
            raise InvalidEtcdRequest(f"range: {start!r} is not before {end!r}")
        return self.full(start), self.full(end)

    def key_value(self, kv: rpc_pb2.KeyValue) -> KeyValue:
        """A stored key and value in the caller's form."""
        key = kv.key.decode(errors="surrogateescape")[len(self.prefix) :]
        return KeyValue(key, kv.value, kv.create_revision, kv.mod_revision, kv.version, kv.lease)

    def txn_request(
        self, compare: Sequence[Compare], success: Sequence[Operation], failure: Sequence[Operation]
    ) -> rpc_pb2.TxnRequest:
        """The wire form. Raises InvalidEtcdRequest if etcd would refuse the size."""
        for name, items in (("compare", compare), ("success", success), ("failure", failure)):
            if len(items) > MAX_TXN_OPERATIONS:
                raise InvalidEtcdRequest(
                    f"{name}: {counted(len(items), 'entry')}, etcd takes {MAX_TXN_OPERATIONS}: "
                    "split the transaction"
                )
        return rpc_pb2.TxnRequest(
            compare=[self._compare(item) for item in compare],
            success=[self._operation(item) for item in success],
            failure=[self._operation(item) for item in failure],
        )

    def txn_result(self, response: rpc_pb2.TxnResponse) -> TxnResult:
        """The caller's form of a reply."""
        found = [self.key_value(kv) for op in response.responses for kv in op.response_range.kvs]
        return TxnResult(response.succeeded, response.header.revision, {kv.key: kv for kv in found})

    def _compare(self, item: Compare) -> rpc_pb2.Compare:
        key = self.full(item.key)
        if isinstance(item, CreateRevisionEquals):
            return rpc_pb2.Compare(
                target=rpc_pb2.Compare.CREATE, key=key, create_revision=item.revision
            )
        return rpc_pb2.Compare(target=rpc_pb2.Compare.MOD, key=key, mod_revision=item.revision)

    def _operation(self, item: Operation) -> rpc_pb2.RequestOp:
        if isinstance(item, Put):
            put = rpc_pb2.PutRequest(key=self.full(item.key), value=item.value, lease=item.lease_id)
            return rpc_pb2.RequestOp(request_put=put)
        if isinstance(item, Get):
            return rpc_pb2.RequestOp(request_range=rpc_pb2.RangeRequest(key=self.full(item.key)))
        if isinstance(item, DeleteRange):
            key, end = self.between(item.start, item.end)
        else:
            key, end = self.range_of(item.key) if item.prefix else (self.full(item.key), b"")
        return rpc_pb2.RequestOp(
            request_delete_range=rpc_pb2.DeleteRangeRequest(key=key, range_end=end)
        )


def prefix_end(prefix: bytes) -> bytes:
    """The smallest key greater than every key that starts with ``prefix``; b"\\0" if none is."""
    stem = prefix.rstrip(b"\xff")
    return stem[:-1] + bytes([stem[-1] + 1]) if stem else b"\0"


class EtcdWatch(Protocol):
    """The changes of a key or prefix: ``async with ... as watch: async for event in watch``."""

    async def __aenter__(self) -> Self:
        """Begin to watch."""
        ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop watching."""
        ...

    def __aiter__(self) -> Self:
        """The events in order."""
        ...

    async def __anext__(self) -> Event:
        """The next event; waits for it.

        Raises:
            EtcdError: etcd will never serve this watch.
            StopAsyncIteration: the watch was closed.
        """
        ...


class Etcd(Protocol):
    """One key space of one etcd cluster. Keys are text, relative to the space's prefix."""

    timeout_s: float  # bounds each call, retries of reads included

    async def get(self, key: str) -> KeyValue | None:
        """The key as stored now, or None."""
        ...

    async def get_range(self, start: str, end: str, *, limit: int = 0, revision: int = 0) -> Page:
        """Keys from ``start`` to before ``end``, in order: at most ``limit`` (0: all), in one call.

        ``revision`` 0 is now. Raises ResourceExhausted when the answer is too large to receive,
        Compacted if the revision is gone.
        """
        ...

    async def get_prefix(self, prefix: str) -> Listing:
        """Every key that starts with ``prefix``, all at one revision."""
        ...

    async def txn(
        self,
        *,
        compare: Sequence[Compare] = (),
        success: Sequence[Operation] = (),
        failure: Sequence[Operation] = (),
    ) -> TxnResult:
        """All of ``success`` if every compare holds, else all of ``failure``, atomically."""
        ...

    async def grant_lease(self, ttl_s: int) -> GrantedLease:
        """A lease of ``ttl_s`` seconds or more. After ``UnknownOutcome`` one may exist unused."""
        ...

    async def keep_alive(self, lease_id: int, timeout_s: float) -> int:
        """Renew the lease; returns its time to live from now in seconds, 0 if it is gone."""
        ...

    async def revoke_lease(self, lease_id: int, timeout_s: float) -> None:
        """End the lease and delete its keys."""
        ...

    def watch(self, key: str, start_revision: int, *, prefix: bool = True) -> EtcdWatch:
        """The changes of a key, or of all keys that start with it, from a revision (>= 1) on."""
        ...
