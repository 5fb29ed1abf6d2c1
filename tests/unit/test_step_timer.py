"""Timers of a rank's steps: what is measured at each level, in which step, and garbage."""

from __future__ import annotations

import gc
import time

import torch

from megascale_common.node.spans.ops import (
    BACKWARD,
    DATA_WAIT,
    FORWARD,
    GARBAGE,
    OPTIMIZER,
    STEP,
    Op,
    OpRegistry,
)
from megascale_common.node.spans.record import NO_MICRO_BATCH, Span, chunk_of
from megascale_trainer.telemetry.timer import PHASES_MICRO_BATCHES, StepTimer, step_timer

CPU = torch.device("cpu")


class Kept:
    """Keeps all spans."""

    def __init__(self) -> None:
        self.registry, self.spans = OpRegistry(), list[Span]()

    def op(self, op: Op) -> int:
        return self.registry.number(op)

    def add(self, span: Span) -> bool:
        self.spans.append(span)
        return True

    def of(self, op: Op) -> list[Span]:
        return [span for span in self.spans if span.op == self.registry.number(op)]


def one_step(timer: StepTimer, step: int, micro_batches: int) -> None:
    timer.begin_step(step)
    with timer.host_span(DATA_WAIT):
        time.sleep(0.002)
    for number in range(micro_batches):
        for op in (FORWARD, BACKWARD):
            with timer.span(op, number, 1):
                pass
    with timer.span(OPTIMIZER):
        pass


def test_phases_have_the_first_micro_batches_and_micro_batches_all() -> None:
    for level, measured in (("phases", PHASES_MICRO_BATCHES), ("micro_batches", 5)):
        ring = Kept()
        timer = step_timer(ring, level, CPU)  # type: ignore[arg-type]
        one_step(timer, 7, 5)
        one_step(timer, 8, 5)
        timer.close()
        forwards = [span for span in ring.of(FORWARD) if span.step == 7]
        assert [span.micro_batch for span in forwards] == list(range(measured))
        assert [span.seq for span in forwards] == list(range(measured))
        assert {chunk_of(span.aux) for span in forwards} == {1}
        assert [span.step for span in ring.of(OPTIMIZER)] == [7, 8]
        assert ring.of(OPTIMIZER)[0].micro_batch == NO_MICRO_BATCH
        waited = ring.of(DATA_WAIT)[0]
        assert waited.duration_ns >= 2_000_000
        first, second = ring.of(STEP)
        assert (first.step, second.step) == (7, 8)
        assert first.start_ns + first.duration_ns == second.start_ns
        assert first.start_ns <= waited.start_ns
        assert waited.start_ns + waited.duration_ns <= second.start_ns


def test_garbage_collections_are_spans_until_the_timer_is_closed() -> None:
    gc.collect()  # so that none is due by itself
    ring, before = Kept(), list(gc.callbacks)
    timer = step_timer(ring, "phases", CPU)
    timer.begin_step(1)
    gc.collect()
    assert len(ring.of(GARBAGE)) == 1 and ring.of(GARBAGE)[0].duration_ns > 0
    with timer.paused():
        gc.collect()
        with timer.span(FORWARD, 0):
            pass
    timer.close()
    assert gc.callbacks == before
    gc.collect()
    assert len(ring.of(GARBAGE)) == 1 and ring.of(FORWARD) == []


def test_level_none_measures_nothing() -> None:
    ring = Kept()
    timer = step_timer(ring, "none", CPU)
    one_step(timer, 1, 3)
    timer.close()
    assert ring.spans == []
