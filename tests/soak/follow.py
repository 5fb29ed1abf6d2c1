"""What a client sees of one job, and which promises it breaks on the way."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from megascale.v1 import job_pb2, types_pb2
from megascale_client import TERMINAL_PHASES, AsyncClient, Job, JobPhase, MegascaleError
from megascale_client.messages import RestoreSource, WatchJobResponse

_AGAIN_S = 1.0


@dataclass(slots=True)
class Followed:
    """A job as it is watched.

    Attributes:
        twin: the losses that the job must have, by step; None for the twin itself.
        may_go_back: somebody has ordered to go back to an older checkpoint.
        damaged: a checkpoint of it was damaged, so that an attempt may restore the one before.
        broken: promises that it broke.
        moved_s: when it last showed progress (monotonic).
    """

    spec: job_pb2.JobSpec
    twin: Mapping[int, float] | None = None
    losses: dict[int, float] = field(default_factory=dict)
    may_go_back: bool = False
    damaged: bool = False
    broken: list[str] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    job: Job | None = None
    moved_s: float = field(default_factory=time.monotonic)
    _committed: int = 0
    _opened: int = 0

    @property
    def name(self) -> str:
        """Of the job."""
        return self.spec.name

    @property
    def suspended(self) -> bool:
        """Whether it waits for an order to resume."""
        return self.job is not None and self.job.phase is JobPhase.SUSPENDED

    @property
    def phase(self) -> str:
        """Its phase in words."""
        return self.job.phase.name if self.job is not None else "UNKNOWN"

    @property
    def state(self) -> str:
        """Phase, reason, attempt and step, for people."""
        if self.job is None:
            return "nothing is known of it"
        job, step = self.job, max(self.losses, default=0)
        return (
            f"{self.phase}, attempt {job.attempt}, {job.restarts} restarts, step {step}, "
            f"committed {job.committed_step}: {job.phase_reason}"
        )

    async def follow(self, client: AsyncClient) -> None:
        """Watch the job until it has ended, through any loss of drivers."""
        while True:
            try:
                async for update in client.watch(self.name):
                    self._take(update)
                    if self.job is not None and self.job.phase in TERMINAL_PHASES:
                        return
            except MegascaleError as error:
                print(f"watch of {self.name}: {error}"[:200], file=sys.stderr, flush=True)
            await asyncio.sleep(_AGAIN_S)

    def _take(self, update: WatchJobResponse) -> None:
        self.moved_s = time.monotonic()
        kind = update.proto.WhichOneof("update")
        if kind == "step":
            self._step(update.step)
        elif kind == "event":
            event = update.event
            self.events.append(
                f"{event.time.ToJsonString()} attempt {event.attempt} {event.reason}: "
                f"{event.message[:300]}"
            )
        elif kind == "job":
            self._see(update.job)

    def _step(self, step: types_pb2.StepRecord) -> None:
        expected = self.twin.get(step.step) if self.twin is not None else None
        if expected is not None and expected != step.loss:
            self.broken.append(
                f"{self.name}: step {step.step} of attempt {step.attempt} has loss {step.loss!r}, "
                f"its twin {expected!r}"
            )
        self.losses[step.step] = step.loss

    def _see(self, job: Job) -> None:
        """Compare what an attempt restores with the newest step that was ever shown as committed.

        A driver that was stopped and has lost its term shows an older step for a moment; what is
        lost in truth is what the next attempt does not restore.
        """
        opened = job.restore_source is not RestoreSource.UNSPECIFIED
        if opened and job.attempt > self._opened:
            self._opened = job.attempt
            free = self.may_go_back or self.damaged
            if job.restored_step < self._committed and not free:
                self.broken.append(
                    f"{self.name}: attempt {job.attempt} restores step {job.restored_step}, "
                    f"{self._committed} was committed, and nobody ordered it"
                )
        self._committed = max(self._committed, job.committed_step)
        self.job = job
