"""Framing of the local contract over unix sockets: u32 length, then one JSON object.

The length is little-endian, and at most 1 MiB. Trainer, agent, data loader and checkpoint daemon of
one node use it. File descriptors can travel with a message (SCM_RIGHTS). There is no pickle. The
trainer uses the blocking calls; servers with an event loop feed received bytes to :class:`Decoder`.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

PROTOCOL_VERSION = 1
MAX_MESSAGE_BYTES = 1 << 20
MAX_DESCRIPTORS = 16
_LENGTH = struct.Struct("<I")

Message = dict[str, Any]  # as it comes off the wire
Sendable: TypeAlias = Mapping[str, Any] | msgspec.Struct


class FramingError(ConnectionError):
    """The peer closed the socket in the middle of a message, or sent an invalid one."""


def encode(message: Sendable) -> bytes:
    """Bytes of one framed message.

    Python's json writes it, because msgspec's own JSON encoder writes null for the NaN of a loss
    and refuses lone surrogates, which file names can contain.

    Raises:
        FramingError: the message is larger than 1 MiB.
    """
    plain = msgspec.to_builtins(message, enc_hook=_plain)
    body = json.dumps(plain, separators=(",", ":")).encode()
    if len(body) > MAX_MESSAGE_BYTES:
        raise FramingError(
            f"message {plain.get('kind')!r} has {len(body)} bytes; the limit is {MAX_MESSAGE_BYTES}"
        )
    return _LENGTH.pack(len(body)) + body


def _plain(value: object) -> object:
    """The plain value of a subclass of a JSON type, such as numpy's float64."""
    for kind in (float, int, str):
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"a message cannot have a value of type {type(value).__name__}")


class Decoder:
    """Turns received bytes into messages, wherever the stream was split."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """Messages that ``data`` completes.

        Raises:
            FramingError: a length beyond 1 MiB or a body that is not a JSON object.
        """
        self._buffer += data
        messages: list[Message] = []
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > MAX_MESSAGE_BYTES:
                raise FramingError(
                    f"announced message of {length} bytes; the limit is {MAX_MESSAGE_BYTES}"
                )
            if len(self._buffer) < _LENGTH.size + length:
                break
            body = bytes(self._buffer[_LENGTH.size : _LENGTH.size + length])
            del self._buffer[: _LENGTH.size + length]
            messages.append(_parse(body))
        return messages


def send(sock: socket.socket, message: Sendable, descriptors: Sequence[int] = ()) -> None:
    """Send one message, and ``descriptors`` with its first byte; blocks until all is written."""
    data = encode(message)
    if not descriptors:
        sock.sendall(data)
        return
    # The kernel attaches descriptors to the first byte of this call, which can write only a part.
    sent = socket.send_fds(sock, [data], list(descriptors))
    sock.sendall(data[sent:])


def receive(sock: socket.socket) -> tuple[Message, list[int]] | None:
    """Wait for one message and the descriptors sent with it; None if the peer has closed.

    Raises:
        FramingError: the peer closed inside a message, or sent a malformed one.
        TimeoutError: the socket's timeout passed.
    """
    # Only the length: a longer read could take bytes of the next message, and with them the
    # descriptors that belong to that message.
    first, descriptors, _, _ = socket.recv_fds(sock, _LENGTH.size, MAX_DESCRIPTORS)
    if not first:
        return None
    head = first + _receive_exactly(sock, _LENGTH.size - len(first))
    (length,) = _LENGTH.unpack(head)
    if length > MAX_MESSAGE_BYTES:
        raise FramingError(f"announced message of {length} bytes; the limit is {MAX_MESSAGE_BYTES}")
    return _parse(_receive_exactly(sock, length)), list(descriptors)


def _receive_exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = sock.recv(size - len(data))
        if not part:
            raise FramingError("the peer closed the socket in the middle of a message")
        data += part
    return bytes(data)


def _parse(body: bytes) -> Message:
    try:
        message = json.loads(body)
    except RecursionError as error:
        raise FramingError("message is JSON that is nested too deeply") from error
    except ValueError as error:
        raise FramingError(f"message is not JSON: {error}") from error
    if not isinstance(message, dict):
        raise FramingError("message is not a JSON object")
    return message
