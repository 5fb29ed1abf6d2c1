"""What two daemons send each other about replicas, over TCP connections of their own.

Not gRPC: a state of gigabytes goes from the slot to the socket and from the socket to the replica
without a copy between. All blocking, for threads, and every wait is bounded
(:mod:`megascale_checkpoint.replicas.connection`). One transfer has several connections, its
streams, between which its pieces are shared (:mod:`megascale_checkpoint.replicas.streams`).

    sender  Hello {version, token}, Request {verb: store, attempt, state}
    server  Reply {verb: wait}, while it makes room, {verb: go, transfer} | {verb: kept} (it has
            this state) | {verb: refused, error, superseded}
    sender  again and again: {verb: pieces, numbers}, and the bytes of those pieces
    server  each time: {verb: have} | {verb: refused, error}
    sender  {verb: end}, when all pieces are there
    server  {verb: kept} | {verb: refused, error}
    sender, on each further stream: Hello, {verb: join, transfer}; server {verb: go}; then pieces

    reader  on each stream: Hello, Request {verb: fetch, key, first}
    server  Reply {verb: state, state} (without it where the stream is not the ``first``) |
            {verb: refused, error}
    reader  again and again: {verb: pieces, numbers}
    server  each time: {verb: bytes}, and the bytes of those pieces | {verb: refused, error}

``attempt`` is the one that the sender runs in: the state may be of an earlier one. The number of a
piece is its place in the state.

A frame is a magic word, a length and a JSON object. The receiver of pieces compares the checksum of
each with the one from the seal before the state counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from megascale_checkpoint.checksums import Count, checksum, is_count
from megascale_common.service.errors import DamagedError, RequestError
from megascale_job.names import is_dns_label

VERSION = 2
T = TypeVar("T")


class StateKey(msgspec.Struct, frozen=True):
    """Which state of which rank. The step alone is not enough: two attempts may differ in it."""

    job: str
    rank: Count
    attempt: Count
    step: Count
    layout_digest: str

    def __post_init__(self) -> None:
        if not is_dns_label(self.job):
            raise ValueError(f"{self.job[:80]!r} is not the name of a job")


class PieceBytes(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One piece of a slot: where it lies, and the xxh3-128 of its bytes."""

    offset: Count
    size_bytes: Count
    checksum: str


class SealedState(msgspec.Struct, frozen=True):
    """A sealed slot without its bytes; ``slot_bytes`` is the size of the whole slot."""

    key: StateKey
    slot_bytes: Count
    pieces: tuple[PieceBytes, ...]
    small_state: dict[str, Any]

    def __post_init__(self) -> None:
        for piece in self.pieces:
            if piece.offset + piece.size_bytes > self.slot_bytes:
                raise ValueError(f"{piece} is no piece of a slot of {self.slot_bytes} bytes")
        if self.size_bytes > self.slot_bytes:
            raise ValueError(f"its pieces exceed its slot of {self.slot_bytes} bytes")

    @property
    def size_bytes(self) -> int:
        """Bytes of all pieces: what travels."""
        return sum(piece.size_bytes for piece in self.pieces)


def read(values: object, form: type[T]) -> T:
    """A part of a message as a ``form``.

    Raises:
        RequestError: a field is missing or wrong.
    """
    try:
        return msgspec.convert(values, form)
    except (msgspec.ValidationError, ValueError) as error:
        raise RequestError(f"replica: {form.__name__}: {str(error)[:200]}") from error


def check_pieces(state: SealedState, numbers: Sequence[int], image: memoryview, where: str) -> None:
    """Raise DamagedError naming ``where`` when these pieces of ``image`` are not as sealed."""
    for number in numbers:
        piece = state.pieces[number]
        data = image[piece.offset : piece.offset + piece.size_bytes]
        if checksum(data) != piece.checksum:
            raise DamagedError(where, f"piece {number} of the replica is not what was sealed")


def numbers_of(fields: Mapping[str, Any], state: SealedState) -> list[int]:
    """The pieces that a message names, each once.

    Raises:
        RequestError: it names none, or one that the state has not.
    """
    numbers = fields.get("numbers")
    good = isinstance(numbers, list) and all(map(is_count, numbers))
    if not good or not numbers or max(numbers) >= len(state.pieces):
        raise RequestError(f"replica: numbers is {str(numbers)[:100]}; it must name pieces")
    return sorted(set(numbers))


def number_of(fields: Mapping[str, Any], name: str) -> int:
    """The whole number, 0 or more, of that name; raises RequestError without one."""
    value = fields.get(name)
    if not isinstance(value, int) or not is_count(value):
        raise RequestError(f"replica: {name} is {str(value)[:50]!r}; it must be a whole number")
    return value
