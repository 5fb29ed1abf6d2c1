"""Addresses of hosts: HOST:PORT for IPv4 and IPv6, and the one at which others reach this host.

A host has several addresses, and its name often resolves to a loopback one. The route to another
host shows which address that host can reach.
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
    """Host (without brackets) and port of ``host:port``; blanks and newlines around it are ignored.

    An IPv6 address can lack brackets, as in `$POD_IP:7790` of a manifest: the port follows the last
    colon.

    Raises:
        ValueError: it is not host:port.
    """
    host, _, port = endpoint.strip().rpartition(":")
    if not host or not (port.isascii() and port.isdecimal()) or int(port) >= 1 << 16:
        raise ValueError(f"{endpoint!r} is not host:port")
    return host.strip("[]"), int(port)


def listen(host: str, port: int = 0, *, backlog: int) -> socket.socket:
    """A socket that listens on an address of this host, of IPv4 or IPv6.

    Raises:
        OSError: this host does not have the address, or the port is taken.
    """
    [(family, _, _, _, address), *_] = socket.getaddrinfo(
        host.strip("[]"), port, type=socket.SOCK_STREAM
    )
    return socket.create_server(address, family=family, backlog=backlog)


def on_route_to(host: str, port: int = 1) -> str:
    """This host's own address on the route to another host.

    Raises:
        OSError: ``host`` is not an address, or there is no route to it.
    """
    [(family, kind, _, _, address), *_] = socket.getaddrinfo(
        host.strip("[]"), port or 1, type=socket.SOCK_DGRAM
    )
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # for datagrams this chooses a route and sends nothing
        found: str = probe.getsockname()[0]
    return found


def is_loopback(address: str) -> bool:
    """Whether ``address`` (an IP address, or ``localhost``) is only reached from its own host."""
    bare = address.strip("[]")
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(bare).is_loopback
    return bare == "localhost"


def interface_of(address: str) -> str:
    """The interface with an IP address, such as ``eth0``; "" if none has it."""
    wanted = ipaddress.ip_address(address.strip("[]"))
    if wanted.is_loopback:
        return LOOPBACK_INTERFACE
    if wanted.version == 6:
        return _interface_of_ipv6(wanted.packed.hex())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # the interface has no address
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
