"""Bring a state back from the memory of a peer, over several streams. Blocking, for threads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megascale_checkpoint.concurrency import Cancellation
from megascale_checkpoint.replicas.connection import (
    Activity,
    Connection,
    PeerError,
    RefusedError,
    refusal,
)
from megascale_checkpoint.replicas.protocol import SealedState, StateKey, key_to_mapping
from megascale_checkpoint.replicas.streams import STREAMS, Shares, Streams
from megascale_common.service.errors import DamagedError, NotFoundError

TRIES = 3  # each goes on with what the one before has left


def fetch(
    endpoint: str,
    token: str,
    key: StateKey,
    image: memoryview,
    cancelled: Cancellation,
    streams: int = STREAMS,
) -> SealedState:
    """Fill ``image``, a slot of the state's layout, and verify it; bytes between pieces are 0.

    Raises:
        NotFoundError: the peer does not keep this state, or refuses.
        DamagedError: what arrives is not what was sealed.
        PeerError: the peer cannot be reached, is silent or too slow.
        SupersededError: cancelled.
    """
    fetching = _Fetch(endpoint, token, key, image, cancelled)
    for left in reversed(range(TRIES)):
        try:
            return fetching.run(streams)
        except RefusedError as error:
            raise NotFoundError(str(error)) from error
        except PeerError:
            if not left or fetching.state is None:
                raise
    raise AssertionError("the last try returns or raises")


class _Fetch:
    def __init__(
        self,
        endpoint: str,
        token: str,
        key: StateKey,
        image: memoryview,
        cancelled: Cancellation,
    ) -> None:
        self._endpoint = endpoint
        self._token = token
        self._key = key
        self._image = image
        self._cancelled = cancelled
        self.state: SealedState | None = None
        self._shares: Shares | None = None
        self._activity = Activity()

    def run(self, streams: int) -> SealedState:
        """One try; raises as :func:`fetch`."""
        with self._dial() as connection:
            self._join(connection)
            state = self.state
            assert state is not None
            if self._shares is None:
                self._shares = Shares(state, streams)
            how = (self._activity, self._cancelled, self._dial, self._join, self._move)
            Streams(self._shares, *how).run(connection)
            return state

    def _dial(self) -> Connection:
        return Connection.dial(self._endpoint, self._token, self._cancelled)

    def _join(self, connection: Connection) -> None:
        first = self.state is None
        connection.send({"verb": "fetch", "key": key_to_mapping(self._key), "first": first})
        reply = connection.receive()
        if problem := refusal(reply, "state"):
            raise RefusedError(f"the peer at {self._endpoint}: {problem}")
        if first:
            self._begin(SealedState.from_mapping(reply.get("state")))

    def _begin(self, state: SealedState) -> None:
        if state.key != self._key or state.slot_bytes > len(self._image):
            raise DamagedError(self._endpoint, "the peer sends another state than it was asked for")
        _clear_between(state, self._image)
        self.state = state
        self._activity = Activity(state.size_bytes)

    def _move(self, connection: Connection, numbers: Sequence[int]) -> None:
        assert self.state is not None
        connection.send({"verb": "pieces", "numbers": list(numbers)})
        if problem := refusal(connection.receive(), "bytes"):
            raise RefusedError(f"the peer at {self._endpoint}: {problem}")
        where = f"the replica at {self._endpoint}"
        connection.receive_pieces(self.state, numbers, self._image, where)


def _clear_between(state: SealedState, image: memoryview) -> None:
    """Set the bytes between pieces to 0: the trainer relies on that for the padding."""
    values, end = np.frombuffer(image, np.uint8), 0
    for piece in sorted(state.pieces, key=lambda piece: piece.offset):
        values[end : piece.offset] = 0
        end = max(end, piece.offset + piece.size_bytes)
    values[end:] = 0
