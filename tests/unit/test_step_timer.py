"""Timers of a rank's steps: what is measured at each level, in which step, and garbage."""

from __future__ import annotations

import contextlib
import gc
import time

import pytest
import torch

from megascale_common.node.spans.ops import (
    BACKWARD,
    DATA_WAIT,
    DISPATCH,
    EXPERT_SHARE,
    EXPERTS,
    FORWARD,
    GARBAGE,
    HOT_EXPERT,
    OPTIMIZER,
    STEP,
    Op,
    OpRegistry,
    figure_of,
)
from megascale_common.node.spans.record import (
    DEVICE_TIMED,
    NO_MICRO_BATCH,
    SUMMED,
    Span,
    chunk_of,
    flags_of,
)
from megascale_trainer.telemetry.timer import (
    PHASES_MICRO_BATCHES,
    DeviceTimer,
    HostTimer,
    StepTimer,
    step_timer,
)

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


def with_experts(timer: StepTimer, layers: int, micro_batches: int) -> None:
    """Passes through ``layers`` layers; a backward has twice as many pieces as a forward."""
    for number in range(micro_batches):
        for op, passes in ((FORWARD, 1), (BACKWARD, 2)):
            with timer.span(op, number, 3):
                for _ in range(layers * passes):
                    with timer.span(DISPATCH), timer.span(Op("all_to_all", "collective", "ep")):
                        time.sleep(0.001)
                    with timer.span(EXPERTS):
                        time.sleep(0.002)


def test_the_parts_of_all_layers_are_one_span_in_each_measured_forward_and_backward() -> None:
    ring = Kept()
    timer = step_timer(ring, "phases", CPU)
    timer.begin_step(7)
    with timer.span(EXPERTS):
        pass  # outside of a forward it is no part of one
    with_experts(timer, 3, PHASES_MICRO_BATCHES + 2)
    timer.close()
    for op, least_ns in ((EXPERTS, 2_000_000), (DISPATCH, 1_000_000)):
        parts = ring.of(op)
        assert [span.micro_batch for span in parts] == [0, 0, 1, 1]
        assert [span.seq for span in parts] == [0, 1, 2, 3]
        assert {chunk_of(span.aux) for span in parts} == {3}
        assert {flags_of(span.aux) for span in parts} == {SUMMED}
        for part, passes in zip(parts, (1, 2, 1, 2), strict=True):
            assert part.duration_ns >= 3 * passes * least_ns
    assert "all_to_all" not in {op.name for op in ring.registry.ops()}, "its time is dispatch's"
    around = ring.of(FORWARD)[0]
    inside = ring.of(DISPATCH)[0], ring.of(EXPERTS)[0]
    assert sum(part.duration_ns for part in inside) <= around.duration_ns
    assert all(part.start_ns >= around.start_ns for part in inside)
    assert flags_of(around.aux) == 0


def test_after_a_part_that_failed_and_in_an_evaluation_the_timer_measures_as_before() -> None:
    ring = Kept()
    timer = step_timer(ring, "phases", CPU)
    timer.begin_step(1)
    with contextlib.suppress(ValueError), timer.span(FORWARD, 0), timer.span(EXPERTS):
        raise ValueError
    with timer.paused():
        with_experts(timer, 1, 1)
    with timer.span(FORWARD, 1):
        pass
    timer.close()
    assert [span.micro_batch for span in ring.of(FORWARD)] == [0, 1]
    assert len(ring.of(EXPERTS)) == 1 and DISPATCH not in ring.registry.ops()


def test_a_figure_belongs_to_its_own_step() -> None:
    ring = Kept()
    timer = HostTimer(ring, "phases")
    timer.begin_step(9)
    timer.figure(EXPERT_SHARE, 8, 1.8)
    timer.figure(HOT_EXPERT, 8, 4.25, micro_batch=17, seq=5)
    timer.close()
    timer.figure(EXPERT_SHARE, 9, 1.0)
    [share], [hot] = ring.of(EXPERT_SHARE), ring.of(HOT_EXPERT)
    assert (share.step, figure_of(share.duration_ns)) == (8, 1.8)
    assert (hot.step, hot.micro_batch, hot.seq, figure_of(hot.duration_ns)) == (8, 17, 5, 4.25)


class Event:
    """An event of a device that is as fast as its host: it passes when it is recorded."""

    clock_ms = 0.0

    def record(self) -> None:
        Event.clock_ms += 1.0  # each event is a millisecond after the one before
        self.at_ms = Event.clock_ms

    def synchronize(self) -> None:
        """Has passed."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Event) -> float:
        return other.at_ms - self.at_ms


def test_on_a_device_the_pieces_of_a_part_are_pairs_of_events(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Event] = []

    def event(timed: bool = False) -> Event:
        assert timed
        made.append(Event())
        return made[-1]

    monkeypatch.setattr("megascale_trainer.telemetry.timer.cuda_event", event)
    capturing = False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    ring = Kept()
    timer = DeviceTimer(ring, "phases", CPU)
    for step in range(1, 21):
        timer.begin_step(step)
        with timer.span(FORWARD, 0, 3):
            for _ in range(3):
                with timer.span(DISPATCH):
                    pass
                with timer.span(EXPERTS):
                    timer._recorded()  # work of a millisecond
            capturing = True
            with timer.span(EXPERTS):
                pass
            capturing = False
    timer.close()
    assert [span.step for span in ring.of(EXPERTS)] == list(range(1, 21))
    for forward, dispatch, experts in zip(*map(ring.of, (FORWARD, DISPATCH, EXPERTS)), strict=True):
        assert (dispatch.duration_ns, experts.duration_ns) == (3_000_000, 6_000_000)
        assert forward.duration_ns > dispatch.duration_ns + experts.duration_ns
        assert dispatch.start_ns > forward.start_ns and dispatch.micro_batch == 0
        assert chunk_of(experts.aux) == 3 and flags_of(experts.aux) == SUMMED | DEVICE_TIMED
    # Events are used again: three steps of 14 spans and an anchor, and those of the test.
    assert len(made) < 3 * 20 + 20 * 3 + 20
