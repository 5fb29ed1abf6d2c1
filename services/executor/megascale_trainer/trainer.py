"""The trainer: one rank's model, buffers and optimizer, and a training step of all of them.

The loss is the weighted sum over the global batch, divided by its weight. Gradients are those of
the sum: the division, the clip factor and the decision to skip a non-finite step happen on the
device, in the update, after the one all-reduce that ends a step. So a step never waits for the
device; only :meth:`StepResult.read` does.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from megascale_common.node.spans.ops import OPTIMIZER, SNAPSHOT
from megascale_common.node.status_page import StatusPageWriter
from megascale_job.config import JobConfig
from megascale_job.sizes.parameter_table import (
    ParameterTable,
    matrix_counts,
    parameter_table,
)
from megascale_job.visible import counted
from megascale_kernels.expert_operators import expert_operators
from megascale_kernels.operators import Operators, choose
from megascale_kernels.torch_calls import cuda_event, is_reached
from megascale_trainer.batch import MicroBatch
from megascale_trainer.model.initial_values import fill_shard
from megascale_trainer.optimizer.interface import Optimizer, OptimizerSetup
from megascale_trainer.optimizer.registry import optimizer_factory
from megascale_trainer.optimizer.router_state import RouterState, StageLoads
from megascale_trainer.optimizer.step_control import (
    SKIP_REASONS,
    StepControl,
    StepTotals,
    learning_rate,
    local_totals,
    step_control,
)
from megascale_trainer.parallel.context.sharding import ContextParallel
from megascale_trainer.parallel.data.bucket_parameters import fp8_gather_of
from megascale_trainer.parallel.data.buffers import FlatBuffers, Place
from megascale_trainer.parallel.data.overlapped_buffers import OverlappedBuffers
from megascale_trainer.parallel.expert.experts import ExpertParallel, UnscaledExperts
from megascale_trainer.parallel.expert.fp8 import Fp8Experts
from megascale_trainer.parallel.groups import Group, Groups
from megascale_trainer.parallel.pipeline.graphs import graphed
from megascale_trainer.parallel.pipeline.peer_edges import connect_edges
from megascale_trainer.parallel.pipeline.runtime import PipelineExecutor, Rehearsal
from megascale_trainer.parallel.pipeline.schedule import (
    SCHEDULES,
    Action,
    PipelineShape,
    forward_only,
)
from megascale_trainer.parallel.pipeline.stage import Stage, StageExperts, VirtualStage
from megascale_trainer.parallel.tensor.fp8 import Fp8, fp8_of
from megascale_trainer.parallel.tensor.sharding import TensorParallel, tensor_parallel
from megascale_trainer.save.state_image import StateImage
from megascale_trainer.telemetry.timer import StepTimer
from megascale_trainer.weights import bind_weights

# Dtype of parameters and hidden states. With fp8 only the layers' GEMMs run in FP8.
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The figures of one step, the same on every rank except those about its own experts.

    ``loss`` is the mean cross entropy, without ``z_loss``; ``gradient_norm`` is the norm of the
    mean gradient before clipping. A step with a NaN loss or norm was skipped, and so was one with a
    norm above ``optimizer.skip_norm``; ``skipped_because`` is one of :data:`SKIP_REASONS`.
    ``consumed_samples`` and ``consumed_tokens`` count from the start of the run. ``votes`` and
    ``wishes`` are sums over the ranks.

    A model with experts has more: ``balance`` and ``router_z``, the auxiliary losses per token;
    ``expert_share``, the rows of this rank's experts in the step before over the mean of its ep
    group, summed over the layers (1: even; 0: dense); ``expert_loads``, for each layer with experts
    on this stage and each expert its share of all choices times the number of experts (1: even).
    """

    step: int
    loss: float
    z_loss: float
    gradient_norm: float
    clip_factor: float
    skipped: bool
    learning_rate: float
    consumed_samples: int
    consumed_tokens: int
    votes: int
    wishes: int = 0
    skipped_because: str = ""
    balance: float = 0.0
    router_z: float = 0.0
    expert_share: float = 0.0
    expert_loads: tuple[tuple[float, ...], ...] = ()


