"""The jobs that this node serves: their ranks' snapshots, commits and errors.

WatchProgress streams this state. A node runs one attempt at a time, so when another job's worker
registers, the staging memory of every job without a connected worker and without work in progress
is freed. Until then, its newest sealed slots can be restored.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Protocol

from megascale.v1 import link_pb2
from megascale_checkpoint.concurrency import Pools, Signal, in_pool
from megascale_checkpoint.memory.registration import RegisteredRank
from megascale_checkpoint.memory.staging import StagingFolder
from megascale_checkpoint.restore.rank_restore import ReplicaReader
from megascale_checkpoint.save.committer_client import CommitterClient
from megascale_checkpoint.save.rank_snapshots import Owner, RankSnapshots
from megascale_checkpoint.save.write_limit import LIMITS, PersistPace
from megascale_common.service import logs
from megascale_common.service.errors import LimitError, RequestError
from megascale_job.restore import RestorePlan, RestoreSource

log = logs.get("jobs")
KEPT_JOBS = 32  # without slots; a heartbeat has room for the progress of this many
MAX_ERROR_CHARS = 500
KEPT_DAMAGED = 16
KEPT_FAILURES = 64  # of saves; a run by hand asks for them twice a second
KEPT_BUSY_STEPS = 16  # recent steps for which a rank may still ask for a slot


@dataclass(slots=True)
class Committed:
    """The newest checkpoint known to be complete."""

    step: int = 0
    attempt: int = 0
    manifest_uri: str = ""


@dataclass(slots=True)
class WorkTotal:
    """Count, total duration and total bytes of one kind of work."""

    count: int = 0
    sum_s: float = 0.0
    size_bytes: int = 0

    def add(self, duration_s: float, size_bytes: int) -> None:
        """Add one piece of work."""
        self.count += 1
        self.sum_s += duration_s
        self.size_bytes += size_bytes


@dataclass(slots=True)
class JobCheckpoints:
    """The checkpoints of one job on this node.

    Attributes:
        attempt: the highest attempt for which a worker has registered.
        skipped_before: number of skipped steps that ``busy_ranks`` no longer holds.
        busy_ranks: ranks that got no slot, by (attempt, step).
        failure: the newest failure since the newest commit.
        failures: number of failed persists and commits.
        recent_failures: the newest KEPT_FAILURES of them, from before the newest commit too.
        damaged: the newest KEPT_DAMAGED sealed slots that were found damaged.
        pace: limit on persistence while it slows down steps; of the newest attempt.
    """

    name: str
    changed: Signal
    attempt: int = 0
    ranks: dict[int, RankSnapshots] = field(default_factory=dict)
    committed: Committed = field(default_factory=Committed)
    skipped_before: int = 0
    busy_ranks: dict[tuple[int, int], set[int]] = field(default_factory=dict)
    failure: link_pb2.CheckpointFailure | None = None
    failures: int = 0
    recent_failures: deque[link_pb2.CheckpointFailure] = field(
        default_factory=lambda: deque(maxlen=KEPT_FAILURES)
    )
    persists: WorkTotal = field(default_factory=WorkTotal)
    restores: dict[str, WorkTotal] = field(default_factory=dict)
    damaged: list[link_pb2.DamagedSnapshot] = field(default_factory=list)
    pace: PersistPace = field(default_factory=lambda: PersistPace(0.0))
    _paced: tuple[int, int] = (0, 0)  # attempt of ``pace``, and bytes written at its last step

    def note_commit(self, step: int, attempt: int, manifest_uri: str) -> None:
        """Record a complete checkpoint."""
        # By attempt first: after a rollback a later attempt commits earlier steps.
        if (attempt, step) > (self.committed.attempt, self.committed.step):
            self.committed = Committed(step, attempt, manifest_uri)
            self.failure = None
            log.info("checkpoint committed", job=self.name, attempt=attempt, step=step)
        self.changed.notify()

    def note_failure(self, rank: int, attempt: int, step: int, error: str) -> None:
        """Record that a rank's part of a checkpoint could not be kept; training continues."""
        self.failure = link_pb2.CheckpointFailure(
            attempt=attempt, step=step, rank=rank, error=error[:MAX_ERROR_CHARS]
        )
        self.recent_failures.append(self.failure)
        self.failures += 1
        log.warning("persist failed", job=self.name, step=step, rank=rank, error=error)
        self.changed.notify()

    def note_persisted(self, duration_s: float, size_bytes: int) -> None:
        """Record that a rank's file of a step is durable."""
        self.persists.add(duration_s, size_bytes)

    def note_restored(self, source: str, duration_s: float, size_bytes: int) -> None:
        """Record that a rank's state was restored into a slot."""
        self.restores.setdefault(source, WorkTotal()).add(duration_s, size_bytes)

    def note_damaged(self, rank: int, attempt: int, step: int, problem: str) -> None:
        """Record a sealed slot whose bytes have changed: no restart can use it."""
        error = problem[:MAX_ERROR_CHARS]
        self.damaged.append(
            link_pb2.DamagedSnapshot(rank=rank, attempt=attempt, step=step, error=error)
        )
        del self.damaged[:-KEPT_DAMAGED]
        log.warning("snapshot damaged", job=self.name, step=step, rank=rank, error=problem)
        self.changed.notify()

    def note_busy(self, attempt: int, step: int, rank: int, busy: bool) -> None:
        """Count a step as skipped while any of its ranks has no slot.

        All ranks skip a step together, so it counts once. It stops counting when every rank that
        was refused has asked again and got a slot.
        """
        ranks = self.busy_ranks.setdefault((attempt, step), set())
        if busy:
            ranks.add(rank)
        else:
            ranks.discard(rank)
        while len(self.busy_ranks) > KEPT_BUSY_STEPS:
            self.skipped_before += bool(self.busy_ranks.pop(next(iter(self.busy_ranks))))
        self.changed.notify()

    def note_step(self, given: RegisteredRank, step: int, time_s: float) -> bool:
        """Record the time of a step; return True if a state is being written meanwhile."""
        attempt, before = self._paced
        if given.attempt != attempt:
            self.pace = PersistPace(given.max_step_slowdown)
            before = LIMITS.taken(self.name)
        written = LIMITS.taken(self.name)
        # The ranks of a node share the bandwidth, and a step takes as long as its slowest rank.
        writing = any(snapshots.persisting is not None for snapshots in self.ranks.values())
        self._paced = given.attempt, written
        self.pace.add(step, time_s, writing=writing, written=written - before)
        LIMITS.set_pace(self.name, self.pace.limit, hold=self.pace.hold, step_s=time_s)
        return writing and not self.pace.hold

    def progress(self) -> link_pb2.CheckpointProgress:
        """The job's progress, as heartbeats carry it to the driver."""
        message = link_pb2.CheckpointProgress(
            job=self.name,
            committed_step=self.committed.step,
            committed_by_attempt=self.committed.attempt,
            manifest_uri=self.committed.manifest_uri,
            skipped_snapshots=self.skipped_before + sum(map(bool, self.busy_ranks.values())),
            failure=self.failure,
            failures=self.failures,
            damaged=self.damaged,
        )
        if self.failure is not None:
            error = self.failure.error
            message.persist_error = f"step {self.failure.step}, rank {self.failure.rank}: {error}"
        skipped = max((key for key, ranks in self.busy_ranks.items() if ranks), default=(0, 0))
        message.skipped_by_attempt, message.skipped_step = skipped
        for rank, snapshots in sorted(self.ranks.items()):
            for seal in snapshots.table.sealed():
                message.sealed.add(
                    rank=rank,
                    attempt=seal.attempt,
                    step=seal.step,
                    layout_digest=seal.layout_digest,
                )
        return message


