"""Records of one job, claims about what a demo has seen, and the base of the demos."""

from __future__ import annotations

import json
import sysconfig
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from google.protobuf.timestamp_pb2 import Timestamp
from rich.markup import escape

from megascale.v1 import types_pb2
from megascale_cli.demo.cluster import (
    POLL_S,
    DemoCluster,
    DemoFailed,
    Echo,
    fresh_folder,
    run_command,
)
from megascale_cli.demo.plan import DemoPlan
from megascale_cli.output import event_text, step_text
from megascale_client import TERMINAL_PHASES, Client, Job, MegascaleError, parse_job
from megascale_client.messages import WatchJobResponse
from megascale_job.visible import counted

CORPUS_BYTES = 2 << 20
ENDING_S = 10.0  # what follows the end of a job takes no longer
FIRST, SECOND = 1, 2  # the attempt that is interrupted, and the one that resumes

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
    error: Exception | None = None  # which ended the recording

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


def require(claims: Iterable[Claim], echo: Echo) -> None:
    """Print which claims hold. Raises DemoFailed with the first that does not."""
    failed = []
    for claim in claims:
        mark, seen = "[green]yes[/green]", f"{claim.text}: {claim.seen}"
        if not claim.holds:
            mark = "[bold red]NO[/bold red] "
            failed.append(seen)
        echo(f"  {mark} {escape(seen)}")
    if failed:
        raise DemoFailed(f"not observed: {failed[0]}")


class Demo:
    """One demo in ``folder``; a subclass says what it shows.

    A part of it may take ``timeout_s``; ``echo`` prints rich markup.
    """

    options: tuple[str, ...] = ("--no-dashboard",)  # of `megascale up`
    show_every_steps = 0  # none is printed

    def __init__(self, plan: DemoPlan, folder: Path, echo: Echo, timeout_s: float) -> None:
        self.plan = plan
        self.folder = folder.resolve()
        self.name = self.folder.name
        self._echo = echo
        self._timeout_s = timeout_s
        self._cluster = DemoCluster(self.folder, echo, *plan.cluster, *self.options)
        self._client: Client
        self._corpus = self.folder / "corpus" / "stdlib"
        self._started_s = time.monotonic()

    def run(self) -> dict[str, Any]:
        """Run the whole demo; returns report.json when everything was observed.

        Raises:
            DemoFailed: something was not observed; the message names it.
            MegascaleError: the cluster refused a call or did not answer.
        """
        fresh_folder(self.folder)
        stdlib = sysconfig.get_path("stdlib")
        arguments = ("--tokenizer", "bytes", "--glob", "*.py", "--max-bytes", CORPUS_BYTES)
        corpus = run_command("data", "tokenize", stdlib, "--output", self._corpus, *arguments)
        documents, tokens = counted(corpus["documents"], "document"), corpus["tokens"]
        self._echo(f"corpus: {documents}, {counted(tokens, 'token')} from {stdlib}")
        try:
            self._cluster.start()
            with Client.from_run_folder(self.folder) as self._client:
                report = self._show()
        finally:
            left = self._cluster.stop()
        seen = f"{counted(left, 'process')} had to be killed"
        require([Claim("nothing is left running", left == 0, seen)], self._echo)
        return report

    def _show(self) -> dict[str, Any]:
        """What this demo shows; returns its report."""
        raise NotImplementedError

    def _submit(self, run: Recording) -> threading.Thread:
        """Submit the job; returns the thread that records it until it ends."""
        checkpoints = self.folder / "checkpoints" / run.name
        self._client.submit(parse_job(self.plan.job(run.name, self._corpus, checkpoints)))
        self._echo(f"job {run.name}: {self.plan.text}")
        following = threading.Thread(target=self._follow, args=(run,), daemon=True)
        following.start()
        return following

    def _follow(self, run: Recording) -> None:
        every = self.show_every_steps
        try:
            for update in self._client.watch(run.name):
                run.add(update)
                kind, step = update.WhichOneof("update"), update.step
                if kind == "event":
                    self._echo(event_text(update.event))
                elif kind == "step" and every and (step.step % every == 0 or step.step == 1):
                    self._echo(step_text(step, self.plan.steps))
            run.job = self._client.get(run.name)
        except (MegascaleError, RuntimeError) as error:  # the latter once the client is closed
            run.error = error

    def _wait(
        self,
        run: Recording,
        ready: Callable[[], Result],
        why: str,
        limit_s: float,
        *,
        moving: bool = False,
    ) -> Result:
        """What ``ready`` returns once it is true within ``limit_s``.

        Args:
            moving: the limit is for the time since the last step, event or change of phase.

        Raises:
            DemoFailed: it took longer; the message has ``why`` and the driver's explanation.
        """
        progress, since_s = (0, 0, 0), time.monotonic()
        while not (found := ready()):
            now = (len(run.records), len(run.events), int(run.job.phase))
            if moving and now != progress:
                progress, since_s = now, time.monotonic()
            if run.error is not None:
                raise run.error
            if time.monotonic() - since_s >= (ENDING_S if run.ended else limit_s):
                limit = f"{'no progress for' if moving else 'not within'} {limit_s:g} s"
                explained = self._client.explain(run.name).explanation
                raise DemoFailed(f"{why} ({limit}): {explained}")
            time.sleep(POLL_S)
        return found

    def _write(self, report: dict[str, Any]) -> None:
        """Write report.json, with the time that the demo has taken."""
        report["wall_s"] = round(time.monotonic() - self._started_s, 3)
        file = self.folder / "report.json"
        file.write_text(json.dumps(report, indent=2) + "\n")
        self._echo(f"report: {file}")
