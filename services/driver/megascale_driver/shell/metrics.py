"""The driver's metrics for Prometheus: jobs, nodes, steps, recoveries, lines of the audit log.

Gauges are read from the state at each scrape; counters and histograms count from the start of this
process.
"""

from __future__ import annotations

import contextlib
import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Gauge, Histogram
from prometheus_client import Counter as Total
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from megascale.v1 import types_pb2
from megascale_common.service.metrics import registry_of
from megascale_driver.analysis.hot_experts import HotRank
from megascale_driver.core.faults import blame
from megascale_driver.core.values import goodput
from megascale_driver.core.values.cluster import Cluster, Node
from megascale_driver.core.values.events import Audit
from megascale_driver.core.values.job import Job, JobPhase
from megascale_driver.core.values.reasons import severity_of
from megascale_driver.nodes.checks import FleetFigures
from megascale_driver.presence.lane import Lane
from megascale_driver.shell.engine import Engine
from megascale_driver.shell.loop import LoopWatch

if TYPE_CHECKING:
    from megascale_driver.telemetry.watches import Collectives
    from megascale_planner.job_plan import Comparison

_TO_ONE_S = (0.01, 0.03, 0.1, 0.3, 1)
STEP_BUCKETS_S = (*_TO_ONE_S, 2, 3, 5, 7.5, 10, 15, 20, 30, 60, 120, 300, 600, math.inf)
RECOVERY_BUCKETS_S = (0.1, 0.3, 1, 2, 3, 5, 10, 15, 20, 30, 60, 120, 300, 600, 1800, math.inf)
# Time for which the series of an ended job are kept, so that its end is scraped.
ENDED_JOB_KEPT_S = 3600.0
# nodes with a metric of the time since their last heartbeat, the longest silent first
MAX_AGES = 512
MAX_HOT_RANKS = 512  # with a metric of their rows
# The part of a recovery by phase; observed when the job leaves the phase.
_PARTS = {
    JobPhase.STOPPING: "stop",
    JobPhase.QUEUED: "schedule",
    JobPhase.PREPARING: "prepare",
    JobPhase.STARTING: "start",
}


@dataclass(frozen=True, slots=True)
class Sources:
    """Sources of further figures, each read at a scrape.

    ``collectives``: for running jobs, the seconds per step of network and of waiting, by operation
    and group. ``plans``: for running jobs. ``slow``: how many times as long a slow node takes.
    ``hot``: for running jobs, ranks whose experts are hot. ``spans``: numbers of spans stored,
    dropped and damaged.
    """

    collectives: Callable[[], Iterable[tuple[str, Collectives]]] = tuple
    plans: Callable[[], Iterable[tuple[str, Comparison]]] = tuple
    slow: Callable[[], Mapping[str, float]] = dict
    hot: Callable[[], Iterable[tuple[str, HotRank]]] = tuple
    spans: Callable[[], Counter[str]] = Counter


class _ExpertGauges:
    """The figures of the newest step of jobs whose models have experts."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._balance = Gauge(
            "megascale_balance",
            "Balance loss of the newest step's experts per token.",
            ["job"],
            registry=registry,
        )
        self._router_z = Gauge(
            "megascale_router_z",
            "z-loss of the newest step's routers per token.",
            ["job"],
            registry=registry,
        )
        self._load = Gauge(
            "megascale_expert_load_ratio",
            "Choices of the hottest and of the coldest expert over the mean of its layer.",
            ["job", "bound"],
            registry=registry,
        )

    def step(self, job: str, record: types_pb2.StepRecord) -> None:
        """A step was completed; a dense model's has none of these."""
        if record.HasField("balance"):
            self._balance.labels(job).set(record.balance)
        if record.HasField("router_z"):
            self._router_z.labels(job).set(record.router_z)
        if record.HasField("expert_load_max"):
            self._load.labels(job, "max").set(record.expert_load_max)
            self._load.labels(job, "min").set(record.expert_load_min)

    def remove(self, job: str) -> None:
        """Forget an ended job."""
        with contextlib.suppress(KeyError):  # not set for a dense model
            self._balance.remove(job)
            self._router_z.remove(job)
            for bound in ("max", "min"):
                self._load.remove(job, bound)


