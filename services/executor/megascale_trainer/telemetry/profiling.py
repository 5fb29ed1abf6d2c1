"""Profiles of steps that the agent names ahead, as traces for Perfetto.

Between two steps the rank looks whether a command has come: one system call. The profiler is made
ready before the step ahead of the first one and started before the first; so on every rank the
trace begins at the same step. After the last one the rank waits for its device and collects the
events (some 2 us each, on this thread: measured with torch 2.13 on a CPU). Writing happens on a
thread of low priority, outside the interpreter's lock. A profile that fails is told and ends
nothing.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
import traceback
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch.autograd import profiler

from megascale_common.node import framing
from megascale_common.node.messages import Profiled, ProfileSteps
from megascale_trainer.telemetry import spans
from megascale_trainer.telemetry.trace_writer import State, TraceWriter, text_of

LAST_TRACE_TIMEOUT_S = 120.0


@dataclass(slots=True)
class _Recording:
    """A profile that records. ``profile`` is torch's, whose methods have no types."""

    command: ProfileSteps
    profile: Any
    step_span: AbstractContextManager[Any] = field(default_factory=contextlib.nullcontext)


class StepProfiler:
    """Carries out the agent's commands. :meth:`before` and :meth:`after` go round every step,
    :meth:`finish` last.
    """

    def __init__(self, agent: socket.socket, device: torch.device) -> None:
        self._agent, self._device = agent, device
        self._wanted: ProfileSteps | None = None
        self._ready: Any = None  # the profiler of ``_wanted``, once it is made ready
        self._recording: _Recording | None = None
        self._writer: TraceWriter | None = None
        self._inbox = select.poll()
        self._inbox.register(agent, select.POLLIN)

    def before(self, step: int) -> None:
        """Take in commands, tell of written traces, begin what begins with ``step`` or the step
        after it.
        """
        self._tell_written()
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
        if step < recording.command["last_step"]:
            return
        self._recording = None
        spans.switch(False)
        begin_s = time.monotonic()
        try:
            recording.profile.__exit__(
                None, None, None
            )  # waits for the device: its last kernels belong to the trace
        except Exception as error:
            self._tell(recording.command, "failed", text_of(error))
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
            self._tell_written()

    def _receive(self) -> None:
        received = framing.receive(self._agent)
        if received is None:  # the agent is gone, and we with it in a moment
            self._inbox.unregister(self._agent)
            return
        message, _ = received
        if message["kind"] != "profile":
            raise framing.FramingError(
                f"a worker that trains knows 'profile', not {message['kind']!r}"
            )
        if self._wanted is not None:
            self._drop(
                self._wanted, "skipped", "another profile was asked for before its first step"
            )
        self._wanted = cast(ProfileSteps, message)

    def _approach(self, command: ProfileSteps, step: int) -> None:
        """Make ready before the step ahead of the first, begin before the first, or say why not."""
        first = command["first_step"]
        if step > first:
            self._drop(
                command, "skipped", f"the word came before step {step}, its first step is {first}"
            )
        elif step == first and time.time() > command["not_after_s"]:
            self._drop(command, "skipped", f"it took too long to come to step {first}")
        elif step >= first - 1:
            try:
                self._make_ready()
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

    def _make_ready(self) -> None:
        """On GPUs this may take a while the first time."""
        if self._recording is not None or self._writer is not None:
            raise RuntimeError("the profile before is still being recorded or written")
        if self._ready is None:
            # torch.profiler's class would import the compiler first: a second of everybody's step.
            device = "cuda" if self._device.type == "cuda" else None
            ready: Any = profiler.profile(use_kineto=True, use_device=device)
            ready._prepare_trace()
            self._ready = ready

    def _drop(self, command: ProfileSteps, state: State, why: str) -> None:
        """Let go of the wanted profile, and of what was made ready for it."""
        ready, self._wanted, self._ready = self._ready, None, None
        if ready is not None:
            try:
                ready._start_trace()  # what is ready can only be ended once it has begun
                ready.__exit__(None, None, None)
            except Exception:
                traceback.print_exc()
        self._tell(command, state, why)

    def _tell_written(self) -> None:
        writer = self._writer
        if writer is not None and not writer.is_alive():
            self._writer = None
            self._tell(writer.command, *writer.outcome)

    def _tell(
        self, command: ProfileSteps, state: State, detail: str = "", size_bytes: int = 0
    ) -> None:
        steps = f"steps {command['first_step']} to {command['last_step']}"
        print(f"profile of {steps}: {state} {detail or command['path']}", flush=True)
        answer: Profiled = {
            "kind": "profiled",
            "id": command["id"],
            "state": state,
            "size_bytes": size_bytes,
            "detail": detail,
        }
        framing.send(self._agent, dict(answer))
