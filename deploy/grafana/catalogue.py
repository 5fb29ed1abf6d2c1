"""Every metric that the three services define, read from their registries.

Each registry is filled with one sample of everything, because prometheus_client names a metric's
labels only in its samples. No service is started; the only file written is a temporary one.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from megascale.v1 import link_pb2, types_pb2
from megascale_checkpoint.concurrency import Pools
from megascale_checkpoint.memory.staging import StagingFolder
from megascale_checkpoint.replicas.node_replicas import NodeReplicas
from megascale_checkpoint.replicas.sender import SentTotals
from megascale_checkpoint.save.committer_client import CommitterClient
from megascale_checkpoint.serve.jobs import Jobs
from megascale_checkpoint.serve.metrics import CheckpointMetrics
from megascale_common.service.clock import SystemClock
from megascale_common.service.metrics import registry_of
from megascale_driver.core.values.attempt import Attempt
from megascale_driver.core.values.cluster import Cluster, Liveness, Node
from megascale_driver.core.values.events import Audit
from megascale_driver.core.values.goodput import submitted
from megascale_driver.core.values.job import Job, JobPhase
from megascale_driver.core.values.policy import Policy
from megascale_driver.shell.engine import Engine, Term
from megascale_driver.shell.metrics import DriverMetrics
from megascale_executor.agent.link.driver_link import DriverLink
from megascale_executor.agent.link.metrics import AgentMetrics
from megascale_executor.agent.reports.span_reports import SpanReports
from megascale_executor.agent.reports.step_reports import StepReports
from megascale_executor.counters.sampler import Sample

EVERY_SERVICE = "every service"


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """One metric. ``kind`` is counter, gauge, histogram, summary or info.

    ``name`` is the name in queries; the samples of a histogram or a summary add ``_sum``,
    ``_count`` and ``_bucket`` to it.
    """

    service: str
    name: str
    kind: str
    help: str
    labels: tuple[str, ...] = ()

    @property
    def sample_names(self) -> tuple[str, ...]:
        """Names of its series in Prometheus."""
        parts = {"histogram": ("_bucket", "_sum", "_count"), "summary": ("_sum", "_count")}
        return tuple(self.name + part for part in parts.get(self.kind, ("",)))


def families() -> list[MetricFamily]:
    """All metrics, by service and in the order of the code; shared metrics come last."""
    found: dict[str, list[MetricFamily]] = {}
    with checkpoint_registry() as checkpoint:
        registries = {
            "driver": driver_registry(),
            "executor": executor_registry(),
            "checkpoint": checkpoint,
        }
        for service, registry in registries.items():
            for metric in registry.collect():
                family = _family(service, metric)
                found.setdefault(family.name, []).append(family)
    own = [each[0] for each in found.values() if len(each) == 1]
    shared = [replace(each[0], service=EVERY_SERVICE) for each in found.values() if len(each) > 1]
    order = [*registries, EVERY_SERVICE]
    return sorted([*own, *shared], key=lambda family: order.index(family.service))


def driver_registry() -> CollectorRegistry:
    """Metrics of a leader with one running job that was restarted."""
    engine = Engine(Policy(), SystemClock(), "token", "address")
    metrics = DriverMetrics(engine)
    node = Node("n1", liveness=Liveness.ALIVE)
    job = Job("job", config=cast(Any, None), current=Attempt(1), goodput=submitted(1.0))
    phases = (
        JobPhase.RUNNING,
        JobPhase.STOPPING,
        JobPhase.QUEUED,
        JobPhase.PREPARING,
        JobPhase.STARTING,
        JobPhase.RUNNING,
    )
    states = [Cluster({"n1": node}, {"job": replace(job, phase=phase)}) for phase in phases]
    for old, new in itertools.pairwise(states):
        metrics.committed(old, new, [Audit("", 1, 0.0, "", "", "SUBMITTED", "")])
    engine.state = states[-1]
    engine.term = cast(Term, SimpleNamespace(epoch=types_pb2.Epoch(cluster_generation=1)))
    metrics.step("job", types_pb2.StepRecord(attempt=1, mfu_causal=0.5, mfu_full=0.5))
    return metrics.registry


def executor_registry() -> CollectorRegistry:
    """Metrics of an agent with one running rank."""
    beat = link_pb2.Heartbeat(phase=link_pb2.ATTEMPT_PHASE_RUNNING)
    beat.workers.add(state=link_pb2.WORKER_STATE_RUNNING)
    beat.checks.add(verdict=types_pb2.CHECK_VERDICT_PASS)
    reports = StepReports()
    spans = SpanReports("n1")
    link = DriverLink("cluster", "token", list, cast(Any, None), reports, spans)
    return registry_of("executor", AgentMetrics(lambda: beat, link, reports, spans, Sample, dict))


@contextmanager
def checkpoint_registry() -> Iterator[CollectorRegistry]:
    """Metrics of a daemon that has persisted and restored one job, until the block ends."""
    with tempfile.TemporaryDirectory() as folder:
        staging = StagingFolder(Path(folder) / "staging", "cluster", "n1", "incarnation")
        pools = Pools()
        try:
            jobs = Jobs(staging, pools, CommitterClient("token"))
            jobs.job("job").note_persisted(0.5, 100)
            jobs.job("job").note_restored("memory", 0.1, 0)
            replicas = NodeReplicas(jobs, staging, pools, "token")
            replicas.sender.totals["job"] = SentTotals(1, 0.1, 100)
            yield registry_of("checkpoint", CheckpointMetrics(jobs, staging, replicas))
        finally:
            pools.close()
            staging.remove()


def _family(service: str, metric: Metric) -> MetricFamily:
    name = metric.name + {"counter": "_total", "info": "_info"}.get(metric.type, "")
    labels = dict.fromkeys(label for sample in metric.samples for label in sample.labels)
    # The bounds of buckets and quantiles are no labels of the metric.
    named = tuple(label for label in labels if label not in {"le", "quantile"})
    return MetricFamily(service, name, metric.type, metric.documentation, named)