class DriverMetrics(Collector):
    """Observes one engine; :attr:`registry` is served."""

    def __init__(
        self, engine: Engine, watch: LoopWatch | None = None, sources: Sources | None = None
    ) -> None:
        self._engine = engine
        self._sources = sources or Sources()
        self._watch = watch if watch is not None else LoopWatch()
        self._events: Counter[str] = Counter()
        self._incidents: Counter[tuple[str, str]] = Counter()  # by cause and action
        self._recovering: dict[str, float] = {}  # job -> when its attempt broke
        self._jobs: set[str] = set()
        job = ["job"]
        self.registry: CollectorRegistry = registry_of("driver", self)
        into = self.registry
        self._step_time = Histogram(
            "megascale_step_duration_seconds",
            "Time of one optimizer step.",
            job,
            buckets=STEP_BUCKETS_S,
            registry=into,
        )
        self._recovery = Histogram(
            "megascale_recovery_duration_seconds",
            "Parts of a recovery, and the whole from verdict to first new step.",
            ["phase"],
            buckets=RECOVERY_BUCKETS_S,
            registry=into,
        )
        self._tokens = Total(
            "megascale_tokens", "Tokens trained on; repeated steps count again.", job, registry=into
        )
        self._data_wait = Total(
            "megascale_data_wait_seconds",
            "Time that training has waited for data.",
            job,
            registry=into,
        )
        self._snapshots = Total(
            "megascale_snapshot_wait_seconds",
            "Time for which snapshots have held training up.",
            job,
            registry=into,
        )
        self._of_job: dict[str, Gauge] = {
            name: Gauge(f"megascale_{name}", text, job, registry=into)
            for name, text in (
                ("loss", "Loss of the newest step."),
                ("gradient_norm", "Gradient norm of the newest step, before clipping."),
                ("learning_rate", "Learning rate of the newest step."),
                ("step", "Newest completed step."),
                (
                    "skipped_updates",
                    "Updates skipped so far: not finite, above skip_norm, or without a target.",
                ),
                ("memory_bytes", "Most memory that the device of the reporting rank has held."),
            )
        }
        self._mfu = Gauge(
            "megascale_mfu_ratio",
            "Model FLOP utilisation of the newest step; attention counted causal or full.",
            ["job", "attention"],
            registry=into,
        )
        self._experts = _ExpertGauges(into)

    def step(self, job: str, record: types_pb2.StepRecord) -> None:
        """A step was completed."""
        self._jobs.add(job)
        duration_s = record.step_time.ToNanoseconds() / 1e9
        self._step_time.labels(job).observe(duration_s, _exemplar(record.attempt))
        self._tokens.labels(job).inc(max(0, round(record.tokens_per_s * duration_s)))
        self._data_wait.labels(job).inc(max(0.0, record.data_wait.ToNanoseconds() / 1e9))
        self._snapshots.labels(job).inc(max(0.0, record.snapshot_time.ToNanoseconds() / 1e9))
        for name, gauge in self._of_job.items():
            gauge.labels(job).set(getattr(record, name))
        if record.HasField("mfu_causal"):
            self._mfu.labels(job, "causal").set(record.mfu_causal)
        if record.HasField("mfu_full"):
            self._mfu.labels(job, "full").set(record.mfu_full)
        self._experts.step(job, record)
        found = self._engine.state.jobs.get(job)
        if found is None or found.phase is not JobPhase.RUNNING:
            return
        if record.attempt == found.attempt:
            self._recovered(found)

    def committed(self, old: Cluster, new: Cluster, audit: Iterable[Audit]) -> None:
        """A decision was committed."""
        self._events.update(line.reason for line in audit)
        for name, job in new.jobs.items():
            before = old.jobs.get(name)
            if before is not None and before is not job and before.phase is not job.phase:
                self._moved(before, job)

    def collect(self) -> Iterator[Metric]:
        """Gauges of the current state; called at each scrape."""
        state, now_s = self._engine.state, self._engine.clock.now_s()
        self._forget_ended(state, now_s)
        leads = GaugeMetricFamily("megascale_leader", "1 while this driver leads.")
        leads.add_metric([], float(self._engine.term is not None))
        yield leads
        yield from _diagnostics(self._engine.node_calls.figures)
        events = CounterMetricFamily(
            "megascale_events",
            "Lines written to the audit log; severity none: no action needed.",
            labels=["reason", "severity"],
        )
        for reason, count in sorted(self._events.items()):
            events.add_metric([reason, severity_of(reason) or "none"], count)
        yield events
        incidents = CounterMetricFamily(
            "megascale_incidents",
            "Attempts that a fault has ended, by its kind and by what the driver did.",
            labels=["cause", "action"],
        )
        for labels, count in sorted(self._incidents.items()):
            incidents.add_metric(list(labels), count)
        yield incidents
        yield _spans(self._sources.spans())
        yield from _loop(self._watch)
        if self._engine.term is None:
            return  # the state of a standby is old or empty: the leader reports it
        yield from _jobs(state)
        yield from _plan_metrics(self._sources.plans())
        yield _collective_metric(self._sources.collectives())
        slow = GaugeMetricFamily(
            "megascale_straggler_ratio",
            "How many times as long a slow node takes for the same work as the others.",
            labels=["node"],
        )
        for node, ratio in sorted(self._sources.slow().items()):
            slow.add_metric([node], ratio)
        yield slow
        yield _hot_ranks(self._sources.hot())
        yield from _goodput(state, now_s)
        yield from _nodes(state, now_s, self._engine.presence.lane)

    def _moved(self, before: Job, job: Job) -> None:
        if before.phase is JobPhase.STOPPING:
            cause = blame.culprit(before.current.faults)
            if cause is not None:
                action = job.phase.lower() if job.terminal else "restart"
                self._incidents[cause.kind.lower(), action] += 1
        if job.terminal:
            self._recovering.pop(job.name, None)
            return
        if job.phase is JobPhase.STOPPING and job.after_stop is JobPhase.QUEUED:
            self._recovering.setdefault(job.name, job.timer_s)
        elif job.name in self._recovering and before.phase in _PARTS:
            self._recovery.labels(_PARTS[before.phase]).observe(
                max(0.0, job.timer_s - before.timer_s), _exemplar(job.attempt)
            )

    def _recovered(self, job: Job) -> None:
        since_s = self._recovering.pop(job.name, None)
        if since_s is not None:
            now_s = self._engine.clock.now_s()
            example = _exemplar(job.attempt)
            self._recovery.labels("first_step").observe(max(0.0, now_s - job.timer_s), example)
            self._recovery.labels("total").observe(max(0.0, now_s - since_s), example)

    def _forget_ended(self, state: Cluster, now_s: float) -> None:
        for name in list(self._jobs):
            job = state.jobs.get(name)
            if job is not None and not (
                job.terminal and now_s - job.updated_at_s > ENDED_JOB_KEPT_S
            ):
                continue
            self._jobs.discard(name)
            of_job = (self._step_time, self._tokens, self._data_wait, self._snapshots)
            for metric in (*of_job, *self._of_job.values()):
                with contextlib.suppress(KeyError):
                    metric.remove(name)
            self._experts.remove(name)
            for kind in ("causal", "full"):
                with contextlib.suppress(KeyError):  # not set if the device's peak is unknown
                    self._mfu.remove(name, kind)


