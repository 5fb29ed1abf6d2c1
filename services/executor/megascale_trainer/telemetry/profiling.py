"""Profiles of steps that the agent names ahead, as traces for Perfetto.

Between two steps the rank checks whether a command has arrived: one system call. The profiler is
prepared before the step ahead of the first one and started before the first; so on every rank the
trace begins at the same step. After the last one the rank waits for its device and collects the
events (some 2 us each, on this thread: measured with torch 2.13 on a CPU). Writing happens on a
thread of low priority, outside the interpreter's lock. A profile that fails is reported and ends
nothing.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd import profiler

from megascale_common.node import framing
from megascale_common.node.messages import (
    Accepted,
    CancelProfile,
    Leave,
    Profiled,
    ProfileSteps,
    Stay,
    WorkerOrder,
)
from megascale_trainer.telemetry import spans
from megascale_trainer.telemetry.trace_writer import State, TraceWriter, text_of

LAST_TRACE_TIMEOUT_S = 120.0
ORDERS: Accepted[WorkerOrder] = Accepted(
    "a worker that trains", ProfileSteps, CancelProfile, Leave, Stay
)


@dataclass(slots=True)
class _Recording:
    """A profile in progress. ``profile`` is torch's, whose methods have no types."""

    command: ProfileSteps
    profile: Any
    step_span: AbstractContextManager[Any] = field(default_factory=contextlib.nullcontext)


class StepProfiler:
    """Carries out the agent's commands: :meth:`before` and :meth:`after` surround each step.

    :meth:`finish` follows the last one. ``others`` takes the commands that are not about profiles.
    ``settle`` waits for what goes on after a step: on a CPU an operation of gloo that was begun in
    a profile and ends after it writes into the profile's freed memory (torch 2.13), and the rank is
    gone.
    """

    def __init__(
        self,
        agent: socket.socket,
        device: torch.device,
        others: Callable[[Leave | Stay], None],
        settle: Callable[[], None],
    ) -> None:
        self._agent, self._device, self._others, self._settle = agent, device, others, settle
        self._wanted: ProfileSteps | None = None
        self._ready: Any = None  # the profiler of ``_wanted``, once it is prepared
        self._recording: _Recording | None = None
        self._writer: TraceWriter | None = None
        self._inbox = select.poll()
        self._inbox.register(agent, select.POLLIN)

    def before(self, step: int) -> None:
        """Receive commands, report written traces, begin what begins with ``step`` or the next."""
        self._report_written()
        if self._inbox.poll(0):
            self._receive()
        if self._wanted is not None:
            self._approach(self._wanted, step)
        if self._recording is not None:
            self._recording.step_span = spans.span("step", step)
            self._recording.step_span.__enter__()

    def after(self, step: int) -> None:
        """End the profile that ends with ``step``."""
        recording = self._recording
        if recording is None:
            return
        recording.step_span.__exit__(None, None, None)
        if step < recording.command.last_step:
            return
        self._recording = None
        spans.switch(False)
        begin_s = time.monotonic()
        try:
            self._settle()
            # Waits for the device: its last kernels belong to the trace.
            recording.profile.__exit__(None, None, None)
        except Exception as error:
            self._report(recording.command, "failed", text_of(error))
            return
        print(
            f"profile: events collected in {time.monotonic() - begin_s:.3f} s after step {step}",
            flush=True,
        )
        self._writer = TraceWriter(recording.command, recording.profile)
        self._writer.start()

    def finish(self) -> None:
        """After the last step: wait for the trace that is being written."""
        if self._writer is not None:
            self._writer.join(LAST_TRACE_TIMEOUT_S)
            self._report_written()

    def _receive(self) -> None:
        received = framing.receive(self._agent)
        if received is None:  # the agent has ended, and this process ends with it
            self._inbox.unregister(self._agent)
            return
        order = ORDERS.read(received[0])
        if isinstance(order, CancelProfile):
            if self._wanted is not None and self._wanted.id == order.id:
                self._drop(self._wanted, "skipped", "cancelled before its first step")
            return
        if not isinstance(order, ProfileSteps):
            self._others(order)
            return
        if self._wanted is not None:
            self._drop(
                self._wanted, "skipped", "another profile was asked for before its first step"
            )
        self._wanted = order

    def _approach(self, command: ProfileSteps, step: int) -> None:
        """Prepare before the step ahead of the first, begin before the first, or report why not."""
        first = command.first_step
        if step > first:
            self._drop(
                command,
                "skipped",
                f"the request arrived before step {step}, its first step is {first}",
            )
        elif step == first and time.time() > command.not_after_s:
            self._drop(command, "skipped", f"it took too long to reach step {first}")
        elif step >= first - 1:
            try:
                self._prepare()
                if step == first:
                    self._ready._start_trace()
                    self._wanted, self._ready, self._recording = (
                        None,
                        None,
                        _Recording(command, self._ready),
                    )
                    spans.switch(True)
            except Exception as error:
                self._drop(command, "failed", text_of(error))

    def _prepare(self) -> None:
        """On GPUs this may take a while the first time."""
        if self._recording is not None or self._writer is not None:
            raise RuntimeError("the previous profile is still being recorded or written")
        if self._ready is None:
            # torch.profiler's class would import the compiler first: a second of every rank's step.
            device = "cuda" if self._device.type == "cuda" else None
            ready: Any = profiler.profile(use_kineto=True, use_device=device)
            ready._prepare_trace()
            self._ready = ready

    def _drop(self, command: ProfileSteps, state: State, why: str) -> None:
        """Give up the wanted profile, and what was prepared for it."""
        ready, self._wanted, self._ready = self._ready, None, None
        if ready is not None:
            try:
                ready._start_trace()  # a prepared profiler can only be ended once it was started
                ready.__exit__(None, None, None)
            except Exception:
                traceback.print_exc()
        self._report(command, state, why)

    def _report_written(self) -> None:
        writer = self._writer
        if writer is not None and not writer.is_alive():
            self._writer = None
            self._report(writer.command, *writer.outcome)

    def _report(
        self, command: ProfileSteps, state: State, detail: str = "", size_bytes: int = 0
    ) -> None:
        steps = f"steps {command.first_step} to {command.last_step}"
        print(f"profile of {steps}: {state} {detail or command.path}", flush=True)
        framing.send(
            self._agent,
            Profiled(id=command.id, state=state, size_bytes=size_bytes, detail=detail),
        )
