"""Writes NCCL's flight recorder to a file when the agent asks, before it ends a rank that hangs.

torch records the newest operations of each communicator (2,000, on by default). A thread waits at a
named pipe, outside the interpreter lock; a byte in it has the record written beside the pipe, and
the training thread's stack to the log: on GPUs the signal that asks for it has brought none
(benchmarks/results/2026-11-27-live-faults-4xh200.md). Where a hung call holds the lock nothing
comes, and the agent waits no longer than it says.
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
    """What returns the record as JSON; None on CPU, or where this torch has none."""
    if device.type != "cuda":
        return None
    dump: Callable[[], bytes] | None = getattr(torch._C._distributed_c10d, NAME, None)
    return dump


def training_stack() -> str:
    """Where the main thread is, innermost frame first, in the words of faulthandler."""
    main = threading.main_thread().ident or 0
    frames = traceback.extract_stack(sys._current_frames().get(main))
    lines = [f'  File "{each.filename}", line {each.lineno} in {each.name}' for each in frames]
    return "\n".join([f"Current thread {main:#018x} (most recent call first):", *reversed(lines)])


def answer(pipe: Path, out: Path, dump: Callable[[], bytes]) -> threading.Thread:
    """Start the thread: each byte in ``pipe``, which it makes, has ``out`` written anew."""
    pipe.unlink(missing_ok=True)  # of a process of this rank that has ended
    os.mkfifo(pipe, 0o600)
    # Its own writing end too, so that a read waits until somebody asks.
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
