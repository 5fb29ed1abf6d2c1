"""Counters of network ports: Ethernet from /sys/class/net, RDMA from /sys/class/infiniband, TCP.

Some mlx5 drivers show PFC pauses in the RDMA port's hw_counters (read by :class:`Rdma`), others in
`ethtool -S` (read by :class:`PriorityPauses`).
"""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from megascale_executor.counters.reading import NotShown, Reading, Source, folders, lines, number

_WORD_BYTES = 4  # port_rcv_data and port_xmit_data count 32-bit words (InfiniBand 16.1.3.5)
_SKIPPED_PORTS = re.compile(r"lo|ifb\d+|docker\d+|veth.*|br-.*|dummy\d+")
_PORT = {
    "rx_bytes": "network_received_bytes_total",
    "tx_bytes": "network_sent_bytes_total",
    "rx_errors": "network_receive_errors_total",
    "tx_errors": "network_send_errors_total",
    "rx_dropped": "network_receive_drops_total",
    "tx_dropped": "network_send_drops_total",
}
_RDMA = {
    "port_rcv_data": ("rdma_received_bytes_total", _WORD_BYTES),
    "port_xmit_data": ("rdma_sent_bytes_total", _WORD_BYTES),
    "symbol_error": ("rdma_symbol_errors_total", 1),
    "link_downed": ("rdma_link_downed_total", 1),
    "port_xmit_wait": ("rdma_send_waits_total", 1),
}
_RDMA_HW = {
    "out_of_sequence": "rdma_out_of_sequence_total",
    "packet_seq_err": "rdma_sequence_errors_total",
    "local_ack_timeout_err": "rdma_ack_timeouts_total",
    "rnr_nak_retry_err": "rdma_receiver_not_ready_total",
    "np_cnp_sent": "rdma_congestion_sent_total",
    "rp_cnp_handled": "rdma_congestion_handled_total",
    "rx_prio3_pause": "rdma_pauses_received_total",
    "tx_prio3_pause": "rdma_pauses_sent_total",
}
_PAUSE = re.compile(r"\s*((?:rx|tx)_prio\d+_pause):\s*(\d+)\s*")
ETHTOOL_TIMEOUT_S = 2.0
ETHTOOL_PERIOD_S = 10.0  # it starts a process per port


def ports(root: Path) -> list[Path]:
    """Folders of the host's network ports, without loopback and bridges."""
    found = folders(root / "sys/class/net")
    return [path for path in found if not _SKIPPED_PORTS.fullmatch(path.name)]


class Ports(Source):
    """Bytes, errors, drops and flaps of every network port."""

    name = "network"

    def __init__(self, root: Path) -> None:
        self._root = root

    def read(self) -> Sequence[Reading]:
        """Counters of each port.

        A flap is a change of the carrier to down. Older kernels have only carrier_changes, which
        counts both directions, so half of it is taken.
        """
        found = []
        for port in ports(self._root):
            for file, name in _PORT.items():
                value = number(port / "statistics" / file)
                if value is not None:
                    found.append(Reading(name, port.name, value))
            flaps = number(port / "carrier_down_count")
            if flaps is None and (changes := number(port / "carrier_changes")) is not None:
                flaps = changes // 2
            if flaps is not None:
                found.append(Reading("link_flaps_total", port.name, flaps))
        if not found:
            raise NotShown("no network port but the loopback")
        return found


class Rdma(Source):
    """Bytes, errors, retransmissions and pauses of every RDMA port."""

    name = "rdma"

    def __init__(self, root: Path) -> None:
        self._folder = root / "sys/class/infiniband"

    def read(self) -> Sequence[Reading]:
        """From counters/ and hw_counters/ of each port; the driver decides which files exist."""
        found = []
        for device in folders(self._folder):
            for port in folders(device / "ports"):
                target = f"{device.name}:{port.name}"
                for file, (name, scale) in _RDMA.items():
                    value = number(port / "counters" / file)
                    if value is not None:
                        found.append(Reading(name, target, value * scale))
                for file, name in _RDMA_HW.items():
                    value = number(port / "hw_counters" / file)
                    if value is not None:
                        found.append(Reading(name, target, value))
        if not found:
            raise NotShown(f"no RDMA port in {self._folder}")
        return found


class Tcp(Source):
    """TCP segments sent and sent again."""

    name = "tcp"

    def __init__(self, root: Path) -> None:
        self._path = root / "proc/net/snmp"

    def read(self) -> Sequence[Reading]:
        """From the kernel's table: a line of names, then a line of values."""
        rows = [line.split() for line in lines(self._path) if line.startswith("Tcp:")]
        if len(rows) != 2:
            raise NotShown(f"{self._path} has no counters of TCP")
        values = dict(zip(*rows, strict=True))
        return [
            Reading("tcp_segments_sent_total", "", float(values["OutSegs"])),
            Reading("tcp_segments_retransmitted_total", "", float(values["RetransSegs"])),
        ]


class PriorityPauses(Source):
    """PFC pauses of each port, as `ethtool -S` prints them."""

    name = "priority_pauses"

    def __init__(self, root: Path) -> None:
        self._root = root
        self._program = shutil.which("ethtool") if root == Path("/") else None
        self._last: tuple[float, list[Reading]] | None = None

    def read(self) -> Sequence[Reading]:
        """One counter per port, direction and priority, at most 10 s old."""
        if self._last is not None and time.monotonic() - self._last[0] < ETHTOOL_PERIOD_S:
            return self._last[1]
        found: list[Reading] = []
        for port in ports(self._root):
            found += parse_pauses(port.name, self._statistics(port.name))
        if not found:
            raise NotShown("no port shows pauses by `ethtool -S`")
        self._last = (time.monotonic(), found)
        return found

    def _statistics(self, port: str) -> str:
        recorded = self._root / "ethtool" / port
        if self._root != Path("/") and recorded.exists():
            return recorded.read_text()
        if self._program is None:
            raise NotShown("ethtool is not installed")
        command = [self._program, "-S", port]
        try:
            return subprocess.run(
                command, capture_output=True, text=True, timeout=ETHTOOL_TIMEOUT_S, check=False
            ).stdout
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NotShown(f"ethtool -S {port}: {error}") from error


def parse_pauses(port: str, output: str) -> list[Reading]:
    """Counters such as rx_prio3_pause from the output of `ethtool -S`."""
    found = []
    for line in output.splitlines():
        if match := _PAUSE.fullmatch(line):
            direction, priority, _ = match.group(1).split("_")
            name = f"pfc_pauses_{'received' if direction == 'rx' else 'sent'}_total"
            found.append(Reading(name, f"{port}:{priority}", float(match.group(2))))
    return found
