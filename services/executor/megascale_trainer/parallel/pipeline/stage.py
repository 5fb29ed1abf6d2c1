"""A virtual pipeline stage: some layers, and on the outer stages the embedding or the head."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch.utils.checkpoint import checkpoint

from megascale_job.blocks.layer import blocks_of
from megascale_job.config import JobConfig
from megascale_job.sizes.parameter_table import ModelChunk
from megascale_kernels.fp8_activation import Fp8Activation
from megascale_kernels.operators import Operators
from megascale_kernels.torch_calls import apply
from megascale_trainer.batch import MicroBatch
from megascale_trainer.model.blocks.ends import embed, logits_of, loss_sums
from megascale_trainer.model.blocks.layer import layer
from megascale_trainer.model.blocks.parts import Context, MoeContext
from megascale_trainer.model.context import batch_context
from megascale_trainer.model.sharding import ExpertSharding
from megascale_trainer.parallel.context.sharding import ContextParallel
from megascale_trainer.parallel.data.buffers import FlatBuffers
from megascale_trainer.parallel.expert.experts import ExpertParallel
from megascale_trainer.parallel.groups import InnerGroups, single_process_groups
from megascale_trainer.parallel.tensor.fp8 import Fp8
from megascale_trainer.parallel.tensor.sharding import TensorParallel
from megascale_trainer.weights import Weights, subset

# Note [Backward from a given gradient]
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
# The backward of a stage can begin with the gradient of its output, which another stage sent.
# `torch.autograd.backward(output, gradient)` does the same, but compares the two shapes as symbols:
# its first call imports sympy, which takes a third of a second of every rank's first step.


def stage_backward(output: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """A scalar without a value; its ``backward()`` gives ``output`` this gradient, bit for bit."""
    y: torch.Tensor = apply(_Given, output, gradient)
    return y


class _Given(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        assert gradient.shape == output.shape, "a stage was sent the gradient of another output"
        ctx.gradient = gradient
        return output.new_empty(())

    @staticmethod
    def backward(ctx: Any, one: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.gradient, None


HEAD = "head"  # the last unit of the model


@dataclass(frozen=True, slots=True)
class StageOutput:
    """The result of a virtual stage for one micro-batch.

    ``output``: hidden states [S / (tp * cp), B, H] for the stage after; of the last stage the
    objective.
    ``losses``: the sums of :func:`megascale_trainer.model.blocks.ends.loss_sums`; last stage only.
    ``terms``: the auxiliary terms of its layers, float64 [2]; None: it has no experts.
    """

    output: torch.Tensor
    losses: torch.Tensor | None = None
    terms: torch.Tensor | None = None


class VirtualStage(Protocol):
    """One virtual stage of a rank, run by its operators or replayed from graphs.

    ``first`` and ``last``: the stage begins the model, or ends it.
    """

    first: bool
    last: bool

    @property
    def at_once(self) -> int:
        """Number of micro-batches in flight that together launch all of the stage's kernels."""
        ...

    def prepare(self, batches: Sequence[MicroBatch]) -> None:
        """Prepare a step of ``batches``, before its first forward."""
        ...

    def kernels(self, batch: MicroBatch) -> Hashable:
        """A value that is equal for micro-batches with the same kernels."""
        ...

    def release(self) -> None:
        """Free what another step can make again; between steps."""
        ...

    def run(self, received: torch.Tensor | None, batch: MicroBatch) -> StageOutput:
        """The stage's output for one micro-batch."""
        ...

    def forward(self, received: torch.Tensor | None, batch: MicroBatch) -> StageOutput:
        """Hidden states from those of the stage before (None: first stage)."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The logits of :func:`megascale_trainer.model.blocks.ends.logits_of`; last stage only."""
        ...


@dataclass(frozen=True, slots=True)
class StageExperts:
    """The experts in the model's dtype, and in FP8 for layers in FP8."""

    plain: ExpertParallel[torch.Tensor]
    in_fp8: ExpertSharding | None


