"""The order to save and end early, in the trainer: one vote, one last step, for all ranks."""

from __future__ import annotations

import itertools

import pytest

from megascale_common.node import framing
from megascale_common.node.messages import Leave, NotLeft, Stay
from megascale_trainer.process.step_loop import LeaveOrder
from megascale_trainer.save.snapshot_schedule import LEAVE, MUST_SKIP, STORE_BUSY, Cadence, Votes
from megascale_trainer.telemetry.profiling import ORDERS


def test_only_rank_0_votes_and_each_order_once_it_failed_no_more() -> None:
    failed: list[NotLeft] = []
    first, other = LeaveOrder(0, failed.append), LeaveOrder(1, failed.append)
    for order in (first, other):
        assert order.vote == 0
        order.take(Leave(id="suspend-1"))
    assert (first.vote, other.vote) == (LEAVE, 0)
    first.fail("the disk is full")
    assert failed == [NotLeft(id="suspend-1", problem="the disk is full")]
    assert first.vote == 0
    first.take(Leave(id="suspend-2"))
    assert first.vote == LEAVE
    first.take(Stay())
    assert first.vote == 0
    first.fail("nobody asked")
    assert len(failed) == 1
    with pytest.raises(framing.FramingError, match="'leave' and 'stay', not 'dance'"):
        ORDERS.read({"kind": "dance"})


@pytest.mark.parametrize("skips", [0, 1, 12_288])
@pytest.mark.parametrize("busy", [0, 1, 12_288])
@pytest.mark.parametrize("leave", [False, True])
def test_the_three_counts_stay_apart_in_a_sum_of_floats(skips: int, busy: int, leave: bool) -> None:
    votes = itertools.chain([MUST_SKIP] * skips, [STORE_BUSY] * busy, [LEAVE] * leave)
    total = sum((float(vote) for vote in votes), 0.0)
    assert Votes.of(round(total)) == Votes(skips, busy, leave=leave)


@pytest.mark.parametrize("interval", [0, 1, 3, 10])
def test_a_run_that_ends_early_has_a_persisted_snapshot_of_its_last_step(interval: int) -> None:
    cadence = Cadence(snapshot_interval=interval, persist_interval=10, last_step=100, done=0)
    cadence.end_at(17)
    assert cadence.last == 17 and cadence.due(17) and cadence.subject(17) == 17
    assert cadence.subject(16) is None, "its vote is about itself"
    assert cadence.ahead(16) is None and cadence.ahead(12) != 17
    assert cadence.persists(17, Votes(0, 5)), "also where a store is busy"
    cadence.go_on()
    assert cadence.last == 100 and cadence.due(17) == (bool(interval) and 17 % interval == 0)
