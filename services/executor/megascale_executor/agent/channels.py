"""The agent's ends of local sockets: framed messages in and out without blocking the loop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence

from megascale_common.node import framing
from megascale_common.node.messages import LocalMessage, kind_of

_RECEIVE_BYTES = 65536
# A new socket's send buffer holds this much without a reader, so that sending never waits.
_MAX_UNREAD_BYTES = 128 * 1024


class MessageChannel:
    """A connected unix stream socket that carries framed messages; it owns the socket."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._decoder = framing.Decoder()

    @classmethod
    def pair(cls) -> tuple[MessageChannel, socket.socket]:
        """A channel and its other end, which the caller passes to a child and then closes."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * _MAX_UNREAD_BYTES)
        return cls(ours), theirs

    def send(self, message: LocalMessage, descriptors: Sequence[int] = ()) -> None:
        """Send at once, together with ``descriptors``.

        Raises:
            FramingError: the message is too large, the peer is gone, or too many of its messages
                are unread.
        """
        size = len(framing.encode(message))
        if size > _MAX_UNREAD_BYTES:
            kind = kind_of(message)
            raise framing.FramingError(f"message {kind!r} exceeds {_MAX_UNREAD_BYTES} bytes")
        try:
            framing.send(self._socket, message, descriptors)
        except BlockingIOError as error:
            raise framing.FramingError("the peer does not read its messages") from error
        except OSError as error:
            raise framing.FramingError(f"the peer is gone: {error}") from error

    async def messages(self) -> AsyncIterator[framing.Message]:
        """Messages until the peer closes.

        Raises:
            FramingError: the peer sent something that is not a message.
        """
        loop = asyncio.get_running_loop()
        while True:
            try:
                data = await loop.sock_recv(self._socket, _RECEIVE_BYTES)
            except OSError:
                return
            if not data:
                return
            for message in self._decoder.feed(data):
                yield message

    def close(self) -> None:
        """Close our end."""
        self._socket.close()
