"""How the processes of a run by hand find each other: through torchrun's store.

Rank 0 publishes what all ranks need: the attempt and what it restores, the address of the ranks'
own store, the token of the daemons. Each host's first rank publishes the sockets of its host.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore

from megascale_trainer.launch.place import Place

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

MEET_TIMEOUT_S = 300.0  # the processes of all hosts start within this time
RESOLVE_TIMEOUT_S = 20.0  # of a host name; a slow name server has answered by then


class MeetingFailed(RuntimeError):
    """Another process of the run could not start, or did not come."""


class NameUnresolved(MeetingFailed):
    """MASTER_ADDR is no name that this host knows."""


class Meeting:
    """The store of one start of all ranks."""

    def __init__(self, place: Place) -> None:
        self._place = place
        store = _store(place)
        self._store = PrefixStore(f"megascale/{place.start}", store)
        # torchrun keeps its store when it starts the processes again.
        self._run = PrefixStore(f"megascale-run/{place.start.rpartition('/')[0]}", store)

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

    def end_for_good(self, problem: str) -> None:
        """Let no later start of this run begin (torchrun --max-restarts)."""
        with contextlib.suppress(RuntimeError):
            self._run.set("ended", problem)

    def refuse_ended(self) -> None:
        """Raise MeetingFailed in a run that an earlier start has ended for good."""
        if self._run.check(["ended"]):
            raise MeetingFailed(self._run.get("ended").decode())

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
    _refuse_unresolved(host)
    serves = place.rank == 0 and not place.hosted_store
    return TCPStore(
        host,
        port,
        is_master=serves,
        timeout=timedelta(seconds=MEET_TIMEOUT_S),
        wait_for_workers=False,
    )


def _refuse_unresolved(host: str) -> None:
    """Raise MeetingFailed where the name cannot be resolved: torch's store would try for minutes.

    In a thread, because a name server that does not answer holds the look-up.
    """
    problem = [f"was not resolved within {RESOLVE_TIMEOUT_S:.0f} s"]

    def resolve() -> None:
        try:
            socket.getaddrinfo(host.strip("[]"), None)
            problem[0] = ""
        except OSError as error:
            problem[0] = f"does not resolve on this host ({error.strerror or error})"

    looking = threading.Thread(target=resolve, name="resolve", daemon=True)
    looking.start()
    looking.join(RESOLVE_TIMEOUT_S)
    if found := problem[0]:
        raise NameUnresolved(
            f"MASTER_ADDR: the host name {host!r} {found}: add it to /etc/hosts or to the name "
            "server, or give its address (torchrun --local-addr, --master-addr)"
        )
