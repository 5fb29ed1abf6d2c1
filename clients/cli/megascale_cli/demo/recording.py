"""What a demo saw of one job, the claims that it must have shown, and the base of the demos."""

from __future__ import annotations

import asyncio
import json
import sysconfig
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from google.protobuf.timestamp_pb2 import Timestamp
from rich.markup import escape

from megascale.v1 import types_pb2
from megascale_cli.demo.cluster import DemoCluster, DemoFailed, Echo, fresh_folder, run_command
from megascale_cli.demo.plan import DemoPlan
from megascale_cli.output import event_text, step_text
from megascale_client import TERMINAL_PHASES, AsyncClient, Job, MegascaleError, parse_job
from megascale_client.messages import WatchJobResponse
from megascale_job.visible import counted

CORPUS_BYTES = 2 << 20
FIRST, SECOND = 1, 2  # the attempt that is interrupted, and the one that resumes
POLL_S = 0.1
ENDING_S = 10.0  # what follows the end of a job takes no longer

Result = TypeVar("Result")


def seconds(stamp: Timestamp) -> float:
    """Seconds since 1970."""
    return stamp.ToMicroseconds() / 1e6


@dataclass(slots=True)
class Recording:
    """Step records by attempt and step, events in order, nodes of each attempt by rank."""

    name: str
    job: Job = field(default_factory=Job)
    records: dict[tuple[int, int], types_pb2.StepRecord] = field(default_factory=dict)
    events: list[types_pb2.Event] = field(default_factory=list)
    nodes_of_attempt: dict[int, list[str]] = field(default_factory=dict)

    async def follow(
        self, client: AsyncClient, on_update: Callable[[WatchJobResponse], None]
    ) -> None:
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
        return max(self.losses(attempt), default=0)

    def first_record(self, attempt: int) -> types_pb2.StepRecord | None:
        """The earliest step record of an attempt."""
        return self.records.get((attempt, min(self.losses(attempt), default=0)))

    def event_time(self, reason: str, subject: str, after: float) -> float | None:
        """Time of the first such event since ``after``; both in seconds since 1970."""
        events = [e for e in self.events if e.reason == reason and e.subject == subject]
        return min((t for event in events if (t := seconds(event.time)) >= after), default=None)


@dataclass(frozen=True, slots=True)
class Claim:
    """One thing that the demo must show, whether it was observed, and what was observed."""

    text: str
    holds: bool
    seen: str

    def __str__(self) -> str:
        return f"{self.text}: {self.seen}"


def require(claims: Iterable[Claim], echo: Echo) -> None:
    """Print which claims hold.

    Raises:
        DemoFailed: one does not; the message has the first of them.
    """
    failed = []
    for claim in claims:
        mark = "[green]yes[/green]" if claim.holds else "[bold red]NO[/bold red] "
        echo(f"  {mark} {escape(str(claim))}")
        if not claim.holds:
            failed.append(claim)
    if failed:
        raise DemoFailed(f"not observed: {failed[0]}")


class Demo:
    """One demo in ``folder``; a subclass says what it shows.

    Args:
        echo: prints rich markup.
        timeout_s: how long a part of it may take.
        options: further ones of `megascale up`.
    """

    show_every_steps = 0  # none is printed

    def __init__(
        self, plan: DemoPlan, folder: Path, echo: Echo, timeout_s: float, *options: str
    ) -> None:
        self.plan = plan
        self.folder = folder.resolve()
        self.name = self.folder.name
        self._echo = echo
        self._timeout_s = timeout_s
        self._cluster = DemoCluster(self.folder, echo, *plan.cluster, *options)
        self._client: AsyncClient
        self._corpus = self.folder / "corpus" / "stdlib"
        self._started = time.monotonic()

    async def run(self) -> dict[str, Any]:
        """Run the whole demo; returns report.json when everything was observed.

        Raises:
            DemoFailed: something was not observed; the message names it.
            MegascaleError: the cluster refused a call or did not answer.
        """
        fresh_folder(self.folder)
        stdlib, size = sysconfig.get_path("stdlib"), str(CORPUS_BYTES)
        arguments = ["--tokenizer", "bytes", "--glob", "*.py", "--max-bytes", size]
        output = str(self._corpus)
        corpus = await run_command("data", "tokenize", stdlib, "--output", output, *arguments)
        documents, tokens = counted(corpus["documents"], "document"), corpus["tokens"]
        self._echo(f"corpus: {documents}, {counted(tokens, 'token')} from {stdlib}")
        try:
            await self._cluster.start()
            async with AsyncClient.from_run_folder(self.folder) as self._client:
                report = await self._show()
        finally:
            left = await self._cluster.stop()
        seen = f"{counted(left, 'process')} had to be killed"
        require([Claim("nothing is left running", left == 0, seen)], self._echo)
        return report

    async def _show(self) -> dict[str, Any]:
        """What this demo shows; returns its report."""
        raise NotImplementedError

    async def _submit(self, run: Recording) -> asyncio.Task[None]:
        """Submit the job; returns the task that records it until it ends."""
        checkpoints = self.folder / "checkpoints" / run.name
        await self._client.submit(parse_job(self.plan.job(run.name, self._corpus, checkpoints)))
        self._echo(f"job {run.name}: {self.plan.text}")
        return asyncio.create_task(run.follow(self._client, self._print))

    def _print(self, update: WatchJobResponse) -> None:
        kind, step, every = update.WhichOneof("update"), update.step, self.show_every_steps
        if kind == "event":
            self._echo(event_text(update.event))
        elif kind == "step" and every and (step.step % every == 0 or step.step == 1):
            self._echo(step_text(step, self.plan.steps))

    async def _until(self, ready: Callable[[], bool], why: str, run: Recording) -> None:
        """Poll until ``ready``, as :meth:`_within` the time for a part of the demo."""

        async def polled() -> None:
            while not ready():  # noqa: ASYNC110 - what a stream has brought
                await asyncio.sleep(POLL_S)

        await self._within(self._timeout_s, polled(), why, run)

    async def _within(
        self,
        limit_s: float,
        waiting: Awaitable[Result],
        why: str,
        run: Recording,
        *,
        moving: bool = False,
    ) -> Result:
        """What ``waiting`` returns within ``limit_s``; if ``moving``, since the last progress.

        Raises:
            DemoFailed: it took longer; the message has ``why`` and the driver's explanation.
        """
        task = asyncio.ensure_future(waiting)
        progress, since_s = run.progress, time.monotonic()
        try:
            while time.monotonic() - since_s < (ENDING_S if run.ended else limit_s):
                done, _ = await asyncio.wait({task}, timeout=POLL_S)
                if done:
                    return task.result()
                if moving and run.progress != progress:
                    progress, since_s = run.progress, time.monotonic()
        finally:
            task.cancel()
        try:
            explanation = (await self._client.explain(run.name)).explanation
        except MegascaleError as error:
            explanation = str(error)
        limit = "no progress for" if moving else "not within"
        raise DemoFailed(f"{why} ({limit} {limit_s:g} s): {explanation}")

    def _write(self, report: dict[str, Any]) -> None:
        """Write report.json, with the time that the demo has taken."""
        report["wall_s"] = round(time.monotonic() - self._started, 3)
        file = self.folder / "report.json"
        file.write_text(json.dumps(report, indent=2) + "\n")
        self._echo(f"report: {file}")