def _exemplar(attempt: int) -> dict[str, str]:
    """The attempt that an observation is an example of."""
    return {"attempt": str(attempt)}


def _spans(counts: Counter[str]) -> Metric:
    spans = CounterMetricFamily(
        "megascale_spans_received", "Spans of ranks at this driver.", labels=["outcome"]
    )
    for outcome in ("stored", "dropped", "damaged"):
        spans.add_metric([outcome], counts[outcome])
    return spans


def _plan_metrics(found: Iterable[tuple[str, Comparison]]) -> Iterator[Metric]:
    steps = GaugeMetricFamily(
        "megascale_plan_step_seconds",
        "Time of a step of a running job: measured (median), planned, and the plan's interval.",
        labels=["job", "kind"],
    )
    parts = GaugeMetricFamily(
        "megascale_plan_term_seconds",
        "Each part of a step of a running job, measured and planned.",
        labels=["job", "term", "kind"],
    )
    for job, each in found:
        plan = each.plan
        kinds = {"low": plan.low_s, "planned": plan.step_s, "high": plan.high_s}
        for kind, value in {"measured": each.step_s, **kinds}.items():
            steps.add_metric([job, kind], value)
        for term in each.terms:
            parts.add_metric([job, term.name, "measured"], term.measured_s)
            parts.add_metric([job, term.name, "planned"], term.planned_s)
    yield steps
    yield parts


def _collective_metric(found: Iterable[tuple[str, Collectives]]) -> Metric:
    seconds = GaugeMetricFamily(
        "megascale_collective_step_seconds",
        "Time of a rank in one kind of collective in a step, of the network and of waiting.",
        labels=["job", "operation", "group", "part"],
    )
    for job, collectives in found:
        for (operation, group), (network_s, waiting_s) in collectives.items():
            seconds.add_metric([job, operation, group, "network"], network_s)
            seconds.add_metric([job, operation, group, "waiting"], waiting_s)
    return seconds


def _hot_ranks(found: Iterable[tuple[str, HotRank]]) -> Metric:
    rows = GaugeMetricFamily(
        "megascale_hot_rank_rows_ratio",
        "Rows of the experts of a hot rank over the mean of its ep group.",
        labels=["job", "rank"],
    )
    for job, hot in sorted(found, key=lambda one: (one[0], -one[1].share))[:MAX_HOT_RANKS]:
        rows.add_metric([job, str(hot.rank)], hot.share)
    return rows


def _loop(watch: LoopWatch) -> Iterator[Metric]:
    longest = GaugeMetricFamily(
        "megascale_event_loop_longest_stall_seconds",
        "Longest time within the last minute for which the driver's event loop stood still.",
    )
    longest.add_metric([], watch.longest_s())
    stalls = CounterMetricFamily(
        "megascale_event_loop_stalls",
        "Times that the driver's event loop stood still for more than 10 ms.",
    )
    stalls.add_metric([], watch.stalls)
    yield from (longest, stalls)


