"""The schedule of snapshots and saves, and the life of each snapshot: pure, keyed by the step.

The life of one snapshot on one rank; :mod:`megascale_checkpoint.memory.slots` has the daemon's
side:

    ask ─▶ granted ─▶ vote 0 ─▶ copying ─▶ copied and settled ─▶ sealed (─▶ persisted ─▶ committed)
     │         └─ given back: some rank voted to skip, or the answer came after the vote
     └───▶ refused, or no answer ─▶ vote 1: all ranks skip

There is no clock and no I/O: :mod:`megascale_trainer.save.snapshot` carries out the decisions. All
ranks decide the same, because they decide from the sum of their votes.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

# Note [Rounds of replicas]
# ~~~~~~~~~~~~~~~~~~~~~~~~~
# All ranks copy the same snapshot to their peers, one at a time. A state can take longer to its
# peer than a step takes. If each rank copied its newest snapshot whenever its last copy has ended,
# the ranks' copies would be of different steps, and no restart could use them. So the ranks decide
# by votes, as they do for snapshots and persistence:
#
#     decided Y ─▶ copied and sealed, with `replicate` ─▶ each daemon copies Y to its peer
#         ▲                                                      │ ended there: vote 0
#         └── the sum of the votes on Z is 0: decided Z ◀────────┘ else: vote REPLICA_BUSY
#
# Until then the daemons keep Y, and the step decided before it, in their own slots as well: after
# the loss of a node its peer has the node's state, and every other node must still have the same
# step in its own memory (`megascale_checkpoint/memory/slots.py`).
#
# On CUDA a vote is cast before the sum of the vote before was read. A vote does not count if a step
# was decided in between, because it says nothing about that step. All ranks cast and read votes in
# the same order, so they discard the same ones.

MUST_SKIP = 1
# A rank adds STORE_BUSY while its store is busy with an earlier state, and REPLICA_BUSY while its
# last copy to the peer has not ended. The counts stay apart in the sum for fewer ranks than
# STORE_BUSY, and the sum is exact in float64.
STORE_BUSY = 1 << 17
REPLICA_BUSY = 1 << 34
# Rank 0 adds this if the job is to save and end early. The sum of all four stays exact.
LEAVE = 1 << 51
MOST_INTERVAL_IN_FLIGHT = 2  # steps by which a snapshot is requested before the last was decided
MOST_STEPS_AHEAD = 8  # steps between the request for a slot and the vote, for the answer to arrive


@dataclass(frozen=True, slots=True)
class Votes:
    """The sum of the ranks' votes: ranks that must skip, busy stores, busy copies, an early end."""

    must_skip: int
    store_busy: int
    replica_busy: int = 0
    leave: bool = False

    @classmethod
    def of(cls, total: int) -> Votes:
        """The votes from their sum."""
        counts, leave = total % LEAVE, total >= LEAVE
        counts, replica_busy = counts % REPLICA_BUSY, counts // REPLICA_BUSY
        return cls(counts % STORE_BUSY, counts // STORE_BUSY, replica_busy, leave)


class Cadence:
    """The steps that get a snapshot in memory, and those whose snapshot is persisted.

    Args:
        snapshot_interval: steps between snapshots; 0: only after the last step.
        persist_interval: steps between saves, a multiple of ``snapshot_interval``.
        last_step: it always gets a snapshot that is persisted.
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
        """The last step of the run, as far as it is decided."""
        return self._last

    def end_at(self, step: int) -> None:
        """Let the run end early, with ``step``."""
        self._last = step

    def go_on(self) -> None:
        """Take back an early end."""
        self._last = self._planned

    def due(self, step: int) -> bool:
        """Whether ``step`` has a snapshot."""
        interval = self._snapshot_interval
        return step == self._last or (
            0 < step < self._last and bool(interval) and not step % interval
        )

    def subject(self, step: int) -> int | None:
        """The step whose snapshot the ranks vote on in ``step``: the next, or the last itself."""
        if step == self._last:
            return step
        following = step + 1
        return following if following < self._last and self.due(following) else None

    def ahead(self, step: int) -> int | None:
        """The step for which a slot can be requested after ``step``, before its vote."""
        interval = self._snapshot_interval
        if not interval:
            return None
        # At most interval - 1: with a snapshot at every step, an earlier request would only hold
        # one more slot.
        lead = min(MOST_STEPS_AHEAD, interval - 1)
        following = (step // interval + 1) * interval
        return following if step < following - 1 <= step + lead and following < self._last else None

    def persists(self, step: int, votes: Votes) -> bool:
        """True if all ranks persist the snapshot of ``step``, which all of them take.

        If there are more snapshots than saves, a due save takes the first snapshot at which every
        store has finished the save before.
        """
        if step != self._last:
            interval = self._persist_interval
            if not interval or step // interval <= self._persisted // interval:
                return False
            # If every snapshot is persisted, some steps apart, a busy store does not matter:
            # snapshots queue in the slots.
            if votes.store_busy and (self._snapshot_interval < interval or interval == 1):
                return False
        self._persisted = step
        return True


class Phase(enum.Enum):
    """The phase of a snapshot."""

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
        """True if a slot must be requested now: it was not requested before, or was refused."""
        if self._abstains():
            return False
        known = self._steps.get(step)
        if known is not None and known.phase is not Phase.REFUSED:
            return False
        self._steps[step] = _Snapshot(Phase.ASKED)
        return True

    def granted(self, step: int, slot: int, *, store_ready: bool) -> int | None:
        """Note that the daemon has reserved ``slot``; returns the slot if it must be given back."""
        known = self._steps.get(step)
        if known is None or known.phase is not Phase.ASKED:
            return slot  # the vote has passed, or the step
        known.phase = Phase.GRANTED
        known.slot = slot
        known.store_ready = store_ready
        return None

    def refused(self, step: int) -> None:
        """Note that the daemon has no free slot."""
        known = self._steps.get(step)
        if known is not None and known.phase is Phase.ASKED:
            known.phase = Phase.REFUSED

    def awaited(self, step: int) -> bool:
        """True if the answer for ``step`` has not arrived yet."""
        known = self._steps.get(step)
        return known is not None and known.phase is Phase.ASKED

    def vote(self, step: int) -> int:
        """This rank's vote on the snapshot of ``step``; without a slot the rank must skip."""
        known = self._steps.get(step)
        if self._abstains():
            self._skipped.clear()
            return MUST_SKIP
        if known is None or known.phase is not Phase.GRANTED:
            self._steps.pop(step, None)
            return MUST_SKIP
        return 0 if known.store_ready else STORE_BUSY

    def skip(self, step: int) -> int | None:
        """Skip ``step``, as all ranks do; returns the slot to give back."""
        known = self._steps.pop(step, None)
        self._skipped.append(step)
        return known.slot if known is not None and known.phase is Phase.GRANTED else None

    def launch(self, step: int, *, persist: bool, replicate: bool = False) -> int | None:
        """Begin the snapshot of ``step``; returns its slot, or None if none was reserved here."""
        known = self._steps.get(step)
        self._skipped.clear()
        if known is None or known.phase is not Phase.GRANTED:
            return None
        known.phase = Phase.COPYING
        known.persist = persist
        known.replicate = replicate
        return known.slot

    def copied(self, step: int) -> None:
        """Note that the copy of ``step`` has ended."""
        if step in self._steps:
            self._steps[step].copied = True

    def settle(self, step: int, *, finite: bool) -> None:
        """Note the result of ``step``."""
        known = self._steps.get(step)
        if known is not None and known.phase is Phase.COPYING:
            known.finite = finite

    def copying(self) -> list[int]:
        """Steps whose copy was started and that are not sealed yet, oldest first."""
        return sorted(s for s, known in self._steps.items() if known.phase is Phase.COPYING)

    def settled(self, step: int) -> bool:
        """True if the result of ``step``, whose copy was started, is known."""
        known = self._steps.get(step)
        return known is not None and known.finite is not None

    def next_seal(self) -> ToSeal | None:
        """The oldest snapshot, if it can be sealed; the slot is the daemon's from now on."""
        # In the order of the steps, because a restart restores the newest sealed slot.
        for step in self.copying()[:1]:
            known = self._steps[step]
            if known.copied and known.finite is not None:
                del self._steps[step]
                return ToSeal(step, known.slot, known.finite, known.persist, known.replicate)
        return None

    def _abstains(self) -> bool:
        """True if no rank takes part in the next vote, because two votes in a row were skipped.

        Suppose that a rank has one free slot and requests it at every step, before it was given
        back. Then it gets the slot at every second step. Other ranks may get theirs at the steps
        between, and all would skip for ever. After a vote without any slot all ranks request one at
        the same step again. All ranks skip the same steps, so they abstain from the same vote.
        """
        last = self._skipped[-2:]
        return len(last) == 2 and last[1] - last[0] <= MOST_INTERVAL_IN_FLIGHT

    def lose(self) -> None:
        """Forget all snapshots: the daemon is gone, and every slot with it."""
        self._steps.clear()


class ReplicaRounds:
    """One rank's part in Note [Rounds of replicas]; without ``enabled`` nothing is copied.

    Attributes:
        count: number of steps decided so far.
    """

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self.count = 0
        self._decided = 0  # the newest step that was decided
        self._cast: dict[int, int] = {}  # by the step of a vote: the decided step when it was cast
        self._unsealed = 0  # the decided step, until its seal was sent to the daemon
        # The answer to a question may arrive after the next step was sealed: the number shows it.
        self._question = 0
        self._ended = False  # at first the daemon may still copy the restored state

    def vote(self, step: int) -> int:
        """This rank's part in the vote on the snapshot of ``step``."""
        if not self._enabled:
            return 0
        self._cast[step] = self._decided
        return 0 if self._ended and not self._unsealed else REPLICA_BUSY

    def decide(self, step: int, votes: Votes) -> bool:
        """True if the snapshot of ``step``, already voted on, is copied to the peers."""
        cast = self._cast.pop(step, None)
        if cast != self._decided or votes.must_skip or votes.replica_busy or not self._enabled:
            return False
        self._decided = self._unsealed = step
        self.count += 1
        self._next_question()
        return True

    def sealed(self) -> None:
        """Note that the decided step's seal was sent: only answers from now on count."""
        self._unsealed = 0
        self._next_question()

    def lost(self) -> None:
        """Note that the daemon is gone, or will never receive the decided step."""
        self._unsealed = 0
        self._next_question()

    @property
    def question(self) -> int:
        """The number of a question to the daemon that is sent now: has its copy ended?"""
        return self._question

    def answered(self, question: int, *, ended: bool) -> None:
        """Take the daemon's answer to a question."""
        if question == self._question:
            self._ended = ended

    def _next_question(self) -> None:
        self._question = self._question + 1
        self._ended = False
