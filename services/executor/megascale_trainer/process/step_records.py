"""The step records that a rank reports: a line in its log and a message to the agent."""

from __future__ import annotations

import mmap
import socket
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from megascale_common.node import framing
from megascale_common.node.messages import Assignment, StepDone
from megascale_job.config import JobConfig
from megascale_job.sizes import flops
from megascale_trainer.process.expert_loads import ExpertLoads, in_words
from megascale_trainer.telemetry.trackers import Trackers
from megascale_trainer.trainer import StepRecord

FIRST_LOGGED_STEPS, LOG_INTERVAL_S = 10, 1.0
MEMORY_INTERVAL_S = 1.0
_OWN = ("skipped", "votes", "wishes")  # fields that are only for the ranks themselves
# Those about experts, of which ExpertLoads makes a bounded number of values.
_EXPERTS = ("balance", "router_z", "expert_share", "expert_loads")


class StepRecords:
    """Adds times and utilisation to the trainer's records, logs them and sends them to the agent.

    ``experts`` reads the figures of experts in them. The time of a step is measured from the end of
    the step before, or :meth:`start`, to :meth:`of`.
    """

    def __init__(
        self, agent: socket.socket, assignment: Assignment, config: JobConfig, device: torch.device
    ) -> None:
        self._agent = agent
        self._assignment = assignment
        self._config = config
        self.experts = ExpertLoads(config, assignment.rank)
        self._device_name = (
            torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        )
        self._last_step_end_s = 0.0
        self._snapshot_time_s = 0.0
        self._trackers: Trackers | None = None
        self._data_wait_s = 0.0
        self._memory = MemoryFigure(device)
        self._logged_steps = 0
        self._logged_at_s = 0.0

    def start(self, done: int = 0) -> None:
        """Begin the first step, the one after ``done``."""
        if self._assignment.reports:
            # The job's folder, which all its attempts share.
            folder = Path(self._assignment.run_folder).parent
            self._trackers = Trackers(self._config, folder, done)
        self._last_step_end_s = time.monotonic()

    def of(self, record: StepRecord, skipped_updates: int) -> dict[str, Any]:
        """The record with the fields of megascale.v1.StepRecord; the log gets a line of it."""
        config, elapsed_s = self._config, time.monotonic() - self._last_step_end_s
        tokens = config.training.global_batch_size * config.model.sequence_length
        tokens_per_s = tokens / elapsed_s
        utilisation = flops.mfu(
            config.model, tokens_per_s, config.layout.world_size, self._device_name
        )
        own = (*_OWN, *_EXPERTS)
        values = {key: value for key, value in asdict(record).items() if key not in own}
        values |= self.experts.values(record)
        values |= {
            "skipped_updates": skipped_updates,
            "attempt": self._assignment.attempt,
            "step_time_s": elapsed_s,
            "snapshot_time_s": self._snapshot_time_s,
            "data_wait_s": self._data_wait_s,
            "memory_bytes": self._memory.read(),
            "tokens_per_s": tokens_per_s,
            "mfu_causal": utilisation.exact if utilisation else None,
            "mfu_full": utilisation.full if utilisation else None,
            "completed_at_s": time.time(),
        }
        self._snapshot_time_s = self._data_wait_s = 0.0
        self._log(values)
        return values

    def held_up(self, elapsed_s: float) -> None:
        """Add time for which a snapshot delayed the training thread to the next record."""
        self._snapshot_time_s += elapsed_s

    def waited(self, elapsed_s: float) -> None:
        """Add time for which the training thread has waited for data to the next record."""
        self._data_wait_s += elapsed_s

    def send(self, values: dict[str, Any]) -> None:
        """End the step, and send its record to the agent if this rank reports."""
        if self._assignment.reports:
            framing.send(self._agent, StepDone(record=values))
            if self._trackers is not None:
                self._trackers.add(values)
        self._last_step_end_s = time.monotonic()

    def close(self) -> None:
        """Close the trackers after the last step."""
        if self._trackers is not None:
            self._trackers.close()

    def _log(self, values: dict[str, Any]) -> None:
        """Log a line of the rank for each of the first steps, then at most one per second."""
        now_s = time.monotonic()
        self._logged_steps += 1
        if self._logged_steps > FIRST_LOGGED_STEPS and now_s - self._logged_at_s < LOG_INTERVAL_S:
            return
        self._logged_at_s = now_s
        why = values["skipped_because"]
        print(
            f"step {values['step']}: loss {values['loss']:.6g}, "
            f"gradient norm {values['gradient_norm']:.4g}, {values['step_time_s']:.3f} s"
            f"{''.join(f', {part}' for part in in_words(values))}"
            f"{f', skipped: {why}' if why else ''}",
            flush=True,
        )


class MemoryFigure:
    """The device's peak memory so far; on a CPU the present memory of this process."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._read_at_s = 0.0
        self._bytes = 0

    def read(self) -> int:
        """Bytes, at most MEMORY_INTERVAL_S old: a query takes too long to make it in every step."""
        now_s = time.monotonic()
        if now_s - self._read_at_s >= MEMORY_INTERVAL_S:
            self._read_at_s = now_s
            if self._device.type == "cuda":
                self._bytes = torch.cuda.max_memory_allocated(self._device)
            else:
                self._bytes = _resident_bytes()
        return self._bytes


def _resident_bytes() -> int:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0
    return pages * mmap.PAGESIZE