class StepResult:
    """The result of a step that may still be running on the device."""

    def __init__(
        self,
        step: int,
        learning_rate: float,
        samples: int,
        tokens: int,
        totals: StepTotals,
        control: StepControl,
        loads: StageLoads,
    ) -> None:
        self._host = (step, learning_rate, samples, tokens)
        self._loads = loads
        weight = totals.weight
        broken = torch.where(totals.broken_ranks > 0, torch.nan, 1.0)
        values = (
            totals.entropy / weight,
            totals.z_loss / weight,
            control.norm * broken,
            control.clip * broken,
            control.reason.double(),
            totals.votes,
            totals.wishes,
            totals.balance / weight,
            totals.router_z / weight,
        )
        packed = torch.stack(values)
        if loads.values is not None:
            packed = torch.cat((packed, loads.values.flatten().double()))
        self._event: torch.cuda.Event | None = None
        if packed.is_cuda:
            # Copied to pinned memory, after the step on its stream: a later read waits only for
            # this event, not for work that was launched after it.
            self._values = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            self._values.copy_(packed, non_blocking=True)
            self._event = cuda_event()
            self._event.record()
        else:
            self._values = packed

    def ready(self) -> bool:
        """True if :meth:`read` would return at once; never waits."""
        return self._event is None or is_reached(self._event)

    def read(self) -> StepRecord:
        """The record; waits until the device has finished the step. Call it one step late."""
        if self._event is not None:
            self._event.synchronize()
        step, rate, samples, tokens = self._host
        loss, z_loss, norm, clip, reason, votes, wishes, balance, router_z, *loads = (
            self._values.tolist()
        )
        by_layer = self._loads.by_layer(loads)
        return StepRecord(
            step=step,
            loss=loss,
            z_loss=z_loss,
            gradient_norm=norm,
            clip_factor=clip,
            skipped=reason > 0,
            learning_rate=rate,
            consumed_samples=samples,
            consumed_tokens=tokens,
            votes=round(votes),
            wishes=round(wishes),
            skipped_because=SKIP_REASONS[round(reason)],
            balance=balance,
            router_z=router_z,
            expert_share=self._loads.share(by_layer),
            expert_loads=by_layer,
        )


