"""When a snapshot is taken and persisted, and what becomes of each: pure, keyed by the step.

The life of one snapshot on one rank; :mod:`megascale_checkpoint.memory.slots` has the daemon's
side:

    ask ─▶ granted ─▶ vote 0 ─▶ copying ─▶ copied and settled ─▶ sealed (─▶ persisted ─▶ committed)
     │         └─ given back: some rank voted to skip, or the answer came after the vote
     └───▶ refused, or no answer ─▶ vote 1: all ranks skip

No clock and no I/O: :mod:`megascale_trainer.save.snapshot` carries out what is decided here. All
ranks decide the same, because they decide from the sum of their votes.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

MUST_SKIP = 1
# A rank whose store is still busy with the state before adds this instead, and one whose last copy
# to its peer has not ended the next. The sum over any number of ranks below the first keeps the
# counts apart, and is exact in float64.
STORE_BUSY = 1 << 17
REPLICA_BUSY = 1 << 34
# Rank 0 adds this when the job is to save and end early. Together the four stay exact.
LEAVE = 1 << 51
MOST_INTERVAL_IN_FLIGHT = 2  # steps: a snapshot is asked for before the one before was decided
MOST_STEPS_AHEAD = 8  # a slot is asked for that long before the vote, so that the answer is there


@dataclass(frozen=True, slots=True)
class Votes:
    """The sum of the ranks' votes.

    How many must skip, how many stores and how many copies to peers are busy; an early end.
    """

    must_skip: int
    store_busy: int
    replica_busy: int = 0
    leave: bool = False

    @classmethod
    def of(cls, total: int) -> Votes:
        """The inverse of the sum."""
        counts, leave = total % LEAVE, total >= LEAVE
        counts, replica_busy = counts % REPLICA_BUSY, counts // REPLICA_BUSY
        return cls(counts % STORE_BUSY, counts // STORE_BUSY, replica_busy, leave)


class Cadence:
    """Which steps get a snapshot in memory, and which of those are persisted.

    Args:
        snapshot_interval: steps between snapshots; 0: only after the last step.
        persist_interval: steps between persisted ones, a multiple of ``snapshot_interval``.
        last_step: it always has a snapshot, which is persisted.
        done: the step that the run starts from.
    """

    def __init__(
        self, *, snapshot_interval: int, persist_interval: int, last_step: int, done: int
    ) -> None:
        self._snapshot_interval, self._persist_interval = snapshot_interval, persist_interval
        self._last, self._persisted = last_step, done
        self._planned = last_step

    @property
    def last(self) -> int:
        """The step that the run ends with, as far as it is decided."""
        return self._last

    def end_at(self, step: int) -> None:
        """The run ends early, with ``step``."""
        self._last = step

    def go_on(self) -> None:
        """The run does not end early after all."""
        self._last = self._planned

    def due(self, step: int) -> bool:
        """Whether ``step`` has a snapshot."""
        interval = self._snapshot_interval
        return step == self._last or (
            0 < step < self._last and bool(interval) and not step % interval
        )

    def subject(self, step: int) -> int | None:
        """The step whose snapshot is voted on in ``step``: the next one, or the last itself."""
        if step == self._last:
            return step
        following = step + 1
        return following if following < self._last and self.due(following) else None

    def ahead(self, step: int) -> int | None:
        """The step whose slot may be asked for after ``step``, before its vote."""
        interval = self._snapshot_interval
        if not interval:
            return None
        # With a snapshot at every step this would hold one more slot, without a use.
        lead = min(MOST_STEPS_AHEAD, interval - 1)
        following = (step // interval + 1) * interval
        return following if step < following - 1 <= step + lead and following < self._last else None

    def persists(self, step: int, votes: Votes) -> bool:
        """Whether the snapshot of ``step``, which all ranks take, is persisted by all of them.

        Where snapshots are more frequent than persisted ones, the newest is persisted as soon as
        one is due and every store has done with the one before.
        """
        if step != self._last:
            interval = self._persist_interval
            if not interval or step // interval <= self._persisted // interval:
                return False
            # Where every snapshot is persisted, some steps apart, they queue up in the slots.
            if votes.store_busy and (self._snapshot_interval < interval or interval == 1):
                return False
        self._persisted = step
        return True


class Phase(enum.Enum):
    """Where a step's snapshot is."""

    ASKED = "asked"
    GRANTED = "granted"
    REFUSED = "refused"
    COPYING = "copying"


