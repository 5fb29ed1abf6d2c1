"""Takes the agent's place in a run by hand: reads the worker's messages, orders it to leave.

The worker runs on the main thread as it does under an agent, with one end of a socket pair; a
thread has the other end. It shows steps, starts a daemon again that has ended, and asks rank 0 to
save and end when a signal has come, to whichever rank, or the time is up. What a driver would
report of saves it reports: those that fail, and that a later attempt has superseded this one.

A rank's spans go from its ring to files next to its log;
:mod:`megascale_common.node.spans.kept` has the files and reads them.
"""

from __future__ import annotations

import json
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megascale_common.node import framing
from megascale_common.node.messages import (
    Accepted,
    Failed,
    Finished,
    Leave,
    NotLeft,
    Profiled,
    Running,
    Saves,
    StepDone,
    WorkerMessage,
)
from megascale_common.node.spans import ops
from megascale_common.node.spans.ring import KeptFiles, SpanRingReader
from megascale_job.layout import RankLayout
from megascale_trainer.launch.display import Display
from megascale_trainer.launch.host_services import HostServices, ServiceFailed
from megascale_trainer.launch.meeting import Meeting

HALF_BYTES = 16 << 20  # of records in one file: half a million spans
_TAKEN_AT_ONCE = 4096  # records


class SpanKeeper:
    """Moves what a rank writes into its ring to files in ``folder``; :meth:`take` never waits."""

    def __init__(
        self,
        ring: Path,
        folder: Path,
        rank: int,
        node: str,
        layout: RankLayout,
        half_bytes: int = HALF_BYTES,
    ) -> None:
        self._ring = ring
        self._half_bytes = half_bytes
        self._files = KeptFiles(folder, rank)
        self._head = {"rank": rank, "node": node, "layout": asdict(layout)}
        self._offset_ns = time.time_ns() - time.monotonic_ns()
        self._ops = 0
        self._reader: SpanRingReader | None = None

    def take(self) -> None:
        """Write what is there.

        Raises:
            OSError: the folder cannot be written.
        """
        if self._reader is None:
            try:
                self._reader = SpanRingReader(self._ring)
            except (OSError, ValueError):  # nothing is measured, or not yet
                return
        while data := self._reader.take(_TAKEN_AT_ONCE):
            self._write(data)

    def _write(self, data: bytes) -> None:
        assert self._reader is not None
        files = self._files
        # Operations first: a reader knows all that a record may count.
        known = self._reader.ops()
        if len(known) > self._ops:
            self._ops = len(known)
            head = {**self._head, "unix_offset_ns": self._offset_ns}
            fresh = files.head.with_suffix(".fresh")
            fresh.write_text(json.dumps({**head, "ops": ops.dump(known).decode()}))
            fresh.replace(files.head)
        with files.records.open("ab") as file:
            file.write(data)
            full = file.tell() >= self._half_bytes
        if full:
            files.records.replace(files.earlier)


LEAVE_KEY = "leave"
_FROM_WORKER: Accepted[WorkerMessage] = Accepted(
    "a run by hand", Running, StepDone, Profiled, NotLeft, Failed, Finished
)
_TURN_S = 0.5
LOOK_S = 5.0  # how often the commit log is asked whether a later attempt is open
_LOADER_GONE_S = 5.0  # workers that the loader serves detect its end themselves, with more detail


class SaveWatch(threading.Thread):
    """Asks the checkpoint daemon what became of the saves, in a thread: it may take long to answer.

    ``looks``: whether this host asks the commit log for a later attempt.
    """

    def __init__(self, services: HostServices, attempt: int, *, looks: bool) -> None:
        super().__init__(name="save-watch", daemon=True)
        self._services = services
        self.attempt = attempt
        self._looks = looks
        self._looked_s = 0.0
        self._found: deque[Saves] = deque()

    def run(self) -> None:
        """Ask until the process ends."""
        while True:
            time.sleep(_TURN_S)
            look = self._looks and time.monotonic() - self._looked_s >= LOOK_S
            if self.ask(look=look) and look:
                self._looked_s = time.monotonic()

    def ask(self, *, look: bool = False) -> bool:
        """Ask once; returns whether there was an answer, which :meth:`take` has."""
        try:
            self._found.append(self._services.saves(self.attempt, look=look))
        except (ServiceFailed, OSError, framing.FramingError):
            return False  # it is being started again, or its storage hangs
        return True

    def take(self) -> Iterator[Saves]:
        """The answers since the last call."""
        while self._found:
            yield self._found.popleft()


@dataclass(frozen=True, kw_only=True)
class Outlets:
    """Where a local agent passes on what it finds.

    Args:
        display: shows what the worker reports.
        report: shows what concerns this host, on any rank: event, values, sentence.
        give_up: ends this process; the worker cannot continue.
    """

    display: Display
    report: Callable[[str, Mapping[str, Any], str], None]
    give_up: Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Watched:
    """What a local agent watches besides the worker; None: there is none on this rank.

    Args:
        services: of this host, on its first rank.
        saves: of this host, on its first rank, if the job has checkpoints.
        spans: of this rank, from its ring to its folder.
    """

    services: HostServices | None = None
    saves: SaveWatch | None = None
    spans: SpanKeeper | None = None


