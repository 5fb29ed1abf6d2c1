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
from dataclasses import dataclass
from typing import Any

from megascale_checkpoint.checksums import checksum
from megascale_common.service.errors import DamagedError, RequestError
from megascale_job.names import is_dns_label

VERSION = 2


@dataclass(frozen=True, slots=True)
class StateKey:
    """Which state of which rank. The step alone is not enough: two attempts may differ in it."""

    job: str
    rank: int
    attempt: int
    step: int
    layout_digest: str


@dataclass(frozen=True, slots=True)
class PieceBytes:
    """One piece of a slot: where it lies, and the xxh3-128 of its bytes."""

    offset: int
    size_bytes: int
    checksum: str


@dataclass(frozen=True, slots=True)
class SealedState:
    """A sealed slot without its bytes; ``slot_bytes`` is the size of the whole slot."""

    key: StateKey
    slot_bytes: int
    pieces: tuple[PieceBytes, ...]
    small_state: dict[str, Any]

    @property
    def size_bytes(self) -> int:
        """Bytes of all pieces: what travels."""
        return sum(piece.size_bytes for piece in self.pieces)

    def to_mapping(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "key": key_to_mapping(self.key),
            "slot_bytes": self.slot_bytes,
            "pieces": [[p.offset, p.size_bytes, p.checksum] for p in self.pieces],
            "small_state": self.small_state,
        }

    @classmethod
    def from_mapping(cls, values: object) -> SealedState:
        """The inverse of :meth:`to_mapping`.

        Raises:
            RequestError: a field is missing or wrong.
        """
        fields = mapping_of(values, "state")
        slot_bytes, pieces = number_of(fields, "slot_bytes"), fields.get("pieces")
        if not isinstance(pieces, list):
            raise RequestError("replica: pieces of the state is not a list")
        state = cls(
            key_from_mapping(fields.get("key")),
            slot_bytes,
            tuple(_piece(item, slot_bytes) for item in pieces),
            dict(mapping_of(fields.get("small_state"), "small_state")),
        )
        if state.size_bytes > slot_bytes:
            raise RequestError(f"replica: its pieces exceed its slot of {slot_bytes} bytes")
        return state


def key_to_mapping(key: StateKey) -> dict[str, Any]:
    """Plain values for JSON."""
    return {
        "job": key.job,
        "rank": key.rank,
        "attempt": key.attempt,
        "step": key.step,
        "layout_digest": key.layout_digest,
    }


def key_from_mapping(values: object) -> StateKey:
    """The inverse of :func:`key_to_mapping`.

    Raises:
        RequestError: a field is missing or wrong.
    """
    fields = mapping_of(values, "key")
    job, digest = fields.get("job"), fields.get("layout_digest")
    if not isinstance(job, str) or not is_dns_label(job) or not isinstance(digest, str):
        raise RequestError(f"replica: {str(dict(fields))[:200]} does not name a state of a rank")
    rank, attempt, step = (number_of(fields, name) for name in ("rank", "attempt", "step"))
    return StateKey(job, rank, attempt, step, digest)


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
    good = isinstance(numbers, list) and all(_whole(number) for number in numbers)
    if not good or not numbers or max(numbers) >= len(state.pieces):
        raise RequestError(f"replica: numbers is {str(numbers)[:100]}; it must name pieces")
    return sorted(set(numbers))


def mapping_of(value: object, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise RequestError(f"replica: {what} is not a JSON object")
    return value


def _piece(item: object, slot_bytes: int) -> PieceBytes:
    if isinstance(item, list) and len(item) == 3 and isinstance(item[2], str):
        offset, size_bytes, checksum = item
        if _whole(offset) and _whole(size_bytes) and offset + size_bytes <= slot_bytes:
            return PieceBytes(offset, size_bytes, checksum)
    raise RequestError(f"replica: {str(item)[:100]} is no piece of a slot of {slot_bytes} bytes")


def number_of(fields: Mapping[str, Any], name: str) -> int:
    """The whole number, 0 or more, of that name; raises RequestError without one."""
    value = fields.get(name)
    if not isinstance(value, int) or not _whole(value):
        raise RequestError(f"replica: {name} is {str(value)[:50]!r}; it must be a whole number")
    return value


def _whole(value: object) -> bool:
    return type(value) is int and value >= 0
