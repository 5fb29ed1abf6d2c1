"""One connection between two daemons: frames, and the bytes of pieces. Blocking, for threads.

The kernel's own limits of time bound each wait, so that one call receives a whole chunk. Buffers
are left to the kernel, which grows them to several MiB by itself; a size that is set here would be
cut to what the host allows, which is 208 KiB by default.
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

# TLS for a connection between two daemons, in the shape of the socket that it replaces.

# Who may keep and fetch snapshots: a node's daemon, which may show its agent's certificate.
_DAEMONS = (Role.CHECKPOINT, Role.EXECUTOR)
_NAMES = "x509_subject_alternative_name"


class Encrypted:
    """The calls of a socket that a connection makes; one thread at a time.

    What would block for ``silence_s`` raises BlockingIOError, as a socket does whose kernel limits
    its waits.
    """

    def __init__(self, sock: ssl.SSLSocket, silence_s: float) -> None:
        sock.settimeout(silence_s)
        self._sock = sock
        self._peeked = b""

    def send(self, data: memoryview) -> int:
        """As of a socket."""
        try:
            return self._sock.send(data)
        except (TimeoutError, ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
            raise BlockingIOError from error

    def recv(self, size: int, flags: int = 0) -> bytes:
        """One byte, which stays to be received (``flags`` MSG_PEEK); b"" at the end."""
        assert (size, flags) == (1, socket.MSG_PEEK), "nothing else is asked for"
        if not self._peeked:
            byte = bytearray(1)
            self._peeked = bytes(byte[: self._read(memoryview(byte))])
        return self._peeked

    def recv_into(self, view: memoryview, size: int = 0, flags: int = 0) -> int:
        """Fill ``view`` (MSG_WAITALL), or as much of it as came; 0 at the end."""
        count = len(self._peeked)
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
        """End both ways; the other side may still read what was sent before."""
        shut(self._sock, how)

    def close(self) -> None:
        """As of a socket."""
        self._sock.close()

    def _read(self, view: memoryview) -> int:
        try:
            return self._sock.recv_into(view)
        except (TimeoutError, ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
            raise BlockingIOError from error


def as_client(sock: socket.socket, host: str, files: Certificates, silence_s: float) -> Encrypted:
    """The connection to the daemon at ``host``, whose certificate has to say so.

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

    ``begins`` gets what has taken the place of ``sock``, before anything is received.
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

    Not by the method of an SSLSocket: it takes the TLS away from under that thread.
    """
    socket.socket.shutdown(sock, how)


def _checked(sock: ssl.SSLSocket, silence_s: float) -> Encrypted:
    shown = sock.getpeercert() or {}
    pairs = [tuple(pair) for pair in shown.get("subjectAltName", ())]
    peer = peer_of({_NAMES: [str(pair[1]).encode() for pair in pairs if pair[0] == "URI"]})
    if peer.role not in _DAEMONS:
        raise ForbiddenError(f"{peer} is no node's daemon")
    return Encrypted(sock, silence_s)


T = TypeVar("T")
MAX_HELLO_BYTES = 4096  # nobody has shown a token yet
MAX_FRAME_BYTES = 32 << 20  # some 60 bytes a piece
CHUNK_BYTES = 1 << 20
CONNECT_TIMEOUT_S = 3.0
SILENCE_S = 10.0  # a peer that neither sends nor takes a byte for so long is given up
# One that drips is given up too: the time for a state, at the least.
SLOWEST_BYTES_PER_S, GRACE_S = 16 << 10, 60.0
_MAGIC = b"MSR2"
_HEAD = struct.Struct("<4sIQ")  # magic, length and checksum of the body
_TIMEVAL = struct.Struct("@ll")

Throttle = Callable[[int], float]  # takes a size, returns the seconds to wait before it is sent


class PeerError(ConnectionError):
    """The peer cannot be reached, is gone, silent or too slow, or refuses."""


class RefusedError(PeerError):
    """The peer refuses, which it would do on another connection, too.

    ``superseded``: it would do so at any later time, because it has what comes after.
    """

    def __init__(self, problem: str, *, superseded: bool = False) -> None:
        super().__init__(problem)
        self.superseded = superseded


class Activity:
    """When the last byte of a transfer moved, on whichever of its connections, and its deadline."""

    def __init__(self, size_bytes: int = 0) -> None:
        self.moved_s = time.monotonic()
        self._until_s = self.moved_s + GRACE_S + size_bytes / SLOWEST_BYTES_PER_S

    def moved(self) -> None:
        """Some bytes have."""
        self.moved_s = time.monotonic()

    @property
    def silent(self) -> bool:
        """Whether nothing has moved for too long."""
        return time.monotonic() - self.moved_s >= SILENCE_S

    def check_time(self) -> None:
        """Raise PeerError once the transfer is slower than any that is worth waiting for."""
        if time.monotonic() > self._until_s:
            raise PeerError(f"the peer is slower than {SLOWEST_BYTES_PER_S >> 10} KiB/s")


class Connection:
    """One end of a connection, blocking; close it after use (``with``).

    ``activity`` is that of its transfer: while other streams of it move, this one may wait.
    """

    _sock: socket.socket | Encrypted

    def __init__(self, sock: socket.socket, cancelled: Cancellation) -> None:
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
        """Take the Hello of a caller; where this process has certificates, the caller shows one.

        Raises:
            PeerError: it shows none, or not that of a node.
            UnauthenticatedError: it does not have the cluster's token.
            RequestError: it is of another version.
        """
        if (files := presented()) is not None:
            assert isinstance(self._sock, socket.socket)
            try:
                self._sock = as_server(self._sock, files, SILENCE_S, self._goes_on_as)
            except (OSError, ServiceError) as error:
                self.close()  # and no word to it
                raise PeerError(f"a caller cannot be trusted: {error}") from error
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
        # A flipped offset would put whole pieces in the wrong place, each with its checksum.
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
        """As :meth:`receive`; None once the peer has closed the connection."""
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

        Not by sendfile, which takes no less processor time: without a copy the receiver reads pages
        of 4 KiB that are in no cache.

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
        """Receive the bytes of some pieces into ``image``, and compare each with its checksum.

        Raises:
            DamagedError: a piece is not what was sealed; names ``where`` it was going to.
            PeerError: the peer is gone, or too slow.
            SupersededError: cancelled.
        """
        for number in numbers:
            piece, hasher = state.pieces[number], xxhash.xxh3_128()
            # Each chunk while it is in the processor's cache.
            for begin, end in _chunks(piece, CHUNK_BYTES):
                self.activity.check_time()
                self._cancelled.check()
                self._receive_into(image[begin:end])
                hasher.update(image[begin:end])
            if hasher.hexdigest() != piece.checksum:
                raise DamagedError(where, f"piece {number} of the replica is not what was sealed")

    def shut(self) -> None:
        """End the connection: a thread that waits in it returns with a PeerError."""
        self._is_shut = True
        with contextlib.suppress(OSError):  # the peer was faster
            if isinstance(self._sock, Encrypted):
                self._sock.shutdown(socket.SHUT_RDWR)
            else:
                shut(self._sock, socket.SHUT_RDWR)

    def _goes_on_as(self, sock: socket.socket) -> None:
        """Take the socket that has taken the place of ours, which a deadline may have shut."""
        self._sock = sock
        if self._is_shut:
            self.shut()

    def close(self) -> None:
        """Close it; no thread waits in it any more."""
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
        """The result of a call that moves bytes, made again while other streams of it move."""
        while True:
            try:
                result = call(*arguments)
            except BlockingIOError as error:
                if self.activity.silent:
                    raise PeerError(f"the peer {what} for {SILENCE_S:g} s") from error
            except OSError as error:
                raise PeerError(f"the connection to the peer broke: {error}") from error
            else:
                self.activity.moved()
                return result


def refusal(reply: Mapping[str, Any], *verbs: str) -> str:
    """The error of a reply whose verb is none of ``verbs``; "" if it is one of them."""
    if reply.get("verb") in verbs:
        return ""
    return str(reply.get("error") or f"the peer answers {reply.get('verb')!r}")[:500]


def _chunks(piece: PieceBytes, size: int) -> list[tuple[int, int]]:
    end = piece.offset + piece.size_bytes
    return [(begin, min(begin + size, end)) for begin in range(piece.offset, end, size)]
