"""The step loop of a rank: data, step, result, evaluation, snapshot, from the first to the last.

On CUDA the result of a step is read one step late, after the next step was launched, so that the
device never waits for the host.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from megascale_common.node.messages import Leave, NotLeft, Stay
from megascale_common.node.spans.ops import DATA_WAIT, EVALUATION, SNAPSHOT
from megascale_common.node.status_page import Phase, StatusPageWriter
from megascale_trainer.data.device_batches import StepBatches
from megascale_trainer.parallel.groups import Groups
from megascale_trainer.process.snapshot_steps import SnapshotSteps
from megascale_trainer.process.step_records import StepRecords
from megascale_trainer.save.snapshot_schedule import LEAVE, Votes
from megascale_trainer.telemetry.profiling import StepProfiler
from megascale_trainer.telemetry.timer import StepTimer
from megascale_trainer.trainer import StepResult, Trainer

# Note [The order to leave]
# ~~~~~~~~~~~~~~~~~~~~~~~~~
# The order to save and end early travels in rank 0's vote, so that it ends all ranks at one step.
# Every rank reads the sum of the votes of step s, on CUDA after it has launched s + 1. So s + 2 is
# the first step that no rank has launched by then, and it is the last step for all of them. If its
# state cannot be saved, they continue to train, and rank 0 votes again only for a new order.

STEPS_AHEAD = 2
MAX_PROBLEM = 2000  # characters that the agent gets


class LeaveOrder:
    """The newest order of this rank's agent; ``report`` sends the agent a failure."""

    def __init__(self, rank: int, report: Callable[[NotLeft], None]) -> None:
        self._rank = rank
        self._report = report
        self._wanted = ""
        self._failed = ""

    def take(self, order: Leave | Stay) -> None:
        """Take an order of the agent."""
        self._wanted = order.id if isinstance(order, Leave) else ""

    @property
    def vote(self) -> int:
        """This rank's part in the sum of the votes of a step."""
        asks = self._rank == 0 and self._wanted and self._wanted != self._failed
        return LEAVE if asks else 0

    def fail(self, problem: str) -> None:
        """Report to the agent why the order could not be carried out."""
        self._failed = self._wanted
        if self._wanted:
            self._report(NotLeft(id=self._wanted, problem=problem[:MAX_PROBLEM]))


# Garbage is collected at the same steps on all ranks: irregular collections delay one rank after
# the other, and all wait for the slowest (MegaScale section 6.3).
COLLECT_EVERY_STEPS = 100
# Interval in which a host that waits for its device polls it; short compared with a step on a GPU.
STEP_POLL_S = 0.001


@dataclass(slots=True)
class _InFlight:
    """A step that was launched, and whose result has not been read yet."""

    step: int
    result: StepResult


