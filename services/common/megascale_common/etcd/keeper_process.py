"""The keeper of a lease in a process of its own: it renews while its owner's event loop ticks.

Note [Keeper process]
~~~~~~~~~~~~~~~~~~~~~
A driver whose event loop is busy for seconds must not lose its lease, but one whose loop hangs must
lose it. So another process sends the keep-alives, for as long as the driver's loop gives signs of
life.

Owner and keeper share a pair of local sockets that keep message boundaries. The owner sends orders
(which lease to keep) and signs of life, each with its time; the keeper sends each answered renewal.
Neither waits for the other: if the socket is full, signs of life are dropped, and the owner reads
the renewals whenever it checks its lease. A keeper ends with its owner, because of the parent-death
signal and the end of the socket. An owner whose keeper ends starts another.

The keeper uses etcd's stubs without asyncio and none of the owner's other code, so that the owner's
load does not reach it:

    python -m megascale_common.etcd.keeper_process --socket FD --etcd HOST:PORT[,..]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import grpc

from megascale_common.etcd import rpc_pb2, rpc_pb2_grpc
from megascale_common.etcd.connection import CHANNEL_OPTIONS, TlsConfig
from megascale_common.etcd.lease import KEEPALIVES_PER_TTL, Renewal, now_s
from megascale_common.node.output import steady_streams
from megascale_common.node.process import arm_parent_death, child_environment
from megascale_common.service import logs

# The owner may give no sign of life for so long. It is longer than a full garbage collection of a
# large state, and short enough that a driver that hangs is replaced within half a minute.
SILENCE_LIMIT_S = 15.0
RETRY_S = 0.2
STOP_TIMEOUT_S = 2.0

# To the keeper: kind, lease id, time to live in seconds, time of sending. From it: a Renewal.
_ORDER = struct.Struct("=cqid")
_RENEWAL = struct.Struct("=qdi")
_TICK, _KEEP, _DROP = b"t", b"k", b"d"
_MESSAGE_BYTES = 64

_log = logs.get(__name__)


class KeeperProcess:
    """A ``lease.Keeper`` in a process of its own; use it as a context.

    See Note [Keeper process]. The process is started with the first order, and again after it has
    ended. Use it from the main thread, because of Note [Parent-death signal] in
    :mod:`megascale_common.node.process`.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        tls: TlsConfig | None = None,
        silence_limit_s: float = SILENCE_LIMIT_S,
    ) -> None:
        self._endpoints = tuple(endpoints)
        self._tls = tls
        self._silence_limit_s = silence_limit_s
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._kept: tuple[int, int] | None = None
        self._newest: Renewal | None = None

    @property
    def pid(self) -> int | None:
        """The process, if it runs."""
        running = self._process is not None and self._process.poll() is None
        return self._process.pid if running and self._process is not None else None

    def start(self) -> None:
        """Start the process if none runs; it takes a second until it can renew."""
        if self.pid is None:
            self._start()

    def keep(self, lease_id: int, ttl_s: int) -> None:
        """Renew this lease from now on, and no other."""
        self._kept = lease_id, ttl_s
        self.start()
        self._send(_KEEP, lease_id, ttl_s)
        self.tick()

    def drop(self) -> None:
        """Stop renewing."""
        self._kept = None
        self._send(_DROP)

    def tick(self) -> None:
        """Sign of life of the owner's loop; it also replaces a keeper that has ended."""
        if self.pid is None and self._kept is not None:
            _log.warning("the keeper of the lease has ended; starting another")
            self._start()
            self._send(_KEEP, *self._kept)
        self._send(_TICK)

    def newest(self) -> Renewal | None:
        """The newest renewal that the keeper has reported."""
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while self._socket is not None:
                message = self._socket.recv(_MESSAGE_BYTES)
                if len(message) != _RENEWAL.size:
                    break
                self._newest = Renewal(*_RENEWAL.unpack(message))
        return self._newest

    def close(self) -> None:
        """End the process."""
        self._kept = None
        process = self._process
        self._process = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if process is not None:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def __enter__(self) -> KeeperProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        if self._socket is not None:
            self._socket.close()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            ours.setblocking(False)
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "megascale_common.etcd.keeper_process"),
                    *("--socket", str(theirs.fileno()), "--etcd", ",".join(self._endpoints)),
                    *("--silence-limit-s", str(self._silence_limit_s)),
                    *_tls_options(self._tls),
                ],
                env=child_environment(),
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )
        self._socket = ours

    def _send(self, kind: bytes, lease_id: int = 0, ttl_s: int = 0) -> None:
        # If the socket is full, the keeper hangs and renews nothing, and the validity ends by
        # itself. A closed socket is replaced with the next sign of life.
        with contextlib.suppress(BlockingIOError, ConnectionError):
            if self._socket is not None:
                self._socket.send(_ORDER.pack(kind, lease_id, ttl_s, now_s()))