def _jobs(state: Cluster) -> Iterator[Metric]:
    phases = Counter(job.phase for job in state.jobs.values())
    by_phase = GaugeMetricFamily("megascale_jobs", "Jobs by phase.", labels=["phase"])
    for phase in JobPhase:
        by_phase.add_metric([phase.lower()], phases[phase])
    yield by_phase
    restarts = CounterMetricFamily(
        "megascale_job_restarts", "Restarts of a job that has not ended.", labels=["job"]
    )
    committed = GaugeMetricFamily(
        "megascale_job_committed_step",
        "Newest complete checkpoint of a job that has not ended.",
        labels=["job"],
    )
    committed_at = GaugeMetricFamily(
        "megascale_job_committed_timestamp_seconds",
        "When the newest complete checkpoint of a job that has not ended became known.",
        labels=["job"],
    )
    spares = GaugeMetricFamily(
        "megascale_job_spare_nodes", "Spares that stand by for a job.", labels=["job"]
    )
    for job in state.jobs.values():
        if not job.terminal:
            restarts.add_metric([job.name], job.restarts)
            committed.add_metric([job.name], job.committed_step)
            if job.committed_at_s:
                committed_at.add_metric([job.name], job.committed_at_s)
            spares.add_metric([job.name], len(job.spares))
    yield from (restarts, committed, committed_at, spares)


def _goodput(state: Cluster, now_s: float) -> Iterator[Metric]:
    """Time of each job that has not ended by part; the parts add up to its age."""
    spent = GaugeMetricFamily(
        "megascale_job_time_seconds",
        "Time of a job that has not ended, by where it went; steps that are lost move from "
        "productive to lost.",
        labels=["job", "part"],
    )
    ratio = GaugeMetricFamily(
        "megascale_job_goodput_ratio",
        "Productive time over the time since submission of a job that has not ended.",
        labels=["job"],
    )
    lost = CounterMetricFamily(
        "megascale_job_lost_steps",
        "Steps that a job that has not ended had to do again.",
        labels=["job"],
    )
    for job in state.jobs.values():
        if not job.terminal and job.goodput.since_us:
            ledger = goodput.at(job.goodput, now_s)
            for part in goodput.PARTS:
                labels = [job.name, part.removesuffix("_us")]
                spent.add_metric(labels, getattr(ledger, part) / 1e6)
            ratio.add_metric([job.name], ledger.ratio)
            lost.add_metric([job.name], ledger.lost_steps)
    yield from (spent, ratio, lost)


def _nodes(state: Cluster, now_s: float, lane: Lane) -> Iterator[Metric]:
    counts = Counter((node.liveness, node.disposition) for node in state.nodes.values())
    nodes = GaugeMetricFamily(
        "megascale_nodes", "Nodes by state.", labels=["liveness", "disposition"]
    )
    for (liveness, disposition), count in sorted(counts.items()):
        nodes.add_metric([liveness.lower(), disposition.lower()], count)
    yield nodes
    age = GaugeMetricFamily(
        "megascale_heartbeat_age_seconds",
        "Time since a node's last sign of life; in large fleets of the oldest only.",
        labels=["node"],
    )
    signs = (
        (max(node.last_seen_s, lane.last_beat_s(node.name)), node.name)
        for node in state.nodes.values()
        if _expected(node)
    )
    for sign_s, name in sorted(heapq.nsmallest(MAX_AGES, signs), key=lambda sign: sign[1]):
        age.add_metric([name], max(0.0, now_s - sign_s))
    yield age
    breaker = GaugeMetricFamily(
        "megascale_breaker_tripped", "1 while silent nodes are only observed, not evicted."
    )
    breaker.add_metric([], float(state.breaker.tripped_at_s > 0))
    yield breaker


def _expected(node: Node) -> bool:
    """True if heartbeats of the node are expected: removed nodes must not alert forever."""
    return node.liveness not in ("DEAD", "UNKNOWN")


def _diagnostics(figures: FleetFigures) -> Iterator[Metric]:
    """Results of the newest diagnostics of all nodes, without a series per node."""
    results = GaugeMetricFamily(
        "megascale_diag_result",
        "Targets of all nodes by test and verdict, of their newest diagnostics.",
        labels=["test", "verdict"],
    )
    for (test, verdict), count in sorted(figures.counts().items()):
        results.add_metric([test, verdict.lower()], count)
    yield results
    values = GaugeMetricFamily(
        "megascale_diag_value",
        "Median of what a test measured on all nodes, in its unit.",
        labels=["test", "class", "unit"],
    )
    for key, value in sorted(figures.medians().items()):
        values.add_metric(list(key), value)
    yield values
