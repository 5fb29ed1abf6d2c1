"""Follows a job through its watch stream, for tests that break something while it runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.harness.waiting import STANDSTILL_S, eventually, log_bytes

from megascale.v1 import driver_pb2, job_pb2, types_pb2
from megascale_client import TERMINAL_PHASES, AsyncClient


class JobFollower:
    """Submits a job and follows it; use as an asynchronous context manager.

    Its waits continue while the job makes progress: a step, an event, a phase or its reason, a
    commit, a line in a rank's log.

    Args:
        folder: the cluster's run folder, for the logs of the job's ranks.
        limit_s: how long there may be no progress.

    Attributes:
        losses: by attempt and step.
        completed_s: when each step was completed (Unix seconds), by attempt and step.
        events: in the order of the stream.
        job: its newest state.
    """

    def __init__(
        self,
        client: AsyncClient,
        spec: job_pb2.JobSpec,
        folder: Path,
        *,
        limit_s: float = STANDSTILL_S,
    ) -> None:
        self.name = spec.name
        self.job = driver_pb2.Job()
        self.losses: dict[int, dict[int, float]] = {}
        self.completed_s: dict[tuple[int, int], float] = {}
        self.events: list[types_pb2.Event] = []
        self.limit_s = limit_s
        self._client, self._spec, self._folder = client, spec, folder
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self.job = await self._client.submit(self._spec)
        self._task = asyncio.create_task(self._follow())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _follow(self) -> None:
        async for update in self._client.watch(self.name):
            kind = update.WhichOneof("update")
            if kind == "job":
                self.job = update.job
            elif kind == "step":
                self.losses.setdefault(update.step.attempt, {})[update.step.step] = update.step.loss
                which = update.step.attempt, update.step.step
                self.completed_s[which] = update.step.completed_at.ToMilliseconds() / 1e3
            elif kind == "event":
                self.events.append(update.event)

    @property
    def step(self) -> int:
        """Last step seen of the newest attempt."""
        return max(self.losses.get(self.job.attempt, {}), default=0)

    @property
    def newest_losses(self) -> dict[int, float]:
        """Loss of each step, of the newest attempt that completed it."""
        return {
            step: loss
            for attempt in sorted(self.losses)
            for step, loss in self.losses[attempt].items()
        }

    def first_event(self, reason: str, subject: str = "") -> types_pb2.Event | None:
        """The first event with this reason (and subject)."""
        found = (
            event
            for event in self.events
            if event.reason == reason and subject in ("", event.subject)
        )
        return next(found, None)

    async def until(self, condition: Callable[[], object], what: str) -> None:
        """Wait until the condition holds.

        Raises:
            Standstill: the job made no progress for the limit; the error has its story.
        """

        def holds() -> object:
            assert self._task is not None
            if (
                self._task.done()
                and not self._task.cancelled()
                and (error := self._task.exception()) is not None
            ):
                raise error
            return condition()

        await eventually(holds, what, self._moves, limit_s=self.limit_s, story=self.story)

    async def until_event(self, reason: str, subject: str = "") -> types_pb2.Event:
        """Wait for an event."""
        await self.until(lambda: self.first_event(reason, subject), f"{reason} {subject}")
        event = self.first_event(reason, subject)
        assert event is not None
        return event

    async def until_step(self, step: int, *, attempt: int = 1) -> None:
        """Wait until the attempt has completed the step."""
        await self.until(
            lambda: max(self.losses.get(attempt, {}), default=0) >= step,
            f"step {step} of attempt {attempt}",
        )

    async def until_committed(self) -> None:
        """Wait for the job's first commit."""
        await self.until(lambda: self.job.committed_step > 0, "the first commit")

    async def until_ended(self) -> driver_pb2.Job:
        """Wait for the end of the watch, which is the end of the job; returns the job."""
        task = self._task
        await self.until(lambda: task is not None and task.done(), "the job's end")
        assert self.job.phase in TERMINAL_PHASES, self.story()
        self.job = await self._client.get(self.name)
        return self.job

    def story(self) -> str:
        """Everything observed so far, for the message of a failure."""
        steps = {attempt: (min(losses), max(losses)) for attempt, losses in self.losses.items()}
        lines = [
            f"{e.time.ToJsonString()} attempt {e.attempt} {e.reason} {e.subject}: {e.message}"
            for e in self.events
        ]
        phase = types_pb2.JobPhase.Name(self.job.phase)
        return "\n".join(
            [f"{self.name} is {phase}: {self.job.phase_reason}; steps {steps}", *lines]
        )

    def _moves(self) -> tuple[object, ...]:
        job, steps = self.job, sum(map(len, self.losses.values()))
        logs = log_bytes(self._folder, f"nodes/*/jobs/{self.name}/*/*.log")
        return (
            steps,
            len(self.events),
            job.phase,
            job.phase_reason,
            job.attempt,
            job.committed_step,
            logs,
        )


def seconds(event: types_pb2.Event) -> float:
    """When the event happened, in seconds since 1970."""
    return event.time.ToMicroseconds() / 1e6
