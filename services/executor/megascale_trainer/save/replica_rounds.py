"""Which snapshots all ranks copy to their peers: one at a time, the same on every rank. Pure.

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

from megascale_trainer.save.snapshot_schedule import REPLICA_BUSY, Votes


class ReplicaRounds:
    """One rank's part; without ``enabled`` nothing is ever copied.

    Attributes:
        count: how many steps were decided.
    """

    def __init__(self, *, enabled: bool) -> None:
        self._enabled, self.count = enabled, 0
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
        self._question, self._ended = self._question + 1, False
