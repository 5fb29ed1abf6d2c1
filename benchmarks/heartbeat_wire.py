"""Streams of `heartbeats.py` on one TCP connection each: gRPC over HTTP/2, as little as that needs.

A gRPC library costs its client as much processor time per message as its server, and more per
connection. On the machine that the driver shares with 12,500 nodes that would measure the nodes.
The bytes are those of RFC 9113 and of gRPC's PROTOCOL-HTTP2.md: settings, headers in literal form,
data frames within both flow-control windows, answers to pings. Headers of answers are not decoded:
a stream that ends is over, for whatever reason.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Iterable
from typing import cast

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, END_HEADERS, PADDED, ACK = 1, 4, 8, 1
INITIAL_WINDOW_SIZE = 4  # an identifier of SETTINGS
WINDOW_BYTES = 1 << 24  # what the server may send before the next window update
DEFAULT_WINDOW_BYTES = 65_535
FRAME_BYTES = 16_384  # the least that every server takes
MAX_WAITING = 64  # messages for a window that is full; beyond, the newest is dropped
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_HEAD = struct.Struct(">BHBBI")
_U32 = struct.Struct(">I")


class Wire(asyncio.Protocol):
    """One connection: the stream of a node, and short calls beside it whose answers are dropped."""

    def __init__(
        self,
        path: str,
        metadata: Iterable[tuple[str, str]],
        taken: Callable[[bytes], None],
        ended: Callable[[], None],
    ) -> None:
        self._path, self._metadata, self._taken, self._ended = path, tuple(metadata), taken, ended
        self._transport: asyncio.Transport | None = None
        self._received, self._message = bytearray(), bytearray()
        self._windows = {0: DEFAULT_WINDOW_BYTES, 1: DEFAULT_WINDOW_BYTES}
        self._initial = DEFAULT_WINDOW_BYTES
        self._waiting: list[bytes] = []
        self._unconfirmed = 0  # bytes received since the last update of our window
        self._next_stream = 3

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Open the stream."""
        self._transport = cast("asyncio.Transport", transport)
        settings = struct.pack(">HI", INITIAL_WINDOW_SIZE, WINDOW_BYTES)
        more = _U32.pack(WINDOW_BYTES - DEFAULT_WINDOW_BYTES)
        self._transport.write(
            _PREFACE + _frame(SETTINGS, 0, 0, settings) + _frame(WINDOW_UPDATE, 0, 0, more)
            + _frame(HEADERS, END_HEADERS, 1, self._headers(self._path))
        )  # fmt: skip

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self.close()

    def close(self) -> None:
        """End the connection; ``ended`` is called once."""
        if self._transport is not None:
            self._transport.abort()
            self._transport = None
            self._ended()

    def send(self, message: bytes) -> None:
        """Send one message on the stream, or when the server's windows allow it."""
        self._waiting.append(b"\0" + _U32.pack(len(message)) + message)
        if len(self._waiting) > MAX_WAITING:
            self._waiting.pop()
        self._flush()

    def call(self, path: str, message: bytes) -> None:
        """Send a call with one request."""
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        data = b"\0" + _U32.pack(len(message)) + message
        if self._transport is None or len(data) > min(self._windows[0], FRAME_BYTES):
            return
        self._windows[0] -= len(data)
        self._transport.write(
            _frame(HEADERS, END_HEADERS, stream, self._headers(path))
            + _frame(DATA, END_STREAM, stream, data)
        )

    def data_received(self, data: bytes) -> None:
        """Take what has arrived, frame by frame."""
        received = self._received
        received += data
        at = 0
        while len(received) - at >= _HEAD.size:
            high, low, kind, flags, stream = _HEAD.unpack_from(received, at)
            end = at + _HEAD.size + (high << 16 | low)
            if len(received) < end:
                break
            self._take(kind, flags, stream, bytes(received[at + _HEAD.size : end]))
            at = end
        del received[:at]

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == DATA:
            self._confirm(len(payload))
            if flags & PADDED:
                payload = payload[1 : len(payload) - payload[0]]
            if stream == 1:
                self._add(payload)
        elif kind == WINDOW_UPDATE and stream in self._windows:
            self._windows[stream] += _U32.unpack(payload)[0]
            self._flush()
        elif kind == SETTINGS and not flags & ACK:
            self._settle(payload)
        elif kind == PING and not flags & ACK and self._transport is not None:
            self._transport.write(_frame(PING, ACK, 0, payload))
        ends = kind in (DATA, HEADERS) and flags & END_STREAM
        if kind == GOAWAY or (stream == 1 and (ends or kind == RST_STREAM)):
            self.close()

    def _settle(self, payload: bytes) -> None:
        for name, value in struct.iter_unpack(">HI", payload):
            if name == INITIAL_WINDOW_SIZE:
                self._windows[1] += value - self._initial
                self._initial = value
        if self._transport is not None:
            self._transport.write(_frame(SETTINGS, ACK, 0, b""))
        self._flush()

    def _confirm(self, count: int) -> None:
        self._unconfirmed += count
        if self._unconfirmed > WINDOW_BYTES // 4 and self._transport is not None:
            more = _U32.pack(self._unconfirmed)
            self._transport.write(
                _frame(WINDOW_UPDATE, 0, 0, more) + _frame(WINDOW_UPDATE, 0, 1, more)
            )
            self._unconfirmed = 0

    def _add(self, payload: bytes) -> None:
        message = self._message
        message += payload
        while len(message) >= 5:
            end = 5 + _U32.unpack_from(message, 1)[0]
            if len(message) < end:
                return
            taken = bytes(message[5:end])
            del message[:end]
            self._taken(taken)

    def _flush(self) -> None:
        while self._waiting and self._transport is not None:
            data = self._waiting[0]
            room = min(self._windows[0], self._windows[1])
            if len(data) > room:
                return
            self._waiting.pop(0)
            self._windows[0] -= len(data)
            self._windows[1] -= len(data)
            for first in range(0, len(data), FRAME_BYTES):
                part = data[first : first + FRAME_BYTES]
                self._transport.write(_frame(DATA, 0, 1, part))

    def _headers(self, path: str) -> bytes:
        # :method POST and :scheme http are entries 3 and 6 of the static table (RFC 7541).
        fields = (
            (":path", path), (":authority", "driver"), ("content-type", "application/grpc"),
            ("te", "trailers"), *self._metadata,
        )  # fmt: skip
        return b"\x83\x86" + b"".join(b"\0" + _text(k) + _text(v) for k, v in fields)


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    size = len(payload)
    return _HEAD.pack(size >> 16, size & 0xFFFF, kind, flags, stream) + payload


def _text(value: str) -> bytes:
    """A string without Huffman coding, behind its length (RFC 7541, 5.1 and 5.2)."""
    data = value.encode()
    size = len(data)
    if size < 127:
        return bytes([size]) + data
    head, size = [127], size - 127
    while size >= 128:
        head.append(size % 128 + 128)
        size //= 128
    return bytes([*head, size]) + data
