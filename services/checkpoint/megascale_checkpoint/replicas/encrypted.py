"""TLS for a connection between two daemons, in the shape of the socket that it replaces."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable

from megascale_common.service.errors import ForbiddenError
from megascale_common.service.identity.certificates import Certificates
from megascale_common.service.identity.peers import Role, peer_of

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
        self._sock, self._peeked = sock, b""

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
