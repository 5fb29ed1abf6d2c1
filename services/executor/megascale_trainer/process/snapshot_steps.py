"""The step loop's side of snapshots: votes, copies and seals, step by step.

All ranks take a snapshot together or skip it together, and no rank waits for it. Around the
snapshot after step s (on CUDA, where a step's result is read after the next one was launched):

    before       ask the daemon for a slot, a few steps ahead
    step s - 1   with a slot reserved the vote is 0; it travels in the step's all-reduce
    step s       launched; the result of s - 1 is read, and with it the sum of votes: the copy
                 starts on a side stream after step s, or all ranks skip
    step s + 1   launched; its update waits on the device for the copy; the result of s is read:
                 if its values are finite, the copied slot is sealed

No step follows the last one, so its vote is about itself, and it waits for a slot.
"""

from __future__ import annotations

import base64
import dataclasses
import math
import time
from collections.abc import Mapping
from typing import Any

import torch

from megascale_common.node.status_page import Phase, StatusPageWriter
from megascale_job.config import JobConfig
from megascale_job.sizes.failures import PUBLISHED_DEVICE_HOURS, mtbf_s
from megascale_trainer.parallel.groups import Group
from megascale_trainer.process.loaded_model import model_fields, schedule_of
from megascale_trainer.save.auto_interval import AutoCadence, SaveCost, wished_steps
from megascale_trainer.save.host_copy import CopyEnd
from megascale_trainer.save.snapshot import Snapshotter
from megascale_trainer.save.snapshot_schedule import Cadence, Votes

# The last step waits at most this long for a slot: its peers wait in the all-reduce of the votes.
LAST_SLOT_TIMEOUT_S, SHARE_OF_COLLECTIVE_TIMEOUT = 60.0, 2
# The status page is written after each slice, so that the wait does not look like a hang.
DRAIN_SLICE_S = 60.0
RECONNECT_S, RECONNECT_WAIT_S = 0.5, 5.0


