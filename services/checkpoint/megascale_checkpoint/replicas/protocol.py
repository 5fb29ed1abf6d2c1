"""What two daemons send each other about replicas, over a TCP connection of its own.

Not gRPC: a state of gigabytes goes from the slot to the socket and from the socket to the replica
without a copy between. All blocking, for threads, and every wait is bounded.

    sender  Hello {version, token}, Request {verb: store, attempt, state}
    server  Reply {verb: go} | {verb: kept} (it has this state) | {verb: refused, error}
    sender  the bytes of the pieces, in the order of the state
    server  Reply {verb: kept} | {verb: refused, error}

    reader  Hello, Request {verb: fetch, key}
    server  Reply {verb: state, state} | {verb: refused, error}, then the bytes of the pieces

``attempt`` is the one that the sender runs in: the state may be of an earlier one.

A frame is a magic word, a length and a JSON object. The receiver of pieces compares the checksum of
each with the one from the seal before the state counts.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import socket
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import xxhash

from megascale_checkpoint.checksums import checksum
from megascale_checkpoint.concurrency import Cancellation
from megascale_common.job.names import is_dns_label
from megascale_common.service.errors import (
    DamagedError,
    RequestError,
    UnauthenticatedError,
)

VERSION = 1
MAX_HELLO_BYTES = 4096  # nobody has shown a token yet
MAX_FRAME_BYTES = 32 << 20  # some 60 bytes a piece
CHUNK_BYTES = 1 << 20
CONNECT_TIMEOUT_S = 3.0
SILENCE_S = 10.0  # a peer that neither sends nor takes a byte for so long is given up
# One that drips is given up too: the time for a state, at the least.
SLOWEST_BYTES_PER_S, GRACE_S = 16 << 10, 60.0
_MAGIC = b"MSRP"
_HEAD = struct.Struct("<4sI")


class PeerError(ConnectionError):
    """The peer cannot be reached, is gone, silent or too slow, or refuses."""


Throttle = Callable[[int], float]  # takes a size, returns the seconds to wait before it is sent


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
        fields = _mapping(values, "state")
        slot_bytes, pieces = number_of(fields, "slot_bytes"), fields.get("pieces")
        if not isinstance(pieces, list):
            raise RequestError("replica: pieces of the state is not a list")
        state = cls(
            key_from_mapping(fields.get("key")),
            slot_bytes,
            tuple(_piece(item, slot_bytes) for item in pieces),
            dict(_mapping(fields.get("small_state"), "small_state")),
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
    fields = _mapping(values, "key")
    job, digest = fields.get("job"), fields.get("layout_digest")
    if not isinstance(job, str) or not is_dns_label(job) or not isinstance(digest, str):
        raise RequestError(f"replica: {str(dict(fields))[:200]} does not name a state of a rank")
    rank, attempt, step = (number_of(fields, name) for name in ("rank", "attempt", "step"))
    return StateKey(job, rank, attempt, step, digest)


class Connection:
    """One end of a connection, blocking; close it after use (``with``)."""

    def __init__(self, sock: socket.socket, cancelled: Cancellation) -> None:
        sock.settimeout(SILENCE_S)
        with contextlib.suppress(OSError):  # the caller may be gone already
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock, self._cancelled = sock, cancelled

    @classmethod
    def dial(cls, endpoint: str, token: str, cancelled: Cancellation) -> Connection:
        """Connect to a peer's replica server, with a Hello.

        Raises:
            PeerError: it cannot be reached.
        """
        host, _, port = endpoint.rpartition(":")
        try:
            sock = socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S)
        except (OSError, ValueError) as error:
            raise PeerError(f"{endpoint} cannot be reached: {error}") from error
        connection = cls(sock, cancelled)
        connection.send({"version": VERSION, "token": token})
        return connection

    def accept(self, token: str) -> None:
        """Take the Hello of a caller.

        Raises:
            UnauthenticatedError: it does not have the cluster's token.
            RequestError: it is of another version.
        """
        hello = self.receive(MAX_HELLO_BYTES)
        if not hmac.compare_digest(str(hello.get("token")).encode(), token.encode()):
            raise UnauthenticatedError("the caller does not have the token of this cluster")
        if hello.get("version") != VERSION:
            version = str(hello.get("version"))[:20]
            raise RequestError(f"replica protocol {version!r}; this build has {VERSION}")

    def send(self, message: Mapping[str, Any]) -> None:
        """Send one frame.

        Raises:
            PeerError: the peer is gone or takes nothing.
        """
        body = json.dumps(message, separators=(",", ":")).encode()
        if len(body) > MAX_FRAME_BYTES:
            raise RequestError(f"replica: a frame of {len(body)} bytes is above {MAX_FRAME_BYTES}")
        self._send(memoryview(_HEAD.pack(_MAGIC, len(body)) + body))

    def receive(self, limit_bytes: int = MAX_FRAME_BYTES) -> dict[str, Any]:
        """Wait for one frame.

        Raises:
            PeerError: the peer is gone, silent, or sends something else.
        """
        head = bytearray(_HEAD.size)
        self._receive_into(memoryview(head))
        magic, length = _HEAD.unpack(head)
        if magic != _MAGIC or length > limit_bytes:
            raise PeerError("the peer sends no frame of the replica protocol")
        body = bytearray(length)
        self._receive_into(memoryview(body))
        try:
            return dict(_mapping(json.loads(body), "message"))
        except ValueError as error:
            raise PeerError(f"the peer sends no JSON: {error}") from error

    def send_pieces(
        self,
        state: SealedState,
        image: memoryview,
        throttle: Throttle,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        """Send the bytes of all pieces of ``image``, a slot, at the pace of ``throttle``.

        Raises:
            PeerError: the peer is gone, or too slow.
            SupersededError: cancelled.
        """
        until_s = _deadline_s(state)
        for piece in state.pieces:
            for begin, end in _chunks(piece, chunk_bytes):
                _check_time(until_s)
                self._cancelled.pause(throttle(end - begin))
                self._send(image[begin:end])

    def receive_pieces(self, state: SealedState, image: memoryview, where: str) -> None:
        """Receive the bytes of all pieces into ``image``, and compare each with its checksum.

        Raises:
            DamagedError: a piece is not what was sealed; names ``where`` it was going to.
            PeerError: the peer is gone, or too slow.
            SupersededError: cancelled.
        """
        until_s = _deadline_s(state)
        for number, piece in enumerate(state.pieces):
            hasher = xxhash.xxh3_128()
            for begin, end in _chunks(piece, CHUNK_BYTES):
                _check_time(until_s)
                self._cancelled.check()
                self._receive_into(image[begin:end])
                hasher.update(image[begin:end])
            if hasher.hexdigest() != piece.checksum:
                raise DamagedError(where, f"piece {number} of the replica is not what was sealed")

    def shut(self) -> None:
        """End the connection: a thread that waits in it returns with a PeerError."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the peer was faster

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self._sock.close()

    def _send(self, data: memoryview) -> None:
        try:
            self._sock.sendall(data)
        except OSError as error:
            raise PeerError(_silent(error, "takes nothing")) from error

    def _receive_into(self, view: memoryview) -> None:
        while view:
            try:
                count = self._sock.recv_into(view)
            except OSError as error:
                raise PeerError(_silent(error, "sends nothing")) from error
            if not count:
                raise PeerError("the peer has closed the connection")
            view = view[count:]


