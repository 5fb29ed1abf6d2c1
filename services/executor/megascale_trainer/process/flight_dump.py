"""Writes NCCL's flight recorder to a file when the agent asks, before it ends a rank that hangs.

torch records the newest operations of each communicator (2,000, on by default). A thread waits at a
named pipe, outside the interpreter lock. For each byte it writes the record next to the pipe, and
the training thread's stack to the log: on GPUs the signal for stacks has brought none
(benchmarks/results/2026-11-27-live-faults-4xh200.md). If a hung call holds the lock, nothing is
written, and the agent's own timeout ends its wait.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from megascale_common.node.flight_record import MAX_DUMP_BYTES

NAME = "_dump_nccl_trace_json"


def recorder(device: torch.device) -> Callable[[], bytes] | None:
    """torch's function that returns the record as JSON; None on a CPU or in a torch without it."""
    if device.type != "cuda":
        return None
    dump: Callable[[], bytes] | None = getattr(torch._C._distributed_c10d, NAME, None)
    return dump


def training_stack() -> str:
    """The stack of the main thread, innermost frame first, in faulthandler's format."""
    main = threading.main_thread().ident or 0
    frames = traceback.extract_stack(sys._current_frames().get(main))
    lines = [f'  File "{each.filename}", line {each.lineno} in {each.name}' for each in frames]
    return "\n".join([f"Current thread {main:#018x} (most recent call first):", *reversed(lines)])


def answer(pipe: Path, out: Path, dump: Callable[[], bytes]) -> threading.Thread:
    """Create ``pipe`` and start the thread that writes ``out`` again for each byte in the pipe."""
    pipe.unlink(missing_ok=True)  # left by an earlier process of this rank
    os.mkfifo(pipe, 0o600)
    # Also open for writing, so that a read waits for a byte instead of reporting the end.
    descriptor = os.open(pipe, os.O_RDWR | os.O_CLOEXEC)

    def wait() -> None:
        while os.read(descriptor, 1):
            print(training_stack(), file=sys.stderr, flush=True)
            try:
                data = dump()
                if len(data) <= MAX_DUMP_BYTES:
                    part = out.with_name(f".{out.name}")
                    part.write_bytes(data)
                    part.replace(out)
            except (OSError, RuntimeError) as error:
                print(f"the record of NCCL's operations was not written: {error}", flush=True)

    thread = threading.Thread(target=wait, name="flight recorder", daemon=True)
    thread.start()
    return thread