class Trainer:
    """One rank of a training job.

    ``step`` is the number of completed steps. ``state`` has the optimizer's states as bytes, which
    snapshots copy and a restore fills.

    Raises:
        ValueError: the model does not fit the layout, or this build lacks a feature; names the
            field.
    """

    def __init__(
        self,
        config: JobConfig,
        rank: int,
        groups: Groups,
        device: torch.device,
        status: StatusPageWriter | None = None,
        timer: StepTimer | None = None,
    ) -> None:
        set_determinism(config, device)
        self.config = config
        self.step = 0
        self._groups = groups
        self._device = device
        self._status = status
        self._timer = timer or StepTimer()
        groups.time_with(self._timer)
        self._table = parameter_table(config, rank)
        dtype, stage = DTYPES[config.training.precision], self._table.at.pp
        place = Place(self._table, dtype, device, groups)
        operators = choose(config.training.kernels, device)
        tp = tensor_parallel(config, groups.tp, dtype, device, operators)
        self._fp8 = _fp8(config, self._table, operators, tp, device)
        self._buffers = _buffers(config, place, tp, operators)
        # Counts updates that were not applied, because optimizers count the others. It is on the
        # device, because the host reads the result of a step later.
        self._skipped = torch.zeros((), dtype=torch.float64, device=device)
        self.state, self._optimizer = _optimizer(config, place, operators, groups.world)
        self._routers = RouterState(config, self._table, self.state.master)
        self._program, self._forwards = _programs(config, stage)
        connect_edges(config, groups.edges, stage, dtype, device)
        self._pipeline = self._make_pipeline(tp, operators, place)

    def _make_pipeline(
        self, tp: TensorParallel, operators: Operators, place: Place
    ) -> PipelineExecutor:
        """The rank's virtual stages, as CUDA graphs if the job asks for them."""
        config, buffers = self.config, self._buffers
        empty_hidden = partial(_empty_hidden, config, place)
        weights = bind_weights(self._table, buffers.values, buffers.gradients, buffers.scales)
        experts = _experts(config, self._groups, tp, operators, place.dtype, self._fp8)
        cp = ContextParallel(self._groups["cp"])
        stages = [
            Stage(config, chunk, weights, tp, buffers, operators, self._fp8, experts, cp)
            for chunk in self._table.chunks
        ]
        cuda = self._device.type == "cuda"
        chunks: Sequence[VirtualStage] = stages
        # A layer whose host waits for the device cannot be captured, and the exchange of heads has
        # not been captured yet.
        captured = (experts is None or not experts.plain.waits) and self._groups["cp"].size == 1
        if config.training.cuda_graphs and cuda and captured:
            chunks = graphed(stages, config, self._program, buffers, tp, empty_hidden)
        rehearsal = None
        if cuda and config.parallelism.pp > 1:
            rehearsal = Rehearsal(
                chunks,
                self._program,
                tp.weight_gradients,
                empty_hidden,
                forget=buffers.zero_gradients,
            )
        return PipelineExecutor(
            chunks,
            self._groups.edges,
            tp.weight_gradients,
            empty_hidden,
            on_forward=self._note_micro_batch,
            timer=self._timer,
            rehearsal=rehearsal,
        )

    def initialise(self) -> None:
        """Give all parameters their initial values; a restored run fills ``state`` instead."""
        fill_shard(self.state.master, self._table, self.config.training.seed)
        self._publish()

    def train_step(
        self, micro_batches: Sequence[MicroBatch], *, vote: int = 0, wish: int = 0
    ) -> StepResult:
        """One update from this replica's micro-batches; all ranks call it together.

        The micro-batches are on the device and in order. ``vote`` and ``wish`` are summed over the
        ranks.

        Raises:
            ValueError: the number or shape of the micro-batches is not the configured one.
        """
        self._check(micro_batches)
        for stage in self._pipeline.chunks:
            stage.prepare(micro_batches)
        self._buffers.zero_gradients()
        sums = self._pipeline.run(self._program, micro_batches)
        with torch.no_grad():
            self._buffers.reduce_gradients()
            # The first point at which a snapshot's copy must have ended: the update overwrites the
            # states. The copy had all of forward and backward to run in.
            copied = self.state.take_copied()
            if copied is not None:
                with self._timer.span(SNAPSHOT):
                    copied.wait()
            gradients = self._buffers.gradient_shards()
            choices = self._routers.take_choices(gradients)
            # Those of the step before: all parameters of this one have arrived by now.
            loads = self._routers.loads(self._buffers.values)
            # The one all-reduce of a step: loss, gradient norm, broken ranks and votes.
            vector = local_totals(
                sums,
                gradients,
                self._table.at,
                vote,
                self._device,
                wish,
                experts=self.config.model.experts.count > 0,
            )
            self._groups.world.all_reduce(vector)
            settings = self.config.optimizer
            totals, control = step_control(
                vector, settings.clip_norm, settings.skip_norm, self._skipped
            )
            rate = learning_rate(self.config, self.step)
            with self._timer.span(OPTIMIZER, shown="optimizer"):
                shards, parameters = [s for _, s in gradients], self._buffers.parameter_shards()
                self._optimizer.update(shards, parameters, control, rate, self.step + 1)
                self._routers.update(choices, parameters, control.apply)
            self._skipped = self._skipped + (1.0 - control.apply.double())
            # Overlapped buffers return at once: the next forward waits for each unit when it enters
            # it.
            self._buffers.gather_parameters()
            self._forget_casts()
        self.step += 1
        samples = self.step * self.config.training.global_batch_size
        tokens = samples * self.config.model.sequence_length
        return StepResult(self.step, rate, samples, tokens, totals, control, loads)

    def evaluate(self, batches: Iterable[Sequence[MicroBatch]]) -> float:
        """Mean cross entropy of held-out global batches, forward only; all ranks call it together.

        Waits for the device. NaN if all weights are zero.

        Args:
            batches: this replica's micro-batches of each global batch (on the device, in order), as
                in a step.

        Raises:
            ValueError: the number or shape of the micro-batches is not the configured one.
        """
        sums = torch.zeros(3, dtype=torch.float64, device=self._device)
        with torch.no_grad(), self._timer.paused():
            for micro_batches in batches:
                self._check(micro_batches)
                for found in self._pipeline.run(self._forwards, micro_batches).losses:
                    # All tp ranks have the same sums, and the all-reduce below adds those of every
                    # rank, so only one of them may contribute.
                    sums += found if self._table.at.tp == 0 else 0.0
            self._groups.world.all_reduce(sums)
        entropy, _, weight = sums.tolist()
        return float(entropy / weight) if weight > 0 else float("nan")

    def logits(self, batch: MicroBatch) -> torch.Tensor:
        """[B, S, V] of a batch, for a job of one rank; S is model.sequence_length."""
        hidden = None
        with torch.no_grad():
            for stage in self._pipeline.chunks:
                hidden = stage.forward(hidden, batch).output
            assert hidden is not None
            logits = stage.logits(hidden)
        return logits.transpose(0, 1)[..., : self.config.model.vocab_size]

    def finish_load(
        self, step: int, *, skipped_updates: int = 0, weights_only: bool = False
    ) -> None:
        """Set the number of completed steps, and publish the loaded parameters to all replicas.

        ``skipped_updates`` of the steps changed nothing. ``weights_only`` sets the optimizer's
        other states to zero, as at the start of a run.
        """
        self.step = step
        self._skipped.fill_(skipped_updates)
        if weights_only:
            self.state.values[1:].zero_()
        self._publish()

    def await_parameters(self) -> None:
        """Make the current stream (CPU: the caller) wait for the last update's parameters.

        They are the only communication that may still run when :meth:`train_step` returns.
        """
        self._buffers.await_parameters()

    def settle(self) -> None:
        """After the last step, wait until its parameters have arrived on this rank.

        A rank that ends before its peers have gathered from it would break their communication.
        CUDA graphs are freed, because NCCL does not end a communicator that a graph uses. Another
        step would capture them again.
        """
        self.await_parameters()
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        for stage in self._pipeline.chunks:
            stage.release()

    def _publish(self) -> None:
        self._buffers.publish(self.state.master)
        self._forget_casts()

    def _forget_casts(self) -> None:
        """Mark the casts of weights in FP8 as stale: the parameters have changed."""
        if self._fp8 is not None:
            self._fp8.weights.forget()

    def _check(self, micro_batches: Sequence[MicroBatch]) -> None:
        wanted = (self.config.training.micro_batch_size, self.config.model.sequence_length)
        if len(micro_batches) != self.config.micro_batches:
            raise ValueError(
                f"a step takes {counted(self.config.micro_batches, 'micro-batch')}, got "
                f"{len(micro_batches)}"
            )
        for batch in micro_batches:
            if tuple(batch.tokens.shape) != wanted:
                raise ValueError(
                    f"a micro-batch is [B, S] = {wanted}, got {tuple(batch.tokens.shape)}"
                )

    def _note_micro_batch(self, number: int) -> None:
        if self._status is not None:
            self._status.update(micro_batch=number)


