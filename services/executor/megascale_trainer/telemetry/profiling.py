"""Profiles of steps that the agent names ahead, as traces for Perfetto.

Between two steps the rank checks whether a command has arrived: one system call. The profiler is
prepared before the step ahead of the first one and started before the first, so the trace begins at
the same step on every rank. After the last one the rank waits for its device and collects the
events (some 2 us each, on this thread: measured with torch 2.13 on a CPU). A thread of low priority
writes the trace, a gzipped Chrome trace; the profiler's export and zlib both run outside the
interpreter's lock (measured with torch 2.13). A profile that fails is reported and ends nothing.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import socket
import threading
import time
import traceback
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch.autograd import profiler
from torch.autograd.profiler import record_function

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
from megascale_trainer.telemetry.timer import show_spans

State = Literal["written", "skipped", "failed"]

MAX_RAW_BYTES = 2 << 30  # of a trace before compression; browsers give up earlier
MIN_FREE_BYTES = 1 << 30  # a trace is not worth a full disk
_WRITER_NICENESS = 10
_PART_BYTES = 1 << 20
_GZIP = 16 + zlib.MAX_WBITS
_END = b'"traceName"'  # the last key that the profiler writes


class TraceWriter(threading.Thread):
    """Writes one trace; ``outcome`` holds state, detail and size once it has ended."""

    def __init__(self, command: ProfileSteps, profile: Any) -> None:
        super().__init__(name="trace-writer", daemon=True)
        self.command = command
        self.outcome: tuple[State, str, int] = ("failed", "the writer ended without a result", 0)
        self._profile = profile

    def run(self) -> None:
        """Body of the thread."""
        # Of this thread alone: on Linux priorities belong to threads.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _WRITER_NICENESS)
        try:
            size_bytes = write_trace(self._profile, Path(self.command.path))
            self.outcome = ("written", "", size_bytes)
        except Exception as error:
            self.outcome = ("failed", text_of(error), 0)
        finally:
            self._profile = None


def write_trace(profile: Any, path: Path) -> int:
    """Write what a profiler has collected to ``path`` as gzipped JSON; returns its size in bytes.

    All of it is written, or nothing.

    Raises:
        OSError: no room, or the trace cannot be written.
        ValueError: it is larger than MAX_RAW_BYTES.
    """
    free_bytes = shutil.disk_usage(path.parent).free
    if free_bytes < MIN_FREE_BYTES:
        raise OSError(
            f"{path.parent} has {free_bytes} bytes left; "
            f"a trace is not written below {MIN_FREE_BYTES}"
        )
    raw, packed = path.with_name(f".{path.name}.raw"), path.with_name(f".{path.name}.part")
    try:
        profile.export_chrome_trace(str(raw))
        _check_whole(raw)
        _compress(raw, packed)
        packed.replace(path)
    finally:
        # The profiler has a name of its own for an unfinished file.
        for unfinished in path.parent.glob(f".{path.name}.*"):
            unfinished.unlink(missing_ok=True)
    return path.stat().st_size


def text_of(error: Exception) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {error}"


def _check_whole(raw: Path) -> None:
    """Raise if a trace is absent or cut: the profiler itself raises nothing then."""
    if not raw.exists():
        raise OSError(
            f"the profiler left no file in {raw.parent}: is the disk full? "
            "The rank's log has its messages"
        )
    size_bytes = raw.stat().st_size
    if size_bytes > MAX_RAW_BYTES:
        raise ValueError(
            f"the trace has {size_bytes} bytes, the limit is {MAX_RAW_BYTES}; profile fewer steps"
        )
    with raw.open("rb") as file:
        file.seek(max(size_bytes - 2 * len(str(raw)) - 1024, 0))
        tail = file.read()
    if _END not in tail or not tail.rstrip().endswith(b"}"):
        raise OSError(f"the trace was cut after {size_bytes} bytes: is the disk full?")


def _compress(raw: Path, packed: Path) -> None:
    packer = zlib.compressobj(level=1, wbits=_GZIP)
    with raw.open("rb") as source, packed.open("wb") as target:
        while part := source.read(_PART_BYTES):
            target.write(packer.compress(part))
        target.write(packer.flush())


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

    def begin_step(self, step: int) -> None:
        """Show ``step`` as a range in the trace."""
        span: AbstractContextManager[Any] = cast(Any, record_function(f"step {step}"))
        span.__enter__()
        self.step_span = span


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
        self._agent = agent
        self._device = device
        self._others = others
        self._settle = settle
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
            self._recording.begin_step(step)

    def after(self, step: int) -> None:
        """End the profile that ends with ``step``."""
        recording = self._recording
        if recording is None:
            return
        recording.step_span.__exit__(None, None, None)
        if step < recording.command.last_step:
            return
        self._recording = None
        show_spans(False)
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
                    self._recording = _Recording(command, self._ready)
                    self._wanted = None
                    self._ready = None
                    show_spans(True)
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
        ready = self._ready
        self._wanted = None
        self._ready = None
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
