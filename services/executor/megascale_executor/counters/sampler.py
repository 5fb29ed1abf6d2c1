"""Reads all sources every second, and chosen counters every few milliseconds into a bounded ring.

Each runs on a thread of its own, so neither a slow file of /sys nor a stuck GPU delays a heartbeat.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megascale_executor.counters import host, network, nvml
from megascale_executor.counters.reading import NotShown, Reading, Source

PERIOD_S = 1.0
MAX_COUNTERS = 256
# Counters that the driver uses for decisions. All counters of a fleet would be megabytes a second.
IN_HEARTBEATS = frozenset(
    {
        *("rdma_received_bytes_total", "rdma_sent_bytes_total", "network_received_bytes_total"),
        *("network_sent_bytes_total", "link_flaps_total", "rdma_link_downed_total"),
        *("tcp_segments_retransmitted_total", "gpu_ecc_uncorrected_total", "gpu_lost", "xid_total"),
    }
)
MAX_IN_HEARTBEAT = 128
# Counters that explain slow steps; they are sent with the spans and stored with them.
WITH_SPANS = frozenset(
    {
        *("gpu_sm_clock_hertz", "gpu_memory_clock_hertz", "gpu_power_watts", "gpu_throttled"),
        *("gpu_temperature_celsius", "rdma_received_bytes_total", "rdma_sent_bytes_total"),
        *("rdma_link_downed_total", "rdma_send_waits_total", "rdma_out_of_sequence_total"),
        *("rdma_ack_timeouts_total", "rdma_receiver_not_ready_total"),
        *("rdma_congestion_handled_total", "rdma_pauses_received_total"),
        *("network_received_bytes_total", "network_sent_bytes_total"),
        *("network_receive_errors_total", "network_receive_drops_total", "link_flaps_total"),
        *("pfc_pauses_received_total", "tcp_segments_sent_total"),
        *("tcp_segments_retransmitted_total", "host_cpu_seconds_total"),
        *("host_pressure_seconds_total", "host_memory_available_bytes"),
    }
)
# A source that is not shown is tried again after this time, because a driver can be loaded later.
RETRY_S = 60.0
TRAFFIC = (
    *("network_received_bytes_total", "network_sent_bytes_total"),
    *("rdma_received_bytes_total", "rdma_sent_bytes_total"),
)
MIN_FAST_PERIOD_S, RING_SAMPLES = 0.001, 4096


def sources(root: Path = Path("/")) -> list[Source]:
    """Every source that reads below ``root``."""
    made = (host.Processors, host.Memory, host.Pressure, host.Disks, host.Agent)
    of_network = (network.Ports, network.Rdma, network.Tcp, network.PriorityPauses)
    return [each(root) for each in (*made, *of_network)]


@dataclass(frozen=True, slots=True)
class Sample:
    """The counters of a host, and for each source that it does not show the reason."""

    readings: tuple[Reading, ...] = ()
    skipped: tuple[str, ...] = ()


def read_all(asked: Iterable[Source]) -> Sample:
    """Read the sources ``asked`` once; an error of one source does not affect the others."""
    found: list[Reading] = []
    skipped = []
    for source in asked:
        try:
            found += source.read()
        except NotShown as error:
            skipped.append(f"{source.name}: {error}")
        # A kernel file in an unknown format is a reason to skip its source too.
        except (ValueError, IndexError, KeyError, OSError) as error:
            skipped.append(f"{source.name}: {type(error).__name__}: {error}")
    if len(found) > MAX_COUNTERS:
        skipped.append(f"counters: {len(found) - MAX_COUNTERS} above the limit of {MAX_COUNTERS}")
    return Sample(tuple(found[:MAX_COUNTERS]), tuple(skipped))


class Sampler:
    """Reads groups of sources, each group on its own thread, until :meth:`stop`."""

    def __init__(self, groups: Sequence[Sequence[Source]], period_s: float = PERIOD_S) -> None:
        self._period_s = period_s
        self._samples: list[Sample] = [Sample() for _ in groups]
        self._groups = groups
        self._stopped = threading.Event()
        self._threads = [
            threading.Thread(
                target=self._run, args=(number,), name=f"counters-{number}", daemon=True
            )
            for number in range(len(groups))
        ]

    def start(self) -> None:
        """Begin to read."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop reading. A thread that is stuck in the kernel is left to end with the process."""
        self._stopped.set()
        for thread in self._threads:
            if thread.ident is not None:  # it was started
                thread.join(timeout=1.0)

    @property
    def newest(self) -> Sample:
        """The newest counters of all groups, at most MAX_COUNTERS."""
        samples = list(self._samples)
        readings = [reading for sample in samples for reading in sample.readings]
        skipped = [reason for sample in samples for reason in sample.skipped]
        return Sample(tuple(readings[:MAX_COUNTERS]), tuple(skipped))

    def _run(self, number: int) -> None:
        shown, hidden_at_s = list(self._groups[number]), 0.0
        reasons: tuple[str, ...] = ()
        while True:
            now_s = time.monotonic()
            if now_s - hidden_at_s >= RETRY_S:
                shown, hidden_at_s = list(self._groups[number]), now_s
            sample = read_all(shown)
            if len(shown) == len(self._groups[number]):
                reasons = sample.skipped
                missing = {reason.partition(":")[0] for reason in reasons}
                shown = [source for source in shown if source.name not in missing]
                self._samples[number] = sample
            else:
                self._samples[number] = Sample(sample.readings, reasons + sample.skipped)
            if self._stopped.wait(self._period_s):
                return