@dataclass(slots=True, kw_only=True)
class StepLoop:
    """One rank's steps with all that they need. ``skipped`` counts the run's skipped updates."""

    trainer: Trainer
    device: torch.device
    groups: Groups
    status: StatusPageWriter
    data: StepBatches
    held_out: StepBatches | None
    snapshots: SnapshotSteps
    records: StepRecords
    profiler: StepProfiler
    leave: LeaveOrder
    skipped: int
    timer: StepTimer = field(default_factory=StepTimer)

    def run(self, done: int) -> int:
        """Run all steps from ``done`` + 1 on; returns the last, which has ended on this rank.

        It is the job's last step, or after an order to leave an earlier one that is committed.
        """
        self.records.start(done)
        previous: _InFlight | None = None
        step, steps = done, self.trainer.config.training.steps
        while step < self.snapshots.last:
            step += 1
            self.timer.begin_step(step)
            self.profiler.before(step)
            # Read at once: the snapshot of the step before must be sealed, or the last step finds
            # no free slot.
            if step == self.snapshots.last and previous is not None:
                self._read(previous)
                previous = None
            current = self._launch(step)
            if previous is not None:
                self._read(previous)
            previous = current
            if self._reads_at_once(step, first=done + 1):
                self._read(current)
                previous = None
            begin_s = time.monotonic()
            with self.timer.host_span(SNAPSHOT):
                self.snapshots.after(step, self.skipped)
            if step == self.snapshots.last < steps:
                self._save_early(step)
            self.records.held_up(time.monotonic() - begin_s)
            if step % COLLECT_EVERY_STEPS == 0:
                gc.collect()
            self.profiler.after(step)
        self.trainer.settle()
        self.timer.close()
        self.profiler.finish()
        return step

    def _save_early(self, step: int) -> None:
        """End the run with ``step`` if its state can be saved; otherwise it continues."""
        self.trainer.settle()
        problem = self.snapshots.save_early(self.groups.world, self.device, self.skipped)
        if problem:
            self.leave.fail(problem)
            print(f"step {step} is not saved, so training continues: {problem}", flush=True)
        else:
            print(f"step {step} is saved; the run ends here by order", flush=True)

    def _launch(self, step: int) -> _InFlight:
        vote, wish = self.snapshots.vote(step) + self.leave.vote, self.snapshots.wish
        begin_s = time.monotonic()
        with self.timer.host_span(DATA_WAIT):
            batches = self.data.take()
        self.records.waited(time.monotonic() - begin_s)
        # A copy in progress reads the states, so the update must not write them yet: see Note
        # [Snapshots off the training thread].
        copied = self.snapshots.copied
        if copied is not None:
            self.trainer.state.wait_before_update(copied)
        launched = _InFlight(step, self.trainer.train_step(batches, vote=vote, wish=wish))
        if step < self.snapshots.last:
            self.data.prefetch()
        return launched

    def _reads_at_once(self, step: int, first: int) -> bool:
        """True if the result is read before the next step is launched.

        On a CPU it is ready anyway. The first step ends the warm-up, no step follows the last one,
        and an evaluation waits for the device in any case.
        """
        last = self.snapshots.last
        return self.device.type == "cpu" or step in (first, last) or self._evaluates_after(step)

    def _read(self, launched: _InFlight) -> None:
        """Read the result of a step: status page, votes, step record, evaluation."""
        # If the device hangs, the host stays in this loop, and the status page shows how far the
        # device has come.
        while not launched.result.ready():
            self.groups.poll()
            self.snapshots.poll()
            time.sleep(STEP_POLL_S)
        record = launched.result.read()
        self.status.update(step=launched.step, phase=Phase.STEP)
        self.groups.poll()
        self.skipped += record.skipped
        # A skipped update has left the state as it was, so it may be saved. The record is the same
        # on all ranks, and so are their decisions from it.
        sound = math.isfinite(record.loss) and math.isfinite(record.gradient_norm)
        finite = record.skipped or sound
        self.snapshots.settle(
            launched.step, record.votes, self.skipped, finite=finite, wishes=record.wishes
        )
        early = launched.step + STEPS_AHEAD
        if Votes.of(record.votes).leave and early < self.snapshots.last:
            self.snapshots.end_at(early)
        values = self.records.of(record, self.skipped)
        self.records.experts.pass_on(record, self.timer)
        self.snapshots.timed(launched.step, values["step_time_s"])
        values |= self.snapshots.figures()
        if self._evaluates_after(launched.step):
            values["evaluation_loss"] = loss = self._evaluate()
            print(f"step {launched.step}: held-out loss {loss:.4f}", flush=True)
        self.records.send(values)

    def _evaluates_after(self, step: int) -> bool:
        config = self.trainer.config
        interval, last = config.evaluation.interval_steps, config.training.steps
        return self.held_out is not None and (step % interval == 0 or step == last)

    def _evaluate(self) -> float:
        """Loss on the held-out batches, the same ones each time."""
        assert self.held_out is not None
        self.status.update(phase=Phase.EVAL)
        held_out = self.held_out
        batches = self.trainer.config.evaluation.batches
        with self.timer.host_span(EVALUATION):  # which waits for the device
            loss = self.trainer.evaluate(held_out.take() for _ in range(batches))
        self.status.update(phase=Phase.STEP)
        return loss