class LocalAgent(threading.Thread):
    """Runs next to the worker until the worker closes its end.

    Args:
        ends_at_s: when the run is to save and end (monotonic); None: no limit.
    """

    def __init__(
        self,
        ours: socket.socket,
        rank: int,
        meeting: Meeting,
        outlets: Outlets,
        watched: Watched,
        ends_at_s: float | None = None,
    ) -> None:
        super().__init__(name="local-agent", daemon=True)
        self._ours = ours
        self._rank = rank
        self._meeting = meeting
        self._display = outlets.display
        self._report = outlets.report
        self._give_up = outlets.give_up
        self._services = watched.services
        self._saves = watched.saves
        self._spans = watched.spans
        self._ends_at_s = ends_at_s
        self._orders = 0
        self.failed_saves: list[int] = []  # steps
        self._failing = False
        self._wanted = ""
        self._ordered = False
        self._loader_gone_s = self._kept_s = 0.0
        self.failed: Failed | None = None
        self.finished: Finished | None = None

    def leave(self, why: str) -> None:
        """Have the run save and end; safe in a signal handler."""
        self._wanted = self._wanted or why

    def run(self) -> None:
        """Read messages until the worker closes its end."""
        if self._saves is not None:
            self._saves.start()
        while True:
            if select.select([self._ours], [], [], _TURN_S)[0]:
                received = framing.receive(self._ours)
                if received is None:
                    self._keep_spans(last=True)
                    if self._saves is not None and self.failed is None:
                        self._saves.ask()
                    self._show_saves()
                    return
                self._take(_FROM_WORKER.read(received[0]))
            self._order()
            self._watch_services()
            self._show_saves()
            self._keep_spans()

    def _show_saves(self) -> None:
        if self._saves is None:
            return
        for found in self._saves.take():
            self._show_failures(found)
            if found.newest_attempt > self._saves.attempt:
                self._superseded(self._saves.attempt, found)

    def _show_failures(self, found: Saves) -> None:
        committed = found.committed_step
        newest = f"the newest complete checkpoint is of step {committed}"
        if not committed:
            newest = "this attempt has no complete checkpoint yet"
        for failed in found.failures:
            step = failed.step
            if step in self.failed_saves:
                continue  # another rank of the same step, or a repetition
            self.failed_saves.append(step)
            self._failing = True
            values = {"failed_step": step, "rank": failed.rank, "error": failed.error}
            self._report(
                "save_failed",
                {**values, "committed_step": committed},
                f"the checkpoint of step {step} is not saved by rank {failed.rank}: "
                f"{failed.error}; training continues, and {newest}",
            )
        if self._failing and committed > self.failed_saves[-1]:
            self._failing = False
            self._report("saved", {"committed_step": committed}, f"saved again: {newest}")

    def _superseded(self, mine: int, found: Saves) -> None:
        """A later attempt has fenced this one, which can save nothing any more."""
        later, committed = found.newest_attempt, found.committed_step
        text = (
            f"attempt {mine} is superseded: attempt {later} of this job was opened in its "
            f"checkpoint folder, by another run or a driver, so this run can save nothing more and "
            f"ends; its newest complete checkpoint is of step {committed}"
        )
        self._report("superseded", {"attempt": mine, "newest_attempt": later}, "")
        self._meeting.end_for_good(text)
        self._give_up(text)

    def _keep_spans(self, *, last: bool = False) -> None:
        now_s = time.monotonic()
        if self._spans is None or (not last and now_s - self._kept_s < _TURN_S):
            return
        self._kept_s = now_s
        try:
            self._spans.take()
        except (OSError, ValueError) as error:  # measurements end, the run does not
            self._spans = None
            print(f"spans are no longer kept: {error}", flush=True)

    def _take(self, message: WorkerMessage) -> None:
        if isinstance(message, Running):
            self._display.running(message.step, message.passed_over)
            if message.notes:
                self._display.note(message.notes)
        elif isinstance(message, StepDone):
            self._display.step(message.record)
        elif isinstance(message, NotLeft):
            # It trains on, and takes another order.
            self._wanted = ""
            self._ordered = False
            self._ends_at_s = None
            problem = message.problem
            self._report(
                "not_left",
                {"error": problem},
                f"the state cannot be saved, so training continues: {problem}",
            )
        elif isinstance(message, Failed):
            self.failed = message
        elif isinstance(message, Finished):
            self.finished = message

    def _order(self) -> None:
        """Pass a wish to leave on to rank 0, which orders its worker once."""
        if self._ordered:
            return
        if self._ends_at_s is not None and time.monotonic() >= self._ends_at_s:
            self.leave("the time limit")
        if self._rank != 0:
            if self._wanted:
                self._meeting.publish(LEAVE_KEY, {"why": self._wanted})
                self._ordered = True
            return
        if not self._wanted and self._meeting.marked(LEAVE_KEY):
            self.leave(str(self._meeting.read(LEAVE_KEY)["why"]))
        if self._wanted:
            self._ordered = True
            self._display.note(f"saves and ends: {self._wanted}")
            self._orders += 1  # an order that has failed is not taken a second time
            framing.send(self._ours, Leave(id=f"hand-{os.getpid()}-{self._orders}"))

    def _watch_services(self) -> None:
        if self._services is None or self.failed or self.finished:
            return
        if ended := self._services.daemon_problem():
            self._report("daemon_ended", {"error": ended}, ended)
        if not (problem := self._services.problem()):
            return
        now_s = time.monotonic()
        self._loader_gone_s = self._loader_gone_s or now_s
        if now_s - self._loader_gone_s > _LOADER_GONE_S:
            self._give_up(problem)
