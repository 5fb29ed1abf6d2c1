"""Leader election on one key: the candidate that creates it, with a lease, leads until it is gone.

Note [Fencing token]
~~~~~~~~~~~~~~~~~~~~
The key's create revision rises from leader to leader and is the fencing token. A lease alone cannot
stop a leader that was paused from completing, after the pause, a write that it began before. So
every write is a transaction that also compares the token (``guard``): once another leader has
created the key, etcd rejects the write.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from megascale_common.etcd.connection import retry_backoff
from megascale_common.etcd.errors import (
    Compacted,
    EtcdError,
    EtcdUnavailable,
    LeaseNotFound,
    UnknownOutcome,
)
from megascale_common.etcd.lease import Keeper, Lease, now_s
from megascale_common.etcd.operations import CreateRevisionEquals, Delete, Etcd, Get, Put
from megascale_common.service.tasks import Periodic


@dataclass(frozen=True, slots=True)
class Leadership:
    """A won election. ``create_revision`` is the fencing token; stop when ``lease.lost`` is set.

    The lease does not detect that the key was deleted by hand. ``deposed`` does, and a fenced write
    that is rejected because ``guard`` failed means that leadership is over too.
    """

    client: Etcd
    key: str
    create_revision: int
    lease: Lease

    def guard(self) -> CreateRevisionEquals:
        """The compare that every write of this leader carries."""
        return CreateRevisionEquals(self.key, self.create_revision)

    async def deposed(self, interval_s: float) -> None:
        """Check the key every ``interval_s``; return once it is gone or another leader's.

        The lease can still be valid then. Without this check a leader that has nothing to write
        would continue next to the new one, and keep all nodes that are linked to it.
        """
        checks = Periodic(interval_s)
        while True:
            await checks.wait()
            with contextlib.suppress(EtcdError):  # no answer proves nothing; the lease decides
                holder = await self.client.get(self.key)
                if holder is None or holder.create_revision != self.create_revision:
                    return

    async def resign(self) -> None:
        """Delete the key at once, so that the next leader need not wait; then revoke the lease."""
        with contextlib.suppress(EtcdError):  # if the delete is lost, the lease ends the term
            await self.client.txn(compare=[self.guard()], success=[Delete(self.key)])
        await self.lease.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.resign()


async def campaign(
    client: Etcd,
    key: str,
    value: bytes,
    *,
    ttl_s: int,
    keeper: Keeper | None = None,
    clock: Callable[[], float] = now_s,
) -> Leadership:
    """Wait until this candidate leads. ``value`` describes the leader and its address to others.

    ``keeper`` renews the lease, by default a task of the event loop; ``clock`` is the lease's.

    Waits without limit, across restarts of etcd; cancel it to give up. No lease is left behind
    after a cancellation or an error. Raises the refusals of ``errors`` (a wrong request, access
    denied).
    """
    backoff = retry_backoff()
    while True:
        try:
            lease = await Lease.grant(client, ttl_s, keeper=keeper, clock=clock)
            try:
                while not lease.lost.is_set():
                    won, revision = await _claim(client, key, value, lease)
                    if won:
                        return Leadership(client, key, revision, lease)
                    # From the next revision on, so that a deletion right after the claim counts.
                    await _until_deleted(client, key, revision + 1)
            except BaseException:
                await lease.close()
                raise
            await lease.close()
        except (EtcdUnavailable, UnknownOutcome, LeaseNotFound, Compacted):
            await backoff.sleep()


async def _claim(client: Etcd, key: str, value: bytes, lease: Lease) -> tuple[bool, int]:
    """Try to create the key: (True, its create revision), or (False, revision of the answer).

    Without an answer the claim is made again. If the first one was applied after all, the key has
    our lease.
    """
    backoff = retry_backoff()
    while True:
        try:
            result = await client.txn(
                compare=[CreateRevisionEquals(key, 0)],
                success=[Put(key, value, lease.lease_id)],
                failure=[Get(key)],
            )
        except UnknownOutcome:
            if lease.lost.is_set():
                raise
            await backoff.sleep()
            continue
        if result.succeeded:
            return True, result.revision
        holder = result.found[key]
        if holder.lease_id == lease.lease_id:
            return True, holder.create_revision
        return False, result.revision


async def _until_deleted(client: Etcd, key: str, start_revision: int) -> None:
    """Wait for the first deletion of the key at ``start_revision`` or later."""
    async with client.watch(key, start_revision, prefix=False) as watch:
        async for event in watch:
            if event.deleted:
                return
