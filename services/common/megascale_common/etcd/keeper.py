"""Who renews a lease: the interface, and the renewal by a task of the event loop.

A lease that its owner's event loop renews is lost when the loop stands still for longer than the
time to live: a long computation, a full garbage collection. `keeper_process` therefore renews in a
process of its own, as long as the loop shows a sign of life now and then. Both stand behind
`Keeper`, and so does the one of a simulation.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from megascale_common.etcd.connection import retry_backoff
from megascale_common.etcd.errors import EtcdError
from megascale_common.etcd.protocol import Etcd
from megascale_common.service import logs

KEEPALIVES_PER_TTL = 3

_log = logs.get(__name__)


@dataclass(frozen=True, slots=True)
class Renewal:
    """One keep-alive that was answered: sent at `sent_s` on the lease's clock.

    The lease lives for `ttl_s` seconds from then at least; 0: it is gone on the server.
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
        """Renew no lease any more."""
        ...

    def tick(self) -> None:
        """The owner is alive. A keeper of its own may stop renewing when this is not called."""
        ...

    def newest(self) -> Renewal | None:
        """The newest renewal that is known; the event loop need not have run since."""
        ...


class LoopKeeper:
    """Renews in a task of the running event loop, every third of the time to live."""

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
        """Renew no lease any more."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    def tick(self) -> None:
        """Nothing to do: the loop that would tick is the one that renews."""

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
