"""Diagnostic: do the largest packets that this node sends reach the hosts that it connects to?

If a switch or tunnel on the way takes only smaller packets and reports nothing, connections open
and then hang at the first full packet: collectives hang, while everything small works. Pings show
this without changing the network: a small one is answered, one of the largest size is not.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass

from megascale_common.node.addresses import interface_of, is_loopback, on_route_to
from megascale_executor.diagnostics.diagnostic import Diagnostic, NodeView
from megascale_executor.diagnostics.finding import Finding

NAME = "path_mtu"
MAX_PEERS = 8
TRIES = 3
SHORTEST_WAIT_S, LONGEST_WAIT_S = 0.25, 1.0
MAX_PACKET = (1 << 16) - 1
NOT_PERMITTED = "pings are not permitted: set net.ipv4.ping_group_range, as systemd does"


@dataclass(frozen=True, slots=True)
class _Family:
    """Differences between IPv4 and IPv6; numbers of linux/in.h and linux/in6.h."""

    kind: socket.AddressFamily
    protocol: int
    level: int
    discover: int  # the option of path MTU discovery
    mtu: int
    request: int  # type of an echo request
    headers: int  # bytes of a ping without its data
    least: int  # every path takes packets of this size


_IPV4 = _Family(socket.AF_INET, socket.IPPROTO_ICMP, socket.IPPROTO_IP, 10, 14, 8, 28, 576)
_IPV6 = _Family(socket.AF_INET6, 58, socket.IPPROTO_IPV6, 23, 24, 128, 48, 1280)
_PMTUDISC_PROBE = 3  # never fragment, and ignore what the kernel has learned about the path
_TOO_LARGE = (errno.EMSGSIZE, errno.ENOBUFS)  # ENOBUFS: the interface has dropped it
_HEADER = struct.Struct("!BBHHH")  # type, code, checksum (the kernel's), id (the kernel's), number


class PathMtu(Diagnostic):
    """Pings each host that the node connects to, with packets of the size that it sends."""

    name = NAME
    before_attempts = False
    stage = 2
    timeout_s = 60.0

    async def run(self, node: NodeView) -> Sequence[Finding]:
        """One finding for each host on another machine; the value is the largest packet."""
        hosts = [host for host in dict.fromkeys(node.peers) if not is_loopback(host)][:MAX_PEERS]
        if not hosts:
            return [Finding(NAME, "node", "SKIPPED", "this node connects to no other host")]
        return await asyncio.gather(*(asyncio.to_thread(check, host) for host in hosts))


def check(host: str) -> Finding:
    """The finding for the path to a host."""
    begin_s = time.monotonic()
    try:
        own = on_route_to(host)
        if own == host:
            return Finding(NAME, host, "SKIPPED", "this host itself")
        with _Pings(host) as pings:
            whole = pings.mtu
            largest = pings.largest()
    except PermissionError:
        return Finding(NAME, host, "SKIPPED", NOT_PERMITTED)
    except OSError as error:
        return Finding(NAME, host, "SKIPPED", f"cannot be pinged: {error}")
    elapsed_s = time.monotonic() - begin_s
    if largest == 0:
        return Finding(NAME, host, "SKIPPED", "answers no ping", elapsed_s)
    interface = interface_of(own) or own
    if largest < whole:
        detail = (
            f"packets of {whole} bytes, which {interface} sends, do not arrive, and those of "
            f"{largest} do: set the MTU of {interface} to {largest}, or that of the switches "
            f"between to {whole}"
        )
        return Finding(NAME, host, "FAIL", detail, elapsed_s, value=float(largest), unit="bytes")
    detail = f"packets of {whole} bytes from {interface} arrive"
    return Finding(NAME, host, "PASS", detail, elapsed_s, value=float(whole), unit="bytes")


class _Pings:
    """A socket for pings of one host; as a context manager it is closed."""

    def __init__(self, host: str) -> None:
        [(kind, _, _, _, address), *_] = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)
        self._family = family = _IPV4 if kind == socket.AF_INET else _IPV6
        self._socket = socket.socket(kind, socket.SOCK_DGRAM, family.protocol)
        self._wait_s = LONGEST_WAIT_S
        self._number = 0
        try:
            self._socket.setsockopt(family.level, family.discover, _PMTUDISC_PROBE)
            self._socket.connect(address)
            known: int = self._socket.getsockopt(family.level, family.mtu)
        except OSError:
            self._socket.close()
            raise
        # The kernel's limit for this host: the interface's MTU, or less if it has learned that.
        self.mtu = min(known, MAX_PACKET)

    def __enter__(self) -> _Pings:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def largest(self) -> int:
        """Size in bytes of the largest packet that is answered, at most the MTU; 0 without any."""
        least = min(self._family.least, self.mtu)
        began_s = time.monotonic()
        if not self._answered(least):
            return 0
        took_s = time.monotonic() - began_s
        self._wait_s = min(max(SHORTEST_WAIT_S, 4 * took_s), LONGEST_WAIT_S)
        if self._answered(self.mtu):
            return self.mtu
        low, high = least, self.mtu
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._answered(middle) else (low, middle)
        return low

    def _answered(self, size: int) -> bool:
        return any(self._ping(size) for _ in range(TRIES))

    def _ping(self, size: int) -> bool:
        """Whether a packet of this size is answered in time; callers try TRIES times."""
        self._number = (self._number + 1) & 0xFFFF
        data = bytes(size - self._family.headers)
        ping = _HEADER.pack(self._family.request, 0, 0, 0, self._number) + data
        end_s = time.monotonic() + self._wait_s
        try:
            self._socket.send(ping)
        except OSError as error:
            if error.errno in _TOO_LARGE:
                return False
            raise
        while (left_s := end_s - time.monotonic()) > 0:
            self._socket.settimeout(left_s)
            try:
                answer = self._socket.recv(MAX_PACKET)
            except TimeoutError:
                return False
            except OSError as error:
                if error.errno in _TOO_LARGE:  # reported by a router on the way
                    return False
                raise
            if len(answer) >= _HEADER.size and _HEADER.unpack_from(answer)[4] == self._number:
                return True
        return False
