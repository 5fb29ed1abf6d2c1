"""Shows a job while it runs: a progress bar with events above it, or lines for a pipe."""

from __future__ import annotations

import asyncio
import statistics
import sys
from collections import deque
from collections.abc import AsyncIterator

from rich.console import OverflowMethod
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from megascale.v1 import types_pb2
from megascale_cli.exits import FAILED, OK, print_note
from megascale_cli.output import (
    condition_lines,
    console,
    duration,
    evaluation_text,
    event_text,
    mfu_text,
    needs_text,
    on_a_terminal,
    phase_text,
    print_json,
    step_text,
)
from megascale_client import TERMINAL_PHASES, AsyncClient, Job, JobConditionType, JobPhase
from megascale_client.messages import PACE_STEPS, WatchJobResponse

# Far longer than the restart of a driver takes, so a watch survives one.
WATCH_RETRY_FOR_S = 120.0


async def watch_job(client: AsyncClient, name: str, as_json: bool, tail: int | None = None) -> int:
    """Show the job until it has ended; 0 if it succeeded and saved its last step, else 1.

    ``tail``: begin this many steps before the newest one; None: with all that the driver holds.

    Raises:
        MegascaleError: no such job, or no driver for WATCH_RETRY_FOR_S.
    """
    if as_json:
        return await _watch_json(client, name, tail)
    view = _Bar() if on_a_terminal() else _Lines()
    try:
        with view:
            await _follow(_updates(client, name, tail), view)
    except asyncio.CancelledError:  # Ctrl-C, which ends the watch alone
        print(f"job {name} continues; `megascale watch {name}` shows it", file=sys.stderr)
        raise
    job = await client.get(name)
    console.print(
        f"job [bold]{name}[/bold] {phase_text(job.phase)}: {escape(job.phase_reason)}",
        soft_wrap=True,
    )
    for line in condition_lines(job):
        console.print(line, soft_wrap=True)
    return _status(job)


async def _updates(
    client: AsyncClient, name: str, tail: int | None
) -> AsyncIterator[WatchJobResponse]:
    if tail is None:
        async for update in client.watch(name):
            yield update
        return
    # A watch begins with all that the driver holds; updates before `first` are dropped here.
    newest = (await client.get(name)).last_record
    first = (newest.attempt, newest.step - tail)
    near, state = not newest.step, None
    async for update in client.watch(name):
        kind = update.WhichOneof("update")
        if kind == "note":
            yield update
            continue
        if not near and kind == "job":
            state = update
        elif not near:
            step, event = update.step, update.event
            near = (
                (step.attempt, step.step) > first
                if kind == "step"
                else (event.time.ToNanoseconds() > newest.completed_at.ToNanoseconds())
            )
            if near and state is not None:  # the view needs the phase before the first step
                yield state
        if near:
            yield update


async def _follow(updates: AsyncIterator[WatchJobResponse], view: _Lines) -> None:
    async for update in updates:
        kind = update.WhichOneof("update")
        if kind == "job":
            view.job(update.job)
        elif kind == "step":
            view.step(update.step)
        elif kind == "event":
            view.event(update.event)
        elif kind == "note":
            print_note(update.note)


async def _watch_json(client: AsyncClient, name: str, tail: int | None) -> int:
    async for update in _updates(client, name, tail):
        print_json(update)
    return _status(await client.get(name))


def _status(job: Job) -> int:
    # The watch has ended, so the job has: without a driver it would have raised an error.
    # A job can be allowed to succeed without its last checkpoint; a script must not assume that the
    # model is saved.
    not_saved = any(item.type == JobConditionType.NOT_SAVED for item in job.conditions)
    succeeded = job.phase == JobPhase.SUCCEEDED and not not_saved
    return OK if succeeded else FAILED


class _Lines:
    """For pipes and log files."""

    def __init__(self) -> None:
        self._steps = 0
        self._phase = JobPhase.UNSPECIFIED

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def job(self, job: Job) -> None:
        """Print a change of phase."""
        self._steps = job.spec.trainer.training.steps
        if job.phase != self._phase and job.phase not in TERMINAL_PHASES:
            self.print(
                f"job {job.spec.name} {phase_text(job.phase)}: {escape(job.phase_reason)}",
                one_line=True,
            )
        self._phase = job.phase

    def step(self, record: types_pb2.StepRecord) -> None:
        """Print a step."""
        self.print(step_text(record, self._steps))

    def event(self, event: types_pb2.Event) -> None:
        """Print an event."""
        self.print(event_text(event))

    def print(self, text: str, *, one_line: bool = False) -> None:
        """One line, never wrapped."""
        console.print(text, soft_wrap=True)


class _Bar(_Lines):
    """For terminals: steps move the bar, everything else is printed above it."""

    def __init__(self) -> None:
        super().__init__()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[left]}"),
            TextColumn("{task.fields[numbers]}"),
            console=console,
        )
        self._task: TaskID | None = None
        # The speed of the job, not of this display, which replays missed steps as fast as it can.
        self._step_times_s: deque[float] = deque(maxlen=PACE_STEPS)
        self._held_out = ""  # loss of the newest evaluation; most steps have none

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def print(self, text: str, *, one_line: bool = False) -> None:
        """Above the bar, wrapped between words, or cut at the edge if ``one_line``."""
        overflow: OverflowMethod | None = "ellipsis" if one_line else None
        console.print(text, no_wrap=one_line, overflow=overflow, soft_wrap=False)

    def job(self, job: Job) -> None:
        """Show the phase next to the bar."""
        super().job(job)
        description = f"{job.spec.name} {phase_text(job.phase)}"
        if self._task is None:
            self._task = self._progress.add_task(
                description, total=self._steps, numbers="", left=""
            )
        self._progress.update(self._task, description=description, total=self._steps)
        if job.phase != JobPhase.RUNNING:
            self._progress.update(self._task, left="")

    def step(self, record: types_pb2.StepRecord) -> None:
        """Move the bar; it moves back when steps are repeated after a restart."""
        if self._task is None:
            return
        self._held_out = evaluation_text(record) or self._held_out
        self._step_times_s.append(record.step_time.ToNanoseconds() / 1e9)
        left_s = (self._steps - record.step) * statistics.median(self._step_times_s)
        left = f"{duration(left_s)} left" if self._phase == JobPhase.RUNNING else ""
        numbers = (
            f"loss {record.loss:.4f}  {record.tokens_per_s:,.0f} tokens/s  MFU {mfu_text(record)}  "
            f"{needs_text(record)}attempt {record.attempt}{self._held_out}"
        )
        self._progress.update(self._task, completed=record.step, numbers=numbers, left=left)
