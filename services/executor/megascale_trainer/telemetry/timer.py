"""Timers that are always on: spans of a rank's steps, into the ring that the agent reads.

On a CPU a span is measured by the monotonic clock. On CUDA it is a pair of events on the stream on
which its work was enqueued: see Note [Times of a device].

While a profile runs, the spans of a step are also ranges in the profiler's trace.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch.autograd.profiler import record_function

from megascale_common.node.spans import ops
from megascale_common.node.spans.ops import SUMMED_OPS, Op, figure_ns
from megascale_common.node.spans.record import (
    DEVICE_TIMED,
    NO_MICRO_BATCH,
    SUMMED,
    Span,
    pack_aux,
)
from megascale_kernels.torch_calls import cuda_event

_profiling = False


def show_spans(on: bool) -> None:
    """Turn spans in the profiler's trace on or off; called by the profiler."""
    global _profiling
    _profiling = on


class Timeline:
    """Adds up the seconds of each part of a long operation, in the order of their first use."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the body as time of ``name``."""
        began_s = time.monotonic()
        try:
            yield
        finally:
            spent_s = time.monotonic() - began_s
            self.seconds[name] = self.seconds.get(name, 0.0) + spent_s

    def __str__(self) -> str:
        return ", ".join(f"{name} {spent_s:.3f} s" for name, spent_s in self.seconds.items())


# Note [Times of a device]
# ~~~~~~~~~~~~~~~~~~~~~~~~
# A CUDA event has no time of day: only the time between two events that have passed can be read.
# The host runs ahead of the device, and must not wait for it. So the pairs of a step are read two
# steps later, if the step's last event has passed by then: one query per step, and no wait. Times
# count from an anchor event at the beginning of the step. The time of the first anchor was read
# while the device was idle; each later anchor adds its distance from the one before. The estimate
# of the first anchor is late by the time that the host took to notice it. If a step's end is seen
# to have passed before its estimated time, the chain is therefore moved back by the difference.

# Note [Parts of a forward]
# ~~~~~~~~~~~~~~~~~~~~~~~~~
# A layer with experts is measured in parts (SUMMED_OPS). A model has many layers, and a span for
# each would fill the ring within a second. So the pieces of one forward or backward are added up,
# and one span per part leaves with it: as many records, whatever the depth of the model. Pieces are
# measured only inside a forward or backward that is. Nothing inside a piece is measured by itself,
# because its time is the piece's: a collective of dispatch would count twice.

Level = Literal["none", "phases", "micro_batches"]
# At level "phases" forward and backward are measured for the first micro-batches of a step only.
PHASES_MICRO_BATCHES = 2
# Steps whose events have not passed; if there are more, the oldest is given up and counted.
MAX_STEPS_PENDING = 8


class Ring(Protocol):
    """The target of spans: :class:`megascale_common.node.spans.ring.SpanRingWriter`."""

    def op(self, op: Op) -> int:
        """The number of an operation."""

    def add(self, span: Span) -> bool:
        """Take a span, or drop and count it."""


