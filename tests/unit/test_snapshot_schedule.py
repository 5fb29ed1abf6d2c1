"""The schedule of snapshots: pure, so every order of events is tried on several ranks at once."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.harness.properties import examples

from megascale_checkpoint.memory.slots import SlotSeal, SlotTable
from megascale_job.sizes.memory import snapshots_in_flight
from megascale_trainer.save.snapshot_schedule import (
    LEAVE,
    MUST_SKIP,
    REPLICA_BUSY,
    STORE_BUSY,
    Cadence,
    SnapshotSchedule,
    Votes,
)

LAST = 1000
RANK = st.integers(0, 2)


class Rank:
    """A rank's schedule beside the slot table of its daemon; messages between them may be late."""

    def __init__(self, interval: int, persist: int, slots: int) -> None:
        self.schedule, self.table = SnapshotSchedule(), SlotTable(slots)
        self.cadence = Cadence(
            snapshot_interval=interval, persist_interval=persist, last_step=LAST, done=0
        )
        self.asked: list[int] = []  # Acquires that the daemon has not answered
        self.held: set[int] = set()  # slots that the trainer was given and has not returned
        self.writing: dict[int, int] = {}  # by slot: step
        self.persisted: list[int] = []

    def answer(self) -> None:
        step = self.asked.pop(0)
        slot = self.table.acquire(step)
        if slot is None:
            self.schedule.refused(step)
            return
        assert slot not in self.held, "a slot was given twice"
        self.held.add(slot)
        self.give_back(self.schedule.granted(step, slot, store_ready=self.table.store_ready))

    def give_back(self, slot: int | None) -> None:
        if slot is not None:
            assert slot not in self.writing, "a slot was given back while it is copied into"
            self.held.remove(slot)
            self.table.release(slot)

    def seal(self) -> None:
        while (found := self.schedule.next_seal()) is not None:
            assert self.writing.pop(found.slot) == found.step
            self.held.remove(found.slot)
            self.table.begin_seal(found.slot, found.step, persist=found.persist)
            self.table.finish_seal(found.slot, SlotSeal(1, found.step, "", (), {}))

    def lose(self) -> None:
        self.schedule.lose()
        self.table = SlotTable(len(self.table.slots))
        self.asked, self.held, self.writing = [], set(), {}


class Ranks(RuleBasedStateMachine):
    """Three ranks in step; daemons answer, copies end and stores persist whenever they like."""

    @initialize(interval=st.integers(1, 4), factor=st.integers(0, 3), slots=st.integers(2, 5))
    def start(self, interval: int, factor: int, slots: int) -> None:
        self.ranks = [Rank(interval, interval * factor, slots) for _ in range(3)]
        self.step = 1  # the next to be launched
        self.decided: dict[int, int] = {}
        self.unread: list[int] = []
        self.ending: set[tuple[int, int]] = set()  # (rank, step) of copies that run

    @rule()
    def launch_a_step(self) -> None:
        """Votes, then the result of the step before, then the snapshot of this one."""
        step, total = self.step, 0
        for rank in self.ranks:
            subject = rank.cadence.subject(step)
            if subject is None:
                continue
            if rank.schedule.ask(subject):
                rank.asked.append(subject)
            total += rank.schedule.vote(subject)
        if (subject := self.ranks[0].cadence.subject(step)) is not None:
            self.decided[subject] = total
        for before in self.unread:
            for rank in self.ranks:
                rank.schedule.settle(before, finite=True)
        self.unread = [step]
        self.step += 1
        if step not in self.decided:
            return
        votes = Votes.of(self.decided.pop(step))
        persists = set()
        for number, rank in enumerate(self.ranks):
            if votes.must_skip:
                rank.give_back(rank.schedule.skip(step))
                continue
            persist = rank.cadence.persists(step, votes)
            persists.add(persist)
            slot = rank.schedule.launch(step, persist=persist)
            if slot is not None:
                assert slot in rank.held and slot not in rank.writing
                rank.writing[slot] = step
                self.ending.add((number, step))
        assert len(persists) <= 1, "the ranks persist different steps"

    @rule(number=RANK)
    def ask_ahead(self, number: int) -> None:
        rank = self.ranks[number]
        subject = rank.cadence.ahead(self.step - 1)
        if subject is not None and rank.schedule.ask(subject):
            rank.asked.append(subject)

    @rule(number=RANK)
    def a_daemon_answers(self, number: int) -> None:
        if self.ranks[number].asked:
            self.ranks[number].answer()

    @precondition(lambda self: self.ending)
    @rule(data=st.data())
    def a_copy_ends(self, data: st.DataObject) -> None:
        number, step = data.draw(st.sampled_from(sorted(self.ending)))
        self.ending.remove((number, step))
        self.ranks[number].schedule.copied(step)
        self.ranks[number].seal()

    @rule(number=RANK)
    def a_store_persists(self, number: int) -> None:
        rank = self.ranks[number]
        slot = rank.table.next_pending()
        if slot is not None and slot.seal is not None:
            slot.pending = False
            rank.persisted.append(slot.seal.step)

    @rule(number=RANK)
    def a_daemon_is_lost(self, number: int) -> None:
        self.ranks[number].lose()
        self.ending = {(other, step) for other, step in self.ending if other != number}

    @invariant()
    def nothing_is_written_that_the_daemon_may_read(self) -> None:
        for rank in getattr(self, "ranks", ()):
            for slot in rank.held:
                assert rank.table.at(slot).phase.value == "writing"

    @invariant()
    def persisted_in_order(self) -> None:
        for rank in getattr(self, "ranks", ()):
            assert rank.persisted == sorted(rank.persisted)

    def teardown(self) -> None:
        """Once all has ended, no slot is held any more."""
        for number, rank in enumerate(getattr(self, "ranks", ())):
            while rank.asked:
                rank.answer()
            for step in [*self.decided, *range(self.step, self.step + 10)]:
                rank.give_back(rank.schedule.skip(step))
            for step in rank.schedule.copying():
                rank.schedule.settle(step, finite=True)
                rank.schedule.copied(step)
                self.ending.discard((number, step))
                rank.seal()
            assert not rank.held and not rank.writing, "a slot has leaked"