def of_host(*, gpus: bool) -> Sampler:
    """The sampler of an agent. It reads GPUs on a thread of their own."""
    groups: list[Sequence[Source]] = [sources()]
    if gpus:
        groups.append([nvml.Gpus()])
    return Sampler(groups)


def traffic_ring(period_s: float, root: Path = Path("/")) -> FastRing:
    """The ring of a host's traffic, that of its RDMA ports or, without any, its network ports."""
    rdma = network.Rdma(root)
    source: Source = network.Ports(root) if read_all([rdma]).skipped else rdma
    return FastRing(source, TRAFFIC, period_s)


class FastRing:
    """One source read every few milliseconds into a ring of the newest samples.

    Args:
        source: a source that is cheap to read, such as a port's counters.
        names: names of the counters to keep.
        period_s: at least 1 ms. A read that takes longer is counted in :attr:`late`, and the next
            one follows at once.
    """

    def __init__(
        self, source: Source, names: Sequence[str], period_s: float, samples: int = RING_SAMPLES
    ) -> None:
        if period_s < MIN_FAST_PERIOD_S:
            raise ValueError(f"period_s is {period_s}: give at least {MIN_FAST_PERIOD_S}")
        self._source = source
        self._names = frozenset(names)
        self._period_s = period_s
        self._ring: deque[tuple[float, tuple[Reading, ...]]] = deque(maxlen=samples)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="counters-fast", daemon=True)
        self.late = 0
        self.problem = ""

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def stop(self) -> None:
        """Stop reading."""
        self._stopped.set()
        if self._thread.ident is not None:  # it was started
            self._thread.join(timeout=1.0)

    def samples(self) -> list[tuple[float, tuple[Reading, ...]]]:
        """The newest samples, oldest first, each with its monotonic time in seconds."""
        return list(self._ring.copy())

    def peaks(self) -> dict[tuple[str, str], float]:
        """Greatest growth per second between two samples, by (name, target) of the counters."""
        found: dict[tuple[str, str], float] = {}
        for (before_s, before), (at_s, after) in itertools.pairwise(self.samples()):
            last = {(each.name, each.target): each.value for each in before}
            for each in after:
                key = (each.name, each.target)
                if key in last and at_s > before_s:
                    rate = (each.value - last[key]) / (at_s - before_s)
                    found[key] = max(found.get(key, 0.0), rate)
        return found

    def _run(self) -> None:
        due_s = time.monotonic()
        while not self._stopped.is_set():
            try:
                found = tuple(each for each in self._source.read() if each.name in self._names)
            except NotShown as error:
                self.problem = str(error)
                return
            self._ring.append((time.monotonic(), found))
            due_s += self._period_s
            rest_s = due_s - time.monotonic()
            if rest_s < 0:
                self.late += 1
                due_s = time.monotonic()
            elif self._stopped.wait(rest_s):
                return
