"""One transfer over several connections: its pieces are shared between streams, a thread each.

Each stream takes a batch of pieces, moves it, and takes the next, so that a slow one gets less to
do. What a stream that breaks had taken goes to the others; it connects again, MOST_BREAKS times in
a transfer. A stream that cannot be opened is one less.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

from megascale_checkpoint.concurrency import Cancellation
from megascale_checkpoint.replicas.connection import Activity, Connection, PeerError, RefusedError
from megascale_checkpoint.replicas.protocol import SealedState
from megascale_common.service.errors import ServiceError

STREAMS, MOST_STREAMS = 4, 16  # of one transfer: a rank's state; and what a caller may ask for
MOST_BREAKS = 4
# What a stream moves between two messages: some batches for each, which a processor's cache holds
# while the server of a fetch verifies them before they go out.
BATCHES_OF_A_STREAM, LEAST_BATCH_BYTES, MOST_BATCH_BYTES = 8, 1 << 20, 16 << 20

Batch = list[int]  # numbers of pieces, ascending


class Shares:
    """The pieces of a state that still have to move."""

    def __init__(self, state: SealedState, streams: int) -> None:
        self._waiting = deque(batches(state, streams))
        self.streams = max(1, min(streams, len(self._waiting)))  # that have something to do
        self._changed = threading.Condition()  # its lock may be taken again by its thread
        self._moving = self._breaks = 0
        self._failure: Exception | None = None

    def take(self, *, wait: bool = False) -> Batch | None:
        """The next batch to move; None when none is left, with ``wait`` until all have moved.

        Raises what the transfer failed with.
        """
        with self._changed:
            while True:
                if self._failure is not None:
                    raise self._failure
                if self._waiting:
                    self._moving += 1
                    return self._waiting.popleft()
                if not wait or not self._moving:
                    return None
                self._changed.wait()

    def moved(self) -> None:
        """A batch that was taken has moved."""
        self._end(None, None)

    def broke(self, batch: Batch, error: PeerError) -> None:
        """It has not, because its stream broke; too often, and the transfer fails."""
        with self._changed:
            self._breaks += 1
            self._end(batch, error if self._breaks > MOST_BREAKS else None)

    def failed(self, error: Exception) -> None:
        """It has not, and no other stream could move it."""
        self._end(None, error)

    def _end(self, again: Batch | None, failure: Exception | None) -> None:
        with self._changed:
            self._moving -= 1
            if again is not None:
                self._waiting.appendleft(again)
            self._failure = self._failure or failure
            self._changed.notify_all()


def batches(state: SealedState, streams: int) -> list[Batch]:
    """All pieces in runs of about equal bytes, a few for each stream."""
    wanted = state.size_bytes // max(1, streams * BATCHES_OF_A_STREAM)
    limit = min(MOST_BATCH_BYTES, max(LEAST_BATCH_BYTES, wanted))
    found: list[Batch] = []
    size = limit
    for number, piece in enumerate(state.pieces):
        if size + piece.size_bytes > limit:
            found.append([])
            size = 0
        found[-1].append(number)
        size += piece.size_bytes
    # A batch larger than the others is one piece that cannot be cut: it goes first.
    return sorted(found, key=lambda batch: -sum(state.pieces[n].size_bytes for n in batch))


class Streams:
    """The streams of one transfer.

    Args:
        dial: connects a further stream; raises PeerError where it cannot.
        join: has the peer make it part of the transfer; raises PeerError where that does not.
        move: moves one batch over a stream; raises PeerError where that broke.
    """

    def __init__(
        self,
        shares: Shares,
        activity: Activity,
        cancelled: Cancellation,
        dial: Callable[[], Connection],
        join: Callable[[Connection], object],
        move: Callable[[Connection, Sequence[int]], None],
    ) -> None:
        self._shares = shares
        self._activity = activity
        self._cancelled = cancelled
        self._dial = dial
        self._join = join
        self._move = move
        self._lock = threading.Lock()
        self._open: set[Connection] = set()
        self._shut = False

    def run(self, first: Connection) -> None:
        """Move all pieces over ``first``, in this thread, and further streams.

        When it returns, or raises, no thread moves anything any more.

        Raises:
            PeerError: ``first`` broke, the others too often, or the peer refuses.
            ServiceError: what arrives is damaged; or cancelled.
        """
        threads = [
            threading.Thread(target=self._further, name="replica-stream", daemon=True)
            for _ in range(self._shares.streams - 1)
        ]
        self._activity.moved()
        self._add(first)
        for thread in threads:
            thread.start()
        try:
            self._move_all(first, wait=True)
        finally:
            self._remove(first)  # its owner still has something to say over it
            self.shut()
            for thread in threads:
                thread.join()

    def shut(self) -> None:
        """End all streams: their threads return."""
        with self._lock:
            self._shut = True
            for connection in self._open:
                connection.shut()

    def _further(self) -> None:
        """One more stream, opened again when it breaks."""
        while not self._shut:
            try:
                connection = self._dial()
            except PeerError:
                return
            with connection:
                try:
                    if not self._add(connection):
                        return
                    self._join(connection)
                except (PeerError, ServiceError):
                    return
                else:
                    if not self._broke(connection):
                        return
                finally:
                    self._remove(connection)

    def _broke(self, connection: Connection) -> bool:
        """Move pieces over a further stream; returns whether it broke and may be opened again."""
        try:
            self._move_all(connection, wait=False)
        except RefusedError:
            return False
        except PeerError:
            return True
        except Exception:  # the transfer has failed with it, which the first stream raises
            return False
        return False

    def _move_all(self, connection: Connection, *, wait: bool) -> None:
        while (batch := self._shares.take(wait=wait)) is not None:
            try:
                self._cancelled.check()
                self._move(connection, batch)
            except RefusedError as error:
                self._shares.failed(error)
                raise
            except PeerError as error:
                self._shares.broke(batch, error)
                raise
            except Exception as error:
                self._shares.failed(error)
                raise
            self._shares.moved()

    def _add(self, connection: Connection) -> bool:
        with self._lock:
            connection.activity = self._activity
            self._open.add(connection)
            if self._shut:
                connection.shut()
            return not self._shut

    def _remove(self, connection: Connection) -> None:
        with self._lock:
            self._open.discard(connection)