@dataclass(slots=True)
class _Snapshot:
    phase: Phase
    slot: int = -1
    store_ready: bool = True
    persist: bool = True
    replicate: bool = False
    copied: bool = False
    finite: bool | None = None


@dataclass(frozen=True, slots=True)
class ToSeal:
    """A snapshot whose copy has ended and whose step's result is known."""

    step: int
    slot: int
    finite: bool
    persist: bool
    replicate: bool = False


class SnapshotSchedule:
    """The snapshots of one rank that are not sealed yet."""

    def __init__(self) -> None:
        self._steps: dict[int, _Snapshot] = {}
        self._skipped: list[int] = []  # since the last snapshot that was taken

    def ask(self, step: int) -> bool:
        """Whether a slot must be asked for now: not asked before, or refused before."""
        if self._abstains():
            return False
        known = self._steps.get(step)
        if known is not None and known.phase is not Phase.REFUSED:
            return False
        self._steps[step] = _Snapshot(Phase.ASKED)
        return True

    def granted(self, step: int, slot: int, *, store_ready: bool) -> int | None:
        """The daemon reserved ``slot``; returns a slot to give back, where nothing needs it."""
        known = self._steps.get(step)
        if known is None or known.phase is not Phase.ASKED:
            return slot  # the vote has passed, or the step
        known.phase, known.slot, known.store_ready = Phase.GRANTED, slot, store_ready
        return None

    def refused(self, step: int) -> None:
        """The daemon has no slot."""
        known = self._steps.get(step)
        if known is not None and known.phase is Phase.ASKED:
            known.phase = Phase.REFUSED

    def awaited(self, step: int) -> bool:
        """Whether the answer for ``step`` is still to come."""
        known = self._steps.get(step)
        return known is not None and known.phase is Phase.ASKED

    def vote(self, step: int) -> int:
        """This rank's vote on the snapshot of ``step``; without a slot by now it must skip."""
        known = self._steps.get(step)
        if self._abstains():
            self._skipped.clear()
            return MUST_SKIP
        if known is None or known.phase is not Phase.GRANTED:
            self._steps.pop(step, None)
            return MUST_SKIP
        return 0 if known.store_ready else STORE_BUSY

    def skip(self, step: int) -> int | None:
        """All ranks skip ``step``; returns the slot to give back."""
        known = self._steps.pop(step, None)
        self._skipped.append(step)
        return known.slot if known is not None and known.phase is Phase.GRANTED else None

    def launch(self, step: int, *, persist: bool, replicate: bool = False) -> int | None:
        """All ranks take ``step``: the slot to copy into; None where this rank has lost its own."""
        known = self._steps.get(step)
        self._skipped.clear()
        if known is None or known.phase is not Phase.GRANTED:
            return None
        known.phase, known.persist, known.replicate = Phase.COPYING, persist, replicate
        return known.slot

    def copied(self, step: int) -> None:
        """The copy of ``step`` has ended."""
        if step in self._steps:
            self._steps[step].copied = True

    def settle(self, step: int, *, finite: bool) -> None:
        """The result of ``step`` was read."""
        known = self._steps.get(step)
        if known is not None and known.phase is Phase.COPYING:
            known.finite = finite

    def copying(self) -> list[int]:
        """Steps whose copy was started and that are not sealed, oldest first."""
        return sorted(s for s, known in self._steps.items() if known.phase is Phase.COPYING)

    def settled(self, step: int) -> bool:
        """Whether the result of ``step``, whose copy was started, is known."""
        known = self._steps.get(step)
        return known is not None and known.finite is not None

    def next_seal(self) -> ToSeal | None:
        """The oldest snapshot, if it can be sealed; the slot is the daemon's from now on."""
        # In the order of the steps: the newest sealed slot is the one that a restart restores.
        for step in self.copying()[:1]:
            known = self._steps[step]
            if known.copied and known.finite is not None:
                del self._steps[step]
                return ToSeal(step, known.slot, known.finite, known.persist, known.replicate)
        return None

    def _abstains(self) -> bool:
        """Whether no rank takes part in the next vote, after two that were skipped.

        With one free slot, asked for at every step before the last was given back, a rank gets it
        at every second step; others may get theirs at those between, and all would skip for ever.
        After a vote without any slot all ask at the same step again. All ranks skip the same steps,
        so they abstain from the same vote.
        """
        last = self._skipped[-2:]
        return len(last) == 2 and last[1] - last[0] <= MOST_INTERVAL_IN_FLIGHT

    def lose(self) -> None:
        """The daemon is gone, and with it every slot."""
        self._steps.clear()