def _fp8(
    config: JobConfig,
    table: ParameterTable,
    operators: Operators,
    tp: TensorParallel,
    device: torch.device,
) -> Fp8 | None:
    """The job's FP8 operators, with the algorithms of their GEMMs chosen; None without FP8."""
    fp8 = fp8_of(config, operators, tp, device)
    if fp8 is not None and device.type == "cuda":
        # Before parameters and states are allocated: the measured operands need gigabytes as well.
        tokens = config.training.micro_batch_size * config.model.sequence_length
        tokens //= config.parallelism.cp
        fp8.choose_algorithms(table, tokens, device)
        torch.cuda.empty_cache()
    return fp8


def _optimizer(
    config: JobConfig, place: Place, operators: Operators, world: Group
) -> tuple[StateImage, Optimizer]:
    """The optimizer's states, zeros at first, and the optimizer that updates them."""
    factory = optimizer_factory(config.optimizer.name)
    state = StateImage(place.table, tuple(factory.state_names), place.device)
    setup = OptimizerSetup(
        config=config.optimizer,
        table=place.table,
        states=state.values,
        kernels=operators.name,
        parameters=matrix_counts(config.model),
        all_reduce=world.all_reduce,
    )
    return state, factory(setup)


def _experts(
    config: JobConfig,
    groups: Groups,
    tp: TensorParallel,
    operators: Operators,
    dtype: torch.dtype,
    fp8: Fp8 | None,
) -> StageExperts | None:
    """The experts over the ep group; None for a dense model."""
    if not config.model.experts.count:
        return None
    found = expert_operators(operators.name, dtype)
    by_token = config.parallelism.expert_exchange == "tokens"
    plain = ExpertParallel(groups["ep"], tp, groups["cp"], UnscaledExperts(found), found, by_token)
    if fp8 is None:
        return StageExperts(plain, None)
    in_fp8 = Fp8Experts(found, fp8.weights, fp8.fast)
    return StageExperts(
        plain, ExpertParallel(groups["ep"], tp, groups["cp"], in_fp8, found, by_token)
    )


