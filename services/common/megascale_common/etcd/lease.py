"""Leases: etcd deletes their keys after the owner is gone, and the owner stops before that.

Note [Validity of a lease]
~~~~~~~~~~~~~~~~~~~~~~~~~~
The owner counts the validity from a moment before the last successful keep-alive was sent, while
the server counts from when it received it, so the owner's count ends first. It is also shorter by a
margin, and uses a clock that continues while the machine is suspended. So the owner stops acting
before the server can give its keys to another, even if it was paused or cut off, or if its event
loop was blocked. A ``Keeper`` sends the keep-alives.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, Self

from megascale_common.etcd.connection import retry_backoff
from megascale_common.etcd.errors import EtcdError, InvalidEtcdRequest, UnknownOutcome
from megascale_common.etcd.operations import Etcd, GrantedLease
from megascale_common.service import logs

KEEPALIVES_PER_TTL = 3

_log = logs.get(__name__)


@dataclass(frozen=True, slots=True)
class Renewal:
    """One keep-alive that was answered: sent at ``sent_s`` on the lease's clock.

    The lease lives for at least ``ttl_s`` seconds from then; 0: it is gone on the server.
    """

    lease_id: int
    sent_s: float
    ttl_s: int


class Keeper(Protocol):
    """Renews one lease at a time. No method waits."""

    def keep(self, lease_id: int, ttl_s: int) -> None:
        """Renew this lease from now on, and no other."""
        ...

    def drop(self) -> None:
        """Stop renewing."""
        ...

    def tick(self) -> None:
        """Sign of life of the owner; a keeper in its own process stops renewing without it."""
        ...

    def newest(self) -> Renewal | None:
        """The newest renewal; it is known even if the event loop has not run since."""
        ...


class LoopKeeper:
    """Renews in a task of the running event loop, three times per time to live."""

    def __init__(self, client: Etcd, clock: Callable[[], float]) -> None:
        self._client = client
        self._clock = clock
        self._newest: Renewal | None = None
        self._task: asyncio.Task[None] | None = None

    def keep(self, lease_id: int, ttl_s: int) -> None:
        """Renew this lease from now on."""
        self.drop()
        self._newest = None
        self._task = asyncio.create_task(
            self._run(lease_id, ttl_s), name=f"etcd-lease-{lease_id:x}"
        )

    def drop(self) -> None:
        """Stop renewing."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    def tick(self) -> None:
        """Does nothing, because the loop that would tick is the one that renews."""

    def newest(self) -> Renewal | None:
        """The newest renewal."""
        return self._newest

    async def _run(self, lease_id: int, ttl_s: int) -> None:
        interval_s = ttl_s / KEEPALIVES_PER_TTL
        backoff = retry_backoff()
        wait_s = interval_s
        while True:
            await asyncio.sleep(wait_s)
            sent_s = self._clock()
            try:
                granted_s = await self._client.keep_alive(lease_id, interval_s)
            except EtcdError as error:
                _log.warning("lease not renewed", lease_id=lease_id, error=str(error))
                wait_s = backoff.next_s()
                continue
            self._newest = Renewal(lease_id, sent_s, granted_s)
            if granted_s <= 0:
                return
            wait_s = interval_s
            backoff.reset()


MARGIN_FRACTION = 0.1  # of the TTL, for clock drift and for the work between check and effect
REVOKE_TIMEOUT_S = 2.0
GRANT_ATTEMPTS = 3  # a grant whose answer is lost leaves a lease that expires by itself
LOOK_INTERVAL_S = 0.25  # between two checks of the keeper's renewals, and between signs of life


