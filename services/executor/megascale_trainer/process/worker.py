"""One rank of a training run: meet the others, restore, train step by step, snapshot, report.

Runs in a process that :mod:`megascale_trainer.process.template` forked. Talks to the agent over one
socket and to nothing else on the control plane; losing the agent ends it (the template dies with
the agent), losing the driver does not concern it.
"""

from __future__ import annotations

import base64
import contextlib
import faulthandler
import gc
import math
import socket
import time
import traceback
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from megascale_common.job import config as job_config
from megascale_common.job.config import JobConfig
from megascale_common.job.restore import RestorePlan, RestoreSource
from megascale_common.node import framing
from megascale_common.node.messages import (
    STACKS_SIGNAL,
    Assignment,
    ErrorKind,
    Failed,
    Finished,
    Running,
    StepDone,
)
from megascale_common.node.status_page import Phase, StatusPageWriter
from megascale_common.sizes import flops
from megascale_trainer.data.client import LoaderClient
from megascale_trainer.data.device_batches import StepBatches, step_batches
from megascale_trainer.data.errors import DataError
from megascale_trainer.parallel.groups import Groups, create_groups
from megascale_trainer.snapshot import Registration, RestoreRefused, Snapshotter
from megascale_trainer.telemetry.profiling import StepProfiler
from megascale_trainer.trainer import StepRecord, StepResult, Trainer

RENDEZVOUS_TIMEOUT_S = 120.0
LOADER_TIMEOUT_S = 120.0
LAST_SLOT_TIMEOUT_S = 60.0
DRAIN_TIMEOUT_S = 300.0
# Collections at chosen steps, the same on all ranks: irregular ones spread ranks apart (MegaScale
# section 6.3).
COLLECT_EVERY_STEPS = 100
# How often a host that waits for its device looks at it; short beside a step that needs a GPU.
STEP_POLL_S = 0.001
MAX_ERROR_CHARS = 8_000
FIRST_LOGGED_STEPS, LOG_INTERVAL_S = 10, 1.0
_COLLECTIVE_WORDS = (
    "gloo",
    "nccl",
    "connection closed by peer",
    "connection reset",
    "timed out",
    "broken pipe",
)


def run(agent: socket.socket, message: framing.Message, descriptors: list[int]) -> int:
    """Do what the assignment says; returns the exit status and never raises."""
    assignment = cast(Assignment, message)
    faulthandler.register(
        STACKS_SIGNAL
    )  # its handler needs no interpreter lock, which a hung call may hold
    try:
        _Worker(agent, assignment, descriptors[0] if descriptors else None).run()
        return 0
    except BaseException as error:
        text = traceback.format_exc()
        print(text, flush=True)
        kind, detail = _classify(error)
        try:
            framing.send(
                agent,
                Failed(
                    kind="failed",
                    error_kind=kind,
                    error=text[-MAX_ERROR_CHARS:],
                    detail=detail,
                ),
            )
        except OSError:
            pass  # the agent is gone, and with it whoever would have listened
        return 1


@dataclass(slots=True)
class _InFlight:
    """A step whose result has been launched but not read (it is read one step late)."""

    step: int
    result: StepResult
    snapshot_step: int | None  # the vote in this step was about a snapshot after that step


