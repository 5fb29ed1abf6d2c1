"""A program of one rank that trains under the step profiler.

The agent's end of the socket is in the same process.
"""

from __future__ import annotations

import contextlib
import resource
import socket
import sys
import time
from pathlib import Path
from typing import Any

from tests.harness.training import device_of, start, step

from megascale_common.node import framing
from megascale_job.loading import from_accepted
from megascale_trainer.parallel.data.overlapped_buffers import OverlappedBuffers
from megascale_trainer.process.bootstrap import destroy_groups
from megascale_trainer.process.step_loop import LeaveOrder
from megascale_trainer.telemetry.profiling import StepProfiler
from megascale_trainer.trainer import Trainer


def train_under_profiler(
    rank: int,
    world_size: int,
    folder: Path,
    *,
    job: dict[str, Any],
    steps: int,
    commands: dict[str, dict[str, Any]],
    patient: bool = True,
    file_limit_bytes: int = 0,
) -> dict[str, Any]:
    """Train ``steps`` steps; ``commands[str(N)]`` (fields of ProfileSteps) comes before step N.

    Each rank writes ``trace-ID-RANK.json.gz``. ``patient``: a trace is waited for after every step.
    ``file_limit_bytes``: no file may grow larger, as on a full disk.

    Returns:
        The losses, the answers (Profiled) in their order, and after each step how many gathers of
        parameters nobody has waited for.
    """
    trainer = start(from_accepted(job), rank, world_size, folder)
    agent, ours = socket.socketpair()
    others, settle = LeaveOrder(rank, lambda message: None).take, trainer.await_parameters
    profiler = StepProfiler(ours, device_of(rank), others, settle)
    if file_limit_bytes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit_bytes, resource.RLIM_INFINITY))
    losses, travelling = [], []
    with contextlib.redirect_stdout(sys.stderr):  # the pool reads our stdout
        for number in range(1, steps + 1):
            given = commands.get(str(number))
            if given is not None:
                path = str(folder / f"trace-{given['id']}-{rank}.json.gz")
                command = {
                    "kind": "profile",
                    "path": path,
                    "not_after_s": time.time() + 60.0,
                    **given,
                }
                framing.send(agent, command)
            profiler.before(number)
            losses.append(step(trainer, rank).read().loss)
            profiler.after(number)
            travelling.append(_gathers(trainer))
            if patient:
                profiler.finish()
        profiler.finish()
    ours.close()
    answers = []
    while (received := framing.receive(agent)) is not None:
        answers.append(received[0])
    destroy_groups()
    return {"losses": losses, "answers": answers, "travelling": travelling}


def _gathers(trainer: Trainer) -> int:
    buffers = trainer._buffers
    return len(buffers._gathers) if isinstance(buffers, OverlappedBuffers) else 0
