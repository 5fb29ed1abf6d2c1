"""The driver's orders to running workers: profiles, and the order to save and end.

Each order is passed to the workers once, and can be withdrawn. The outcome of each rank's trace is
reported to the driver.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

from megascale.v1 import link_pb2, types_pb2
from megascale_common.node import framing
from megascale_common.node.files import TRACE_PREFIX, trace_file
from megascale_common.node.messages import (
    CancelProfile,
    Leave,
    NotLeft,
    Profiled,
    ProfileSteps,
    Stay,
)
from megascale_common.service import logs
from megascale_common.service.wire_text import encodable
from megascale_executor.agent.attempt import AttemptKey
from megascale_executor.agent.workers.workers import Worker

_log = logs.get(__name__)

MAX_DETAIL_CHARS = 200  # a heartbeat can have 64 traces
_STATES = {
    "written": types_pb2.TRACE_STATE_WRITTEN,
    "skipped": types_pb2.TRACE_STATE_SKIPPED,
    "failed": types_pb2.TRACE_STATE_FAILED,
}


class Profiles:
    """Profiles of the present attempt. ``changed`` is called when the next heartbeat has news."""

    def __init__(self, node_folder: Path, changed: Callable[[], None]) -> None:
        self._node_folder = node_folder
        self._changed = changed
        self._id = ""
        self._ranks: set[int] = set()
        self._reports: list[link_pb2.TraceReport] = []

    @property
    def reports(self) -> Sequence[link_pb2.TraceReport]:
        """Reports on the newest profile's traces so far."""
        return self._reports

    def want(
        self, key: AttemptKey, command: link_pb2.ProfileCommand, workers: Sequence[Worker]
    ) -> None:
        """Pass the command to the workers of its ranks, once."""
        if command.id == self._id:
            return
        self._id = command.id
        self._ranks = set(command.ranks)
        self._reports = []
        for worker in workers:
            if worker.rank in command.ranks:
                self._send(key, command, worker)

    def unwant(self, workers: Sequence[Worker]) -> None:
        """Cancel traces that have not begun: the driver no longer waits for them."""
        profile = self._id
        self._id = ""
        if not profile:
            return
        reported = {report.rank for report in self._reports}
        message = CancelProfile(id=profile)
        for worker in workers:
            if worker.rank in self._ranks - reported:
                with contextlib.suppress(framing.FramingError):  # an ended worker traces nothing
                    worker.channel.send(message)

    def take(self, rank: int, message: Profiled) -> None:
        """Take a worker's report about its trace."""
        self._note(message.id, rank, message.state, message.detail, message.size_bytes)

    def forget(self, folder: Path) -> None:
        """The attempt has ended: remove the incomplete traces of its workers in ``folder``."""
        self._id = ""
        self._reports = []
        for unfinished in folder.glob(f".{TRACE_PREFIX}*"):
            with contextlib.suppress(OSError):  # it is a folder that the job's own code made
                unfinished.unlink()

    def _send(self, key: AttemptKey, command: link_pb2.ProfileCommand, worker: Worker) -> None:
        first, last = command.first_step, command.last_step
        path = self._node_folder / trace_file(key.job, key.attempt, first, last, worker.rank)
        message = ProfileSteps(
            id=command.id,
            first_step=first,
            last_step=last,
            path=str(path),
            not_after_s=command.not_after.ToNanoseconds() / 1e9,
        )
        try:
            worker.channel.send(message)
        except framing.FramingError as error:
            self._note(command.id, worker.rank, "failed", f"the worker cannot be reached: {error}")

    def _note(self, profile: str, rank: int, state: str, detail: str, size_bytes: int = 0) -> None:
        if profile != self._id:
            return  # of an earlier profile, for which the driver no longer waits
        _log.info(
            "trace", profile=profile, rank=rank, state=state, detail=detail, size_bytes=size_bytes
        )
        self._reports.append(
            link_pb2.TraceReport(
                profile=profile,
                rank=rank,
                state=_STATES[state],
                size_bytes=size_bytes,
                detail=encodable(detail[:MAX_DETAIL_CHARS]),
            )
        )
        self._changed()


def part_of(desired: link_pb2.DesiredState, key: AttemptKey) -> link_pb2.ProfileCommand | None:
    """The profile that the desired state requests from the attempt ``key``, if any."""
    assignment = desired.assignment
    mine = (assignment.job, assignment.attempt) == (key.job, key.attempt)
    return desired.profile if mine and desired.HasField("profile") else None


class LeaveOrders:
    """The order to save and end that the workers of the present attempt have, if any."""

    def __init__(self) -> None:
        self._id = ""
        # The newest order that a worker could not carry out, and why; ("", "") without one.
        self.failed = ("", "")

    def failed_by(self, message: NotLeft) -> None:
        """A worker could not save; the first such report of the node is kept."""
        if message.id != self.failed[0]:
            self.failed = (message.id, message.problem)
            _log.warning("order to save failed", id=message.id, reason=message.problem)

    def want(self, order: str, workers: Sequence[Worker]) -> None:
        """Pass this order to the workers, once; "" withdraws the last one."""
        if order == self._id:
            return
        self._id = order
        _log.info("order to save and end", id=order or "withdrawn")
        message = Leave(id=order) if order else Stay()
        for worker in workers:
            # A worker that cannot be reached has ended, which the driver learns in another way.
            with contextlib.suppress(framing.FramingError):
                worker.channel.send(message)

    def forget(self) -> None:
        """The attempt has ended."""
        self._id = ""
        self.failed = ("", "")