class Stage:
    """The stage's forward; autograd's backward adds to the weights' ``main_grad``.

    ``layers`` are indices in the model. The forward of the ``last`` stage is followed by
    :meth:`loss`. Units (embedding, layers, head) are entered through ``buffers``, which hold their
    parameters. ``fp8``: operators and weights of its layers in FP8. ``experts``: those of the ep
    group; None: a dense model.
    """

    def __init__(
        self,
        config: JobConfig,
        chunk: ModelChunk,
        weights: Weights,
        tp: TensorParallel,
        buffers: FlatBuffers,
        operators: Operators,
        fp8: Fp8 | None = None,
        experts: StageExperts | None = None,
        cp: ContextParallel | None = None,
    ) -> None:
        self._config = config
        self._weights = weights
        self._tp = tp
        self._buffers = buffers
        self._operators = operators
        self._fp8 = fp8
        self._experts = experts
        self._cp = cp or ContextParallel(single_process_groups()["cp"])
        self.first = chunk.first
        self.last = chunk.last
        self.at_once = 1
        self.layers = tuple(chunk.layers)
        self._layers = {
            index: (config.model.window_of(index), subset(weights, f"{unit_of(index)}."))
            for index in chunk.layers
        }

    @property
    def inner_groups(self) -> InnerGroups:
        """The groups with which its layers communicate."""
        ep = () if self._experts is None else (self._experts.plain.group,)
        return InnerGroups((self._tp.group, self._cp.group, *ep))

    def prepare(self, batches: Sequence[MicroBatch]) -> None:
        """Nothing to prepare."""

    def kernels(self, batch: MicroBatch) -> Hashable:
        """See :meth:`VirtualStage.kernels`."""
        return batch.documents.kernels if self._config.data.document_attention else 0

    def release(self) -> None:
        """Nothing to free."""

    def run(self, received: torch.Tensor | None, batch: MicroBatch) -> StageOutput:
        """See :meth:`VirtualStage.run`."""
        found = self.forward(received, batch)
        if not self.last:
            return found
        objective, losses = self.loss(found.output, batch)
        return StageOutput(objective, losses, found.terms)

    def forward(self, received: torch.Tensor | None, batch: MicroBatch) -> StageOutput:
        """See :meth:`VirtualStage.forward`."""
        hidden, total = self.embed(batch) if received is None else received, None
        contexts = self.contexts(batch)
        for index in self.layers:
            # Outside the layer's checkpoint: recomputation must not wait for parameters again or
            # count the unit's backward twice.
            hidden = self._buffers.enter(unit_of(index), hidden)
            hidden, terms = self.layer(index, hidden, contexts)
            if terms is not None:
                total = terms if total is None else total + terms
        return StageOutput(hidden, terms=total)

    def embed(self, batch: MicroBatch) -> torch.Tensor:
        """The hidden states [S / (tp * cp), B, H] before the first layer; first stage only."""
        self._buffers.await_parameters("embedding")
        return embed(self._cp.part(batch), self._weights, self._config.model, self._tp)

    def contexts(self, batch: MicroBatch) -> dict[int, Context[torch.Tensor]]:
        """Masks and rotary tables by window: made once per micro-batch, not once per layer."""
        moe = None
        if self._experts is not None:
            moe = MoeContext(
                self._operators,
                self._tp,
                self._experts.plain,
                batch.loss_weight.sum(1),
                self._config.loss,
                self._config.training.forced_balance,
            )
        position = self._cp.part(batch).position
        return {
            window: batch_context(
                batch, position, self._config, window, self._operators, self._cp.attend, moe
            )
            for window in {window for window, _ in self._layers.values()}
        }

    def layer(
        self, index: int, hidden: torch.Tensor, contexts: Mapping[int, Context[torch.Tensor]]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The output of layer ``index`` and its auxiliary terms.

        It is recomputed in backward if the job asks for it.
        """
        window, weights = self._layers[index]
        run = self._layer(index, contexts[window], weights)
        if self._config.parallelism.recompute == "full":
            recomputed: tuple[torch.Tensor, torch.Tensor | None] = checkpoint(
                run, hidden, use_reentrant=False, preserve_rng_state=False
            )
            return recomputed
        return run(hidden)

    def renew_casts(self, index: int) -> None:
        """Cast the weights of layer ``index`` again, in place, if they have changed.

        Only weights that its operators have cast before; without FP8 none.
        """
        if self._fp8 is not None and index in self._fp8.layers:
            self._fp8.weights.renew(self._layers[index][1].values())

    def _layer(
        self, index: int, context: Context[torch.Tensor], weights: Weights
    ) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]:
        """Layer ``index`` as a function of its input, in FP8 if the job asks for it."""
        model, fp8 = self._config.model, self._fp8
        run = partial(layer, blocks=blocks_of(model, index), weights=weights, model=model)
        if fp8 is None or index not in fp8.layers:
            return partial(run, context=context, sharding=self._tp)
        return partial(run, context=_in_fp8(context, fp8, self._experts), sharding=fp8.linears)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The logits of :func:`megascale_trainer.model.blocks.ends.logits_of`; last stage only."""
        hidden = self._buffers.enter(HEAD, hidden)
        return logits_of(hidden, self._weights, self._config, self._tp, self._operators)

    def loss(self, hidden: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """See :func:`megascale_trainer.model.blocks.ends.loss_sums`; last stage only."""
        return self.head(self._buffers.enter(HEAD, hidden), batch)

    def head(self, hidden: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """:meth:`loss` for a caller that has entered the unit."""
        return loss_sums(
            hidden,
            self._cp.part(batch),
            self._weights,
            self._config,
            self._tp,
            self._operators,
        )


def unit_of(index: int) -> str:
    """The name of layer ``index`` as a unit of the buffers."""
    return f"layers.{index}"


def _in_fp8(
    context: Context[torch.Tensor], fp8: Fp8, experts: StageExperts | None
) -> Context[Fp8Activation]:
    moe = context.moe
    if moe is not None and experts is not None and experts.in_fp8 is not None:
        moe = replace(moe, experts=experts.in_fp8)
    return Context(
        fp8.operators,
        context.mask,
        context.rotary,
        context.recompute_inner,
        context.attend,
        moe,
    )
