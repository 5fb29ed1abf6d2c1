"""A job as its watch stream shows it, for tests that break something while it runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

from megascale.v1 import driver_pb2, job_pb2, types_pb2
from megascale_client import TERMINAL_PHASES, AsyncClient

POLL_INTERVAL_S = 0.01


class JobFollower:
    """Submits a job and follows it: ``losses`` by attempt and step, ``events`` in their order, ``job`` as last seen.

    Use as an asynchronous context manager.
    """

    def __init__(self, client: AsyncClient, spec: job_pb2.JobSpec) -> None:
        self.name = spec.name
        self.job = driver_pb2.Job()
        self.losses: dict[int, dict[int, float]] = {}
        self.events: list[types_pb2.Event] = []
        self._client, self._spec = client, spec
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self.job = await self._client.submit(self._spec)
        self._task = asyncio.create_task(self._follow())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
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
            elif kind == "event":
                self.events.append(update.event)

    @property
    def step(self) -> int:
        """Last step seen of the newest attempt."""
        return max(self.losses.get(self.job.attempt, {}), default=0)

    @property
    def newest_losses(self) -> dict[int, float]:
        """Loss of each step, of the newest attempt that completed it."""
        return {step: loss for attempt in sorted(self.losses) for step, loss in self.losses[attempt].items()}

    def first_event(self, reason: str, subject: str = "") -> types_pb2.Event | None:
        """The first event with this reason (and subject)."""
        found = (event for event in self.events if event.reason == reason and subject in ("", event.subject))
        return next(found, None)

    async def until(self, condition: Callable[[], object], timeout_s: float, what: str) -> None:
        """Wait until the condition holds; AssertionError that tells the job's story after ``timeout_s``."""
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        while not condition():
            assert asyncio.get_running_loop().time() < deadline_s, f"{what}: not within {timeout_s:g} s\n{self.story()}"
            assert self._task is not None
            if self._task.done() and self._task.exception() is not None:
                await self._task
            await asyncio.sleep(POLL_INTERVAL_S)

    async def until_event(self, reason: str, timeout_s: float, subject: str = "") -> types_pb2.Event:
        """Wait for an event."""
        await self.until(lambda: self.first_event(reason, subject), timeout_s, f"{reason} {subject}")
        event = self.first_event(reason, subject)
        assert event is not None
        return event

    async def until_step(self, step: int, timeout_s: float, *, attempt: int = 1) -> None:
        """Wait until the attempt has completed the step."""
        await self.until(
            lambda: max(self.losses.get(attempt, {}), default=0) >= step, timeout_s, f"step {step} of attempt {attempt}"
        )

    async def until_ended(self, timeout_s: float) -> driver_pb2.Job:
        """Wait for the end of the watch, which is the end of the job; the job."""
        task = self._task
        await self.until(lambda: task is not None and task.done(), timeout_s, "the job's end")
        assert self.job.phase in TERMINAL_PHASES, self.story()
        self.job = await self._client.get(self.name)
        return self.job

    def story(self) -> str:
        """What has been seen, for failures."""
        steps = {attempt: (min(losses), max(losses)) for attempt, losses in self.losses.items()}
        lines = [
            f"{e.time.ToJsonString()} attempt {e.attempt} {e.reason} {e.subject}: {e.message}" for e in self.events
        ]
        phase = types_pb2.JobPhase.Name(self.job.phase)
        return "\n".join([f"{self.name} is {phase}: {self.job.phase_reason}; steps {steps}", *lines])


def seconds(event: types_pb2.Event) -> float:
    """When the event happened, in seconds since 1970."""
    return event.time.ToMicroseconds() / 1e6
