"""Takes the agent's place in a run by hand: reads the worker's messages, orders it to leave.

The worker runs on the main thread as it does under an agent, with one end of a socket pair; a
thread has the other end. It shows steps, starts a daemon again that has ended, and asks rank 0 to
save and end when a signal has come, to whichever rank, or the time is up.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import cast

from megascale_common.node import framing
from megascale_common.node.messages import Failed, Finished, Leave, WorkerMessage
from megascale_trainer.launch.display import Display
from megascale_trainer.launch.host_services import HostServices
from megascale_trainer.launch.meeting import Meeting
from megascale_trainer.launch.span_keeper import SpanKeeper

LEAVE_KEY = "leave"
_TURN_S = 0.5
_LOADER_GONE_S = 5.0  # workers that the loader serves detect its end themselves, with more detail


class LocalAgent(threading.Thread):
    """Runs beside the worker until that has closed its end.

    Args:
        display: shows what the worker reports.
        services: of this host, on its first rank.
        spans: of this rank, from its ring to its folder; None: they are not kept.
        ends_at_s: when the run is to save and end (monotonic); None: no limit.
        give_up: ends this process; the worker cannot go on.
    """

    def __init__(
        self,
        ours: socket.socket,
        rank: int,
        meeting: Meeting,
        display: Display,
        services: HostServices | None,
        spans: SpanKeeper | None,
        ends_at_s: float | None,
        give_up: Callable[[str], None],
    ) -> None:
        super().__init__(name="local-agent", daemon=True)
        self._ours, self._rank, self._meeting, self._display = ours, rank, meeting, display
        self._services, self._ends_at_s, self._give_up = services, ends_at_s, give_up
        self._spans = spans
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
        while True:
            if select.select([self._ours], [], [], _TURN_S)[0]:
                received = framing.receive(self._ours)
                if received is None:
                    self._keep_spans(last=True)
                    return
                self._take(cast(WorkerMessage, received[0]))
            self._order()
            self._watch_services()
            self._keep_spans()

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
        if message["kind"] == "running":
            self._display.running(message["step"], message.get("passed_over", ""))
            if notes := message.get("notes", ""):
                self._display.note(notes)
        elif message["kind"] == "step":
            self._display.step(message["record"])
        elif message["kind"] == "failed":
            self.failed = message
        elif message["kind"] == "finished":
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
            framing.send(self._ours, Leave(kind="leave", id=f"hand-{os.getpid()}"))

    def _watch_services(self) -> None:
        problem = self._services.problem() if self._services is not None else ""
        if not problem or self.failed or self.finished:
            return
        now_s = time.monotonic()
        self._loader_gone_s = self._loader_gone_s or now_s
        if now_s - self._loader_gone_s > _LOADER_GONE_S:
            self._give_up(problem)
