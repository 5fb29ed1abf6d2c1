"""Addresses of hosts: IPv4 and IPv6 as HOST:PORT, and which of this host's the others reach.

A host has several addresses, and its name often stands for a loopback one. Which of them another
host reaches is what the route to that host says.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

LOOPBACK_INTERFACE = "lo"
_SIOCGIFADDR = 0x8915
_IPV6_ADDRESSES = Path("/proc/net/if_inet6")  # proc_net(5): one row for each address


def joined(host: str, port: int) -> str:
    """``host:port``; an IPv6 address gets brackets."""
    bare = host.strip("[]")
    return f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"


def split(endpoint: str) -> tuple[str, int]:
    """Host, without brackets, and port of ``host:port``, also as a file has it, with its newline.

    An IPv6 address may stand without brackets, as `$POD_IP:7790` of a manifest gives it: the port
    is what follows the last colon.

    Raises:
        ValueError: it is not that.
    """
    host, _, port = endpoint.strip().rpartition(":")
    if not host or not (port.isascii() and port.isdecimal()) or int(port) >= 1 << 16:
        raise ValueError(f"{endpoint!r} is not host:port")
    return host.strip("[]"), int(port)


def listen(host: str, port: int = 0, *, backlog: int) -> socket.socket:
    """A socket that listens on an address of this host, of IPv4 or IPv6.

    Raises:
        OSError: the address is none of this host, or the port is taken.
    """
    [(family, _, _, _, address), *_] = socket.getaddrinfo(
        host.strip("[]"), port, type=socket.SOCK_STREAM
    )
    return socket.create_server(address, family=family, backlog=backlog)


def on_route_to(host: str, port: int = 1) -> str:
    """The address of this host from which the route to another one starts.

    Raises:
        OSError: ``host`` is no address, or no route goes there.
    """
    [(family, kind, _, _, address), *_] = socket.getaddrinfo(
        host.strip("[]"), port or 1, type=socket.SOCK_DGRAM
    )
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # of datagrams: chooses a route and sends nothing
        found: str = probe.getsockname()[0]
    return found


def is_loopback(address: str) -> bool:
    """Whether ``address`` (an IP address, or ``localhost``) is only reached from its own host."""
    bare = address.strip("[]")
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(bare).is_loopback
    return bare == "localhost"


def interface_of(address: str) -> str:
    """The interface that has an IP address, such as ``eth0``; "" where none has it."""
    wanted = ipaddress.ip_address(address.strip("[]"))
    if wanted.is_loopback:
        return LOOPBACK_INTERFACE
    if wanted.version == 6:
        return _interface_of_ipv6(wanted.packed.hex())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # it has none
                answer = fcntl.ioctl(asked.fileno(), _SIOCGIFADDR, request)
                if answer[20:24] == wanted.packed:
                    return name
    return ""


def _interface_of_ipv6(digits: str) -> str:
    with contextlib.suppress(OSError):
        for row in _IPV6_ADDRESSES.read_text().splitlines():
            fields = row.split()
            if fields[0] == digits:
                return fields[-1]
    return ""
