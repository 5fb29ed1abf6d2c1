"""A stage that is replayed from CUDA graphs: one call of the host for all kernels of a layer.

One layer of one micro-batch takes the host some 45 launches; at small sizes they take longer than
the kernels. So forward and backward of every unit (layer, head) are captured once, and a
micro-batch then launches one graph for each. Between units the host still waits for parameters and
starts to reduce gradients: collectives of data parallelism and transfers between stages are in no
graph.

The same kernels run as without graphs. The first steps run without graphs: they compile kernels,
make plans and choose algorithms, which a capture cannot do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch

from megascale_job.config import JobConfig
from megascale_kernels.attention import attention
from megascale_kernels.documents import Documents
from megascale_kernels.torch_calls import apply, cuda_stream
from megascale_trainer.batch import MicroBatch
from megascale_trainer.model.blocks.parts import Context
from megascale_trainer.parallel.data.buffers import FlatBuffers
from megascale_trainer.parallel.groups import InnerGroups
from megascale_trainer.parallel.pipeline.schedule import Action, most_in_flight, split_chunks
from megascale_trainer.parallel.pipeline.stage import (
    HEAD,
    Stage,
    StageOutput,
    stage_backward,
    unit_of,
)
from megascale_trainer.parallel.tensor.matmul import OverlappedMatmuls
from megascale_trainer.parallel.tensor.sharding import TensorParallel
from megascale_trainer.weights import WeightGradients, Work, run_all

# Note [Graph pools and replay order]
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
# A graph reads and writes the addresses that it was captured with. A *slot* is this memory, with
# its graphs, for one micro-batch between its forward and its backward; a pipeline needs as many
# slots as it has micro-batches in flight (`most_in_flight`).
#
# A slot has a memory pool of its own. Inside a pool torch hands out memory during captures as it
# does for eager operators: memory that one capture frees, a later capture may take. So two graphs
# of a pool can share an address, and that is right only if replays keep the order of captures. They
# do: all forwards of the slot's units are captured first, then all backwards in reverse, then the
# weight gradients where the program splits backwards, and a micro-batch replays them in exactly
# this order. Memory that a later graph reads (activations for backward, both for weight gradients)
# stays referenced until that graph is captured, so no capture in between gets its address.
#
# Two slots must not share a pool: micro-batches in flight interleave, so a replay in one slot would
# overwrite activations that the other still needs. For the same reason a slot is free only after
# the last graph of its micro-batch, and the gradient that leaves the stage is a copy: the original
# address may be written by the slot's next micro-batch while the message is still being sent.

EAGER_STEPS = 2  # before the first capture
_LEAST_DOCUMENTS = 16

T = TypeVar("T")


@dataclass(frozen=True)
class _Unit:
    """A layer (``index``) or the head (None), captured.

    ``weights`` are the weight gradients; None: they are part of ``backward`` or ``forward``.
    """

    index: int | None
    forward: torch.cuda.CUDAGraph
    backward: torch.cuda.CUDAGraph
    weights: torch.cuda.CUDAGraph | None = None

    @property
    def name(self) -> str:
        return HEAD if self.index is None else unit_of(self.index)


@dataclass(frozen=True)
class _Slot:
    """The memory and graphs of one micro-batch in flight: Note [Graph pools and replay order].

    Args:
        batch: copies of its tensors; ``documents`` has room for a fixed number of documents.
        hidden, d_hidden: [S / tp, B, H], the input of the stage's first unit, and its gradient.
        output, d_output: the result of :meth:`Stage.run` and its gradient (None: the loss).
        sums: the figures of the loss; None: not the last stage.
        terms: the auxiliary terms of each layer with experts.
    """

    batch: MicroBatch
    hidden: torch.Tensor
    d_hidden: torch.Tensor
    output: torch.Tensor
    d_output: torch.Tensor | None
    sums: torch.Tensor | None
    terms: tuple[torch.Tensor, ...]
    units: tuple[_Unit, ...]


class GraphedStage:
    """A virtual stage whose micro-batches replay the graphs of ``stage``.

    Args:
        buffers: those of the stage, on a CUDA device.
        tp: the tensor-parallel group and its operators; all its ranks capture together.
        empty_hidden: makes an uninitialised [S / tp, B, H].
        slots: the largest number of micro-batches between forward and the end of backward.
        split: weight gradients run after all input gradients of a micro-batch.
    """

    def __init__(
        self,
        stage: Stage,
        config: JobConfig,
        buffers: FlatBuffers,
        tp: TensorParallel,
        empty_hidden: Callable[[], torch.Tensor],
        slots: int,
        *,
        split: bool,
    ) -> None:
        self._stage = stage
        self._config = config
        self._buffers = buffers
        self._inner = stage.inner_groups
        matmuls = tp.matmuls
        self._transfers = matmuls.transfers if isinstance(matmuls, OverlappedMatmuls) else None
        self.first = stage.first
        self.last = stage.last
        self._weight_gradients = tp.weight_gradients
        self._empty_hidden = empty_hidden
        self._slots = slots
        self._split = split
        self._steps = 0  # begun
        self._captures = 0
        self._room = 0  # documents that a slot has room for; 0: each sequence is one document
        self._free: list[_Slot] = []
        self._stream: torch.cuda.Stream | None = None

    def prepare(self, batches: Sequence[MicroBatch]) -> None:
        """Provide slots for a step of ``batches``; captures new ones if the old are too small.

        Called between steps, because it waits for the device: a posted receive would never end.

        Raises:
            RuntimeError: a capture failed, for lack of memory or in an operator that waits.
        """
        self._steps += 1
        if self._steps <= EAGER_STEPS:
            return
        room = max(self._needed_room(batch.documents) for batch in batches)
        if self._free and room <= self._room:
            return
        self._room = max(room, self._room)
        self._captures = self._captures + 1
        self._free.clear()
        copies = self._copies(batches[0])
        if self._room:
            self._make_plans(copies)
        for index in self._stage.layers:
            self._buffers.await_parameters(unit_of(index))
            self._stage.renew_casts(index)
        self._even()
        if self._stream is None:
            self._stream = cuda_stream(copies.tokens.device)
        # Steps without graphs have left their activations' memory in the allocator's cache, from
        # which a graph's pool cannot take any.
        torch.cuda.synchronize(copies.tokens.device)
        torch.cuda.empty_cache()
        try:
            for _ in range(self._slots):
                capture = _Capture(
                    self._stage,
                    self._stream,
                    self._inner,
                    self._even,
                    self._weight_gradients if self._split else None,
                )
                self._free.append(capture.slot(self._empty_hidden(), self._copies(batches[0])))
        except RuntimeError as problem:  # of torch and of CUDA
            problem.add_note(
                "CUDA graphs could not be captured: set trainer.training.cuda_graphs to false"
            )
            raise

    @property
    def at_once(self) -> int:
        """See :attr:`Stage.at_once`: each slot has graphs of its own."""
        return self._slots if self._replays else self._stage.at_once

    def kernels(self, batch: MicroBatch) -> Hashable:
        """See :meth:`Stage.kernels`; every capture makes new graphs, whatever they contain."""
        return ("graphs", self._captures) if self._replays else self._stage.kernels(batch)

    def release(self) -> None:
        """Free the graphs, between steps."""
        self._free.clear()

    def run(self, received: torch.Tensor | None, batch: MicroBatch) -> StageOutput:
        """See :meth:`Stage.run`; a later micro-batch overwrites the output after its backward."""
        if not self._replays:
            return self._stage.run(received, batch)
        hidden = self._stage.embed(batch) if received is None else received
        slot = self._free.pop()
        slot.batch.refilled(batch)
        output = apply(_Replay, hidden, slot, self)
        losses = None if slot.sums is None else slot.sums.clone()
        terms = torch.stack(slot.terms).sum(0) if slot.terms else None
        return StageOutput(output, losses, terms)

    def forward(self, received: torch.Tensor | None, batch: MicroBatch) -> StageOutput:
        """See :meth:`Stage.forward`; without graphs."""
        return self._stage.forward(received, batch)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See :meth:`Stage.logits`; without graphs."""
        return self._stage.logits(hidden)

    def replay_forward(self, slot: _Slot, hidden: torch.Tensor) -> torch.Tensor:
        """The output of ``slot``, whose batch is already filled, for ``hidden``."""
        slot.hidden.copy_(hidden)
        for unit in slot.units:
            self._buffers.await_parameters(unit.name)
            self._replay(unit.forward, unit, slot)
        return slot.output.detach()

    def replay_backward(self, slot: _Slot, d_output: torch.Tensor) -> torch.Tensor:
        """The gradient of the hidden states; ``slot`` becomes free after the weight gradients."""
        if slot.d_output is not None:
            slot.d_output.copy_(d_output)
        for unit in reversed(slot.units):
            self._replay(unit.backward, unit, slot)
            self._weight_gradients.run(partial(self._leave, unit))
        self._weight_gradients.run(partial(self._free.append, slot))
        # A copy: the slot's next backward may write this memory while the message is still being
        # sent.
        return slot.d_hidden.clone()

    @property
    def _replays(self) -> bool:
        return torch.is_grad_enabled() and self._steps > EAGER_STEPS

    def _leave(self, unit: _Unit) -> None:
        if unit.weights is not None:
            unit.weights.replay()
        self._buffers.left(unit.name)

    def _replay(self, graph: torch.cuda.CUDAGraph, unit: _Unit, slot: _Slot) -> None:
        if unit.index is not None:
            self._stage.renew_casts(unit.index)
        self._even()
        with self._inner.operation(slot.hidden):
            graph.replay()

    def _even(self) -> None:
        if self._transfers is not None:
            self._transfers.even()

    def _needed_room(self, documents: Documents) -> int:
        sequences = documents.shape[0]
        apart = self._config.data.document_attention and documents.number > sequences
        # At least one more than sequences: a mask with as many documents as sequences counts as one
        # without documents, and would choose other kernels.
        least = max(documents.number, sequences + 1, _LEAST_DOCUMENTS)
        return 1 << (least - 1).bit_length() if apart else 0

    def _copies(self, batch: MicroBatch) -> MicroBatch:
        """Memory for micro-batches like ``batch``; unused room for documents holds empty ones."""
        copies = batch.map(torch.clone)
        sequences, sequence = copies.documents.shape
        documents = replace(copies.documents, number=self._room or sequences, longest=sequence)
        return replace(copies, documents=documents)

    def _make_plans(self, batch: MicroBatch) -> None:
        """Run attention once for this number of documents: a capture could not build its plans."""
        model, parallel = self._config.model, self._config.parallelism
        ranks = parallel.tp * parallel.cp
        sequences, sequence = batch.tokens.shape
        for context in self._stage.contexts(batch).values():
            query, key, value = (
                torch.zeros(
                    (sequences, heads // ranks, sequence, model.head_size),
                    dtype=self._empty_hidden().dtype,
                    device=batch.tokens.device,
                    requires_grad=True,
                )
                for heads in (model.heads, model.key_value_heads, model.key_value_heads)
            )
            torch.autograd.backward(attention(query, key, value, context.mask).sum())


def graphed(
    stages: Sequence[Stage],
    config: JobConfig,
    program: Sequence[Action],
    buffers: FlatBuffers,
    tp: TensorParallel,
    empty_hidden: Callable[[], torch.Tensor],
) -> list[GraphedStage]:
    """The virtual ``stages`` of a rank as graphs, with slots for its ``program`` of a step."""
    split = split_chunks(program)
    return [
        GraphedStage(
            stage,
            config,
            buffers,
            tp,
            empty_hidden,
            slots=most_in_flight(program, chunk),
            split=chunk in split,
        )
        for chunk, stage in enumerate(stages)
    ]


class _Capture:
    """Captures the units of a stage for one slot, on ``stream``; a capture computes nothing.

    ``weight_gradients``: those of its operators, if they get graphs of their own.
    """

    def __init__(
        self,
        stage: Stage,
        stream: torch.cuda.Stream,
        inner: InnerGroups,
        even: Callable[[], None],
        weight_gradients: WeightGradients | None,
    ) -> None:
        self._stage = stage
        self._stream = stream
        self._inner = inner
        self._even = even
        self._weight_gradients = weight_gradients
        self._pool = torch.cuda.graph_pool_handle()
        self._contexts: dict[int, Context[torch.Tensor]] = {}

    def slot(self, hidden: torch.Tensor, batch: MicroBatch) -> _Slot:
        """The slot that begins with ``hidden`` and reads ``batch``.

        The order of captures is that of the replays: Note [Graph pools and replay order].
        """
        stage, y = self._stage, hidden
        sums, terms = None, list[torch.Tensor]()
        indices: list[int | None] = [*stage.layers, *([None] if stage.last else [])]
        forwards: list[tuple[torch.cuda.CUDAGraph, torch.Tensor, list[torch.Tensor]]] = []
        for index in indices:
            d_x: list[torch.Tensor] = []
            graph, made = self._graph(partial(self._forward, index, batch, y.detach(), d_x))
            y, figures = made
            if index is None:
                sums = figures
            elif figures is not None:
                terms.append(figures)
            forwards.append((graph, y, d_x))
        d_output = None if stage.last else torch.empty_like(y)
        d_y, output, units = d_output, y.detach(), list[_Unit]()
        left: list[deque[Work]] = []
        for index in reversed(indices):
            forward, y, d_x = forwards.pop()
            backward, works = self._graph(partial(self._backward, y, d_y))
            left += [] if works is None else [works]
            units.append(_Unit(index, forward, backward))
            [d_y] = d_x
        assert d_y is not None, "a stage has a unit"
        for at, works in enumerate(left):
            if works:  # a head in chunks has none: its weight gradient is part of its forward
                weights, _ = self._graph(partial(run_all, works))
                units[at] = replace(units[at], weights=weights)
        return _Slot(
            batch, hidden, d_y, output, d_output, sums, tuple(terms), tuple(reversed(units))
        )

    def _forward(
        self, index: int | None, batch: MicroBatch, x: torch.Tensor, d_x: list[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        # In the graph of the first unit, so that each replay computes masks and tables again.
        if not self._contexts:
            self._contexts.update(self._stage.contexts(batch))
        with torch.enable_grad():
            entered = apply(_Entry, x.requires_grad_(), d_x)
            if index is None:
                return self._stage.head(entered, batch)
            return self._stage.layer(index, entered, self._contexts)

    def _backward(self, y: torch.Tensor, d_y: torch.Tensor | None) -> deque[Work] | None:
        """Backward of a unit; returns its weight gradients if they get a graph of their own."""
        begin = y if d_y is None else stage_backward(y, d_y)
        if self._weight_gradients is None:
            torch.autograd.backward(begin)
            return None
        with self._weight_gradients.collected() as works:
            torch.autograd.backward(begin)
        return works

    def _graph(self, work: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream), self._inner.uncounted():
            # "thread_local": a capture forbids some calls, and the other threads (snapshots, NCCL's
            # watchdog) must be able to make them.
            graph.capture_begin(self._pool, "thread_local")
            try:
                found = work()
                self._even()
            finally:
                graph.capture_end()
        return graph, found


class _Entry(torch.autograd.Function):
    """The identity; its backward keeps the gradient as it is, and ends there.

    A leaf's ``grad`` would be a copy, in another layout and without the amax that operators note on
    a gradient, and then sums would have another order than without graphs.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, d_x: list[torch.Tensor]) -> torch.Tensor:
        ctx.d_x = d_x
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None]:
        ctx.d_x.append(gradient)
        return None, None


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, slot: _Slot, stage: GraphedStage) -> torch.Tensor:
        ctx.slot = slot
        ctx.stage = stage
        return stage.replay_forward(slot, hidden)

    @staticmethod
    def backward(ctx: Any, d_output: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.stage.replay_backward(ctx.slot, d_output), None, None
