"""The meeting of the processes of a run by hand, through torchrun's store.

Rank 0 publishes what all ranks need: the attempt and what it restores, the address of the ranks'
own store, and the daemons' token. The first rank of each host publishes the host's sockets.
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
RESOLVE_TIMEOUT_S = 20.0  # for a host name; even a slow name server has answered by then


class MeetingFailed(RuntimeError):
    """Another process of the run could not start, or did not appear."""


class NameUnresolved(MeetingFailed):
    """This host cannot resolve the name in MASTER_ADDR."""


class Meeting:
    """The store of one start of all ranks."""

    def __init__(self, place: Place) -> None:
        self._place = place
        store = _store(place)
        self._store = PrefixStore(f"megascale/{place.start}", store)
        # Keys of the whole run: torchrun keeps its store when it starts the processes again.
        self._run = PrefixStore(f"megascale-run/{place.start.rpartition('/')[0]}", store)

    def publish(self, key: str, value: dict[str, Any]) -> None:
        """Give ``value`` to the processes that :meth:`read` the key."""
        self._store.set(key, json.dumps(value))

    def fail(self, key: str, problem: str) -> None:
        """Publish the reason why ``key`` will not be published, to those that wait for it."""
        self.publish(key, {"problem": problem})

    def read(self, key: str, timeout_s: float = MEET_TIMEOUT_S) -> dict[str, Any]:
        """The value of ``key``; waits until it is published.

        Raises:
            MeetingFailed: it was not published in time, or its process has failed.
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
        """Prevent later starts of this run (torchrun --max-restarts)."""
        with contextlib.suppress(RuntimeError):
            self._run.set("ended", problem)

    def refuse_ended(self) -> None:
        """Raise MeetingFailed if an earlier start has ended the run for good."""
        if self._run.check(["ended"]):
            raise MeetingFailed(self._run.get("ended").decode())

    def mark(self, key: str) -> None:
        """Set a mark that :meth:`marked` and :meth:`await_marks` see."""
        self._store.set(key, "1")

    def marked(self, key: str) -> bool:
        """Whether the mark is set; False if the store is gone."""
        try:
            return bool(self._store.check([key]))
        except RuntimeError:
            return False

    def await_marks(self, keys: list[str], timeout_s: float) -> bool:
        """Wait until all marks are set; returns whether they are."""
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
    """Raise MeetingFailed if the name cannot be resolved: torch's store would try for minutes.

    The look-up runs in a thread, because a name server that does not answer blocks it.
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