def now_s() -> float:
    """Seconds on a clock that never steps and that continues while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Lease:
    """A lease that is kept alive in the background until ``close`` or until it is lost.

    See Note [Validity of a lease]. ``lost`` is set forever when the server reports that the lease
    is gone, when its validity has run out here, or when it was closed; ``lost_reason`` says which.
    Code that must not act without the lease checks ``remaining_s()`` right before it acts, which is
    correct even if the event loop has not run since.
    """

    def __init__(
        self,
        client: Etcd,
        granted: GrantedLease,
        granted_from_s: float,
        keeper: Keeper | None = None,
        clock: Callable[[], float] = now_s,
    ) -> None:
        self.lease_id = granted.lease_id
        self.ttl_s = granted.ttl_s  # the server raises one that is below its election timeout
        self.lost = asyncio.Event()
        self.lost_reason = ""
        self._client = client
        self._clock = clock
        self._sent_s = granted_from_s
        self._valid_until_s = 0.0
        self._extend(granted_from_s, granted.ttl_s)
        self._keeper: Keeper = keeper if keeper is not None else LoopKeeper(client, clock)
        self._keeper.keep(self.lease_id, self.ttl_s)
        self._watcher = asyncio.create_task(self._look(), name=f"etcd-lease-{self.lease_id:x}")

    @classmethod
    async def grant(
        cls,
        client: Etcd,
        ttl_s: int,
        *,
        keeper: Keeper | None = None,
        clock: Callable[[], float] = now_s,
    ) -> Self:
        """Get a lease of ``ttl_s`` whole seconds and start to keep it alive.

        Raises InvalidEtcdRequest for a TTL below one second, EtcdUnavailable and UnknownOutcome as
        usual.
        """
        if ttl_s < 1:
            raise InvalidEtcdRequest(f"ttl_s: {ttl_s} must be at least 1 second")
        attempts_left = GRANT_ATTEMPTS
        while True:
            attempts_left -= 1
            # Taken before sending, so that our validity ends before the server's.
            sent_s = clock()
            try:
                granted = await client.grant_lease(ttl_s)
            except UnknownOutcome:
                if attempts_left == 0:
                    raise
            else:
                return cls(client, granted, sent_s, keeper, clock)

    def remaining_s(self) -> float:
        """Seconds for which the lease is still valid; 0 if it is lost."""
        if self.lost.is_set():
            return 0.0
        self._take()
        return 0.0 if self.lost.is_set() else max(0.0, self._valid_until_s - self._clock())

    @property
    def answered_s(self) -> float:
        """Time on the lease's clock at which the newest answered renewal was sent."""
        return self._sent_s

    async def close(self) -> None:
        """Stop the keep-alives and revoke the lease, which deletes its keys. Never raises."""
        self._lose("closed")
        self._keeper.drop()
        self._watcher.cancel()
        await asyncio.wait([self._watcher])
        # A lease that cannot be revoked expires by itself.
        with contextlib.suppress(EtcdError):
            await self._client.revoke_lease(self.lease_id, REVOKE_TIMEOUT_S)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _extend(self, sent_s: float, ttl_s: float) -> None:
        self._sent_s = sent_s
        self._valid_until_s = sent_s + ttl_s * (1.0 - MARGIN_FRACTION)

    def _take(self) -> None:
        """Apply the keeper's newest renewal."""
        renewal = self._keeper.newest()
        if renewal is None or renewal.lease_id != self.lease_id or renewal.sent_s <= self._sent_s:
            return
        if renewal.ttl_s <= 0:
            self._lose("expired or revoked on the server")
        else:
            self._extend(renewal.sent_s, renewal.ttl_s)

    def _lose(self, reason: str) -> None:
        if not self.lost.is_set():
            self.lost_reason = reason
            self.lost.set()

    async def _look(self) -> None:
        """Give the keeper signs of life, and set ``lost`` when the validity ends."""
        try:
            while True:
                self._keeper.tick()
                remaining_s = self.remaining_s()
                if self.lost.is_set():
                    return
                if remaining_s <= 0:
                    return self._lose(f"not renewed for {self.ttl_s} s less a margin")
                await asyncio.sleep(min(LOOK_INTERVAL_S, remaining_s))
        finally:
            self._lose("no longer renewed")