class _Worker:
    def __init__(
        self, agent: socket.socket, assignment: Assignment, store_listen: int | None
    ) -> None:
        self._agent, self._assignment, self._store_listen = agent, assignment, store_listen
        self._config: JobConfig = job_config.from_accepted(assignment["config"])
        self._plan = RestorePlan.from_mapping(assignment["restore"])
        self._device = _device(assignment)
        self._status = StatusPageWriter(
            Path(assignment["status_page"]), rank=assignment["rank"], attempt=assignment["attempt"]
        )
        self._snapshots: Snapshotter | None = None
        self._held_out: StepBatches | None = None
        self._profiler = StepProfiler(agent, self._device)
        self._last_step_end_s = 0.0
        self._logged_steps, self._logged_at_s = 0, 0.0
        self._skipped, self._consumed = 0, 0
        self._settled: tuple[int, bool] | None = (
            None  # (newest step whose result was read, its state is fit to keep)
        )
        self._decided: tuple[int, int] | None = (
            None  # (snapshot after this step, ranks that must skip it)
        )

    def run(self) -> None:
        """The whole life of the rank."""
        self._say_hello()
        self._groups = self._meet()
        try:
            self._work()
        except BaseException:
            with contextlib.suppress(
                RuntimeError
            ):  # of a device that is lost: what it was doing stays on the page
                self._groups.poll()
            raise

    def _work(self) -> None:
        config, status = self._config, self._status
        trainer = Trainer(config, self._assignment["rank"], self._groups, self._device, status)
        if config.checkpoint.uri:
            self._snapshots = self._register(trainer)
        done = self._restore(trainer)
        data = self._open_data("training", self._consumed)
        if config.evaluates:
            self._held_out = self._open_data("evaluation", 0)
        gc.collect()
        gc.freeze()
        gc.disable()
        framing.send(self._agent, Running(kind="running", step=done))
        status.update(step=done, phase=Phase.WARMUP)
        self._last_step_end_s = time.monotonic()
        self._train(trainer, data, done)
        trainer.settle()
        self._profiler.finish()
        status.update(phase=Phase.SNAPSHOT)
        if done == config.training.steps and self._plan.source is RestoreSource.MEMORY:
            self._take_last_again()
        self._finish(done)
        data.close()
        if self._held_out is not None:
            self._held_out.close()
        status.update(phase=Phase.DONE)
        print(f"finished: step {config.training.steps} is the last", flush=True)
        framing.send(self._agent, Finished(kind="finished", step=config.training.steps))

    def _say_hello(self) -> None:
        who, layout = self._assignment, self._config.layout
        at = layout.coordinates(who["rank"])
        print(
            f"rank {who['rank']} of {layout.world_size}: tp {at.tp} dp {at.dp} pp {at.pp} on {self._device}, "
            f"attempt {who['attempt']}, job {who['job']}, torch {torch.__version__}",
            flush=True,
        )

    def _meet(self) -> Groups:
        """Rendezvous of all ranks; every key carries the job and the attempt."""
        who, config = self._assignment, self._config
        store = TCPStore(
            who["store_host"],
            who["store_port"],
            world_size=config.layout.world_size,
            is_master=who["rank"] == 0,
            timeout=timedelta(seconds=RENDEZVOUS_TIMEOUT_S),
            wait_for_workers=False,
            master_listen_fd=self._store_listen if who["rank"] == 0 else None,
        )
        prefixed = PrefixStore(f"{who['job']}/{who['attempt']}", store)
        return create_groups(
            config.layout,
            who["rank"],
            prefixed,
            self._device,
            timeout_s=config.recovery.collective_timeout_s,
            ring=config.parallelism.virtual_stages > 1,
            status=self._status,
        )

    def _register(self, trainer: Trainer) -> Snapshotter:
        who, sizes = self._assignment, self._config.parallelism
        registration = Registration(
            job=who["job"],
            attempt=who["attempt"],
            rank=who["rank"],
            world_size=self._config.layout.world_size,
            uri=self._config.checkpoint.uri,
            committer_endpoint=who["committer_endpoint"],
            slots=self._config.checkpoint.slots,
            sizes={
                "tp": sizes.tp,
                "cp": sizes.cp,
                "dp": sizes.dp,
                "pp": sizes.pp,
                "vpp": sizes.virtual_stages,
            },
        )
        timeout_s = self._config.recovery.collective_timeout_s
        return Snapshotter(
            who["checkpoint_socket"],
            registration,
            trainer,
            self._device,
            collective_timeout_s=timeout_s,
        )

    def _restore(self, trainer: Trainer) -> int:
        """Load what the driver decided; returns the last completed step."""
        plan = self._plan
        if plan.source is RestoreSource.NONE:
            trainer.initialise()
            print("starts from initial values", flush=True)
            return 0
        if self._snapshots is None:
            raise RestoreRefused(
                "OTHER", "the plan restores a step, but the job has no checkpoint uri", ""
            )
        self._status.update(phase=Phase.RESTORE)
        small_state = self._snapshots.restore(plan)
        consumed, expected = (
            small_state["consumed_samples"],
            plan.step * self._config.training.global_batch_size,
        )
        if consumed != expected:
            raise RestoreRefused(
                "OTHER",
                f"the checkpoint of step {plan.step} has consumed {consumed} samples, training.global_batch_size = "
                f"{self._config.training.global_batch_size} would make it {expected}: keep the batch size of the job "
                "that wrote it",
                "",
            )
        trainer.finish_load(plan.step)
        self._skipped, self._consumed = int(small_state["skipped_updates"]), consumed
        torch.set_rng_state(
            torch.frombuffer(bytearray(base64.b64decode(small_state["cpu_rng"])), dtype=torch.uint8)
        )
        print(f"restored step {plan.step} from {plan.source}", flush=True)
        return plan.step

    def _open_data(
        self, stream: Literal["training", "evaluation"], first_sample: int
    ) -> StepBatches:
        who, config = self._assignment, self._config
        loader = LoaderClient(
            Path(who["loader_socket"]),
            config,
            dp_rank=config.layout.coordinates(who["rank"]).dp,
            reader=who["reader"],
            readers=who["readers"],
            first_sample=first_sample,
            timeout_s=LOADER_TIMEOUT_S,
            stream=stream,
        )
        return step_batches(loader, self._device)

    def _train(self, trainer: Trainer, data: StepBatches, done: int) -> None:
        """All steps from ``done`` + 1 on. On CUDA the result of a step is read after the next has
        been launched.
        """
        steps = self._config.training.steps
        previous: _InFlight | None = None
        for step in range(done + 1, steps + 1):
            self._profiler.before(step)
            if (
                step == steps and previous is not None
            ):  # its snapshot is sealed before the last one finds a slot
                self._take_in(previous, trainer)
                previous = None
            snapshot_step = self._snapshot_to_vote_on(step)
            vote = self._vote(step, snapshot_step)
            batches = data.take()
            if self._snapshots is not None and self._snapshots.copied is not None:
                trainer.wait_before_update(self._snapshots.copied)
            current = _InFlight(step, trainer.train_step(batches, vote=vote), snapshot_step)
            if step < steps:
                data.prefetch()
            if previous is not None:
                self._take_in(previous, trainer)
            # On CPU the result is there already; the first ends the warm-up; the last has no step
            # to hide behind, and an evaluation waits for the device anyway.
            if (
                self._device.type == "cpu"
                or step in (done + 1, steps)
                or self._evaluates_after(step)
            ):
                self._take_in(current, trainer)
                previous = None
            else:
                previous = current
            self._snapshot(step)
            if step % COLLECT_EVERY_STEPS == 0:
                gc.collect()
            self._profiler.after(step)

    def _snapshot_to_vote_on(self, step: int) -> int | None:
        """The snapshot that the vote in ``step`` is about: the next step's, or at the end this
        one's.
        """
        config = self._config
        if self._snapshots is None:
            return None
        if step == config.training.steps:
            return step
        following = step + 1
        interval = config.checkpoint.interval_steps
        return (
            following
            if interval and following % interval == 0 and following < config.training.steps
            else None
        )

    def _vote(self, step: int, snapshot_step: int | None) -> int:
        if self._snapshots is None or snapshot_step is None:
            return 0
        if snapshot_step == step:
            self._status.update(phase=Phase.SNAPSHOT)  # it may wait for long
            vote = self._snapshots.reserve_or_wait(step, LAST_SLOT_TIMEOUT_S)
            self._status.update(phase=Phase.STEP)
            return vote
        return self._snapshots.reserve(snapshot_step)

    def _evaluates_after(self, step: int) -> bool:
        interval, last = self._config.evaluation.interval_steps, self._config.training.steps
        return self._held_out is not None and (step % interval == 0 or step == last)

    def _evaluate(self, trainer: Trainer) -> float:
        """Loss on the held-out batches, the same ones each time."""
        assert self._held_out is not None
        self._status.update(phase=Phase.EVAL)
        held_out = self._held_out
        loss = trainer.evaluate(held_out.take() for _ in range(self._config.evaluation.batches))
        self._status.update(phase=Phase.STEP)
        return loss

    def _take_in(self, step: _InFlight, trainer: Trainer) -> None:
        """Read the result of a step: status page, step record, evaluation, and the ranks' vote on a
        snapshot.
        """
        while (
            not step.result.ready()
        ):  # here the host sits when its device hangs: the page shows how far that came
            self._groups.poll()
            time.sleep(STEP_POLL_S)
        record = step.result.read()
        self._status.update(step=step.step, phase=Phase.STEP)
        self._groups.poll()
        self._skipped += record.skipped
        # A masked update leaves the state as it was; the record is the same on all ranks, and so is
        # what they say.
        sound = math.isfinite(record.loss) and math.isfinite(record.gradient_norm)
        self._settle(step.step, finite=record.skipped or sound)
        if step.snapshot_step is not None:
            self._decided = (step.snapshot_step, record.votes)
        values = self._step_record(record, time.monotonic())
        self._log_step(values)
        if self._evaluates_after(step.step):
            values["evaluation_loss"] = self._evaluate(trainer)
        if self._assignment["reports"]:
            framing.send(self._agent, StepDone(kind="step", record=values))
        self._last_step_end_s = time.monotonic()

    def _step_record(self, record: StepRecord, now_s: float) -> dict[str, Any]:
        """The record as megascale.v1.StepRecord has it, with times and utilisation added."""
        config, elapsed_s = self._config, now_s - self._last_step_end_s
        tokens = config.training.global_batch_size * config.model.sequence_length
        tokens_per_s = tokens / elapsed_s
        utilisation = flops.mfu(
            config.model, tokens_per_s, config.layout.world_size, _device_name(self._device)
        )
        values = {
            key: value for key, value in asdict(record).items() if key not in ("skipped", "votes")
        }
        return {
            **values,
            "skipped_updates": self._skipped,
            "attempt": self._assignment["attempt"],
            "step_time_s": elapsed_s,
            "tokens_per_s": tokens_per_s,
            "mfu_causal": utilisation.exact if utilisation else None,
            "mfu_full": utilisation.full if utilisation else None,
            "completed_at_s": time.time(),
        }

    def _log_step(self, values: dict[str, Any]) -> None:
        """A line of the rank's log: each of the first steps, then at most one a second."""
        now_s = time.monotonic()
        self._logged_steps += 1
        if self._logged_steps > FIRST_LOGGED_STEPS and now_s - self._logged_at_s < LOG_INTERVAL_S:
            return
        self._logged_at_s = now_s
        print(
            f"step {values['step']}: loss {values['loss']:.6g}, gradient norm {values['gradient_norm']:.4g}, "
            f"{values['step_time_s']:.3f} s",
            flush=True,
        )

    def _snapshot(self, step: int) -> None:
        """Seal what has been copied; start or skip the snapshot after ``step`` as the ranks
        decided.
        """
        if self._snapshots is None:
            return
        self._snapshots.seal_if_copied()
        if self._decided is None or self._decided[0] != step:
            return
        votes, self._decided = self._decided[1], None
        self._take(step, votes)
        self._snapshots.seal_if_copied()

    def _take(self, step: int, votes: int) -> None:
        assert self._snapshots is not None
        small_state = {
            "skipped_updates": self._skipped,
            "consumed_samples": step * self._config.training.global_batch_size,
            "cpu_rng": base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode(),
        }
        if self._snapshots.take(step, small_state, votes=votes):
            print(f"step {step}: snapshot started", flush=True)
        if self._settled is not None and self._settled[0] == step:
            self._snapshots.settle(
                step, {"skipped_updates": self._skipped}, finite=self._settled[1]
            )

    def _settle(self, step: int, *, finite: bool) -> None:
        """The result of ``step`` has been read; its snapshot may have been started before, or
        follow.
        """
        self._settled = step, finite
        if self._snapshots is not None:
            self._snapshots.settle(step, {"skipped_updates": self._skipped}, finite=finite)

    def _take_last_again(self) -> None:
        """All steps are done, and the state was in memory alone: what would have committed it is
        gone.
        """
        assert self._snapshots is not None
        steps = self._config.training.steps
        votes = torch.zeros(1, device=self._device)
        votes += self._snapshots.reserve_or_wait(steps, LAST_SLOT_TIMEOUT_S)
        self._groups.world.all_reduce(votes)
        self._settle(steps, finite=True)
        self._take(steps, round(votes.item()))

    def _finish(self, done: int) -> None:
        """After the last step: seal it, wait until it is committed or say why not."""
        if self._snapshots is None:
            return
        if done == self._config.training.steps and self._plan.source is RestoreSource.STORAGE:
            self._snapshots.close()  # it was committed before we began
            return
        self._snapshots.seal_if_copied(wait=True)
        problem = self._snapshots.drain(self._config.training.steps, DRAIN_TIMEOUT_S)
        if problem:
            print(f"the last checkpoint is not committed: {problem}", flush=True)
        self._snapshots.close()


def _device(assignment: Assignment) -> torch.device:
    """The rank's device. Workers see all devices of the host in one order and get an index."""
    if assignment["device_kind"] == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", assignment["device_index"])
    torch.cuda.set_device(device)
    return device


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _classify(error: BaseException) -> tuple[ErrorKind, str]:
    """Kind of the error for the driver's judgement, and a detail such as the damaged file.

    A failed collective is a symptom (a peer died); it never makes this rank the culprit. Where only
    a lost CUDA context is left of it, the agent tells by the status page
    (:mod:`megascale_executor.agent.symptoms`).
    """
    if isinstance(error, RestoreRefused):
        return error.kind, error.file
    if isinstance(error, DataError):
        return "DATA", str(error)
    if isinstance(error, torch.OutOfMemoryError):
        return "OUT_OF_MEMORY", ""
    text = str(error).lower()
    if isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in text for word in _COLLECTIVE_WORDS)
    ):
        return "COLLECTIVE", ""
    return "OTHER", ""
