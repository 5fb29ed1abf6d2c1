"""Step records on their way to the core: per job the newest, and how long its snapshots took."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class JobSteps:
    """What has been reported of one job since the core last took it."""

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
        """A step was completed; ``held_s``: how long snapshots held it up."""
        lane = self._lanes.get(job)
        if lane is None:
            self._lanes[job] = JobSteps(attempt, step, held_s)
        else:
            lane.attempt, lane.step, lane.held_s = attempt, step, lane.held_s + held_s

    def take(self) -> dict[str, JobSteps]:
        """Remove and return what was reported, by job."""
        taken, self._lanes = self._lanes, {}
        return taken
