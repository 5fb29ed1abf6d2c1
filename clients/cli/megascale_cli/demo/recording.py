"""Everything that the watch of one job returned, with the queries that the demo needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from megascale.v1 import types_pb2
from megascale_client import TERMINAL_PHASES, AsyncClient, Job
from megascale_client.messages import WatchJobResponse

OnUpdate = Callable[[WatchJobResponse], None]


def seconds(stamp: object) -> float:
    """Seconds since 1970 of a Timestamp."""
    return stamp.ToMicroseconds() / 1e6  # type: ignore[attr-defined, no-any-return]


@dataclass(slots=True)
class Recording:
    """Step records by attempt and step, events in order, nodes of each attempt by rank."""

    name: str
    job: Job = field(default_factory=Job)
    records: dict[tuple[int, int], types_pb2.StepRecord] = field(default_factory=dict)
    events: list[types_pb2.Event] = field(default_factory=list)
    nodes_of_attempt: dict[int, list[str]] = field(default_factory=dict)

    async def follow(self, client: AsyncClient, on_update: OnUpdate) -> None:
        """Record the job until it ends."""
        async for update in client.watch(self.name):
            self.add(update)
            on_update(update)
        self.job = await client.get(self.name)

    def add(self, update: WatchJobResponse) -> None:
        """Record one update."""
        kind = update.WhichOneof("update")
        if kind == "step":
            self.records[update.step.attempt, update.step.step] = update.step
        elif kind == "event":
            self.events.append(update.event)
        elif kind == "job":
            self.job = update.job
            if update.job.nodes:
                self.nodes_of_attempt[update.job.attempt] = list(update.job.nodes)

    @property
    def progress(self) -> tuple[int, int, int]:
        """A value that changes whenever the job makes progress: steps, events, phase."""
        return len(self.records), len(self.events), self.job.phase

    @property
    def ended(self) -> bool:
        """Whether the job has ended."""
        return self.job.phase in TERMINAL_PHASES

    @property
    def attempts(self) -> int:
        """Number of the newest attempt."""
        return self.job.attempt

    def losses(self, attempt: int | None = None) -> dict[int, float]:
        """Loss by step: of one attempt, or of the newest attempt that completed the step."""
        return {
            step: record.loss
            for (number, step), record in sorted(self.records.items())
            if attempt is None or number == attempt
        }

    def last_step(self, attempt: int) -> int:
        """Last step that an attempt completed; 0 if none."""
        return max((step for number, step in self.records if number == attempt), default=0)

    def first_record(self, attempt: int) -> types_pb2.StepRecord | None:
        """The earliest step record of an attempt."""
        steps = [step for number, step in self.records if number == attempt]
        return self.records[attempt, min(steps)] if steps else None

    def event_time(self, reason: str, subject: str, after: float) -> float | None:
        """Time of the first such event since ``after``; both in seconds since 1970."""
        times = [
            seconds(event.time)
            for event in self.events
            if event.reason == reason and event.subject == subject and seconds(event.time) >= after
        ]
        return min(times, default=None)
