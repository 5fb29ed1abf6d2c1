"""One rank of a training run: meet the other ranks, restore, run the steps, finish.

It runs in a process that the template (:mod:`megascale_trainer.process.__main__`) forked. Its only
link to the control plane is its agent, over one socket. The end of the agent ends it too, because
the template dies with the agent; the loss of the driver does not affect it.
"""

from __future__ import annotations

import base64
import contextlib
import faulthandler
import gc
import os
import re
import socket
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from megascale_common.node import framing
from megascale_common.node.files import AttemptFolder
from megascale_common.node.messages import (
    Assignment,
    ErrorKind,
    Failed,
    Finished,
    Running,
)
from megascale_common.node.spans.ring import SpanRingWriter
from megascale_common.node.status_page import Phase, StatusPageWriter
from megascale_job import loading
from megascale_job.config import JobConfig
from megascale_job.restore import RestorePlan, RestoreSource
from megascale_job.sizes.failures import device_hours_per_failure
from megascale_job.sizes.memory import snapshots_in_flight
from megascale_job.visible import counted
from megascale_kernels import flash_attention_4
from megascale_trainer.data.client import LoaderClient, RingRequest
from megascale_trainer.data.device_batches import StepBatches, step_batches
from megascale_trainer.data.indexed import CorpusError, DataError
from megascale_trainer.model.context import attention_backends
from megascale_trainer.parallel.determinism import pin_collectives
from megascale_trainer.parallel.groups import Groups
from megascale_trainer.process import flight_dump
from megascale_trainer.process.bootstrap import Rendezvous, compare_rank_tables, create_groups
from megascale_trainer.process.loaded_model import (
    differences,
    other_data,
    other_schedule,
    position_of,
)
from megascale_trainer.process.snapshot_steps import SnapshotSteps
from megascale_trainer.process.step_loop import LeaveOrder, StepLoop
from megascale_trainer.process.step_records import StepRecords
from megascale_trainer.process.system import make_room, pin_interface, show_title
from megascale_trainer.save.daemon_link import DaemonLink, RankRegistration
from megascale_trainer.save.restore import MemoryLook, RestoreRefused, restore
from megascale_trainer.save.snapshot import Snapshotter
from megascale_trainer.save.state_image import largest_slot_bytes, layout_of_rank
from megascale_trainer.telemetry.profiling import StepProfiler
from megascale_trainer.telemetry.timer import StepTimer, Timeline, step_timer
from megascale_trainer.telemetry.trackers import problem_of
from megascale_trainer.trainer import Trainer

RENDEZVOUS_TIMEOUT_S = 120.0
LOADER_TIMEOUT_S = 120.0
LOOK_S = 0.1  # wait for the answer whether memory has the state; a fetch from a peer takes longer
MAX_ERROR_CHARS = 8_000
_HOST_ALLOCATOR = "defaultcpuallocator: "  # torch's text in front of "can't allocate memory"
# gloo's joke at the end of a message about a lost connection, an emoji included.
_ADVICE = re.compile(r" *GLHF!\W*?(?=\n|$)")
_COLLECTIVE_WORDS = (
    "gloo",
    "nccl",
    "connection closed by peer",
    "connection reset",
    "timed out",
    "broken pipe",
)


def run(agent: socket.socket, assignment: Assignment, descriptors: list[int]) -> int:
    """Carry out the assignment; returns the exit status and never raises."""
    rank, job, attempt = assignment.rank, assignment.job, assignment.attempt
    show_title(f"megascale rank {rank} of job {job} attempt {attempt}", f"r{rank} {job}")
    # For crashes of native code, which would leave no line in the log. It needs no interpreter
    # lock.
    faulthandler.enable()
    try:
        _Worker(agent, assignment, descriptors[0] if descriptors else None).run()
        return 0
    except BaseException as error:
        text = _ADVICE.sub("", traceback.format_exc())
        print(text, flush=True)
        kind, detail = _classify(error)
        try:
            failed = Failed(error_kind=kind, error=text[-MAX_ERROR_CHARS:], detail=detail)
            framing.send(agent, failed)
        except OSError:
            pass  # the agent has ended, so there is no one to report to
        return 1


class JobRefused(Exception):
    """This rank cannot run the job in any attempt; the message has field and remedy."""


