"""Ledger of a job's time: every moment since submission belongs to one part.

Times are whole microseconds, so the parts add up to the wall time exactly. The ledger only moves
forward: while a clock that was set back catches up, no time passes; a clock that was set forward
adds the jump to the activity of that moment.

A step is productive when it is completed, and becomes lost when a later attempt restores an earlier
step. The lost time follows from marks (step, productive time until then). A bounded number of them
is kept, the newer ones denser; between two marks all steps count as equally long.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from dataclasses import dataclass, replace

MAX_MARKS = 32
THINNED_MARKS = 16  # the oldest marks, of which every second is dropped when there are too many


class Activity(enum.StrEnum):
    """The current activity of the job, which decides the part that passing time belongs to."""

    WAITING = "WAITING"
    STARTING = "STARTING"
    TRAINING = "TRAINING"
    RESTARTING = "RESTARTING"
    ENDING = "ENDING"
    ENDED = "ENDED"


_PART_OF = {
    Activity.WAITING: "waiting_us",
    Activity.STARTING: "starting_us",
    Activity.TRAINING: "productive_us",
    Activity.RESTARTING: "restarting_us",
    Activity.ENDING: "ending_us",
}
PARTS = (
    *("productive_us", "lost_us", "detecting_us", "restarting_us"),
    *("checkpointing_us", "waiting_us", "starting_us", "ending_us"),
)


@dataclass(frozen=True, slots=True)
class Ledger:
    """The parts of the time from ``since_us`` to ``until_us`` (Unix time), in microseconds.

    ``started_us``: when the first attempt was placed; 0 before. ``faulted``: a fault has ended an
    attempt, so starting means restarting. ``undecided_us``: part of ``lost_us``, the time between
    the last known step and the fault. It turns out productive if a later step is restored.
    """

    since_us: int = 0
    until_us: int = 0
    started_us: int = 0
    activity: Activity = Activity.WAITING
    faulted: bool = False
    productive_us: int = 0
    lost_us: int = 0
    detecting_us: int = 0
    restarting_us: int = 0
    checkpointing_us: int = 0
    waiting_us: int = 0
    starting_us: int = 0
    ending_us: int = 0
    undecided_us: int = 0
    lost_steps: int = 0
    faults: int = 0
    marks: tuple[tuple[int, int], ...] = ()

    @property
    def wall_us(self) -> int:
        """Accounted time since submission; the sum of all parts."""
        return self.until_us - self.since_us

    @property
    def ratio(self) -> float:
        """Productive time over the time since submission, 0 to 1; 0 if no time has passed."""
        return self.productive_us / self.wall_us if self.wall_us else 0.0

    @property
    def ratio_since_start(self) -> float:
        """Productive time over the time since the first placement, 0 to 1; 0 if none has passed."""
        since_start_us = self.until_us - self.started_us if self.started_us else 0
        return self.productive_us / since_start_us if since_start_us else 0.0


def submitted(now_s: float) -> Ledger:
    """The ledger of a job that is submitted now."""
    now_us = _us(now_s)
    return Ledger(since_us=now_us, until_us=now_us)


def entered(ledger: Ledger, activity: Activity, now_s: float) -> Ledger:
    """Begin another activity.

    The time between the last step and a stop without a fault counts as ending.
    """
    part = _PART_OF.get(ledger.activity, "")
    if ledger.activity is Activity.TRAINING and activity is not Activity.TRAINING:
        part = "ending_us"
    ledger = _settled(ledger, part, _us(now_s))
    if activity is not Activity.WAITING and not ledger.started_us:
        ledger = replace(ledger, started_us=ledger.until_us)
    return replace(ledger, activity=activity)


def placed(ledger: Ledger, now_s: float) -> Ledger:
    """An attempt has its nodes: begin to start or, after a fault, to restart."""
    activity = Activity.RESTARTING if ledger.faulted else Activity.STARTING
    return entered(ledger, activity, now_s)


def stepped(ledger: Ledger, step: int, now_s: float, checkpointing_s: float = 0.0) -> Ledger:
    """A step of the current attempt is known to be completed.

    The first one ends the start, and its own time belongs to the start. ``checkpointing_s``: the
    time for which snapshots held up the steps since the one before.
    """
    if ledger.activity is Activity.ENDED:
        return ledger
    if ledger.activity is not Activity.TRAINING:
        ledger = entered(ledger, Activity.TRAINING, now_s)
    else:
        before_us = ledger.productive_us
        ledger = _settled(ledger, "productive_us", _us(now_s))
        held_us = min(_us(max(0.0, checkpointing_s)), ledger.productive_us - before_us)
        ledger = replace(
            ledger,
            productive_us=ledger.productive_us - held_us,
            checkpointing_us=ledger.checkpointing_us + held_us,
        )
    return _marked(ledger, step)


def learned(ledger: Ledger, step: int) -> Ledger:
    """A step of an attempt that has already broken turns out to have been completed."""
    return _marked(_decided(ledger), step) if step > _newest(ledger) else ledger


def broke(ledger: Ledger, happened_s: float, now_s: float) -> Ledger:
    """A fault that happened at ``happened_s`` is detected now and ends the attempt.

    ``happened_s`` may come from another clock: it is cut to the time since the last known step.
    """
    now_us = max(_us(now_s), ledger.until_us)
    happened_us = min(max(_us(happened_s), ledger.until_us), now_us)
    if ledger.activity is Activity.TRAINING:
        undecided_us = happened_us - ledger.until_us
        ledger = _settled(ledger, "lost_us", happened_us)
        ledger = replace(ledger, undecided_us=ledger.undecided_us + undecided_us)
    else:
        ledger = _settled(ledger, _PART_OF.get(ledger.activity, ""), happened_us)
    ledger = _settled(ledger, "detecting_us", now_us)
    if ledger.activity is Activity.ENDED:
        return ledger
    return replace(ledger, activity=Activity.RESTARTING, faulted=True, faults=ledger.faults + 1)


def restored(ledger: Ledger, step: int) -> Ledger:
    """The attempt starts from ``step``: later steps will be done again."""
    newest = _newest(ledger)
    if step > newest:
        # Those steps were never reported to this driver: the time up to the fault was theirs.
        return _marked(_decided(ledger), step)
    kept_us = _productive_at(ledger.marks, step)
    marks = tuple(mark for mark in ledger.marks if mark[0] < step)
    return replace(
        ledger,
        productive_us=kept_us,
        lost_us=ledger.lost_us + ledger.productive_us - kept_us,
        lost_steps=ledger.lost_steps + newest - step,
        undecided_us=0,
        marks=(*marks, (step, kept_us)),
    )


def at(ledger: Ledger, now_s: float) -> Ledger:
    """The ledger now; a step in progress counts as productive until it is lost."""
    return _settled(ledger, _PART_OF.get(ledger.activity, ""), _us(now_s))


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


def _settled(ledger: Ledger, part: str, until_us: int) -> Ledger:
    """Give the time up to ``until_us`` to a part; after the end of the job nothing changes."""
    if ledger.activity is Activity.ENDED or until_us <= ledger.until_us:
        return ledger
    time_us = getattr(ledger, part) + until_us - ledger.until_us
    return replace(ledger, until_us=until_us, **{part: time_us})


def _decided(ledger: Ledger) -> Ledger:
    """Count the undecided time as productive."""
    return replace(
        ledger,
        productive_us=ledger.productive_us + ledger.undecided_us,
        lost_us=ledger.lost_us - ledger.undecided_us,
        undecided_us=0,
    )


def _newest(ledger: Ledger) -> int:
    return ledger.marks[-1][0] if ledger.marks else 0


def _marked(ledger: Ledger, step: int) -> Ledger:
    """Mark the productive time until ``step``; the last mark always has all of it."""
    step = max(step, _newest(ledger))
    marks = tuple(mark for mark in ledger.marks if mark[0] < step)
    marks = (*marks, (step, ledger.productive_us))
    # Old marks are thinned first: a restore of a step far back is rare, and needs less precision.
    if len(marks) > MAX_MARKS:
        marks = (*marks[:THINNED_MARKS:2], *marks[THINNED_MARKS:])
    return replace(ledger, marks=marks)


def _productive_at(marks: tuple[tuple[int, int], ...], step: int) -> int:
    """Productive time until ``step``, interpolated between marks, at most that of the last."""
    if not marks:
        return 0
    after = bisect_left(marks, (step, -1))
    step_after, time_after = marks[after]
    if step_after == step:
        return time_after
    if after == 0:
        return 0
    step_before, time_before = marks[after - 1]
    share = (step - step_before) / (step_after - step_before)
    return time_before + round((time_after - time_before) * share)