class _Renewing:
    """The keeper's side: the lease to renew, and whether the owner is alive."""

    def __init__(
        self,
        connection: socket.socket,
        endpoints: Sequence[str],
        tls: TlsConfig | None,
        silence_limit_s: float,
    ) -> None:
        self._connection = connection
        self._silence_limit_s = silence_limit_s
        self._endpoints = list(endpoints)
        self._tls = tls
        self._channels: list[grpc.Channel] = []
        self._stubs: list[rpc_pb2_grpc.LeaseStub] = []
        self._dial()
        self._lease: tuple[int, int] | None = None
        self._ticked_s = self._due_s = now_s()

    def run(self) -> None:
        """Renew until the owner is gone."""
        while self._take():
            if self._lease is None or (wait_s := self._due_s - now_s()) > 0:
                select.select([self._connection], [], [], None if self._lease is None else wait_s)
            elif now_s() - self._ticked_s > self._silence_limit_s:
                # Wait for the owner; its next sign of life, if one comes, is read above.
                select.select([self._connection], [], [], RETRY_S)
            else:
                self._renew(*self._lease)

    def _dial(self) -> None:
        """Open channels to all members, with the present files."""
        tls = self._tls
        self._stamp = () if tls is None else tls.stamp()
        credentials = None if tls is None else tls.credentials()
        before = self._channels
        self._channels = [
            grpc.insecure_channel(endpoint, options=CHANNEL_OPTIONS)
            if credentials is None
            else grpc.secure_channel(endpoint, credentials, options=CHANNEL_OPTIONS)
            for endpoint in self._endpoints
        ]
        self._stubs = [rpc_pb2_grpc.LeaseStub(channel) for channel in self._channels]
        for channel in before:
            channel.close()

    def _dial_with_new_files(self) -> None:
        """After a failure, connect again if the files were replaced and all of them exist."""
        if self._tls is not None and self._tls.stamp() not in ((), self._stamp):
            with contextlib.suppress(OSError):  # a file is just being replaced
                self._dial()

    def _take(self) -> bool:
        """Take the owner's messages; returns False if it is gone."""
        with contextlib.suppress(BlockingIOError):
            while message := self._connection.recv(_MESSAGE_BYTES):
                kind, lease_id, ttl_s, sent_s = _ORDER.unpack(message)
                if kind == _TICK:
                    # The time of sending counts, not that of reading: signs of life that waited in
                    # the socket while this process was slow are as old as they are.
                    self._ticked_s = max(self._ticked_s, sent_s)
                else:
                    self._lease = (lease_id, ttl_s) if kind == _KEEP else None
                    self._due_s = sent_s + ttl_s / KEEPALIVES_PER_TTL
            return False
        return True

    def _renew(self, lease_id: int, ttl_s: int) -> None:
        sent_s = now_s()
        interval_s = ttl_s / KEEPALIVES_PER_TTL
        request = rpc_pb2.LeaseKeepAliveRequest(ID=lease_id)
        try:
            # One stream per renewal, so that the next one can go to another member.
            call = self._stubs[0].LeaseKeepAlive(
                iter((request,)), timeout=interval_s / len(self._stubs)
            )
            reply = next(iter(call))
            call.cancel()
        except (grpc.RpcError, StopIteration) as error:
            print(f"lease {lease_id:x} not renewed: {_reason(error)}", file=sys.stderr, flush=True)
            self._stubs.append(self._stubs.pop(0))  # the next member is tried first from now on
            self._dial_with_new_files()
            self._due_s = now_s() + RETRY_S
            return
        self._due_s = sent_s + interval_s
        if reply.TTL <= 0:
            self._lease = None
        self._connection.send(_RENEWAL.pack(lease_id, sent_s, reply.TTL))


def _reason(error: Exception) -> str:
    return str(error.code().name) if isinstance(error, grpc.Call) else "the stream ended"


def _tls_options(tls: TlsConfig | None) -> list[str]:
    if tls is None:
        return []
    options = ["--ca", str(tls.ca_path)]
    if tls.certificate_path and tls.key_path:
        options += ["--certificate", str(tls.certificate_path), "--key", str(tls.key_path)]
    return options


def main() -> None:
    """Renew the lease that the owner orders, until the owner is gone."""
    arm_parent_death()
    steady_streams()
    # Ctrl-C at a terminal is for the owner, which resigns in order; it needs its lease until then.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parser = argparse.ArgumentParser(prog="megascale_common.etcd.keeper_process")
    parser.add_argument("--socket", required=True, type=int, metavar="FD")
    parser.add_argument("--etcd", required=True, metavar="HOST:PORT[,..]")
    parser.add_argument("--silence-limit-s", type=float, default=SILENCE_LIMIT_S, metavar="S")
    for name in ("--ca", "--certificate", "--key"):
        parser.add_argument(name, type=Path, metavar="PEM")
    options = parser.parse_args()
    tls = TlsConfig(options.ca, options.certificate, options.key) if options.ca else None
    connection = socket.socket(fileno=options.socket)
    connection.setblocking(False)
    with contextlib.suppress(ConnectionError):
        _Renewing(connection, options.etcd.split(","), tls, options.silence_limit_s).run()
    # Do not wait for gRPC's threads: the owner is gone, and there is nothing to finish.
    os._exit(0)


if __name__ == "__main__":
    main()
