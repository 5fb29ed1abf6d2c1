"""The jobs that this node serves: their ranks' snapshots, what is committed, what went wrong. Source
of WatchProgress.

A node runs one attempt at a time, so the staging memory of a job that nobody is connected to, and
that has nothing left to persist, is freed when another job's worker registers; until then its
newest seals can be restored from.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import dataclass, field

from megascale.v1 import link_pb2
from megascale_checkpoint.committer_client import CommitterClient
from megascale_checkpoint.concurrency import Pools, Signal, in_pool
from megascale_checkpoint.errors import RequestError, StagingError
from megascale_checkpoint.rank_snapshots import Owner, RankSnapshots
from megascale_checkpoint.registration import RankRegistration
from megascale_checkpoint.staging import LEAST_SLOTS, StagingFolder
from megascale_common.service import logs

log = logs.get("jobs")
KEPT_JOBS = 32  # that hold nothing here any more: a heartbeat has room for the progress of so many
KEPT_BUSY_STEPS = 16  # steps that ranks may still ask again for


@dataclass(slots=True)
class Committed:
    """Newest checkpoint known to be complete."""

    step: int = 0
    attempt: int = 0
    manifest_uri: str = ""


@dataclass(slots=True)
class Work:
    """How often something was done, how long it took together, and how much it moved."""

    count: int = 0
    sum_s: float = 0.0
    size_bytes: int = 0

    def add(self, duration_s: float, size_bytes: int) -> None:
        """Once more."""
        self.count += 1
        self.sum_s += duration_s
        self.size_bytes += size_bytes


@dataclass(slots=True)
class JobCheckpoints:
    """One job on this node. ``attempt`` is the highest that registered."""

    name: str
    changed: Signal
    attempt: int = 0
    ranks: dict[int, RankSnapshots] = field(default_factory=dict)
    committed: Committed = field(default_factory=Committed)
    skipped_before: int = 0
    busy_ranks: dict[tuple[int, int], set[int]] = field(default_factory=dict)
    persist_error: str = ""
    persists: Work = field(default_factory=Work)
    restores: dict[str, Work] = field(default_factory=dict)

    def note_commit(self, step: int, attempt: int, manifest_uri: str) -> None:
        """A checkpoint is complete."""
        if (attempt, step) > (self.committed.attempt, self.committed.step):
            self.committed = Committed(step, attempt, manifest_uri)
            self.persist_error = ""
            log.info("checkpoint committed", job=self.name, attempt=attempt, step=step)
        self.changed.notify()

    def note_failure(self, rank: int, step: int, error: str) -> None:
        """A rank's part of a checkpoint could not be kept; training goes on."""
        self.persist_error = f"step {step}, rank {rank}: {error}"
        log.warning("persist failed", job=self.name, step=step, rank=rank, error=error)
        self.changed.notify()

    def note_persisted(self, duration_s: float, size_bytes: int) -> None:
        """A rank's file of a step has reached storage."""
        self.persists.add(duration_s, size_bytes)

    def note_restored(self, source: str, duration_s: float, size_bytes: int) -> None:
        """A rank's state lies in a slot again."""
        self.restores.setdefault(source, Work()).add(duration_s, size_bytes)

    def note_busy(self, attempt: int, step: int, rank: int, busy: bool) -> None:
        """A rank has got a slot for ``step``, or not. All ranks skip together, so a step counts
        once.

        It no longer counts when the ranks that got none asked again and did.
        """
        ranks = self.busy_ranks.setdefault((attempt, step), set())
        if busy:
            ranks.add(rank)
        else:
            ranks.discard(rank)
        while len(self.busy_ranks) > KEPT_BUSY_STEPS:
            self.skipped_before += bool(self.busy_ranks.pop(next(iter(self.busy_ranks))))
        self.changed.notify()

    def progress(self) -> link_pb2.CheckpointProgress:
        """What the driver is told."""
        message = link_pb2.CheckpointProgress(
            job=self.name,
            committed_step=self.committed.step,
            committed_by_attempt=self.committed.attempt,
            manifest_uri=self.committed.manifest_uri,
            skipped_snapshots=self.skipped_before + sum(map(bool, self.busy_ranks.values())),
            persist_error=self.persist_error,
        )
        for rank, snapshots in sorted(self.ranks.items()):
            for seal in snapshots.table.sealed():
                message.sealed.add(
                    rank=rank,
                    attempt=seal.attempt,
                    step=seal.step,
                    layout_digest=seal.layout_digest,
                )
        return message


