"""Hosts of one machine: network namespaces on a bridge, with faults of the network between them.

Each host has one interface ``eth0``, an IPv4 and an IPv6 address, and a loopback of its own. Its
cable is a veth pair, or, for a delay, two TAP devices with a relay between them
(:mod:`tests.harness.delay_relay`), since not every kernel has netem. Loss and partitions are rules
of iptables within a host, rates are ``tc tbf``. The bridge is in the namespace of this process.
Needs root, ip, iptables, ip6tables and tc.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.harness.processes import ended
from tests.harness.waiting import until

from megascale_common.node.process import child_environment

PROGRAMS = ("ip", "iptables", "ip6tables", "tc")
REPOSITORY = Path(__file__).resolve().parents[2]
BRIDGE_NUMBER = 254
FIREWALLS = ("iptables", "ip6tables")


def missing() -> str:
    """What this machine lacks for hosts of its own; "" for nothing."""
    if os.geteuid() != 0:
        return "needs root"
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"needs {', '.join(absent)}: make netns-tools"
    tried = subprocess.run(
        ["ip", "link", "add", "ms-try", "type", "veth"], capture_output=True, check=False
    )
    subprocess.run(["ip", "link", "delete", "ms-try"], capture_output=True, check=False)
    return "" if tried.returncode == 0 else f"no veth here: {tried.stderr.decode().strip()}"


@dataclass(frozen=True, slots=True)
class Host:
    """One namespace: what runs in it reaches the others at their addresses alone."""

    name: str
    namespace: str
    ipv4: str
    ipv6: str

    def command(self, *words: str) -> list[str]:
        """The words as a command line that runs on this host, in the process that is started."""
        return ["ip", "netns", "exec", self.namespace, *words]

    def run(self, *words: str) -> str:
        """Run a command on this host to its end; its output."""
        return _run(*self.command(*words))

    def address(self, family: int = 4) -> str:
        """Its address of IPv4 or IPv6, without brackets."""
        return self.ipv4 if family == 4 else self.ipv6

    def cut(self) -> None:
        """Drop every packet from and to other hosts, in both directions, without an answer."""
        for firewall in FIREWALLS:
            self.run(firewall, "-I", "INPUT", "-i", "eth0", "-j", "DROP")
            self.run(firewall, "-I", "OUTPUT", "-o", "eth0", "-j", "DROP")

    def heal(self) -> None:
        """Let all packets through again."""
        for firewall in FIREWALLS:
            self.run(firewall, "-F")

    def lose(self, share: float) -> None:
        """Drop this share of the packets that arrive, at random."""
        for firewall in FIREWALLS:
            self.run(
                firewall, "-A", "INPUT", "-i", "eth0", "-m", "statistic", "--mode", "random",
                "--probability", str(share), "-j", "DROP",
            )  # fmt: skip

    def limit_rate(self, rate: str) -> None:
        """Send no faster than this, such as ``20mbit``, with 100 ms of queue."""
        self.run(
            *("tc", "qdisc", "replace", "dev", "eth0", "root", "tbf"),
            *("rate", rate, "burst", "32kbit", "latency", "100ms"),
        )

    def set_mtu(self, size: int) -> None:
        """Believe that packets of this size pass, which the bridge need not do."""
        self.run("ip", "link", "set", "eth0", "mtu", str(size))


class HostNetwork:
    """Hosts on one bridge; the process that makes them is on it, too.

    ``delay_ms``: how long every packet takes from a host to the bridge, and back; 0: no relay.
    """

    def __init__(self, names: Sequence[str], *, delay_ms: float = 0.0) -> None:
        self._tag = f"{os.getpid():x}"
        subnet = secrets.randbelow(200) + 1
        self._four, self._six = f"10.77.{subnet}", f"fd77:{subnet:x}"
        self.bridge = f"ms{self._tag}br"
        self.delay_ms = delay_ms
        self.hosts = {
            name: Host(
                name, f"ms{self._tag}-{name}", f"{self._four}.{number}", f"{self._six}::{number:x}"
            )
            for number, name in enumerate(names, 1)
        }
        self._relays: list[subprocess.Popen[bytes]] = []

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    def open(self) -> None:
        """Make everything, after the removal of what processes have left that were killed."""
        _sweep()
        _run("ip", "link", "set", "lo", "up")
        _run("ip", "link", "add", self.bridge, "type", "bridge", "forward_delay", "0")
        for address in (f"{self._four}.{BRIDGE_NUMBER}/24", f"{self._six}::fe/64"):
            _run("ip", "address", "add", address, "dev", self.bridge, *_nodad(address))
        _run("ip", "link", "set", self.bridge, "up")
        for number, host in enumerate(self.hosts.values()):
            _run("ip", "netns", "add", host.namespace)
            self._cable(number, host)
            host.run("ip", "link", "set", "lo", "up")
            for address in (f"{host.ipv4}/24", f"{host.ipv6}/64"):
                host.run("ip", "address", "add", address, "dev", "eth0", *_nodad(address))
            host.run("ip", "link", "set", "eth0", "up")
            # As systemd sets it: everybody may send pings, which the diagnostic of the MTU does.
            host.run("sysctl", "-qw", "net.ipv4.ping_group_range=0 2147483647")
        for host in self.hosts.values():
            until(lambda host=host: self._reached(host), f"{host.name} on the bridge")  # type: ignore[misc]

    def close(self) -> None:
        """Remove everything; what still runs on a host keeps its namespace, without a cable."""
        for relay in self._relays:
            relay.kill()
            relay.wait()
        for number, host in enumerate(self.hosts.values()):
            subprocess.run(
                ["ip", "link", "delete", self._port(number)], capture_output=True, check=False
            )
            subprocess.run(
                ["ip", "netns", "delete", host.namespace], capture_output=True, check=False
            )
        subprocess.run(["ip", "link", "delete", self.bridge], capture_output=True, check=False)

    def _cable(self, number: int, host: Host) -> None:
        port = self._port(number)
        if self.delay_ms:
            self._relay(port, f"{port}h")
        else:
            _run("ip", "link", "add", port, "type", "veth", "peer", "name", f"{port}h")
        _run("ip", "link", "set", f"{port}h", "netns", host.namespace)
        host.run("ip", "link", "set", f"{port}h", "name", "eth0")
        _run("ip", "link", "set", port, "master", self.bridge, "up")

    def _relay(self, *taps: str) -> None:
        command = [sys.executable, "-m", "tests.harness.delay_relay", *taps, str(self.delay_ms)]
        relay = subprocess.Popen(
            command, stdout=subprocess.PIPE, env=child_environment(), cwd=REPOSITORY
        )
        self._relays.append(relay)
        assert relay.stdout is not None
        assert relay.stdout.readline() == b"ready\n", "the relay did not start"

    def _port(self, number: int) -> str:
        return f"ms{self._tag}p{number}"

    def _reached(self, host: Host) -> bool:
        addresses = host.run("ip", "-6", "address", "show", "dev", "eth0")
        carrier = host.run("cat", "/sys/class/net/eth0/operstate").strip()
        return "tentative" not in addresses and carrier in ("up", "unknown")


@contextlib.contextmanager
def host_network(names: Sequence[str], *, delay_ms: float = 0.0) -> Iterator[HostNetwork]:
    """Hosts of these names, which are removed at the end."""
    network = HostNetwork(names, delay_ms=delay_ms)
    try:
        network.open()
        yield network
    finally:
        network.close()


def _sweep() -> None:
    """Remove the namespaces and devices of processes that have ended."""
    spaces = [line.split()[0] for line in _run("ip", "netns", "list").splitlines()]
    links = [line.split()[0].partition("@")[0] for line in _run("ip", "-br", "link").splitlines()]
    for kind, names in (("netns", spaces), ("link", links)):
        for name in names:
            owner = re.fullmatch(r"ms([0-9a-f]+)(-.*|p\d+|br)", name)
            if owner is not None and ended(int(owner[1], 16)):
                _delete(kind, name)


def _nodad(address: str) -> tuple[str, ...]:
    # Without the search for a second host of the address, which takes a second.
    return ("nodad",) if ":" in address else ()


def _delete(kind: str, name: str) -> None:
    """Delete a link or a namespace, if it is still there."""
    subprocess.run(["ip", kind, "delete", name], capture_output=True, check=False)


def _run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip() or done.returncode}")
    return done.stdout
