"""When a snapshot is taken and persisted, and what becomes of each: pure, keyed by the step.

The life of one snapshot on one rank; :mod:`megascale_checkpoint.memory.slots` has the daemon's
side:

    ask ─▶ granted ─▶ vote 0 ─▶ copying ─▶ copied and settled ─▶ sealed (─▶ persisted ─▶ committed)
     │         └─ given back: some rank voted to skip, or the answer came after the vote
     └───▶ refused, or no answer ─▶ vote 1: all ranks skip

No clock and no I/O: :mod:`megascale_trainer.save.snapshot` carries out what is decided here. All
ranks decide the same, because they decide from the sum of their votes.

Which snapshots all ranks copy to their peers: one at a time, the same on every rank. Pure.

A state may take longer to its peer than a step takes. If each rank copied its newest snapshot when
its last copy has ended, the ranks' copies would be of different steps, and no restart could use
them. So the ranks decide by their votes, as they do for snapshots and persistence:

    decided Y ─▶ copied and sealed, with ``replicate`` ─▶ each daemon copies Y to its peer
        ▲                                                      │ ended there: vote 0
        └── the sum of the votes on Z is 0: decided Z ◀────────┘ else: vote REPLICA_BUSY

Until then the daemons keep Y, and what was decided before it, in their own slots as well: of a lost
node the peer has the state, of all others their own memory has to have the same step
(:mod:`megascale_checkpoint.memory.slots`).

On CUDA a vote is cast before the sum of the one before was read. It says nothing about a step that
was decided in between, and does not count: all ranks cast and read in the same order.
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
        self._snapshot_interval = snapshot_interval
        self._persist_interval = persist_interval
        self._last = last_step
        self._persisted = done
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
        known.phase = Phase.GRANTED
        known.slot = slot
        known.store_ready = store_ready
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
        known.phase = Phase.COPYING
        known.persist = persist
        known.replicate = replicate
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


class ReplicaRounds:
    """One rank's part; without ``enabled`` nothing is ever copied.

    Attributes:
        count: how many steps were decided.
    """

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self.count = 0
        self._decided = 0  # the newest step that is copied, or was
        self._cast: dict[int, int] = {}  # by the step of a vote: what was decided when it was cast
        self._unsealed = 0  # the decided step, until its seal has gone to the daemon
        # A question about a step may be answered after that was sealed: its number shows that.
        self._question = 0
        self._ended = False  # until the daemon says so: it may still copy what was restored

    def vote(self, step: int) -> int:
        """This rank's part in the vote on the snapshot of ``step``."""
        if not self._enabled:
            return 0
        self._cast[step] = self._decided
        return 0 if self._ended and not self._unsealed else REPLICA_BUSY

    def decide(self, step: int, votes: Votes) -> bool:
        """Whether the snapshot of ``step``, which was voted on, is copied to the peers."""
        cast = self._cast.pop(step, None)
        if cast != self._decided or votes.must_skip or votes.replica_busy or not self._enabled:
            return False
        self._decided = self._unsealed = step
        self.count += 1
        self._next_question()
        return True

    def sealed(self) -> None:
        """The seal of the decided step has gone to the daemon: what it says from now on counts."""
        self._unsealed = 0
        self._next_question()

    def lost(self) -> None:
        """The daemon is gone, or will never be given the decided step."""
        self._unsealed = 0
        self._next_question()

    @property
    def question(self) -> int:
        """The number of a question that goes to the daemon now: has its copy ended?"""
        return self._question

    def answered(self, question: int, *, ended: bool) -> None:
        """The daemon's answer to a question."""
        if question == self._question:
            self._ended = ended

    def _next_question(self) -> None:
        self._question = self._question + 1
        self._ended = False