def _programs(config: JobConfig, stage: int) -> tuple[list[Action], list[Action]]:
    """The programs of a pipeline stage for a step and for an evaluation."""
    parallel = config.parallelism
    shape = PipelineShape(stage, parallel.pp, config.micro_batches, parallel.virtual_stages)
    overlap = parallel.overlap.pp
    program = SCHEDULES[parallel.pipeline_schedule](shape, overlap=overlap)
    return program, forward_only(shape, overlap=overlap)


def _empty_hidden(config: JobConfig, place: Place) -> torch.Tensor:
    """An uninitialised [S / (tp * cp), B, H], the message between stages."""
    model = config.model
    length = model.sequence_length // (config.parallelism.tp * config.parallelism.cp)
    shape = (length, config.training.micro_batch_size, model.hidden_size)
    return torch.empty(shape, dtype=place.dtype, device=place.device)


def _buffers(
    config: JobConfig, place: Place, tp: TensorParallel, operators: Operators
) -> FlatBuffers:
    """Parameters and gradients, with the communication that the job asks for."""
    fp8 = fp8_gather_of(config, place.table, place.device, place.groups["gradient"], operators.name)
    if config.parallelism.overlap.dp:
        return OverlappedBuffers(place, config.micro_batches, tp.weight_gradients, fp8)
    return FlatBuffers(place, fp8)


def set_determinism(config: JobConfig, device: torch.device) -> None:
    """Make CUDA repeat itself bit for bit for ``training.deterministic``; a CPU always does.

    cuBLAS may cut a bf16 product along K, by shape and device. With ``deterministic`` it then adds
    the parts in float32, like the sums inside of a part; torch's default lets it add them in bf16.
    NCCL is pinned before its first communicator
    (:func:`megascale_trainer.parallel.determinism.pin_collectives`).
    """
    deterministic = config.training.deterministic
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = not deterministic
    if device.type != "cuda":
        return
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic)
    # By default torch would also fill every new tensor, to reveal reads of unwritten memory: one
    # more pass over memory per tensor.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic = deterministic
