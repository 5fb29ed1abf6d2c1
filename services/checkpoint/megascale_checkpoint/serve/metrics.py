"""Prometheus metrics of the daemon: seals, commits, persists, restores, staging memory."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from megascale_checkpoint.memory.staging import StagingFolder
from megascale_checkpoint.replicas.node_replicas import NodeReplicas
from megascale_checkpoint.serve.jobs import Jobs

_PREFIX = "megascale_checkpoint"


class CheckpointMetrics(Collector):
    """Figures of one node's daemon, read at each scrape. Counters start at 0 with the daemon."""

    def __init__(self, jobs: Jobs, staging: StagingFolder, replicas: NodeReplicas) -> None:
        self._jobs = jobs
        self._staging = staging
        self._replicas = replicas

    def collect(self) -> Iterator[Metric]:
        """All metrics, with their current values."""
        yield GaugeMetricFamily(
            f"{_PREFIX}_staging_used_bytes",
            "Staging memory held by slots and replicas.",
            value=float(self._staging.used_bytes),
        )
        yield GaugeMetricFamily(
            f"{_PREFIX}_staging_room_bytes",
            "Staging memory that can still be allocated.",
            value=float(self._staging.room_bytes()),
        )
        yield from self._progress()
        yield from self._ranks()
        yield from self._work()
        yield from self._pace()
        yield from self._replication()

    def _progress(self) -> Iterator[Metric]:
        labels = ["job"]
        sealed = GaugeMetricFamily(
            f"{_PREFIX}_sealed_step",
            "Newest step that every rank of this node holds in a sealed slot.",
            labels=labels,
        )
        committed = GaugeMetricFamily(
            f"{_PREFIX}_committed_step", "Newest complete checkpoint known.", labels=labels
        )
        failing = GaugeMetricFamily(
            f"{_PREFIX}_persist_failing",
            "1 while the newest attempt to persist a step has failed.",
            labels=labels,
        )
        skipped = CounterMetricFamily(
            f"{_PREFIX}_skipped_snapshots",
            "Snapshots skipped for lack of a free slot.",
            labels=labels,
        )
        failures = CounterMetricFamily(
            f"{_PREFIX}_failures", "Persists and commits that failed.", labels=labels
        )
        for job in self._jobs.progress():
            newest: dict[int, int] = {}
            for seal in job.sealed:
                newest[seal.rank] = max(seal.step, newest.get(seal.rank, 0))
            sealed.add_metric([job.job], min(newest.values(), default=0))
            committed.add_metric([job.job], job.committed_step)
            failing.add_metric([job.job], float(bool(job.persist_error)))
            skipped.add_metric([job.job], job.skipped_snapshots)
            failures.add_metric([job.job], job.failures)
        yield from (sealed, committed, failing, skipped, failures)

    def _ranks(self) -> Iterator[Metric]:
        labels = ["job", "rank"]
        durable = GaugeMetricFamily(
            f"{_PREFIX}_rank_durable_step",
            "Newest step whose file a rank of this node has written.",
            labels=labels,
        )
        written = GaugeMetricFamily(
            f"{_PREFIX}_rank_written_ratio",
            "Written share of the step that a rank persists now, 0 to 1.",
            labels=labels,
        )
        still = GaugeMetricFamily(
            f"{_PREFIX}_rank_storage_silent_seconds",
            "Seconds since the storage last took bytes of the step that a rank persists now.",
            labels=labels,
        )
        for job in self._jobs.all():
            for rank, snapshots in sorted(job.ranks.items()):
                who = [job.name, str(rank)]
                durable.add_metric(who, snapshots.durable_step)
                progress = snapshots.persisting
                if progress is not None:
                    share = progress.written_bytes / max(1, progress.total_bytes)
                    written.add_metric(who, min(1.0, share))
                    still.add_metric(who, progress.still_s)
        yield from (durable, written, still)

    def _work(self) -> Iterator[Metric]:
        persist = SummaryMetricFamily(
            f"{_PREFIX}_persist_duration_seconds",
            "Time to write one rank's file of a step to storage.",
            labels=["job"],
        )
        size = CounterMetricFamily(
            f"{_PREFIX}_persisted_bytes", "Bytes written to storage.", labels=["job"]
        )
        restore = SummaryMetricFamily(
            f"{_PREFIX}_restore_duration_seconds",
            "Time to restore one rank's state into a slot.",
            labels=["job", "source"],
        )
        read = CounterMetricFamily(
            f"{_PREFIX}_restored_bytes",
            "Bytes read to restore ranks: from storage, or from the memory of a peer.",
            labels=["job", "source"],
        )
        for job in self._jobs.all():
            if job.persists.count:
                persist.add_metric([job.name], job.persists.count, job.persists.sum_s)
                size.add_metric([job.name], job.persists.size_bytes)
            for source, work in sorted(job.restores.items()):
                restore.add_metric([job.name, source], work.count, work.sum_s)
                read.add_metric([job.name, source], work.size_bytes)
        yield from (persist, size, restore, read)

    def _pace(self) -> Iterator[Metric]:
        limit = GaugeMetricFamily(
            f"{_PREFIX}_write_limit_bytes_per_second",
            "Limit on writes to storage while they slow down steps on this node; 0: no limit.",
            labels=["job"],
        )
        slowdown = GaugeMetricFamily(
            f"{_PREFIX}_step_slowdown_ratio",
            "Share by which steps with a write to storage took longer, at the last comparison.",
            labels=["job"],
        )
        for job in self._jobs.all():
            if job.ranks:
                limit.add_metric([job.name], job.pace.limit)
                slowdown.add_metric([job.name], job.pace.slowdown)
        yield from (limit, slowdown)

    def _replication(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            f"{_PREFIX}_replica_used_bytes",
            "Staging memory held by replicas of other nodes.",
            value=float(self._replicas.store.used_bytes),
        )
        sent = SummaryMetricFamily(
            f"{_PREFIX}_replicate_duration_seconds",
            "Time to copy one rank's snapshot to its peer.",
            labels=["job"],
        )
        size = CounterMetricFamily(
            f"{_PREFIX}_replicated_bytes", "Bytes copied to peers.", labels=["job"]
        )
        failures = CounterMetricFamily(
            f"{_PREFIX}_replica_failures",
            "Snapshots of a rank whose copy to the peer failed or was overtaken.",
            labels=["job"],
        )
        for job, totals in sorted(self._replicas.sender.totals.items()):
            sent.add_metric([job], totals.count, totals.sum_s)
            size.add_metric([job], totals.size_bytes)
            failures.add_metric([job], totals.failures)
        yield from (sent, size, failures)
