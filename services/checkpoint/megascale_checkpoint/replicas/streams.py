"""One transfer over several connections, its streams, each with a thread of its own.

Each stream takes a batch of pieces, moves it, and takes the next, so that a slow stream moves less.
If a stream breaks, its batch goes to the others and it connects again, at most MOST_BREAKS times
per transfer. If a stream cannot be opened, the others do without it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

from megascale_checkpoint.concurrency import Cancellation
from megascale_checkpoint.replicas.connection import Activity, Connection, PeerError, RefusedError
from megascale_checkpoint.replicas.protocol import SealedState
from megascale_common.service.errors import ServiceError

STREAMS, MOST_STREAMS = 4, 16  # of one transfer: the default, and the limit for callers
MOST_BREAKS = 4
# Size of a batch. Each stream gets several, and a batch fits into a processor's cache, in which the
# server of a fetch verifies it before it goes out.
BATCHES_OF_A_STREAM, LEAST_BATCH_BYTES, MOST_BATCH_BYTES = 8, 1 << 20, 16 << 20

Batch = list[int]  # numbers of pieces, ascending


class Shares:
    """The pieces of a state that still have to move."""

    def __init__(self, state: SealedState, streams: int) -> None:
        self._waiting = deque(batches(state, streams))
        self.streams = max(1, min(streams, len(self._waiting)))  # no more than there are batches
        self._changed = threading.Condition()  # with an RLock: broke() calls _end() under it
        self._moving = self._breaks = 0
        self._failure: Exception | None = None

    def take(self, *, wait: bool = False) -> Batch | None:
        """The next batch to move; None if none is left.

        With ``wait``, None only after all batches have moved: one that another stream moves now
        comes back if that stream breaks. Raises the error with which the transfer has failed, if
        any.
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
        """Report that a batch has moved."""
        self._end(None, None)

    def broke(self, batch: Batch, error: PeerError) -> None:
        """Return a batch whose stream broke; after MOST_BREAKS breaks the transfer fails."""
        with self._changed:
            self._breaks += 1
            self._end(batch, error if self._breaks > MOST_BREAKS else None)

    def failed(self, error: Exception) -> None:
        """Fail the transfer with an error that any stream would meet."""
        self._end(None, error)

    def _end(self, again: Batch | None, failure: Exception | None) -> None:
        with self._changed:
            self._moving -= 1
            if again is not None:
                self._waiting.appendleft(again)
            self._failure = self._failure or failure
            self._changed.notify_all()


def batches(state: SealedState, streams: int) -> list[Batch]:
    """All pieces in batches of about equal bytes, several for each stream."""
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
    # Largest first: a batch above the limit is one piece that cannot be cut, and started last it
    # would keep one stream busy after all others have ended.
    return sorted(found, key=lambda batch: -sum(state.pieces[n].size_bytes for n in batch))


class Streams:
    """The streams of one transfer.

    Args:
        dial: connects a further stream; raises PeerError if it cannot.
        join: asks the peer to add a stream to the transfer; raises PeerError if it refuses.
        move: moves one batch over a stream; raises PeerError if the stream breaks.
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
        """Move all pieces over ``first``, in this thread, and over further streams.

        On return, and after an error, no thread moves anything any more.

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
            self._remove(first)  # not shut with the others: the caller ends the transfer over it
            self.shut()
            for thread in threads:
                thread.join()

    def shut(self) -> None:
        """End all streams, so that their threads return."""
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
        """Move pieces over a further stream; True if it broke and can be opened again."""
        try:
            self._move_all(connection, wait=False)
        except RefusedError:
            return False
        except PeerError:
            return True
        except Exception:  # the transfer has failed, and the first stream raises this error
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