class _Worker:
    def __init__(
        self, agent: socket.socket, assignment: Assignment, store_listen: int | None
    ) -> None:
        self._agent = agent
        self._assignment = assignment
        self._store_listen = store_listen
        self._config: JobConfig = loading.from_json(assignment.config)
        self._plan = RestorePlan.from_mapping(assignment.restore)
        self._device = _device(assignment)
        self._status = StatusPageWriter(
            Path(assignment.status_page), rank=assignment.rank, attempt=assignment.attempt
        )
        self._timer = StepTimer()
        self._snapshots: Snapshotter | None = None
        self._link: DaemonLink | None = None
        self._look: MemoryLook | None = None
        self._skipped = 0
        self._consumed = 0
        self._stored: dict[str, Any] = {}  # the small state of the step that is continued
        self._notes: list[str] = []
        self._start = Timeline()
        self._passed_over: tuple[str, ...] = ()
        self._position: dict[str, Any] = {}

    def run(self) -> None:
        """The whole life of the rank."""
        self._say_hello()
        if self._config.checkpoint.uri:
            with self._start.part("register"):
                self._register()
        self._groups = self._meet()
        if self._look is not None:
            self._look.poll()
        try:
            self._work()
        except BaseException:
            # On a lost device the poll itself fails; the status page then keeps its last
            # operations.
            with contextlib.suppress(RuntimeError):
                self._groups.poll()
            raise

    def _work(self) -> None:
        status, start = self._status, self._start
        with start.part("build"):
            trainer = self._build()
        if self._link is not None:
            self._snapshots = Snapshotter(
                self._link,
                trainer.state,
                self._device,
                verified_share=self._config.checkpoint.verify_d2h,
                replicas=self._config.checkpoint.replicas > 0,
            )
        with start.part("restore"):
            done = self._restore(trainer)
        with start.part("data"):
            loop = self._step_loop(trainer, done)
        with start.part("attention"):  # waits for a package that is still being imported
            attention = attention_backends(self._config, self._device)
        print(f"attention by {attention}", flush=True)
        print(f"ready to train: {start}", flush=True)
        # From here on garbage is only collected at fixed steps (COLLECT_EVERY_STEPS of step_loop).
        gc.collect()
        gc.freeze()
        gc.disable()
        passed_over = "; ".join(self._passed_over)[:MAX_ERROR_CHARS]
        for note in self._notes:
            print(note, flush=True)
        notes = "; ".join(self._notes)[:MAX_ERROR_CHARS]
        framing.send(self._agent, Running(step=done, passed_over=passed_over, notes=notes))
        status.update(step=done, phase=Phase.WARMUP)
        last = loop.run(done)
        status.update(phase=Phase.SNAPSHOT)
        not_saved = self._finish(loop, done, last)
        loop.records.close()
        loop.data.close()
        if loop.held_out is not None:
            loop.held_out.close()
        status.update(phase=Phase.DONE)
        print(f"finished: step {last} is the last", flush=True)
        framing.send(self._agent, Finished(step=last, not_saved=not_saved))

    def _say_hello(self) -> None:
        who, layout = self._assignment, self._config.layout
        at = layout.coordinates(who.rank)
        print(
            f"rank {who.rank} of {layout.world_size}: tp {at.tp} dp {at.dp} pp {at.pp} "
            f"on {self._device}, attempt {who.attempt}, job {who.job}, "
            f"torch {torch.__version__}",
            flush=True,
        )

    def _meet(self) -> Groups:
        """Rendezvous of all ranks; every key carries the job and the attempt."""
        who, config = self._assignment, self._config
        pin_interface(who.store_host, self._device.type == "cuda")
        with self._start.part("store"):
            store = self._store()
        if self._device.type == "cuda":
            # Before the first communicator, at which NCCL reads these variables.
            os.environ.update(who.network)
            collectives = pin_collectives(config.training.deterministic)
            print(f"NCCL: {collectives}", flush=True)
        if (recorded := flight_dump.recorder(self._device)) is not None:
            files = AttemptFolder(Path(who.status_page).parent)
            request, out = files.flight_request(who.rank), files.flight_dump(who.rank)
            flight_dump.answer(request, out, recorded)
        prefixed = PrefixStore(f"{who.job}/{who.attempt}", store)
        with self._start.part("rank table"):
            compare_rank_tables(prefixed, who.rank, who.rank_table)
        timeout_s = config.recovery.collective_timeout_s
        return create_groups(
            config.layout,
            who.rank,
            Rendezvous(prefixed, self._device, timeout_s, self._status),
            ring=config.parallelism.virtual_stages > 1,
            tied=config.model.tie_embeddings,
            experts=config.model.experts.count > 0,
            timeline=self._start,
        )

    def _store(self) -> TCPStore:
        """The rendezvous store; rank 0 serves it on the socket that its agent has bound."""
        who, world_size = self._assignment, self._config.layout.world_size
        serves = who.rank == 0
        if serves:
            make_room(world_size)
        return TCPStore(
            who.store_host,
            who.store_port,
            world_size=world_size,
            is_master=serves,
            timeout=timedelta(seconds=RENDEZVOUS_TIMEOUT_S),
            wait_for_workers=False,
            master_listen_fd=self._store_listen if serves else None,
        )

    def _build(self) -> Trainer:
        rank = self._assignment.rank
        if self._assignment.reports and (problem := problem_of(self._config.telemetry)):
            raise JobRefused(problem)
        try:
            self._timer = self._make_timer()
            return Trainer(
                self._config, rank, self._groups, self._device, self._status, self._timer
            )
        except ValueError as error:
            # This build or the node's packages refuse sizes or names, such as an optimizer's.
            raise JobRefused(str(error)) from error

    def _make_timer(self) -> StepTimer:
        who, level = self._assignment, self._config.telemetry.spans
        if level == "none" or not who.spans:
            return StepTimer()
        ring = SpanRingWriter(Path(who.spans), rank=who.rank, attempt=who.attempt)
        return step_timer(ring, level, self._device)

    def _register(self) -> None:
        """Register first of all: the daemon verifies and pins the state to restore meanwhile."""
        who, sizes = self._assignment, self._config.parallelism
        axes = {"tp": sizes.tp, "cp": sizes.cp, "dp": sizes.dp, "pp": sizes.pp}
        if sizes.ep > 1:  # dense models keep the manifests that they had
            axes["ep"] = sizes.ep
        try:
            layout = layout_of_rank(self._config, who.rank)
            largest_bytes = largest_slot_bytes(self._config) if who.replicas.target else 0
        except ValueError as error:
            raise JobRefused(str(error)) from error
        registration = RankRegistration(
            job=who.job,
            attempt=who.attempt,
            rank=who.rank,
            world_size=self._config.layout.world_size,
            uri=self._config.checkpoint.uri,
            committer_endpoint=who.committer_endpoint,
            slots=self._config.checkpoint.slots,
            sizes={**axes, "vpp": sizes.virtual_stages},
            in_flight=snapshots_in_flight(self._config.checkpoint.memory_interval_steps),
            local_ranks=who.local_ranks,
            largest_slot_bytes=largest_bytes,
            max_write_mib_per_s=self._config.checkpoint.max_write_mib_per_s,
            max_step_slowdown=self._config.checkpoint.max_step_slowdown,
            replicas=who.replicas,
        )
        timeout_s = self._config.recovery.collective_timeout_s
        self._link = DaemonLink(
            who.checkpoint_socket,
            registration,
            layout,
            self._device,
            collective_timeout_s=timeout_s,
        ).connect()
        if self._plan.source is not RestoreSource.NONE:
            self._look = MemoryLook(self._link, self._plan)
            self._look.poll(LOOK_S)

    def _restore(self, trainer: Trainer) -> int:
        """Load the state that the driver chose; returns the last completed step."""
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
        world = self._groups.world
        link, device = self._snapshots.link, self._device
        restored = restore(link, plan, trainer.state, device, world, self._look)
        plan = self._plan = restored.plan
        self._passed_over = restored.passed_over
        for problem in restored.passed_over:
            print(f"passed over: {problem}", flush=True)
        if restored.damage:
            print(f"memory is damaged, storage was read: {restored.damage}", flush=True)
        small_state = restored.small_state
        refused, changed = differences(small_state.get("model"), self._config.model)
        if refused:
            raise JobRefused(f"{'; '.join(refused)}; set them as in the job that wrote it")
        for difference in changed:
            print(f"{difference}: this job continues with its own", flush=True)
        if plan.step == 0:
            trainer.finish_load(0, weights_only=True)
            print(f"takes the parameters alone: {restored.timeline}", flush=True)
            return 0
        self._refuse_beyond(plan)
        consumed = int(small_state.get("consumed_samples", 0))
        expected = plan.step * self._config.training.global_batch_size
        if consumed != expected:
            raise JobRefused(
                f"trainer.training.global_batch_size: the checkpoint of step {plan.step} has "
                f"consumed {counted(consumed, 'sample')}, "
                f"{self._config.training.global_batch_size} would "
                f"make it {expected}; keep the batch size of the job that wrote it"
            )
        self._stored = small_state
        self._notes += other_schedule(small_state.get("schedule"), self._config, plan.step)
        self._skipped = int(small_state.get("skipped_updates", 0))
        self._consumed = consumed
        trainer.finish_load(plan.step, skipped_updates=self._skipped)
        if "cpu_rng" in small_state:  # an imported model has none, so the job's seed applies
            random_state = bytearray(base64.b64decode(small_state["cpu_rng"]))
            torch.set_rng_state(torch.frombuffer(random_state, dtype=torch.uint8))
        print(f"restored step {plan.step}: {restored.sources}; {restored.timeline}", flush=True)
        return plan.step

    def _refuse_beyond(self, plan: RestorePlan) -> None:
        """Refuse a checkpoint past the last step, or another job's at it: no step is left."""
        steps = self._config.training.steps
        if plan.step > steps or (plan.step == steps and not plan.written_by_attempt):
            field = "checkpoint.uri" if plan.written_by_attempt else "checkpoint.load_uri"
            raise JobRefused(
                f"{field}: its checkpoint is of step {plan.step}, and trainer.training.steps is "
                f"{steps}; give more steps, or take the parameters alone with checkpoint.load "
                "weights from another job's folder"
            )

    def _open_data(
        self, stream: Literal["training", "evaluation"], first_sample: int
    ) -> StepBatches:
        who, config = self._assignment, self._config
        ring = RingRequest(
            dp_rank=config.layout.coordinates(who.rank).dp,
            reader=who.reader,
            readers=who.readers,
            first_sample=first_sample,
            stream=stream,
        )
        loader = LoaderClient(Path(who.loader_socket), config, ring, LOADER_TIMEOUT_S)
        if stream == "training":
            self._position = self._compared(loader)
        return step_batches(loader, self._device)

    def _compared(self, loader: LoaderClient) -> dict[str, Any]:
        """The meaning of the data position, checked against the checkpoint's."""
        here = position_of(self._config, loader.identities, loader.blend_scheme)
        if self._consumed:
            refused, changed = other_data(self._stored.get("data"), here)
            if refused:
                raise JobRefused(
                    f"{'; '.join(refused)}; keep the data of the job that wrote it, or start a job "
                    "of its own from it with checkpoint.load: weights"
                )
            self._notes += changed
        return here

    def _step_loop(self, trainer: Trainer, done: int) -> StepLoop:
        config, device = self._config, self._device
        leave = LeaveOrder(
            self._assignment.rank, lambda message: framing.send(self._agent, message)
        )
        data = self._open_data("training", self._consumed)
        return StepLoop(
            trainer=trainer,
            device=device,
            groups=self._groups,
            status=self._status,
            data=data,
            held_out=self._open_data("evaluation", 0) if config.evaluates else None,
            snapshots=SnapshotSteps(
                config, self._status, self._snapshots, done, self._device_hours(), self._position
            ),
            records=StepRecords(self._agent, self._assignment, config, device),
            profiler=StepProfiler(self._agent, device, leave.take, trainer.await_parameters),
            leave=leave,
            skipped=self._skipped,
            timer=self._timer,
        )

    def _device_hours(self) -> float:
        """Device hours between failures, from published figures and the fleet's own count."""
        counted = self._assignment.failures
        return device_hours_per_failure(
            self._config.checkpoint.device_mtbf_hours, counted.count, counted.device_hours
        )

    def _finish(self, loop: StepLoop, done: int, last: int) -> str:
        """After the last step, wait for its commit; returns "" or why it is not committed."""
        if last < self._config.training.steps:
            loop.snapshots.close()
            return ""
        world, device, skipped = self._groups.world, self._device, loop.skipped
        if done == self._config.training.steps:
            if self._plan.source is RestoreSource.STORAGE:
                return ""  # it was already committed
            loop.snapshots.take_last_again(world, device, skipped)
        return loop.snapshots.finish(world, device, skipped)