class SnapshotSteps:
    """Votes, copies and seals for the steps of one rank; without ``snapshots`` it does nothing.

    ``done`` is the step that the run starts from, ``device_hours`` the device hours between
    failures, and ``position`` the meaning of the data position.
    """

    def __init__(
        self,
        config: JobConfig,
        status: StatusPageWriter,
        snapshots: Snapshotter | None,
        done: int = 0,
        device_hours: float = PUBLISHED_DEVICE_HOURS,
        position: Mapping[str, Any] | None = None,
    ) -> None:
        self._config = config
        self._status = status
        self._snapshots = snapshots
        self._position = position or {}
        # The newest step whose result was read: (step, skipped updates, its values are finite).
        self._settled: tuple[int, int, bool] | None = None
        # By step: the votes on the snapshot after it. With short intervals the votes on the next
        # snapshot are known before this one is taken.
        self._decided: dict[int, Votes] = {}
        self._cadence = _cadence(config, done)
        self._cost = SaveCost()
        self._mtbf_s = mtbf_s(device_hours, config.layout.world_size)
        self._last_missed = False  # some rank had no slot for the last step
        self._slot_timeout_s = min(
            LAST_SLOT_TIMEOUT_S,
            config.checkpoint.final_timeout_s,
            config.recovery.collective_timeout_s / SHARE_OF_COLLECTIVE_TIMEOUT,
        )

    @property
    def copied(self) -> CopyEnd | None:
        """The copy that still reads the states, for which the next update must wait."""
        return None if self._snapshots is None else self._snapshots.copied

    def vote(self, step: int) -> int:
        """This rank's vote in ``step`` (:mod:`megascale_trainer.save.snapshot_schedule`)."""
        subject = self._cadence.subject(step)
        if self._snapshots is None or subject is None:
            return 0
        if subject != step:
            return self._snapshots.reserve(subject)
        self._status.update(phase=Phase.SNAPSHOT)  # it may wait long
        vote = self._snapshots.reserve_or_wait(step, self._slot_timeout_s)
        self._status.update(phase=Phase.STEP)
        return vote

    @property
    def wish(self) -> int:
        """The number of steps that this rank would leave between saves; 0 if the job fixes it."""
        cadence, snapshots = self._cadence, self._snapshots
        if not isinstance(cadence, AutoCadence):
            return 0
        persist_s = 0.0 if snapshots is None else snapshots.store.persist_s
        steps = self._config.training.steps
        return wished_steps(self._cost, persist_s, self._mtbf_s, cadence.interval, steps)

    def timed(self, step: int, time_s: float) -> None:
        """Note that ``step`` took ``time_s``: the daemon limits how much its writes slow steps."""
        if self._snapshots is None:
            return
        self._snapshots.report_time(step, time_s)
        # With snapshots between saves, copies cost the same with and without a save: then only the
        # way to storage counts as a save's disturbance.
        split = self._config.checkpoint.snapshot_interval_steps > 0
        copying = self._snapshots.copied is not None and not split
        self._cost.add(time_s, disturbed=copying or self._snapshots.store.persisting)

    def figures(self) -> dict[str, float]:
        """The fields of a step record that are about saves."""
        if not isinstance(self._cadence, AutoCadence):
            return {}
        found: dict[str, float] = {"checkpoint_interval_steps": self._cadence.interval}
        if self._cost.cost_s is not None:
            found["checkpoint_cost_s"] = self._cost.cost_s
        return found

    def settle(
        self, step: int, votes: int, skipped_updates: int, *, finite: bool, wishes: int = 0
    ) -> None:
        """Note the result of ``step``, whose snapshot may have started already, or follows."""
        self._settle(step, skipped_updates, finite=finite)
        subject = self._cadence.subject(step)
        if self._snapshots is not None and subject is not None:
            self._decided[subject] = Votes.of(votes)
        if isinstance(self._cadence, AutoCadence):
            self._cadence.decide(step, wishes)

    def poll(self) -> None:
        """Seal finished copies while the host waits for the device, so that slots become free."""
        if self._snapshots is not None:
            self._snapshots.seal_if_copied()

    def after(self, step: int, skipped_updates: int) -> None:
        """After the launch of ``step``: seal finished copies, start or skip its snapshot."""
        if self._snapshots is None:
            return
        self._snapshots.seal_if_copied()
        votes = self._decided.pop(step, None)
        if votes is not None:
            self._take(step, votes, skipped_updates)
            self._snapshots.seal_if_copied()
        ahead = self._cadence.ahead(step)
        if ahead is not None:
            self._snapshots.ask_ahead(ahead)

    def take_last_again(self, world: Group, device: torch.device, skipped_updates: int) -> None:
        """Snapshot the last step of a run that was restored from memory with all its steps done.

        The attempt that should have committed it is gone. All ranks call it together.
        """
        self._settle(self._config.training.steps, skipped_updates, finite=True)
        self._vote_and_take_last(world, device, skipped_updates)

    @property
    def last(self) -> int:
        """The last step of the run, as far as it is decided."""
        return self._cadence.last

    def end_at(self, step: int) -> None:
        """Let the run end early, with ``step``, if that step can be saved."""
        self._cadence.end_at(step)

    def save_early(self, world: Group, device: torch.device, skipped_updates: int) -> str:
        """Save the step with which the run ends early; returns "" once it is committed, or why not.

        All ranks call it together and get the same answer. After a problem they continue to train.
        """
        if self._snapshots is None:
            return "the job has no checkpoints"
        # A rank that gives up at once waits for the others in the all-reduce.
        timeout_s = min(
            self._config.checkpoint.final_timeout_s,
            self._config.recovery.collective_timeout_s / SHARE_OF_COLLECTIVE_TIMEOUT,
        )
        problem = self._save_last(world, device, skipped_updates, timeout_s)
        saved = torch.zeros(1, device=device, dtype=torch.float64)
        saved += not problem
        world.all_reduce(saved)
        if saved.item() > 0:  # a commit that one rank has seen holds for all
            return ""
        self._cadence.go_on()
        self._status.update(phase=Phase.STEP)
        return problem

    def close(self) -> None:
        """Close the connection after a run that ended early; its last step is committed."""
        if self._snapshots is not None:
            self._snapshots.close()

    def finish(self, world: Group, device: torch.device, skipped_updates: int) -> str:
        """After the last step, wait until it is committed; returns "" or why it is not.

        All ranks call it together. The wait ends after ``checkpoint.final_timeout_s``.
        """
        if self._snapshots is None:
            return ""
        timeout_s = self._config.checkpoint.final_timeout_s
        problem = self._save_last(world, device, skipped_updates, timeout_s)
        if problem:
            print(f"the last checkpoint is not committed: {problem}", flush=True)
        self._snapshots.close()
        return problem

    def _save_last(
        self, world: Group, device: torch.device, skipped_updates: int, timeout_s: float
    ) -> str:
        """Wait until the last step is committed; take its snapshot again if it was skipped.

        Returns "" or the problem.
        """
        # The ranks have the same sum of votes, so they try equally often.
        for _ in range(math.ceil(timeout_s / self._slot_timeout_s)):
            if not self._last_missed:
                break
            self._vote_and_take_last(world, device, skipped_updates)
        return self._drain_last(skipped_updates, time.monotonic() + timeout_s)

    def _drain_last(self, skipped_updates: int, deadline_s: float) -> str:
        assert self._snapshots is not None
        while True:
            self._status.update(phase=Phase.SNAPSHOT)
            self._snapshots.seal_if_copied(wait=True)
            slice_s = min(DRAIN_SLICE_S, max(0.0, deadline_s - time.monotonic()))
            drained = self._snapshots.drain(self.last, slice_s)
            if not drained.problem or time.monotonic() >= deadline_s:
                return drained.problem
            if not self._snapshots.connected:
                # The daemon has ended, and the snapshot with it, but the state is still here. The
                # other ranks' parts are safe and only miss this rank's.
                time.sleep(RECONNECT_S)
                self._take_last_alone(skipped_updates)
            elif not drained.waiting:
                return drained.problem

    def _take_last_alone(self, skipped_updates: int) -> None:
        assert self._snapshots is not None
        # The link has just begun to connect, and to prepare the slots.
        vote = self._snapshots.reserve_or_wait(self.last, RECONNECT_WAIT_S)
        if Votes.of(vote).must_skip == 0:
            self._take(self.last, Votes(0, 0, replica_busy=1), skipped_updates)

    def _vote_and_take_last(self, world: Group, device: torch.device, skipped_updates: int) -> None:
        assert self._snapshots is not None
        self._status.update(phase=Phase.SNAPSHOT)
        votes = torch.zeros(1, device=device, dtype=torch.float64)
        votes += self._snapshots.reserve_or_wait(self.last, self._slot_timeout_s)
        world.all_reduce(votes)
        self._take(self.last, Votes.of(round(votes.item())), skipped_updates)

    def _take(self, step: int, votes: Votes, skipped_updates: int) -> None:
        assert self._snapshots is not None
        if step == self.last:
            self._last_missed = votes.must_skip > 0
        persist = not votes.must_skip and self._cadence.persists(step, votes)
        replicate = self._snapshots.replicas.decide(step, votes)
        small_state = {
            "skipped_updates": skipped_updates,
            "consumed_samples": step * self._config.training.global_batch_size,
            # For an export: heads, windows and angles, which the parameters' shapes do not show.
            "model": model_fields(self._config.model),
            "data": dict(self._position),
            # For an export as well: without an end token no text ends.
            "tokenizer": dataclasses.asdict(self._config.data.tokenizer),
            "schedule": schedule_of(self._config),
            "cpu_rng": base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode(),
        }
        if self._snapshots.take(
            step, small_state, votes=votes.must_skip, persist=persist, replicate=replicate
        ):
            print(f"step {step}: snapshot started", flush=True)
            if persist:
                self._cost.began()
        # The result may have been read before the copy started (CPU, last step): settle it now.
        if self._settled is not None and self._settled[0] == step:
            self._settle(*self._settled[:2], finite=self._settled[2])

    def _settle(self, step: int, skipped_updates: int, *, finite: bool) -> None:
        self._settled = step, skipped_updates, finite
        if self._snapshots is not None:
            small_state = {"skipped_updates": skipped_updates}
            self._snapshots.settle(step, small_state, finite=finite)


def _cadence(config: JobConfig, done: int) -> Cadence:
    checkpoint, last_step = config.checkpoint, config.training.steps
    if checkpoint.interval == "auto":
        return AutoCadence(
            snapshot_interval=checkpoint.snapshot_interval_steps,
            last_step=last_step,
            done=done,
            world_size=config.layout.world_size,
        )
    return Cadence(
        snapshot_interval=checkpoint.memory_interval_steps,
        persist_interval=checkpoint.interval_steps,
        last_step=last_step,
        done=done,
    )
