"""The agent's metrics for Prometheus: its part in an attempt, the ranks' progress, link and host.

Each scrape builds a heartbeat and reads them from it. Ranks are reduced to minimum and maximum,
because one series per rank would grow with the fleet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from megascale.v1 import link_pb2, types_pb2
from megascale_executor.agent.link.driver_link import DriverLink
from megascale_executor.agent.reports.span_reports import SpanReports
from megascale_executor.agent.reports.step_reports import StepReports
from megascale_executor.counters.sampler import Sample


class AgentMetrics(Collector):
    """Metrics of one node. ``beat`` builds a heartbeat and must not have side effects."""

    def __init__(
        self,
        beat: Callable[[], link_pb2.Heartbeat],
        link: DriverLink,
        reports: StepReports,
        spans: SpanReports,
        counters: Callable[[], Sample],
        peaks: Callable[[], dict[tuple[str, str], float]],
    ) -> None:
        self._beat = beat
        self._link = link
        self._reports = reports
        self._spans = spans
        self._counters = counters
        self._peaks = peaks

    def collect(self) -> Iterator[Metric]:
        """All present metrics."""
        beat = self._beat()
        yield _gauge(
            "megascale_link_connected", "1 while a driver is linked.", self._link.connected
        )
        yield _gauge(
            "megascale_step_records_pending",
            "Step records that no driver has taken yet.",
            len(self._reports),
        )
        dropped = CounterMetricFamily(
            "megascale_step_records_dropped", "Step records lost: the buffer was full."
        )
        dropped.add_metric([], self._reports.dropped)
        yield dropped
        yield from _spans(self._spans)
        phase = GaugeMetricFamily(
            "megascale_attempt_phase", "1 for the phase that the node is in.", labels=["phase"]
        )
        phase.add_metric(
            [link_pb2.AttemptPhase.Name(beat.phase).removeprefix("ATTEMPT_PHASE_").lower()], 1
        )
        yield phase
        restarts = CounterMetricFamily(
            "megascale_checkpoint_daemon_restarts", "Restarts of the node's checkpoint daemon."
        )
        restarts.add_metric([], beat.checkpoint_daemon.restarts)
        yield restarts
        yield from _ranks(beat)
        yield from _host(beat.host)
        yield from _counters(self._counters())
        peaks = GaugeMetricFamily(
            "megascale_port_peak_bytes_per_second",
            "Greatest rate between two fast samples of each port, of the newest 4096.",
            labels=["counter", "port"],
        )
        for (name, port), rate in sorted(self._peaks().items()):
            peaks.add_metric([name, port], rate)
        yield peaks
        checks = GaugeMetricFamily(
            "megascale_self_checks",
            "Self-checks of the newest attempt by verdict.",
            labels=["verdict"],
        )
        for verdict, count in sorted(Counter(check.verdict for check in beat.checks).items()):
            checks.add_metric(
                [types_pb2.CheckVerdict.Name(verdict).removeprefix("CHECK_VERDICT_").lower()], count
            )
        yield checks


def _spans(spans: SpanReports) -> Iterator[Metric]:
    sent = CounterMetricFamily("megascale_spans_sent", "Spans of steps sent to a driver.")
    sent.add_metric([], spans.sent)
    yield sent
    dropped = CounterMetricFamily(
        "megascale_spans_dropped",
        "Spans lost, by where there was no room: ring (of a rank) or queue (to the driver).",
        labels=["reason"],
    )
    for reason, count in sorted(spans.dropped.items()):
        dropped.add_metric([reason], count)
    yield dropped


def _ranks(beat: link_pb2.Heartbeat) -> Iterator[Metric]:
    workers = GaugeMetricFamily(
        "megascale_workers", "Workers of the attempt by state.", labels=["state"]
    )
    for state, count in sorted(Counter(worker.state for worker in beat.workers).items()):
        workers.add_metric(
            [link_pb2.WorkerState.Name(state).removeprefix("WORKER_STATE_").lower()], count
        )
    yield workers
    running = [worker for worker in beat.workers if worker.state == link_pb2.WORKER_STATE_RUNNING]
    if not running:
        return
    step = GaugeMetricFamily(
        "megascale_worker_step",
        "Step that the node's ranks are in: the last and the first of them.",
        labels=["bound"],
    )
    step.add_metric(["min"], min(worker.step for worker in running))
    step.add_metric(["max"], max(worker.step for worker in running))
    yield step
    oldest_s = max(worker.status_age.ToNanoseconds() for worker in running) / 1e9
    yield _gauge(
        "megascale_status_page_age_seconds",
        "Time since the quietest rank wrote its status page.",
        oldest_s,
    )


def _host(host: link_pb2.HostCounters) -> Iterator[Metric]:
    yield _gauge("megascale_host_load_1min", "Load average of the last minute.", host.load_1min)
    yield _gauge(
        "megascale_host_memory_available_bytes", "Memory available.", host.memory_available_bytes
    )
    yield _gauge(
        "megascale_host_staging_free_bytes", "Room for staging memory.", host.staging_free_bytes
    )
    traffic = CounterMetricFamily(
        "megascale_host_network_bytes",
        "Bytes through all interfaces but the loopback.",
        labels=["direction"],
    )
    traffic.add_metric(["received"], host.network_received_bytes)
    traffic.add_metric(["sent"], host.network_sent_bytes)
    yield traffic


def _counters(sample: Sample) -> Iterator[Metric]:
    """Traffic, flaps and Xid by names of their own, all others as one family."""
    rdma = CounterMetricFamily(
        "megascale_rdma_bytes", "Bytes through each RDMA port.", labels=["port", "direction"]
    )
    flaps = CounterMetricFamily(
        "megascale_link_flaps", "Times that a port lost its carrier.", labels=["port"]
    )
    xids = CounterMetricFamily(
        "megascale_xid", "Critical Xid of each GPU since the agent's start.", labels=["gpu", "xid"]
    )
    others = GaugeMetricFamily(
        "megascale_host_counter",
        "Other counters of the host by name and by port, disk or device.",
        labels=["counter", "target"],
    )
    for each in sample.readings:
        if each.name in ("rdma_received_bytes_total", "rdma_sent_bytes_total"):
            rdma.add_metric([each.target, each.name.split("_")[1]], each.value)
        elif each.name == "link_flaps_total":
            flaps.add_metric([each.target], each.value)
        elif each.name == "xid_total":
            gpu, _, xid = each.target.rpartition(":")
            xids.add_metric([gpu, xid], each.value)
        else:
            others.add_metric([each.name, each.target], each.value)
    yield from (rdma, flaps, xids, others)
    yield _gauge(
        "megascale_counter_sources_skipped",
        "Sources of counters that this host does not show.",
        len(sample.skipped),
    )


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=float(value))