class StepTimer:
    """Measures nothing (level "none"); the base of the other timers."""

    on = False

    def begin_step(self, step: int) -> None:
        """Begin ``step``; the step before has ended."""

    def span(
        self,
        op: Op | None,
        micro_batch: int = NO_MICRO_BATCH,
        chunk: int = 0,
        *,
        shown: str = "",
    ) -> AbstractContextManager[None]:
        """Measure the body, or on CUDA what it enqueues on the current stream.

        Args:
            op: None: the span is only shown, not measured. One of SUMMED_OPS: a piece of the
                forward or backward around it, whose micro-batch and chunk it has; see Note [Parts
                of a forward].
            shown: the name in a profiler's trace, "forward 3.0" with micro-batch and chunk; empty:
                the span is not shown there.
        """
        measured = self._measured(op, micro_batch, chunk)
        if not (_profiling and shown):
            return measured
        numbered = shown if micro_batch == NO_MICRO_BATCH else f"{shown} {micro_batch}.{chunk}"
        return _shown(numbered, measured)

    def _measured(
        self, op: Op | None, micro_batch: int, chunk: int
    ) -> AbstractContextManager[None]:
        return _NOTHING

    def host_span(self, op: Op) -> AbstractContextManager[None]:
        """Measure the body by the host's clock."""
        return _NOTHING

    def figure(
        self, op: Op, step: int, value: float, *, micro_batch: int = NO_MICRO_BATCH, seq: int = 0
    ) -> None:
        """Pass on a figure of ``step``: ``value`` is finite and at least 0."""

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Measure nothing in the body, which is not part of a step (an evaluation)."""
        before = self.on
        self.on = False
        try:
            yield
        finally:
            self.on = before

    def close(self) -> None:
        """Stop measuring after the last step."""


class HostTimer(StepTimer):
    """Spans by the monotonic clock; ``level`` is "phases" or "micro_batches".

    Garbage collections are spans too, until :meth:`close`. With ``on`` False nothing is measured.
    """

    def __init__(self, ring: Ring, level: Level) -> None:
        self.on = True
        self._ring = ring
        self._micro_batches = PHASES_MICRO_BATCHES if level == "phases" else NO_MICRO_BATCH
        self._step = 0
        self._step_began_ns = 0
        self._counts: dict[Op, int] = {}
        # The pieces of the measured forward or backward in progress; None outside of one.
        self._pieces: _Pieces | None = None
        self._in_piece = False
        self._garbage_began_ns = 0
        gc.callbacks.append(self._on_garbage)

    def begin_step(self, step: int) -> None:
        now_ns = time.monotonic_ns()
        if self._step_began_ns and self.on:
            self._add(ops.STEP, self._step_began_ns, now_ns)
        self._step = step
        self._step_began_ns = now_ns
        self._counts = {}

    def host_span(self, op: Op) -> AbstractContextManager[None]:
        return _HostSpan(self, op) if self.on else _NOTHING

    def figure(
        self, op: Op, step: int, value: float, *, micro_batch: int = NO_MICRO_BATCH, seq: int = 0
    ) -> None:
        if self.on:
            number, now_ns = self._ring.op(op), time.monotonic_ns()
            self._ring.add(Span(now_ns, figure_ns(value), step, number, micro_batch, seq))

    def close(self) -> None:
        self.begin_step(self._step + 1)
        gc.callbacks.remove(self._on_garbage)
        self.on = False

    def _measured(
        self, op: Op | None, micro_batch: int, chunk: int
    ) -> AbstractContextManager[None]:
        if op is None or self._in_piece or not self._wanted(micro_batch) or not self._can_measure():
            return _NOTHING
        if op not in SUMMED_OPS:
            return _Span(self, op, micro_batch, chunk)
        return _Piece(self, op, self._pieces)

    def _can_measure(self) -> bool:
        return True

    def _now(self) -> Any:
        return time.monotonic_ns()

    def _took(self, op: Op, micro_batch: int, chunk: int, pieces: list[tuple[Any, Any]]) -> None:
        """Add one span for all pieces, each of which begins and ends at a :meth:`_now`."""
        begin_ns = pieces[0][0]
        end_ns = begin_ns + sum(end - begin for begin, end in pieces)
        self._add(op, begin_ns, end_ns, micro_batch, chunk)

    def _wanted(self, micro_batch: int) -> bool:
        return self.on and (micro_batch == NO_MICRO_BATCH or micro_batch < self._micro_batches)

    def _seq(self, op: Op) -> int:
        number = self._counts.get(op, 0)
        self._counts[op] = number + 1
        return number

    def _add(
        self, op: Op, begin_ns: int, end_ns: int, micro_batch: int = NO_MICRO_BATCH, chunk: int = 0
    ) -> None:
        duration_ns, aux = max(end_ns - begin_ns, 0), pack_aux(chunk, flags=_flags(op))
        number = self._ring.op(op)
        seq = self._seq(op)
        self._ring.add(Span(begin_ns, duration_ns, self._step, number, micro_batch, seq, aux))

    def _on_garbage(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            self._garbage_began_ns = time.monotonic_ns()
        elif self.on and self._garbage_began_ns:
            self._add(ops.GARBAGE, self._garbage_began_ns, time.monotonic_ns())


def _flags(op: Op) -> int:
    return SUMMED if op in SUMMED_OPS else 0


# Begin and end of each piece by part: nanoseconds of the host, or events of the device.
_Pieces = dict[Op, list[tuple[Any, Any]]]


class _HostSpan:
    """A span by the host's clock, whatever the timer's is."""

    __slots__ = ("_began_ns", "_op", "_timer")

    def __init__(self, timer: HostTimer, op: Op) -> None:
        self._timer = timer
        self._op = op
        self._began_ns = 0

    def __enter__(self) -> None:
        self._began_ns = time.monotonic_ns()

    def __exit__(self, *_: object) -> None:
        self._timer._add(self._op, self._began_ns, time.monotonic_ns())


class _Span:
    """A span by the timer's clock; computation collects the pieces of its parts."""

    __slots__ = ("_began", "_chunk", "_micro_batch", "_op", "_outer", "_timer")

    def __init__(self, timer: HostTimer, op: Op, micro_batch: int, chunk: int) -> None:
        self._timer = timer
        self._op = op
        self._micro_batch = micro_batch
        self._chunk = chunk
        self._outer: _Pieces | None = None
        self._began: Any = None

    def __enter__(self) -> None:
        if self._op.kind == "compute":
            self._outer = self._timer._pieces
            self._timer._pieces = {}
        self._began = self._timer._now()

    def __exit__(self, *_: object) -> None:
        timer, place = self._timer, (self._micro_batch, self._chunk)
        timer._took(self._op, *place, [(self._began, timer._now())])
        if self._op.kind == "compute":
            parts = timer._pieces or {}
            timer._pieces = self._outer
            for op, pieces in parts.items():
                timer._took(op, *place, pieces)


