"""`checkpoint.interval: auto`: the steps between saves, decided by all ranks together; pure.

Each rank computes from its measurements how many steps it would leave between two saves
(:mod:`megascale_job.sizes.failures`), and adds this wish to the all-reduce of each step. The sum
is the same on all ranks, and so is its mean, from which all decide at the same step: after the step
of a snapshot, before they request a slot for the next one.

The cost of a save follows from the times of steps, without a clock. A step is disturbed if a copy
or a write to storage runs at the same time. The time that disturbed steps take beyond the median of
quiet ones is the cost of the save that disturbed them.
"""

from __future__ import annotations

from collections import deque
from statistics import median

from megascale_job.sizes.failures import interval_steps
from megascale_trainer.save.snapshot_schedule import MOST_STEPS_AHEAD, Cadence, Votes

KEPT_STEPS, KEPT_SAVES = 64, 8
LEAST_QUIET = 3  # quiet steps before anything is compared with them
WARM_UP_STEPS = 2  # they compile kernels and open connections, so their times do not count


class SaveCost:
    """The cost of a save, measured by the run itself."""

    def __init__(self) -> None:
        self._quiet: deque[float] = deque(maxlen=KEPT_STEPS)
        self._saves: deque[float] = deque(maxlen=KEPT_SAVES)
        self._warm_up = WARM_UP_STEPS
        self._began = False
        self._disturbed = list[float]()

    @property
    def step_s(self) -> float | None:
        """Time of a quiet step; None before LEAST_QUIET of them."""
        return median(self._quiet) if len(self._quiet) >= LEAST_QUIET else None

    @property
    def cost_s(self) -> float | None:
        """Cost of a save: the median of the newest saves; None before one has ended."""
        return median(self._saves) if self._saves else None

    def began(self) -> None:
        """Note that a save begins; the measurement of the one before is complete."""
        self._close()
        self._began = True

    def add(self, time_s: float, *, disturbed: bool) -> None:
        """Note that a step took ``time_s``; ``disturbed``: a save ran at the same time."""
        if self._warm_up:
            self._warm_up -= 1
        elif disturbed:
            if self._began:
                self._disturbed.append(time_s)
        else:
            self._quiet.append(time_s)
            if self._disturbed:
                self._close()

    def _close(self) -> None:
        """Close the measurement of a save. A save that disturbed no step has cost nothing."""
        step_s = self.step_s
        if self._began and step_s is not None:
            extra_s = sum(time_s - step_s for time_s in self._disturbed)
            self._saves.append(max(0.0, extra_s))
        self._began = False
        self._disturbed = []


FIRST_STEPS = 10  # interval until the cost of a first save is known
LEAST_STEPS = 4  # the result of a snapshot's step must be read before the next slot is requested
MOST_GROWTH = 4  # largest factor of one decision, because a first measurement can be far off
BUSY_GROWTH = 1.5  # least factor if some rank's store was still busy with the save before


def wished_steps(cost: SaveCost, persist_s: float, mtbf_s: float, present: int, most: int) -> int:
    """The interval that this rank would choose; the ``present`` one until it has measured."""
    step_s, cost_s = cost.step_s, cost.cost_s
    if not step_s or cost_s is None:
        return present
    return interval_steps(
        cost_s=cost_s,
        persist_s=persist_s,
        step_s=step_s,
        mtbf_s=mtbf_s,
        least=LEAST_STEPS,
        most=max(LEAST_STEPS, most),
    )


class AutoCadence(Cadence):
    """A :class:`Cadence` whose interval between saves, ``interval``, is decided during the run.

    Args:
        snapshot_interval: steps between snapshots in memory; 0: one for each persisted step.
        world_size: the number of ranks whose wishes are summed.
    """

    def __init__(
        self, *, snapshot_interval: int, last_step: int, done: int, world_size: int
    ) -> None:
        super().__init__(
            snapshot_interval=snapshot_interval,
            persist_interval=0,
            last_step=last_step,
            done=done,
        )
        self._world_size = world_size
        self.interval = FIRST_STEPS
        self._next = done + FIRST_STEPS
        self._busy = False

    def due(self, step: int) -> bool:
        """Whether ``step`` has a snapshot."""
        return super().due(step) if self._snapshot_interval else step in (self._last, self._next)

    def ahead(self, step: int) -> int | None:
        """The step for which a slot can be requested after ``step``, before its vote."""
        if self._snapshot_interval:
            return super().ahead(step)
        following = self._next
        soon = step < following - 1 <= step + MOST_STEPS_AHEAD
        return following if soon and following < self._last else None

    def persists(self, step: int, votes: Votes) -> bool:
        """True if all ranks persist the snapshot of ``step``, which all of them take."""
        busy = votes.store_busy > 0
        if step != self._last and self._snapshot_interval:
            if step - self._persisted < self.interval:
                return False
            self._busy = self._busy or busy
            if busy:
                return False  # the next snapshot for which all stores are free is persisted instead
        self._busy = self._busy or busy
        self._persisted = step
        return True

    def decide(self, step: int, wishes: int) -> None:
        """Decide the interval after ``step``, from the sum of the ranks' wishes."""
        if not self.due(step) or step == self._last:
            return
        mean = round(wishes / self._world_size)
        wanted = max(LEAST_STEPS, min(mean, MOST_GROWTH * self.interval))
        if self._busy:
            wanted = max(wanted, round(BUSY_GROWTH * self.interval))
        self.interval = wanted
        self._busy = False
        self._next = step + self.interval