def _device(assignment: Assignment) -> torch.device:
    """The rank's device; all workers of a host see its devices in the same order."""
    if assignment.device_kind == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", assignment.device_index)
    torch.cuda.set_device(device)
    flash_attention_4.begin_import()  # takes seconds, in parallel with the rest of the start
    return device


def _classify(error: BaseException) -> tuple[ErrorKind, str]:
    """Kind of the error for the driver's recovery, and a detail such as the damaged file.

    BAD_JOB means that every attempt would fail in the same way.

    A failed collective is a symptom (a peer died) and never blames this rank. If all that is left
    of it is a lost CUDA context, the agent finds the cause on the status page
    (:mod:`megascale_executor.agent.workers.evidence`).
    """
    if isinstance(error, (JobRefused, CorpusError)):
        return "BAD_JOB", str(error)
    if isinstance(error, RestoreRefused):
        return error.kind, error.file or str(error)
    if isinstance(error, DataError):
        return "DATA", str(error)
    text = str(error).lower()
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or _HOST_ALLOCATOR in text:
        return "OUT_OF_MEMORY", str(error).partition("\n")[0] or "the host has no memory left"
    if isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in text for word in _COLLECTIVE_WORDS)
    ):
        return "COLLECTIVE", ""
    return "OTHER", ""