class _Piece:
    """A piece of a part; ``pieces`` is None outside of a measured forward or backward."""

    __slots__ = ("_began", "_op", "_pieces", "_timer")

    def __init__(self, timer: HostTimer, op: Op, pieces: _Pieces | None) -> None:
        self._timer = timer
        self._op = op
        self._pieces = pieces
        self._began: Any = None

    def __enter__(self) -> None:
        self._timer._in_piece = True
        if self._pieces is not None:
            self._began = self._timer._now()

    def __exit__(self, *_: object) -> None:
        self._timer._in_piece = False
        if self._pieces is not None:
            self._pieces.setdefault(self._op, []).append((self._began, self._timer._now()))


@dataclass(slots=True)
class _Step:
    """The events of one step: its anchor, the pairs of each span, and the last event."""

    step: int
    anchor: Any
    spans: list[tuple[Op, int, int, int, list[tuple[Any, Any]]]] = field(default_factory=list)
    end: Any = None


class DeviceTimer(HostTimer):
    """Spans of CUDA streams by pairs of events from a pool; made while the device is idle."""

    def __init__(self, ring: Ring, level: Level, device: torch.device) -> None:
        super().__init__(ring, level)
        self._device = device
        self._pool: list[Any] = []
        self._steps: deque[_Step] = deque()
        self.given_up = 0  # steps whose events had not passed in time
        self._anchor = self._event()
        self._anchor.record()
        self._anchor.synchronize()  # once, before the first step
        self._anchor_ns = time.monotonic_ns()

    def begin_step(self, step: int) -> None:
        super().begin_step(step)
        event = self._recorded()
        if self._steps:
            self._steps[-1].end = event
        # The last two steps are left alone: the host must not wait for their events.
        while len(self._steps) > 2 and self._steps[0].end.query():
            self._read(self._steps.popleft())
        if len(self._steps) > MAX_STEPS_PENDING:
            self.given_up += 1
            lost = self._steps.popleft()
            self._free(lost)
        self._steps.append(_Step(step, event))

    def close(self) -> None:
        super().close()
        while self._steps and self._steps[0].end is not None and self._steps[0].end.query():
            self._read(self._steps.popleft())

    def _can_measure(self) -> bool:
        # In a capture: the caller measures each replay of the graph as one span.
        return bool(self._steps) and not torch.cuda.is_current_stream_capturing()

    def _now(self) -> Any:
        return self._recorded()

    def _took(self, op: Op, micro_batch: int, chunk: int, pieces: list[tuple[Any, Any]]) -> None:
        self._steps[-1].spans.append((op, micro_batch, chunk, self._seq(op), pieces))

    def _read(self, passed: _Step) -> None:
        seen_ns = time.monotonic_ns()
        self._anchor_ns += round(self._anchor.elapsed_time(passed.anchor) * 1e6)
        self._anchor = passed.anchor
        end_ns = self._anchor_ns + round(passed.anchor.elapsed_time(passed.end) * 1e6)
        self._anchor_ns -= max(end_ns - seen_ns, 0)
        for op, micro_batch, chunk, seq, pieces in passed.spans:
            begin_ns = self._anchor_ns + round(passed.anchor.elapsed_time(pieces[0][0]) * 1e6)
            duration_ns = max(round(sum(b.elapsed_time(e) for b, e in pieces) * 1e6), 0)
            number, aux = self._ring.op(op), pack_aux(chunk, flags=DEVICE_TIMED | _flags(op))
            self._ring.add(Span(begin_ns, duration_ns, passed.step, number, micro_batch, seq, aux))
        self._free(passed)

    def _free(self, step: _Step) -> None:
        for *_, pieces in step.spans:
            for pair in pieces:
                self._pool += pair

    def _event(self) -> Any:
        return self._pool.pop() if self._pool else cuda_event(timed=True)

    def _recorded(self) -> Any:
        event = self._event()
        event.record()
        return event


def step_timer(ring: Ring, level: Level, device: torch.device) -> StepTimer:
    """The timer of a rank; on CUDA call it before the first step, as it waits for the device."""
    if level == "none":
        return StepTimer()
    return DeviceTimer(ring, level, device) if device.type == "cuda" else HostTimer(ring, level)


@contextlib.contextmanager
def _shown(text: str, measured: AbstractContextManager[None]) -> Iterator[None]:
    with record_function(text), measured:
        yield


_NOTHING: AbstractContextManager[None] = contextlib.nullcontext()
