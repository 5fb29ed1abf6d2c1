"""Which steps the ranks copy to their peers: pure, so ranks, daemons and peers run here in step."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st
from tests.harness.properties import examples

from megascale_checkpoint.memory.slots import SlotSeal, SlotTable
from megascale_job.sizes.memory import snapshots_in_flight
from megascale_trainer.save.snapshot_schedule import (
    REPLICA_BUSY,
    Cadence,
    ReplicaRounds,
    SnapshotSchedule,
    Votes,
)

STEPS, RANKS = 80, 3


class Rank:
    """A rank, its daemon, and what the peer keeps of it: two states, the older one is overwritten.

    Answers of the daemon, copies into slots and copies to the peer take as long as ``chance`` says.
    """

    def __init__(self, interval: int, slots: int, chance: random.Random) -> None:
        self.schedule, self.rounds = SnapshotSchedule(), ReplicaRounds(enabled=True)
        self.table, self.chance = SlotTable(slots), chance
        self.cadence = Cadence(
            snapshot_interval=interval, persist_interval=0, last_step=10**6, done=0
        )
        self.asked: list[int] = []
        self.questions: list[int] = []
        self.writing: list[int] = []  # steps that are copied into a slot
        self.copying = 0  # the step that is on its way to the peer
        self.peer: list[int] = []
        self.failed = False

    def vote(self, step: int) -> int:
        if self.schedule.ask(step):
            self.asked.append(step)
        if self.chance.random() < 0.9:
            self.answer()
        return self.schedule.vote(step) + self.rounds.vote(step)

    def answer(self) -> None:
        """The daemon answers what it was asked, in order."""
        for step in self.asked:
            slot, unneeded = self.table.acquire(step), None
            if slot is None:
                self.schedule.refused(step)
            else:
                unneeded = self.schedule.granted(step, slot, store_ready=True)
            if unneeded is not None:
                self.table.release(unneeded)
        for question in self.questions:
            self.rounds.answered(question, ended=self.table.replica_ended)
        self.asked, self.questions = [], []

    def ask_whether_it_ended(self) -> None:
        if not self.questions:
            self.questions.append(self.rounds.question)

    def take(self, step: int, votes: Votes) -> bool:
        replicate = self.rounds.decide(step, votes)
        if votes.must_skip:
            slot = self.schedule.skip(step)
            if slot is not None:
                self.table.release(slot)
        elif self.schedule.launch(step, persist=False, replicate=replicate) is not None:
            self.writing.append(step)
        return replicate

    def seal(self) -> None:
        while self.writing and self.chance.random() < 0.8:
            self.schedule.copied(self.writing.pop(0))
        while (found := self.schedule.next_seal()) is not None:
            self.table.begin_seal(found.slot, found.step, persist=False, replicate=found.replicate)
            self.table.finish_seal(found.slot, SlotSeal(1, found.step, "", (), {}))
            if found.replicate:
                self.rounds.sealed()

    def send(self, copies: float, failures: float) -> None:
        """Copies to the peer begin, and end in a share ``copies`` of the steps."""
        slot = self.table.to_replicate()
        if not self.copying and slot is not None and slot.seal is not None:
            self.copying, self.peer = slot.seal.step, self.peer[-1:]
        elif self.copying and self.chance.random() < copies:
            assert slot is not None and slot.seal is not None and slot.seal.step == self.copying
            slot.replicate = False
            self.failed = self.chance.random() < failures
            self.peer += [] if self.failed else [self.copying]
            self.copying = 0

    def has(self) -> set[int]:
        return {seal.step for seal in self.table.sealed()}


def common_steps(ranks: list[Rank], lost: Rank) -> set[int]:
    """What a restart finds without the node of ``lost``: a replica of its own, the others' slots.

    The peer of another rank may be the lost node, so its replica does not count.
    """
    found = set(lost.peer)
    for rank in ranks:
        found &= rank.has() if rank is not lost else found
    return found


@given(
    seed=st.integers(0, 1 << 32),
    interval=st.sampled_from([1, 1, 2, 5]),
    fewer_slots=st.integers(0, 3),
    late=st.booleans(),
    copies=st.sampled_from([0.05, 0.2, 0.7]),
    failures=st.sampled_from([0.0, 0.0, 0.1]),
)
@examples(150)
def test_all_ranks_copy_the_same_steps_and_the_loss_of_a_node_leaves_one_in_all_memories(
    seed: int, interval: int, fewer_slots: int, late: bool, copies: float, failures: float
) -> None:
    """Where a copy takes longer than a step, too. ``late``: results are read one step later."""
    chance = random.Random(seed)
    slots = max(4, snapshots_in_flight(interval) + 4 - fewer_slots)
    ranks = [Rank(interval, slots, chance) for _ in range(RANKS)]
    votes: dict[int, int] = {}
    rounds: list[int] = []
    for step in range(1, STEPS + 1):
        subject = ranks[0].cadence.subject(step)
        total = sum(rank.vote(subject) for rank in ranks) if subject is not None else 0
        if not late and subject is not None:
            votes[subject] = total
        for rank in ranks:
            rank.schedule.settle(step - 1, finite=True)
            rank.ask_whether_it_ended()
            rank.seal()
        if step in votes:
            decided = {rank.take(step, Votes.of(votes[step])) for rank in ranks}
            assert len(decided) == 1, "the ranks copy different steps"
            if decided == {True}:
                assert not any(rank.copying for rank in ranks), "the copy before has not ended"
                rounds.append(step)
        if late and subject is not None:
            votes[subject] = total
        for rank in ranks:
            rank.send(copies, failures)
            rank.answer()
        if len(rounds) > 1 and not failures:
            found = [common_steps(ranks, rank) for rank in ranks]
            assert all(found), f"after {rounds}: {[rank.has() for rank in ranks]}"
    if copies > 0.5 and interval == 1:
        assert len(rounds) > 5, "copies that end are followed by others"


def test_a_vote_that_was_cast_before_a_step_was_decided_says_nothing_about_it() -> None:
    rounds = ReplicaRounds(enabled=True)
    assert rounds.vote(5) == REPLICA_BUSY, "the daemon may still copy what was restored"
    rounds.answered(rounds.question, ended=True)
    assert rounds.vote(6) == rounds.vote(7) == 0
    assert rounds.decide(6, Votes(0, 0, 0)) and not rounds.decide(7, Votes(0, 0, 0))
    assert rounds.vote(8) == REPLICA_BUSY


def test_an_answer_from_before_the_seal_says_nothing_about_the_step() -> None:
    rounds = ReplicaRounds(enabled=True)
    rounds.answered(rounds.question, ended=True)
    early = rounds.question
    rounds.vote(5)
    assert rounds.decide(5, Votes(0, 0, 0))
    rounds.answered(early, ended=True)
    before_the_seal = rounds.question
    rounds.sealed()
    rounds.answered(before_the_seal, ended=True)
    assert rounds.vote(6) == REPLICA_BUSY
    rounds.answered(rounds.question, ended=True)
    assert rounds.vote(7) == 0


def test_a_job_without_replicas_votes_and_copies_nothing() -> None:
    rounds = ReplicaRounds(enabled=False)
    assert rounds.vote(5) == 0 and not rounds.decide(5, Votes(0, 0, 0))
