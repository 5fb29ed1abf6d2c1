"""The slot state machine: a slot that is needed is never overwritten, in any order of calls."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.harness.properties import examples

from megascale_checkpoint.memory.slots import SlotPhase, SlotSeal, SlotTable
from megascale_common.service.errors import RequestError


def seal(step: int, attempt: int = 1) -> SlotSeal:
    return SlotSeal(attempt, step, "digest", (), {})


class SlotMachine(RuleBasedStateMachine):
    """Random calls, with a model of what must survive: the newest seal, pending and read slots."""

    @initialize(count=st.integers(2, 4))
    def start(self, count: int) -> None:
        self.table = SlotTable(count)
        self.step, self.attempt = 0, 1
        self.writing: list[int] = []
        self.lent: list[int] = []
        self.persisting: list[tuple[int, SlotSeal]] = []
        self.persisted: list[tuple[int, int]] = []
        self.newest: SlotSeal | None = None

    @rule()
    def acquire(self) -> None:
        self.step += 1
        before = {s.index: (s.pending, s.busy, s.seal) for s in self.table.slots}
        index = self.table.acquire(self.step)
        if index is None:
            return
        pending, busy, old = before[index]
        assert not pending and not busy and index not in self.writing
        assert old is None or old is not self.newest
        self.writing.append(index)

    @precondition(lambda self: self.writing)
    @rule(persist=st.booleans())
    def seal(self, persist: bool) -> None:
        index = self.writing.pop(0)
        step = self.table.at(index).step
        self.table.begin_seal(index, step, persist=persist)
        record = seal(step, self.attempt)
        self.table.finish_seal(index, record)
        if self.newest is None or record.age > self.newest.age:
            self.newest = record

    @precondition(lambda self: self.writing)
    @rule()
    def release(self) -> None:
        self.table.release(self.writing.pop())

    @precondition(lambda self: not self.persisting)
    @rule()
    def begin_persist(self) -> None:
        slot = self.table.next_pending()
        if slot is not None and slot.seal is not None:
            slot.busy += 1
            self.persisting.append((slot.index, slot.seal))

    @precondition(lambda self: self.persisting)
    @rule()
    def end_persist(self) -> None:
        index, record = self.persisting.pop()
        slot = self.table.at(index)
        assert slot.seal is record, "a slot was reused while it was being persisted"
        slot.busy, slot.pending = slot.busy - 1, False
        self.persisted.append(record.age)

    @rule()
    def lend_newest(self) -> None:
        if self.newest is not None:
            slot = self.table.find(self.newest.attempt, self.newest.step, "digest")
            assert slot is not None
            self.table.lend(slot.index)
            self.lent.append(slot.index)

    @precondition(lambda self: self.lent)
    @rule()
    def give_back(self) -> None:
        self.table.release(self.lent.pop())

    @precondition(lambda self: not self.writing)
    @rule()
    def new_attempt(self) -> None:
        self.attempt += 1
        self.table.supersede(self.attempt)
        assert self.table.next_pending() is None

    @invariant()
    def newest_survives(self) -> None:
        if self.newest is not None:
            assert self.table.sealed()[-1] is self.newest

    @invariant()
    def persisted_in_order(self) -> None:
        assert self.persisted == sorted(self.persisted)


SlotMachine.TestCase.settings = settings(examples(60), stateful_step_count=40)
TestSlotMachine = SlotMachine.TestCase


def test_two_slots_are_busy_until_the_older_one_is_persisted() -> None:
    table = SlotTable(2)
    for step in (1, 2):
        index = table.acquire(step)
        assert index is not None
        table.begin_seal(index, step, persist=True)
        table.finish_seal(index, seal(step))
    assert table.acquire(3) is None
    oldest = table.next_pending()
    assert oldest is not None and oldest.seal == seal(1)
    oldest.pending = False
    assert table.acquire(3) == oldest.index


def test_restore_takes_the_newest_seal_only_as_a_last_resort() -> None:
    table = SlotTable(2)
    for step in (1, 2):
        index = table.acquire(step)
        assert index is not None
        table.begin_seal(index, step, persist=False)
        table.finish_seal(index, seal(step))
    first = table.take_for_restore()
    assert [s.step for s in table.sealed()] == [2]
    second = table.take_for_restore()
    assert {first, second} == {0, 1} and not table.sealed()
    with pytest.raises(RequestError, match="no slot is free"):
        table.take_for_restore()


def test_seal_must_name_the_step_that_was_acquired() -> None:
    table = SlotTable(2)
    index = table.acquire(5)
    assert index is not None
    with pytest.raises(RequestError, match="acquire it for step 6"):
        table.begin_seal(index, 6, persist=True)
    with pytest.raises(RequestError, match="nothing to release"):
        table.release(1 - index)
    assert table.at(index).phase is SlotPhase.WRITING


def test_the_store_is_ready_once_everything_that_was_to_be_persisted_is() -> None:
    table = SlotTable(3)
    assert table.acquire(1) == 0
    assert table.store_ready
    table.begin_seal(0, 1, persist=True)
    assert not table.store_ready and table.sealing(1)
    table.finish_seal(0, seal(1))
    assert not table.store_ready and not table.sealing(1)
    table.at(0).pending = False
    assert table.store_ready


def test_an_adopted_state_keeps_its_seal_and_is_dropped_with_its_adopter() -> None:
    table = SlotTable(2)
    assert table.acquire(1) == 0
    table.begin_seal(0, 1, persist=True)
    table.finish_seal(0, seal(1))
    table.supersede(2)
    assert table.next_pending() is None
    table.adopt(0, 2)
    table.supersede(2)
    slot = table.next_pending()
    assert slot is not None and slot.seal == seal(1)
    assert table.find(1, 1, "digest") is slot, "the next attempt may still need it"
    table.supersede(3)
    assert table.next_pending() is None