def check_pieces(state: SealedState, image: memoryview, where: str) -> None:
    """Raise DamagedError naming ``where`` when ``image`` is not what was sealed."""
    for number, piece in enumerate(state.pieces):
        data = image[piece.offset : piece.offset + piece.size_bytes]
        if checksum(data) != piece.checksum:
            raise DamagedError(where, f"piece {number} of the replica is not what was sealed")


def refusal(reply: Mapping[str, Any], *verbs: str) -> str:
    """The error of a reply whose verb is none of ``verbs``; "" if it is one of them."""
    if reply.get("verb") in verbs:
        return ""
    return str(reply.get("error") or f"the peer answers {reply.get('verb')!r}")[:500]


def _chunks(piece: PieceBytes, size: int) -> list[tuple[int, int]]:
    end = piece.offset + piece.size_bytes
    return [(begin, min(begin + size, end)) for begin in range(piece.offset, end, size)]


def _deadline_s(state: SealedState) -> float:
    return time.monotonic() + GRACE_S + state.size_bytes / SLOWEST_BYTES_PER_S


def _check_time(until_s: float) -> None:
    if time.monotonic() > until_s:
        raise PeerError(f"the peer is slower than {SLOWEST_BYTES_PER_S >> 10} KiB/s")


def _silent(error: OSError, what: str) -> str:
    if isinstance(error, TimeoutError):
        return f"the peer {what} for {SILENCE_S:g} s"
    return f"the connection to the peer broke: {error}"


def _mapping(value: object, what: str) -> Mapping[str, Any]:
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
