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
from megascale_common.node.spans.ops import Op
from megascale_common.node.spans.record import DEVICE_TIMED, NO_MICRO_BATCH, Span, pack_aux
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
            op: None: the span is only shown, not measured.
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
        return _HostSpan(self, op, NO_MICRO_BATCH, 0) if self.on else _NOTHING

    def close(self) -> None:
        self.begin_step(self._step + 1)
        gc.callbacks.remove(self._on_garbage)
        self.on = False

    def _measured(
        self, op: Op | None, micro_batch: int, chunk: int
    ) -> AbstractContextManager[None]:
        if op is None or not self._wanted(micro_batch):
            return _NOTHING
        return self._of(op, micro_batch, chunk)

    def _of(self, op: Op, micro_batch: int, chunk: int) -> AbstractContextManager[None]:
        return _HostSpan(self, op, micro_batch, chunk)

    def _wanted(self, micro_batch: int) -> bool:
        return self.on and (micro_batch == NO_MICRO_BATCH or micro_batch < self._micro_batches)

    def _seq(self, op: Op) -> int:
        number = self._counts.get(op, 0)
        self._counts[op] = number + 1
        return number

    def _add(
        self, op: Op, begin_ns: int, end_ns: int, micro_batch: int = NO_MICRO_BATCH, chunk: int = 0
    ) -> None:
        duration_ns, aux = max(end_ns - begin_ns, 0), pack_aux(chunk)
        number = self._ring.op(op)
        seq = self._seq(op)
        self._ring.add(Span(begin_ns, duration_ns, self._step, number, micro_batch, seq, aux))

    def _on_garbage(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            self._garbage_began_ns = time.monotonic_ns()
        elif self.on and self._garbage_began_ns:
            self._add(ops.GARBAGE, self._garbage_began_ns, time.monotonic_ns())


class _HostSpan:
    __slots__ = ("_began_ns", "_chunk", "_micro_batch", "_op", "_timer")

    def __init__(self, timer: HostTimer, op: Op, micro_batch: int, chunk: int) -> None:
        self._timer = timer
        self._op = op
        self._micro_batch = micro_batch
        self._chunk = chunk
        self._began_ns = 0

    def __enter__(self) -> None:
        self._began_ns = time.monotonic_ns()

    def __exit__(self, *_: object) -> None:
        end_ns = time.monotonic_ns()
        self._timer._add(self._op, self._began_ns, end_ns, self._micro_batch, self._chunk)


@dataclass(slots=True)
class _Step:
    """The events of one step: its anchor, the pairs with their operations, and the last event."""

    step: int
    anchor: Any
    pairs: list[tuple[Op, int, int, int, Any, Any]] = field(default_factory=list)
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

    def _of(self, op: Op, micro_batch: int, chunk: int) -> AbstractContextManager[None]:
        if not self._steps or torch.cuda.is_current_stream_capturing():
            # In a capture: the caller measures each replay of the graph as one span.
            return _NOTHING
        return _DeviceSpan(self, op, micro_batch, chunk)

    def _read(self, passed: _Step) -> None:
        seen_ns = time.monotonic_ns()
        self._anchor_ns += round(self._anchor.elapsed_time(passed.anchor) * 1e6)
        self._anchor = passed.anchor
        end_ns = self._anchor_ns + round(passed.anchor.elapsed_time(passed.end) * 1e6)
        self._anchor_ns -= max(end_ns - seen_ns, 0)
        aux = pack_aux(flags=DEVICE_TIMED)
        for op, micro_batch, chunk, seq, begin, end in passed.pairs:
            begin_ns = self._anchor_ns + round(passed.anchor.elapsed_time(begin) * 1e6)
            duration_ns = max(round(begin.elapsed_time(end) * 1e6), 0)
            number = self._ring.op(op)
            self._ring.add(
                Span(begin_ns, duration_ns, passed.step, number, micro_batch, seq, aux | chunk)
            )
        self._free(passed)

    def _free(self, step: _Step) -> None:
        for *_, begin, end in step.pairs:
            self._pool += (begin, end)

    def _event(self) -> Any:
        return self._pool.pop() if self._pool else cuda_event(timed=True)

    def _recorded(self) -> Any:
        event = self._event()
        event.record()
        return event


class _DeviceSpan:
    __slots__ = ("_begin", "_chunk", "_micro_batch", "_op", "_timer")

    def __init__(self, timer: DeviceTimer, op: Op, micro_batch: int, chunk: int) -> None:
        self._timer = timer
        self._op = op
        self._micro_batch = micro_batch
        self._chunk = chunk
        self._begin: Any = None

    def __enter__(self) -> None:
        self._begin = self._timer._recorded()

    def __exit__(self, *_: object) -> None:
        timer, op = self._timer, self._op
        pair = (op, self._micro_batch, self._chunk, timer._seq(op), self._begin, timer._recorded())
        timer._steps[-1].pairs.append(pair)


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