Ranks.TestCase.settings = settings(examples(80), stateful_step_count=60)
TestRanks = Ranks.TestCase


def test_an_answer_after_the_vote_gives_its_slot_back() -> None:
    schedule = SnapshotSchedule()
    assert schedule.ask(5) and not schedule.ask(5)
    assert schedule.vote(5) == MUST_SKIP
    assert schedule.granted(5, 2, store_ready=True) == 2


def test_of_two_answers_for_a_step_that_was_asked_for_again_one_is_given_back() -> None:
    schedule = SnapshotSchedule()
    assert schedule.ask(5) and schedule.vote(5) == MUST_SKIP and schedule.ask(5)
    assert schedule.granted(5, 1, store_ready=True) is None
    assert schedule.granted(5, 2, store_ready=True) == 2
    assert schedule.launch(5, persist=True) == 1


def test_a_refused_step_is_asked_for_again() -> None:
    schedule = SnapshotSchedule()
    assert schedule.ask(5)
    schedule.refused(5)
    assert schedule.ask(5)
    assert schedule.granted(5, 1, store_ready=False) is None
    assert schedule.vote(5) == STORE_BUSY


def test_seals_follow_the_order_of_the_steps() -> None:
    schedule = SnapshotSchedule()
    for step in (1, 2):
        schedule.ask(step)
        schedule.granted(step, step, store_ready=True)
        assert schedule.launch(step, persist=False) == step
        schedule.settle(step, finite=True)
    schedule.copied(2)
    assert schedule.next_seal() is None
    schedule.copied(1)
    sealed = [schedule.next_seal(), schedule.next_seal(), schedule.next_seal()]
    assert [found.step if found else None for found in sealed] == [1, 2, None]


def test_all_counts_of_a_vote_survive_the_sum_over_all_ranks() -> None:
    total = sum([MUST_SKIP] * 12_288 + [STORE_BUSY] * 12_287 + [REPLICA_BUSY] * 12_286 + [LEAVE])
    assert Votes.of(total) == Votes(12_288, 12_287, 12_286, leave=True)
    assert float(total) == total and float(total - 1) == total - 1


@pytest.mark.parametrize(
    ("interval", "persist", "busy", "expected"),
    [
        (1, 10, (), [10, 20, 30]),
        (1, 10, (10, 11, 12), [13, 20, 30]),  # the newest as soon as the stores are ready
        (1, 10, tuple(range(10, 25)), [25, 30]),  # what was missed is not made up for
        (5, 10, (10,), [15, 20, 30]),
        (1, 1, (2, 3, 5), [1, 4, *range(6, 36)]),
        (5, 5, (10,), [5, 10, 15, 20, 25, 30, 35]),  # every snapshot is persisted: they queue up
        (1, 0, (), []),
    ],
)
def test_the_newest_snapshot_is_persisted_as_soon_as_every_store_is_ready(
    interval: int, persist: int, busy: tuple[int, ...], expected: list[int]
) -> None:
    cadence = Cadence(snapshot_interval=interval, persist_interval=persist, last_step=36, done=0)
    steps = [step for step in range(1, 36) if cadence.due(step)]
    found = [step for step in steps if cadence.persists(step, Votes(0, int(step in busy)))]
    assert found == expected
    assert cadence.due(36) and cadence.persists(36, Votes(0, 3))


def test_every_second_step_and_every_step_have_more_slots_in_flight() -> None:
    assert [snapshots_in_flight(interval) for interval in (0, 1, 2, 3, 100)] == [1, 3, 2, 1, 1]
