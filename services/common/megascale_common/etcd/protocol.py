"""What the driver needs of etcd: few verbs, which `client.EtcdClient` offers over gRPC.

The journal, the election and the leases use these verbs alone, so a simulation can put another
implementation in their place. It has to keep what etcd promises and the callers rest on:

- `txn` is atomic; reads and transactions are strictly serializable. Every call may raise
  `EtcdUnavailable` (nothing happened), a write also `UnknownOutcome` (it may have happened, now or
  later), all of `errors` else: nothing happened.
- Revisions count the transactions that changed something, from 2 on; one transaction has one.
- A lease that is not renewed for its time to live is gone with its keys, at the earliest then.
- A watch delivers every change from its start revision on, in order and once, however late; it
  raises `Compacted` if that revision is gone.
"""

from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self

from megascale_common.etcd.operations import (
    Compare,
    Event,
    GrantedLease,
    KeyValue,
    Listing,
    Operation,
    Page,
    TxnResult,
)


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
            StopAsyncIteration: it was closed.
        """
        ...


class Etcd(Protocol):
    """One key space of one etcd cluster. Keys are text, relative to the space's prefix."""

    timeout_s: float  # bounds each call, retries of reads included

    async def get(self, key: str) -> KeyValue | None:
        """The key as stored now, or None."""
        ...

    async def get_range(self, start: str, end: str, *, limit: int = 0, revision: int = 0) -> Page:
        """Keys from `start` to before `end`, ascending: at most `limit` (0: all), in one request.

        `revision` 0 is now. Raises ResourceExhausted when the answer is too large to receive,
        Compacted if the revision is gone.
        """
        ...

    async def get_prefix(self, prefix: str) -> Listing:
        """Every key that starts with `prefix`, all at one revision."""
        ...

    async def txn(
        self,
        *,
        compare: Sequence[Compare] = (),
        success: Sequence[Operation] = (),
        failure: Sequence[Operation] = (),
    ) -> TxnResult:
        """All of `success` if every compare holds, else all of `failure`, atomically."""
        ...

    async def grant_lease(self, ttl_s: int) -> GrantedLease:
        """A new lease that lives for `ttl_s` seconds at least. `UnknownOutcome`: one may exist."""
        ...

    async def keep_alive(self, lease_id: int, timeout_s: float) -> int:
        """Renew the lease; its time to live from now in seconds, 0 if it is gone."""
        ...

    async def revoke_lease(self, lease_id: int, timeout_s: float) -> None:
        """End the lease and delete its keys."""
        ...

    def watch(self, key: str, start_revision: int, *, prefix: bool = True) -> EtcdWatch:
        """The changes of a key, or of all keys that start with it, from a revision (>= 1) on."""
        ...
