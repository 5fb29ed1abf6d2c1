"""What a history shows in numbers: productive time, recoveries, detection, false evictions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megascale_driver.core.values.job import JobPhase

if TYPE_CHECKING:
    from tests.simulation.shell.training import Gang
    from tests.simulation.shell.world import World

MAIN_JOB = "main"


@dataclass
class _Fault:
    at_s: float
    node: str


class Figures:
    """Counted while the history runs; times are of the world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.recoveries = 0
        self.false_evictions = 0
        self.detected_s: list[float] = []
        self.submitted_at_s = 0.0
        self.best_step = 0
        self.suspended_s = 0.0  # of the main job, by order
        self._suspended_at_s = 0.0
        self._open: list[_Fault] = []

    def struck(self, node: str) -> None:
        """A fault has ended the work of a node."""
        self._open.append(_Fault(self._world.now_s, node))

    def ended(self, gang: Gang) -> None:
        """A gang is gone, with the steps that it has done."""
        if gang.job == MAIN_JOB:
            self.best_step = max(self.best_step, gang.step())

    def phase(self, job: Any, was: JobPhase | None) -> None:
        """A job has changed its phase."""
        now_s = self._world.now_s
        if job.name == MAIN_JOB and job.phase is JobPhase.SUSPENDED:
            self._suspended_at_s = now_s
        elif job.name == MAIN_JOB and was is JobPhase.SUSPENDED:
            self.suspended_s += now_s - self._suspended_at_s
        if job.phase is JobPhase.STOPPING and was is not None:
            mine = [fault for fault in self._open if fault.node in _nodes(job)]
            if mine:
                self.detected_s.append(now_s - min(fault.at_s for fault in mine))
            self._open = [fault for fault in self._open if fault not in mine]
        if job.phase is JobPhase.PREPARING:  # what hit it while it stopped needed no detection
            self._open = [fault for fault in self._open if fault.node not in _nodes(job)]
        if job.phase is JobPhase.RUNNING and job.attempt > 1 and was is JobPhase.STARTING:
            self.recoveries += 1

    def ettr(self) -> float:
        """Productive time of the main job over wall time, from its submission until now.

        The time for which somebody had it suspended does not count.
        """
        world = self._world
        best = max([self.best_step, *(gang.step() for gang in world.gangs_of(MAIN_JOB))])
        wall_s = world.now_s - self.submitted_at_s - self.suspended_s
        return best * world.step_s(MAIN_JOB) / wall_s if wall_s > 0 else 0.0


def _nodes(job: Any) -> set[str]:
    return {slot.node for slot in job.slots}
