"""Two networks of one machine that reach each other like two hosts: each has a loopback of its own.

Needs root and the commands ip and nsenter.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

INTERFACE = "veth0"


@dataclass(frozen=True, slots=True)
class Network:
    """``inside`` begins a command that runs in it."""

    address: str
    inside: tuple[str, ...]


def why_not() -> str:
    """What is missing here for :func:`two_networks`; "" if nothing is."""
    if os.geteuid() or not (shutil.which("ip") and shutil.which("nsenter")):
        return "needs root, ip and nsenter"
    name = f"megascale-{uuid.uuid4().hex[:8]}"
    done = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if done.returncode:
        return done.stderr.strip()
    _ip("netns", "delete", name)
    return ""


@contextlib.contextmanager
def two_networks() -> Iterator[tuple[Network, Network]]:
    """Two namespaces with a pair of virtual cables between them, removed afterwards."""
    mark = uuid.uuid4().hex[:6]
    names, cables = (f"megascale-{mark}-{end}" for end in "ab"), (f"m{mark}a", f"m{mark}b")
    one, other = names
    try:
        for name in (one, other):
            _ip("netns", "add", name)
        _ip("link", "add", cables[0], "type", "veth", "peer", "name", cables[1])
        found = []
        for number, (name, cable) in enumerate(zip((one, other), cables, strict=True), start=1):
            address = f"10.211.55.{number}"
            _ip("link", "set", cable, "netns", name, "name", INTERFACE)
            _ip("-n", name, "address", "add", f"{address}/24", "dev", INTERFACE)
            for device in ("lo", INTERFACE):
                _ip("-n", name, "link", "set", device, "up")
            inside = ("nsenter", f"--net=/run/netns/{name}", "env")
            found.append(Network(address, (*inside, f"GLOO_SOCKET_IFNAME={INTERFACE}")))
        yield found[0], found[1]
    finally:
        for name in (one, other):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
