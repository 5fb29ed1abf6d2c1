"""Events that wait for the core: in order if they must not be lost, per job if they are progress.

Hellos, broken links, exits, answers and requests of operators are never dropped and keep their
order. Progress (what is in memory, what was committed) waits per job, only the newest report of
each node, and jobs take turns, so that no job holds up another. When there is too much of it, the
newest report is dropped: its node's next heartbeat brings it again.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

MAX_PROGRESS = 100_000
# Most reports of one node that wait in a row; after that its newest replaces the one before.
MAX_REPORTS = 16
PROGRESS_SHARE = 4  # at least one in PROGRESS_SHARE events taken is progress, while both wait

Entry = TypeVar("Entry")


class _Waiting(Generic[Entry]):
    """The waiting entries of one node, and its newest reports among them."""

    __slots__ = ("count", "reports")

    def __init__(self) -> None:
        self.count = 0
        self.reports: list[_Cell[Entry]] = []  # reports since its last entry of another kind


class _Cell(Generic[Entry]):
    """A place in the order; a newer entry can replace the one in it."""

    __slots__ = ("entry", "node")

    def __init__(self, node: str, entry: Entry) -> None:
        self.node = node
        self.entry = entry


class Inbox(Generic[Entry]):
    """Events in the order in which the core takes them."""

    def __init__(self, max_progress: int = MAX_PROGRESS) -> None:
        self.dropped = 0
        self._max_progress = max_progress
        self._ordered: deque[_Cell[Entry]] = deque()
        self._waiting: dict[str, _Waiting[Entry]] = {}
        self._progress: dict[str, dict[str, Entry]] = {}  # by job, then by node
        self._job_of: dict[str, str] = {}  # the job of each node whose progress waits

    def __len__(self) -> int:
        return len(self._ordered) + len(self._job_of)

    def put(self, entry: Entry, node: str = "") -> None:
        """Add an event that must not be lost; ``node``: the node that it is about, if any."""
        if node in self._job_of:  # its progress came before
            self._append(node, self._take_progress(node))
        self._append(node, entry)
        if node:
            self._waiting[node].reports.clear()

    def put_report(self, entry: Entry, node: str) -> None:
        """Add a report of a node that must not be lost."""
        if node in self._job_of:
            self._take_progress(node)  # the new report includes everything in the old one
        waiting = self._waiting.get(node)
        if waiting is not None and len(waiting.reports) >= MAX_REPORTS:
            # Only reports in a row are merged, so a hello or an exit in between keeps its place.
            waiting.reports[-1].entry = entry
            return
        cell = self._append(node, entry)
        self._waiting[node].reports.append(cell)

    def put_progress(self, entry: Entry, node: str, job: str) -> bool:
        """Add a report that only shows progress of ``job``; False if it was dropped."""
        if node in self._waiting:
            self.put_report(entry, node)  # it must not overtake waiting entries of its node
            return True
        if node in self._job_of:
            self._take_progress(node)
        elif len(self._job_of) >= self._max_progress:
            self.dropped += 1
            return False
        self._progress.setdefault(job, {})[node] = entry
        self._job_of[node] = job
        return True

    def take(self, limit: int) -> list[Entry]:
        """Remove and return up to ``limit`` events: those in order first, then jobs in turn."""
        # Some room is reserved, so that a stream of other events cannot starve progress.
        kept = min(len(self._job_of), max(1, limit // PROGRESS_SHARE))
        taken = [self._pop() for _ in range(min(len(self._ordered), limit - kept))]
        while self._progress and len(taken) < limit:
            job, nodes = next(iter(self._progress.items()))
            taken.append(self._take_progress(next(iter(nodes))))
            if nodes:  # the next turn is another job's
                self._progress[job] = self._progress.pop(job)
        return taken

    def clear(self) -> list[Entry]:
        """Remove and return everything."""
        return self.take(len(self) + 1)

    def _append(self, node: str, entry: Entry) -> _Cell[Entry]:
        cell = _Cell(node, entry)
        self._ordered.append(cell)
        if node:
            self._waiting.setdefault(node, _Waiting()).count += 1
        return cell

    def _pop(self) -> Entry:
        cell = self._ordered.popleft()
        waiting = self._waiting.get(cell.node)
        if waiting is not None:
            waiting.count -= 1
            if not waiting.count:
                del self._waiting[cell.node]
            elif waiting.reports and waiting.reports[0] is cell:
                del waiting.reports[0]
        return cell.entry

    def _take_progress(self, node: str) -> Entry:
        job = self._job_of.pop(node)
        nodes = self._progress[job]
        entry = nodes.pop(node)
        if not nodes:
            del self._progress[job]
        return entry


# Step records for the core: per job the newest one, and how long its snapshots took.


@dataclass(slots=True)
class JobSteps:
    """Steps of one job that were reported since the core last took them."""

    attempt: int
    step: int
    held_s: float = 0.0


class StepLanes:
    """One lane per job; a record replaces the one before, so a lane never grows."""

    def __init__(self) -> None:
        self._lanes: dict[str, JobSteps] = {}

    def __bool__(self) -> bool:
        return bool(self._lanes)

    def add(self, job: str, attempt: int, step: int, held_s: float = 0.0) -> None:
        """Add a completed step; ``held_s``: time for which snapshots held it up."""
        lane = self._lanes.get(job)
        if lane is None:
            self._lanes[job] = JobSteps(attempt, step, held_s)
        else:
            lane.attempt = attempt
            lane.step = step
            lane.held_s = lane.held_s + held_s

    def take(self) -> dict[str, JobSteps]:
        """Remove and return the reported steps by job."""
        taken = self._lanes
        self._lanes = {}
        return taken