class Replicas(ReplicaReader, Protocol):
    """The replicas of this node (:mod:`megascale_checkpoint.replicas.node_replicas`)."""

    def report(self, message: link_pb2.CheckpointProgress) -> None:
        """Add the replicas of a job to its progress."""

    async def retire(self) -> None:
        """Free the replicas of jobs that no longer have slots here."""


class Jobs:
    """All jobs of the node; ``changed`` fires on every change that WatchProgress shows."""

    def __init__(self, staging: StagingFolder, pools: Pools, committer: CommitterClient) -> None:
        self.changed = Signal()
        self._staging = staging
        self._pools = pools
        self._committer = committer
        self._jobs: dict[str, JobCheckpoints] = {}
        self.replicas: Replicas | None = None
        self._job_pools: dict[str, Pools] = {}
        # Reports of ranks whose slots are freed; each ends by itself.
        self._reports: set[asyncio.Task[None]] = set()
        self._registering: dict[tuple[str, int], asyncio.Lock] = defaultdict(asyncio.Lock)

    def job(self, name: str) -> JobCheckpoints:
        """The job's state, created on first use."""
        # Moved to the end: jobs without slots are dropped from the front, least recently used
        # first.
        self._jobs[name] = (
            self._jobs.pop(name) if name in self._jobs else JobCheckpoints(name, self.changed)
        )
        without_ranks = [other for other, job in self._jobs.items() if not job.ranks]
        for other in without_ranks[:-KEPT_JOBS]:
            del self._jobs[other]
            LIMITS.forget(other)
            if other in self._job_pools:
                self._job_pools.pop(other).close()
        return self._jobs[name]

    def all(self) -> list[JobCheckpoints]:
        """Every job, by name."""
        return [self._jobs[name] for name in sorted(self._jobs)]

    def registration(self, name: str) -> RegisteredRank | None:
        """A registration for the job's newest attempt on this node, if there is one."""
        job = self._jobs.get(name)
        if job is None:
            return None
        registered = (snapshots.registration for snapshots in job.ranks.values())
        return next((given for given in registered if given.attempt == job.attempt), None)

    def progress(self) -> list[link_pb2.CheckpointProgress]:
        """Progress of every job, by name."""
        messages = [self._jobs[name].progress() for name in sorted(self._jobs)]
        if self.replicas is not None:
            for message in messages:
                self.replicas.report(message)
        return messages

    def note_restore(self, name: str, plan: RestorePlan) -> None:
        """Note the checkpoint that a new attempt restores from storage as the newest commit."""
        # Attempt 0 means that another job wrote it, so it is not a commit of this job.
        if plan.source is RestoreSource.STORAGE and plan.written_by_attempt:
            self.job(name).note_commit(plan.step, plan.written_by_attempt, plan.manifest_uri)

    async def register(self, registration: RegisteredRank, owner: Owner) -> RankSnapshots:
        """The snapshots of a rank, owned from now on by the worker's connection ``owner``.

        Slots sealed in the same layout are kept, so that the rank can restore from them.

        Raises:
            RequestError: the attempt is lower than one seen before.
            LimitError: there is no room for the slots.
        """
        job = self.job(registration.job)
        _refuse_superseded(job, registration)
        if registration.attempt > job.attempt:
            job.attempt = registration.attempt
            # All ranks of the node, because any of them may still persist a step of the previous
            # attempt.
            for other in job.ranks.values():
                other.supersede(registration.attempt)
        # Before slots are allocated: another job's idle slots may hold the memory that is needed.
        await self._free_idle(registration.job)
        if self.replicas is not None:
            await self.replicas.retire()
        # An old worker and its successor can register the same rank at the same time. The lock lets
        # one of them at a time allocate slots or take them over.
        async with self._registering[registration.job, registration.rank]:
            snapshots = job.ranks.get(registration.rank)
            # Checked again, because the successor may have registered during the wait.
            _refuse_superseded(job, registration)
            if snapshots is not None and snapshots.owner is not None:
                _refuse_older(snapshots.owner, owner)
            if snapshots is None or not await self._keep(job, snapshots, registration):
                snapshots = await RankSnapshots.create(
                    registration, job, self._staging, self._pools_of(job.name), self._committer
                )
                self._log_loss_bound(registration, len(snapshots.memories))
                job.ranks[registration.rank] = snapshots
            snapshots.restores.replicas = self.replicas
            snapshots.take_over(registration, owner)
        self.changed.notify()
        return snapshots

    async def close(self, drain_s: float) -> bool:
        """Stop persisting; work in progress has ``drain_s`` to finish.

        Returns True if no thread is stuck in a storage, which would keep the process from ending.
        """
        all_snapshots = [
            snapshots for job in self._jobs.values() for snapshots in job.ranks.values()
        ]
        reports = set(self._reports)
        stopping = asyncio.gather(*(snapshots.stop(drain_s) for snapshots in all_snapshots))
        if reports and drain_s:
            await asyncio.wait(reports, timeout=drain_s)
        for report in reports:
            report.cancel()
        ended = await stopping
        for pools in self._job_pools.values():
            pools.close()
        return all(ended)

    async def _free_idle(self, registering: str) -> None:
        for job in list(self._jobs.values()):
            if (
                job.name != registering
                and job.ranks
                and all(snapshots.idle() for snapshots in job.ranks.values())
            ):
                log.info("staging memory freed for another job", job=job.name, other=registering)
                for rank, snapshots in list(job.ranks.items()):
                    # Their files are durable and need no slot, so the step can still become
                    # complete.
                    for report in snapshots.hand_over_reports():
                        self._reports.add(report)
                        report.add_done_callback(self._reports.discard)
                    await self._free(job, rank)

    async def _keep(
        self, job: JobCheckpoints, snapshots: RankSnapshots, registration: RegisteredRank
    ) -> bool:
        """True if the rank's slots can be used as they are; otherwise they are freed."""
        if snapshots.fits(registration):
            try:
                await snapshots.detach_owner()
                return True
            except LimitError as error:
                log.warning(
                    "slots are allocated again",
                    job=job.name,
                    rank=registration.rank,
                    error=str(error),
                )
        await self._free(job, registration.rank)
        return False

    async def _free(self, job: JobCheckpoints, rank: int) -> None:
        snapshots = job.ranks.pop(rank, None)
        if snapshots is not None:
            snapshots.owner = None
            if not await snapshots.stop(0.0):
                # The stuck thread still maps the memory; the bytes that it reads are never
                # reported.
                log.warning("a storage holds a thread", job=job.name, rank=rank)
            await in_pool(self._pools.memory, self._staging.free, snapshots.memories)

    def _pools_of(self, job: str) -> Pools:
        if job not in self._job_pools:
            self._job_pools[job] = self._pools.for_job()
        return self._job_pools[job]

    @staticmethod
    def _log_loss_bound(registration: RegisteredRank, slots: int) -> None:
        bound = "none: a snapshot is taken while the one before is persisted"
        missing = registration.wanted_slots - slots
        if missing > 0:
            bound = (
                "snapshots are skipped while one is persisted or copied to the peer, or while more "
                f"than {max(1, registration.in_flight - missing)} are copied and not sealed"
            )
        size_bytes = registration.layout.slot_bytes
        who = {"job": registration.job, "rank": registration.rank}
        log.info("slots ready", **who, slots=slots, slot_bytes=size_bytes, loss_bound=bound)


def _refuse_superseded(job: JobCheckpoints, registration: RegisteredRank) -> None:
    if registration.attempt < job.attempt:
        raise RequestError(
            f"attempt {registration.attempt} is superseded: attempt {job.attempt} has registered"
        )


def _refuse_older(present: Owner, owner: Owner) -> None:
    """Raise RequestError for an older connection of a rank that has registered on a newer one.

    A worker that connects again can be served before the registration that it gave up on.
    """
    if owner.serial < present.serial:
        raise RequestError("this connection is superseded: the rank has registered on a newer one")