class Jobs:
    """All jobs of the node. ``changed`` fires on every change that WatchProgress shows."""

    def __init__(self, staging: StagingFolder, pools: Pools, committer: CommitterClient) -> None:
        self.changed = Signal()
        self._staging, self._pools, self._committer = staging, pools, committer
        self._jobs: dict[str, JobCheckpoints] = {}
        self._registering: dict[tuple[str, int], asyncio.Lock] = defaultdict(asyncio.Lock)

    def job(self, name: str) -> JobCheckpoints:
        """The job's state, created on first use."""
        # The most recently used stand last.
        self._jobs[name] = (
            self._jobs.pop(name) if name in self._jobs else JobCheckpoints(name, self.changed)
        )
        without_ranks = [other for other, job in self._jobs.items() if not job.ranks]
        for other in without_ranks[:-KEPT_JOBS]:
            del self._jobs[other]
        return self._jobs[name]

    def all(self) -> list[JobCheckpoints]:
        """Every job, by name."""
        return [self._jobs[name] for name in sorted(self._jobs)]

    def registration(self, name: str) -> RankRegistration | None:
        """What some rank of the job's newest attempt said of itself on this node."""
        job = self._jobs.get(name)
        all_snapshots = job.ranks.values() if job else ()
        return next(
            (
                s.registration
                for s in all_snapshots
                if job and s.registration.attempt == job.attempt
            ),
            None,
        )

    def progress(self) -> list[link_pb2.CheckpointProgress]:
        """Progress of every job, by name."""
        return [self._jobs[name].progress() for name in sorted(self._jobs)]

    async def register(self, registration: RankRegistration, owner: Owner) -> RankSnapshots:
        """The snapshots of a rank, which ``owner`` (its connection) now holds; seals of the same layout
        are kept.

        Raises:
            RequestError: the attempt is lower than one seen before.
            StagingError: there is no room for the slots.
        """
        job = self.job(registration.job)
        if registration.attempt < job.attempt:
            raise RequestError(
                f"attempt {registration.attempt} is superseded: attempt {job.attempt} has registered"
            )
        if registration.attempt > job.attempt:
            job.attempt = registration.attempt
            for other in job.ranks.values():
                other.supersede(registration.attempt)
        await self._free_idle(registration.job)
        async with self._registering[registration.job, registration.rank]:
            snapshots = job.ranks.get(registration.rank)
            if snapshots is None or not await self._keep(job, snapshots, registration):
                snapshots = await RankSnapshots.create(
                    registration, job, self._staging, self._pools, self._committer
                )
                self._log_loss_bound(registration, len(snapshots.memories))
                job.ranks[registration.rank] = snapshots
            snapshots.take_over(registration, owner)
        self.changed.notify()
        return snapshots

    async def close(self, drain_s: float) -> None:
        """End persistence: what runs may take ``drain_s`` to end."""
        all_snapshots = [
            snapshots for job in self._jobs.values() for snapshots in job.ranks.values()
        ]
        await asyncio.gather(*(snapshots.stop(drain_s) for snapshots in all_snapshots))

    async def _free_idle(self, registering: str) -> None:
        for job in list(self._jobs.values()):
            if (
                job.name != registering
                and job.ranks
                and all(snapshots.idle() for snapshots in job.ranks.values())
            ):
                log.info("staging memory freed for another job", job=job.name, other=registering)
                for rank in list(job.ranks):
                    await self._free(job, rank)

    async def _keep(
        self, job: JobCheckpoints, snapshots: RankSnapshots, registration: RankRegistration
    ) -> bool:
        """Whether the rank's snapshots serves on; otherwise it is freed."""
        if snapshots.fits(registration):
            try:
                await snapshots.detach_owner(self._staging)
                return True
            except StagingError as error:
                log.warning(
                    "snapshots is made anew", job=job.name, rank=registration.rank, error=str(error)
                )
        await self._free(job, registration.rank)
        return False

    async def _free(self, job: JobCheckpoints, rank: int) -> None:
        snapshots = job.ranks.pop(rank, None)
        if snapshots is not None:
            snapshots.owner = None
            await snapshots.stop(0.0)
            await in_pool(self._pools.memory, self._staging.free, snapshots.memories)

    @staticmethod
    def _log_loss_bound(registration: RankRegistration, slots: int) -> None:
        bound = "none: a snapshot is taken while the one before is persisted"
        if slots == LEAST_SLOTS:
            bound = "a snapshot is skipped when persisting takes longer than the interval between snapshots"
        size_bytes = registration.layout.slot_bytes
        who = {"job": registration.job, "rank": registration.rank}
        log.info("slots ready", **who, slots=slots, slot_bytes=size_bytes, loss_bound=bound)
