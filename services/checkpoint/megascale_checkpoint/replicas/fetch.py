"""Bring a state back from the memory of a peer. Blocking, for threads."""

from __future__ import annotations

import numpy as np

from megascale_checkpoint.concurrency import Cancellation
from megascale_checkpoint.replicas.protocol import (
    Connection,
    SealedState,
    StateKey,
    key_to_mapping,
    refusal,
)
from megascale_common.service.errors import DamagedError, NotFoundError


def fetch(
    endpoint: str, token: str, key: StateKey, image: memoryview, cancelled: Cancellation
) -> SealedState:
    """Fill ``image``, a slot of the state's layout, and verify it; bytes between pieces are 0.

    Raises:
        NotFoundError: the peer does not keep this state, or refuses.
        DamagedError: what arrives is not what was sealed.
        PeerError: the peer cannot be reached, is silent or too slow.
        SupersededError: cancelled.
    """
    with Connection.dial(endpoint, token, cancelled) as connection:
        connection.send({"verb": "fetch", "key": key_to_mapping(key)})
        reply = connection.receive()
        problem = refusal(reply, "state")
        if problem:
            raise NotFoundError(f"the peer at {endpoint}: {problem}")
        state = SealedState.from_mapping(reply.get("state"))
        if state.key != key or state.slot_bytes > len(image):
            raise DamagedError(endpoint, "the peer sends another state than it was asked for")
        _clear_between(state, image)
        connection.receive_pieces(state, image, f"the replica at {endpoint}")
        return state


def _clear_between(state: SealedState, image: memoryview) -> None:
    """Set the bytes between pieces to 0: the trainer relies on that for the padding."""
    values, end = np.frombuffer(image, np.uint8), 0
    for piece in sorted(state.pieces, key=lambda piece: piece.offset):
        values[end : piece.offset] = 0
        end = max(end, piece.offset + piece.size_bytes)
    values[end:] = 0
