"""What a demo saw of one job, what it must have shown as claims, and the base of the demos."""

from __future__ import annotations

import json
import sysconfig
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp
from rich.markup import escape

from megascale.v1 import types_pb2
from megascale_cli.demo.cluster import DemoCluster, DemoFailed, Echo, fresh_folder, run_command
from megascale_cli.demo.plan import DemoPlan, FaultPlan
from megascale_client import TERMINAL_PHASES, AsyncClient, Job, MegascaleError, parse_job
from megascale_client.messages import WatchJobResponse
from megascale_job.visible import counted

CORPUS_BYTES = 2 << 20
FIRST, SECOND = 1, 2  # the attempt that is interrupted, and the one that resumes


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

    def steps(self, attempt: int) -> list[int]:
        """Steps that an attempt completed, in order."""
        return sorted(step for number, step in self.records if number == attempt)

    def last_step(self, attempt: int) -> int:
        """Last step that an attempt completed; 0 if none."""
        return max(self.steps(attempt), default=0)

    def first_record(self, attempt: int) -> types_pb2.StepRecord | None:
        """The earliest step record of an attempt."""
        steps = self.steps(attempt)
        return self.records[attempt, steps[0]] if steps else None

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
        timeout_s: how long a part of it may take without progress.
    """

    def __init__(
        self, plan: DemoPlan | FaultPlan, folder: Path, echo: Echo, timeout_s: float
    ) -> None:
        self.folder = folder.resolve()
        self.name = self.folder.name
        self._echo = echo
        self._timeout_s = timeout_s
        self._job_plan = plan
        self._cluster = DemoCluster(plan, self.folder, echo)
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
        await self._tokenise()
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

    async def _tokenise(self) -> None:
        """Write the corpus: the sources of Python's standard library, as bytes."""
        stdlib = sysconfig.get_path("stdlib")
        arguments = ["--output", str(self._corpus), "--tokenizer", "bytes", "--glob", "*.py"]
        corpus = await run_command(
            "data", "tokenize", stdlib, *arguments, "--max-bytes", str(CORPUS_BYTES)
        )
        documents, tokens = counted(corpus["documents"], "document"), corpus["tokens"]
        self._echo(f"corpus: {documents}, {counted(tokens, 'token')} from {stdlib}")

    async def _submit(self, name: str, checkpoints: Path) -> None:
        await self._client.submit(parse_job(self._job_plan.job(name, self._corpus, checkpoints)))
        self._echo(f"job {name}: {self._job_plan.text}")

    def _write(self, report: dict[str, Any]) -> Path:
        file = self.folder / "report.json"
        file.write_text(json.dumps(report, indent=2) + "\n")
        return file

    async def _failed(self, why: str, run: Recording) -> DemoFailed:
        """The error for what did not happen, with the driver's explanation of the job."""
        try:
            explanation = (await self._client.explain(run.name)).explanation
        except MegascaleError as error:
            explanation = str(error)
        return DemoFailed(f"{why}: {explanation}")
