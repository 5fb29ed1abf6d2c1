"""One connection between two daemons: frames, and the bytes of pieces. Blocking, for threads.

Time limits of the kernel (SO_RCVTIMEO, SO_SNDTIMEO) bound each wait, so one call can receive a
whole chunk. The kernel also sizes the buffers, up to several MiB; a size set here would be cut to
what the host allows, 208 KiB by default.

If this process has certificates, :class:`Encrypted` takes the place of the socket: TLS between two
daemons, each of which must show the certificate of a node.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import socket
import ssl
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import xxhash
from msgspec import to_builtins

from megascale_checkpoint.concurrency import Cancellation
from megascale_checkpoint.replicas.protocol import (
    VERSION,
    PieceBytes,
    SealedState,
)
from megascale_common.node.addresses import split
from megascale_common.service.channel import presented
from megascale_common.service.errors import (
    DamagedError,
    ForbiddenError,
    RequestError,
    ServiceError,
    UnauthenticatedError,
)
from megascale_common.service.identity.certificates import Certificates
from megascale_common.service.identity.peers import Role, peer_of

# Roles that can keep and fetch snapshots. A node's daemon can show its agent's certificate.
_DAEMONS = (Role.CHECKPOINT, Role.EXECUTOR)
_NAMES = "x509_subject_alternative_name"


class Encrypted:
    """A TLS connection with those calls of a socket that :class:`Connection` makes.

    For one thread at a time.

    A call that would block for ``silence_s`` raises BlockingIOError, as a socket with kernel time
    limits does.
    """

    def __init__(self, sock: ssl.SSLSocket, silence_s: float) -> None:
        sock.settimeout(silence_s)
        self._sock = sock
        self._peeked = b""

    def send(self, data: memoryview) -> int:
        """As a socket's."""
        try:
            return self._sock.send(data)
        except (TimeoutError, ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
            raise BlockingIOError from error

    def recv(self, size: int, flags: int = 0) -> bytes:
        """The next byte, which stays to be received (``flags`` MSG_PEEK); b"" at the end."""
        assert (size, flags) == (1, socket.MSG_PEEK), "only MSG_PEEK of one byte is supported"
        if not self._peeked:
            byte = bytearray(1)
            self._peeked = bytes(byte[: self._read(memoryview(byte))])
        return self._peeked

    def recv_into(self, view: memoryview, size: int = 0, flags: int = 0) -> int:
        """Fill ``view`` (MSG_WAITALL), or as much as arrives in time; return 0 at the end."""
        count = len(self._peeked)  # the byte that recv() has left to be received
        view[:count] = self._peeked
        self._peeked = b""
        while count < len(view):
            try:
                received = self._read(view[count:])
            except BlockingIOError:
                if not count:
                    raise
                break
            if not received:
                break
            count += received
        return count

    def shutdown(self, how: int) -> None:
        """End both directions; the other side can still read what was sent before."""
        shut(self._sock, how)

    def close(self) -> None:
        """As a socket's."""
        self._sock.close()

    def _read(self, view: memoryview) -> int:
        try:
            return self._sock.recv_into(view)
        except (TimeoutError, ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
            raise BlockingIOError from error


def as_client(sock: socket.socket, host: str, files: Certificates, silence_s: float) -> Encrypted:
    """The connection to the daemon at ``host``, which its certificate has to name.

    Raises:
        OSError: the handshake failed (ssl.SSLError is one).
        ForbiddenError: the certificate is not that of a node.
        OptionError: the files of this process cannot be used.
    """
    context = files.context(ssl.PROTOCOL_TLS_CLIENT)
    sock.settimeout(silence_s)
    return _checked(context.wrap_socket(sock, server_hostname=host), silence_s)


def as_server(
    sock: socket.socket,
    files: Certificates,
    silence_s: float,
    begins: Callable[[socket.socket], None],
) -> Encrypted:
    """The connection of a daemon that has dialled; raises as :func:`as_client`.

    ``begins`` is called with the TLS socket that replaces ``sock``, before anything is received.
    """
    context = files.context(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_REQUIRED
    sock.settimeout(silence_s)
    tls = context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
    begins(tls)
    tls.do_handshake()
    return _checked(tls, silence_s)


def shut(sock: socket.socket, how: int) -> None:
    """End a connection while another thread waits in it.

    Not with SSLSocket.shutdown, which would drop the TLS object that the other thread is using.
    """
    socket.socket.shutdown(sock, how)


def _checked(sock: ssl.SSLSocket, silence_s: float) -> Encrypted:
    shown = sock.getpeercert() or {}
    pairs = [tuple(pair) for pair in shown.get("subjectAltName", ())]
    peer = peer_of({_NAMES: [str(pair[1]).encode() for pair in pairs if pair[0] == "URI"]})
    if peer.role not in _DAEMONS:
        raise ForbiddenError(f"{peer} is not a node's daemon")
    return Encrypted(sock, silence_s)


T = TypeVar("T")
MAX_HELLO_BYTES = 4096  # small, because the caller has not shown a token yet
MAX_FRAME_BYTES = 32 << 20  # some 60 bytes per piece
CHUNK_BYTES = 1 << 20
CONNECT_TIMEOUT_S = 3.0
SILENCE_S = 10.0  # a peer that neither sends nor takes a byte for so long is given up
# A peer that only drips is given up too: a state has GRACE_S plus its time at the slowest rate.
SLOWEST_BYTES_PER_S, GRACE_S = 16 << 10, 60.0
_MAGIC = b"MSR2"
_HEAD = struct.Struct("<4sIQ")  # magic, length and checksum of the body
_TIMEVAL = struct.Struct("@ll")

Throttle = Callable[[int], float]  # from a size to the seconds to wait before it is sent


class PeerError(ConnectionError):
    """The peer cannot be reached, is gone, silent or too slow, or refuses."""


class RefusedError(PeerError):
    """The peer refuses, and would refuse on any other connection too.

    ``superseded``: it would also refuse at any later time, because it has a later state.
    """

    def __init__(self, problem: str, *, superseded: bool = False) -> None:
        super().__init__(problem)
        self.superseded = superseded


class Activity:
    """The time of the last byte of a transfer, on any of its connections, and its deadline."""

    def __init__(self, size_bytes: int = 0) -> None:
        self.moved_s = time.monotonic()
        self._until_s = self.moved_s + GRACE_S + size_bytes / SLOWEST_BYTES_PER_S

    def moved(self) -> None:
        """Note that bytes have moved."""
        self.moved_s = time.monotonic()

    @property
    def silent(self) -> bool:
        """True if nothing has moved for SILENCE_S."""
        return time.monotonic() - self.moved_s >= SILENCE_S

    def check_time(self) -> None:
        """Raise PeerError if the transfer has passed its deadline."""
        if time.monotonic() > self._until_s:
            raise PeerError(f"the peer is slower than {SLOWEST_BYTES_PER_S >> 10} KiB/s")


class Connection:
    """One end of a connection, blocking; close it after use (``with``).

    ``activity`` is shared by the transfer's streams: while others move bytes, this one can wait.
    """

    _sock: socket.socket | Encrypted

    def __init__(self, sock: socket.socket, cancelled: Cancellation) -> None:
        # Limits in the kernel and not Python's timeout, which would add a poll to every call.
        limit = _TIMEVAL.pack(int(SILENCE_S), int(SILENCE_S % 1 * 1e6))
        sock.settimeout(None)
        with contextlib.suppress(OSError):  # the caller may be gone already
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock
        self._cancelled = cancelled
        self._is_shut = False
        self.activity = Activity()

    @classmethod
    def dial(cls, endpoint: str, token: str, cancelled: Cancellation) -> Connection:
        """Connect to a peer's replica server, with a Hello.

        Raises:
            PeerError: it cannot be reached.
        """
        try:
            host, port = split(endpoint)
            sock = socket.create_connection((host, port), CONNECT_TIMEOUT_S)
        except (OSError, ValueError) as error:
            raise PeerError(f"{endpoint} cannot be reached: {error}") from error
        connection = cls(sock, cancelled)
        if (files := presented()) is not None:
            try:
                connection._sock = as_client(sock, host, files, SILENCE_S)
            except (OSError, ServiceError) as error:
                sock.close()
                raise PeerError(f"{endpoint} cannot be trusted: {error}") from error
        connection.send({"version": VERSION, "token": token})
        return connection

    def accept(self, token: str) -> None:
        """Receive the caller's Hello, and its certificate if this process has certificates.

        Raises:
            PeerError: it shows no certificate, or not that of a node.
            UnauthenticatedError: it does not have the cluster's token.
            RequestError: it is of another version.
        """
        if (files := presented()) is not None:
            assert isinstance(self._sock, socket.socket)
            try:
                self._sock = as_server(self._sock, files, SILENCE_S, self._switch_to)
            except (OSError, ServiceError) as error:
                self.close()  # without an answer
                raise PeerError(f"a caller cannot be trusted: {error}") from error
        hello = self.receive(MAX_HELLO_BYTES)
        # In constant time, so that the token cannot be guessed byte by byte.
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
        body = json.dumps(message, separators=(",", ":"), default=to_builtins).encode()
        if len(body) > MAX_FRAME_BYTES:
            raise RequestError(f"replica: a frame of {len(body)} bytes is above {MAX_FRAME_BYTES}")
        head = _HEAD.pack(_MAGIC, len(body), xxhash.xxh3_64_intdigest(body))
        self._send(memoryview(head + body))

    def receive(self, limit_bytes: int = MAX_FRAME_BYTES) -> dict[str, Any]:
        """Wait for one frame.

        Raises:
            PeerError: the peer is gone, silent, or sends something else.
        """
        head = bytearray(_HEAD.size)
        self._receive_into(memoryview(head))
        magic, length, sent = _HEAD.unpack(head)
        if magic != _MAGIC or length > limit_bytes:
            raise PeerError("the peer sends no frame of the replica protocol")
        body = bytearray(length)
        self._receive_into(memoryview(body))
        # Without this checksum, a flipped offset would put a whole piece in the wrong place.
        if xxhash.xxh3_64_intdigest(body) != sent:
            raise PeerError("a frame of the peer is not what was sent")
        try:
            message = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise PeerError(f"the peer sends no JSON: {error}") from error
        if not isinstance(message, dict):
            raise RequestError("replica: message is not a JSON object")
        return message

    def receive_or_end(self) -> dict[str, Any] | None:
        """As :meth:`receive`, but None if the peer has closed the connection."""
        if not self._moved("sends nothing", self._sock.recv, 1, socket.MSG_PEEK):
            return None
        return self.receive()

    def send_pieces(
        self,
        state: SealedState,
        numbers: Sequence[int],
        image: memoryview,
        throttle: Throttle = lambda _: 0.0,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        """Send the bytes of some pieces of ``image``, a slot, at the pace of ``throttle``.

        Not with sendfile, which takes as much processor time: without a copy here, the receiver
        reads 4 KiB pages that are in no cache.

        Raises:
            PeerError: the peer is gone, or too slow.
            SupersededError: cancelled.
        """
        for number in numbers:
            for begin, end in _chunks(state.pieces[number], chunk_bytes):
                self.activity.check_time()
                self._cancelled.pause(throttle(end - begin))
                self._send(image[begin:end])

    def receive_pieces(
        self, state: SealedState, numbers: Sequence[int], image: memoryview, where: str
    ) -> None:
        """Receive the bytes of some pieces into ``image``, and verify each piece's checksum.

        Raises:
            DamagedError: a piece is not what was sealed; names ``where`` it belongs.
            PeerError: the peer is gone, or too slow.
            SupersededError: cancelled.
        """
        for number in numbers:
            piece, hasher = state.pieces[number], xxhash.xxh3_128()
            # Each chunk is hashed while it is still in the processor's cache.
            for begin, end in _chunks(piece, CHUNK_BYTES):
                self.activity.check_time()
                self._cancelled.check()
                self._receive_into(image[begin:end])
                hasher.update(image[begin:end])
            if hasher.hexdigest() != piece.checksum:
                raise DamagedError(where, f"piece {number} of the replica is not what was sealed")

    def shut(self) -> None:
        """End the connection; a thread that waits in it gets a PeerError."""
        self._is_shut = True
        with contextlib.suppress(OSError):  # the peer was faster
            if isinstance(self._sock, Encrypted):
                self._sock.shutdown(socket.SHUT_RDWR)
            else:
                shut(self._sock, socket.SHUT_RDWR)

    def _switch_to(self, sock: socket.socket) -> None:
        """Switch to the TLS socket; shut it if a deadline has shut this connection meanwhile."""
        self._sock = sock
        if self._is_shut:
            self.shut()

    def close(self) -> None:
        """Close it; no thread may still wait in it."""
        self._sock.close()

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self, data: memoryview) -> None:
        while data:
            data = data[self._moved("takes nothing", self._sock.send, data) :]

    def _receive_into(self, view: memoryview) -> None:
        while view:
            how = (view, 0, socket.MSG_WAITALL)
            count = self._moved("sends nothing", self._sock.recv_into, *how)
            if not count:
                raise PeerError("the peer has closed the connection")
            view = view[count:]

    def _moved(self, what: str, call: Callable[..., T], *arguments: Any) -> T:
        """The result of a call that moves bytes; repeated while other streams of it move."""
        while True:
            try:
                result = call(*arguments)
            except BlockingIOError as error:
                # A silent stream alone is no failure: the peer may be busy with the others.
                if self.activity.silent:
                    raise PeerError(f"the peer {what} for {SILENCE_S:g} s") from error
            except OSError as error:
                raise PeerError(f"the connection to the peer broke: {error}") from error
            else:
                self.activity.moved()
                return result


def refusal(reply: Mapping[str, Any], *verbs: str) -> str:
    """The error in a reply whose verb is not one of ``verbs``; "" if it is one of them."""
    if reply.get("verb") in verbs:
        return ""
    return str(reply.get("error") or f"the peer answers {reply.get('verb')!r}")[:500]


def _chunks(piece: PieceBytes, size: int) -> list[tuple[int, int]]:
    end = piece.offset + piece.size_bytes
    return [(begin, min(begin + size, end)) for begin in range(piece.offset, end, size)]
