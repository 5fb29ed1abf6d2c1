"""How the processes of a run by hand find each other: through torchrun's store.

Rank 0 publishes what all ranks need: the attempt and what it restores, the address of the ranks'
own store, the token of the daemons. Each host's first rank publishes the sockets of its host.
"""

from __future__ import annotations

import json
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore

from megascale_trainer.launch.place import Place

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

MEET_TIMEOUT_S = 300.0  # the processes of all hosts start within this time


class MeetingFailed(RuntimeError):
    """Another process of the run could not start, or did not come."""


class Meeting:
    """The store of one start of all ranks."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._store = PrefixStore(f"megascale/{place.start}", _store(place))

    def publish(self, key: str, value: dict[str, Any]) -> None:
        """Give ``value`` to the processes that :meth:`read` the key."""
        self._store.set(key, json.dumps(value))

    def fail(self, key: str, problem: str) -> None:
        """Let those that wait for the key learn why it does not come."""
        self.publish(key, {"problem": problem})

    def read(self, key: str, timeout_s: float = MEET_TIMEOUT_S) -> dict[str, Any]:
        """What was published under ``key``; waits for it.

        Raises:
            MeetingFailed: nothing was in time, or the process that should have has failed.
        """
        try:
            self._store.wait([key], timedelta(seconds=timeout_s))
            value: dict[str, Any] = json.loads(self._store.get(key))
        except RuntimeError as error:  # torch's errors of stores: DistError, DistStoreError
            raise MeetingFailed(
                f"{key!r} was not published within {timeout_s:.0f} s: {error}"
            ) from error
        if "problem" in value:
            raise MeetingFailed(value["problem"])
        return value

    def mark(self, key: str) -> None:
        """Set a mark that :meth:`marked` and :meth:`await_marks` see."""
        self._store.set(key, "1")

    def marked(self, key: str) -> bool:
        """Whether the mark is set; False where the store is gone."""
        try:
            return bool(self._store.check([key]))
        except RuntimeError:
            return False

    def await_marks(self, keys: list[str], timeout_s: float) -> bool:
        """Wait until all these marks are set; returns whether they are."""
        try:
            self._store.wait(keys, timedelta(seconds=timeout_s))
        except RuntimeError:
            return False
        return True


def _store(place: Place) -> Store:
    if place.world_size == 1:
        return HashStore()
    host, port = place.master
    serves = place.rank == 0 and not place.hosted_store
    return TCPStore(
        host,
        port,
        is_master=serves,
        timeout=timedelta(seconds=MEET_TIMEOUT_S),
        wait_for_workers=False,
    )
