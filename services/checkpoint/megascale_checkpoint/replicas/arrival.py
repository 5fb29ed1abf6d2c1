"""A state that arrives over several streams, and those of a server, by name. For threads."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Iterator

from megascale_checkpoint.replicas.connection import SILENCE_S, Activity, Connection, PeerError
from megascale_checkpoint.replicas.protocol import SealedState, numbers_of
from megascale_checkpoint.replicas.streams import MOST_STREAMS
from megascale_common.service.errors import NotFoundError, RequestError
from megascale_job.visible import agreed, counted


class Arrival:
    """One state; each stream that brings pieces of it has a thread in :meth:`join`."""

    def __init__(self, state: SealedState, image: memoryview) -> None:
        self._state, self._image = state, image
        self._activity = Activity(state.size_bytes)
        self._changed = threading.Condition()
        self._missing = set(range(len(state.pieces)))
        self._streams: dict[Connection, set[int]] = {}  # which pieces each of them writes now
        self._closed = False

    def receive_all(self, first: Connection) -> None:
        """Take pieces over ``first`` until it says that all are there.

        When it returns, or raises, no stream writes any more.

        Raises:
            PeerError: ``first`` broke, or pieces are missing.
            DamagedError: a piece is not what was sealed.
        """
        try:
            self._take_from(first)
        finally:
            self._close()
        # Only now: a stream whose request lay unread may have begun to write a piece again.
        if self._missing:
            missing = len(self._missing)
            raise PeerError(f"{counted(missing, 'piece')} {agreed(missing, 'have')} not arrived")

    def join(self, stream: Connection) -> None:
        """Take pieces over a further stream until it ends.

        Raises:
            PeerError: it broke.
            RequestError: the transfer has ended.
            DamagedError: a piece is not what was sealed.
        """
        with self._changed:
            if self._closed or len(self._streams) >= MOST_STREAMS:
                raise RequestError("replica: the transfer has ended, or has too many streams")
        stream.send({"verb": "go"})
        self._take_from(stream)

    def _take_from(self, stream: Connection) -> None:
        with self._changed:
            if self._closed:
                return
            self._streams[stream] = set()
        stream.activity = self._activity
        try:
            self._take_all(stream)
        finally:
            with self._changed:
                del self._streams[stream]
                self._changed.notify_all()

    def _take_all(self, stream: Connection) -> None:
        rank, step = self._state.key.rank, self._state.key.step
        while (message := stream.receive_or_end()) is not None and message.get("verb") != "end":
            numbers = numbers_of(message, self._state)
            self._claim(stream, set(numbers))
            where = f"replica of rank {rank}, step {step}"
            stream.receive_pieces(self._state, numbers, self._image, where)
            with self._changed:
                self._missing -= set(numbers)
                self._streams[stream] = set()
                self._changed.notify_all()
            stream.send({"verb": "have"})

    def _claim(self, stream: Connection, numbers: set[int]) -> None:
        """From here on this stream alone writes these pieces, which count as missing again.

        Another that has not ended yet is one that broke for the sender: what it would still write
        may be damaged, and would come behind the checksum.

        Raises:
            PeerError: the transfer has ended, or the other does not.
        """
        until_s = time.monotonic() + SILENCE_S
        with self._changed:
            if self._closed:  # what was sent before the end can still be read behind it
                raise PeerError("the transfer has ended")
            self._missing |= numbers
            while others := self._writing(numbers):
                for other in others:
                    other.shut()
                if not self._changed.wait(max(0.0, until_s - time.monotonic())):
                    raise PeerError("a stream that broke does not end")
            self._streams[stream] = numbers

    def _writing(self, numbers: set[int]) -> list[Connection]:
        return [stream for stream, own in self._streams.items() if own & numbers]

    def _close(self) -> None:
        """Let no stream write any more."""
        with self._changed:
            self._closed = True
            while self._streams:
                for stream in self._streams:
                    stream.shut()
                self._changed.wait()


class Arrivals:
    """The states that arrive at one server, by the names of their transfers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_name: dict[str, Arrival] = {}

    @contextlib.contextmanager
    def add(self, arrival: Arrival) -> Iterator[str]:
        """Streams may join it while the body runs; yields its name."""
        name = secrets.token_hex(8)
        with self._lock:
            self._by_name[name] = arrival
        try:
            yield name
        finally:
            with self._lock:
                del self._by_name[name]

    def find(self, name: object) -> Arrival:
        """The one of that name; raises NotFoundError without one."""
        with self._lock:
            found = self._by_name.get(str(name))
        if found is None:
            raise NotFoundError(f"no replica arrives here as {str(name)[:50]!r}")
        return found
