"""A stage that is replayed from CUDA graphs: one call of the host for all kernels of a layer.

A layer and micro-batch takes the host some 45 launches, at small sizes longer than they run. So
forward and backward of every unit (layer, head) are captured once, and a micro-batch then launches
one graph for each. Between units the host still waits for parameters and has gradients leave, which
no graph contains: collectives of data parallelism and transfers between stages stay outside.

A graph reads and writes the memory that it was captured with. A *slot* is that memory, with its
graphs, for one micro-batch between its forward and its backward; a pipeline has several in flight.
Each has a memory pool of its own, in which captures of its forward and then of its backward share
memory as the eager operators would, because replays come in the same order.

Where the program splits a backward, a unit has a third graph, that of its weight gradients, and the
slot is held until they have run.

The same kernels run as without graphs. The first steps run without: kernels are compiled, plans
made and algorithms chosen there, which a capture cannot do.
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
from megascale_trainer.model.layer import Context
from megascale_trainer.parallel.data.buffers import FlatBuffers
from megascale_trainer.parallel.groups import Group
from megascale_trainer.parallel.pipeline.schedule import Action, most_in_flight, split_chunks
from megascale_trainer.parallel.pipeline.stage import HEAD, Stage, given_gradient, unit_of
from megascale_trainer.parallel.tensor.matmul import OverlappedMatmuls
from megascale_trainer.parallel.tensor.sharding import TensorParallel
from megascale_trainer.weights import WeightGradients, Work, run_all

EAGER_STEPS = 2  # before the first capture
_LEAST_DOCUMENTS = 16

T = TypeVar("T")


@dataclass(frozen=True)
class _Unit:
    """A layer (``index``) or the head (None), captured.

    ``weights``: the weight gradients; None: they are part of ``backward``.
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
    """The memory and graphs of one micro-batch in flight.

    Args:
        batch: copies of its tensors; ``documents`` holds as many as its graphs have room for.
        hidden: [S / tp, B, H], what the stage begins with, and its gradient.
        output: what :meth:`Stage.run` returns, and where its gradient is put (None: the loss).
    """

    batch: MicroBatch
    hidden: torch.Tensor
    d_hidden: torch.Tensor
    output: torch.Tensor
    d_output: torch.Tensor | None
    sums: torch.Tensor | None
    units: tuple[_Unit, ...]


class GraphedStage:
    """``stage`` with its micro-batches replayed; it stands where the stage stands.

    Args:
        buffers: those of the stage, on a CUDA device.
        tp: the tensor-parallel group, all of whose ranks capture together, and its operators.
        empty_hidden: makes an uninitialised [S / tp, B, H].
        slots: the most micro-batches between forward and the end of backward.
        split: whether weight gradients run after all input gradients of a micro-batch.
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
        self._tp = tp.group
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
        self._room = 0  # documents that a slot holds; 0: each sequence is one
        self._free: list[_Slot] = []
        self._stream: torch.cuda.Stream | None = None

    def prepare(self, batches: Sequence[MicroBatch]) -> None:
        """Have slots for a step of ``batches``; captures them when there are none that hold these.

        Between steps, because it waits for the device: a receive that is posted would never end.

        Raises:
            RuntimeError: a capture failed, for want of memory or in an operator that waits.
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
        # The activations of steps without graphs have left memory that a graph's pool cannot take.
        torch.cuda.synchronize(copies.tokens.device)
        torch.cuda.empty_cache()
        try:
            for _ in range(self._slots):
                capture = _Capture(
                    self._stage,
                    self._stream,
                    self._tp,
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
        """As :attr:`Stage.at_once`: each slot has graphs of its own."""
        return self._slots if self._replays else self._stage.at_once

    def kernels(self, batch: MicroBatch) -> Hashable:
        """As :meth:`Stage.kernels`; a graph is new after each capture, whatever is in it."""
        return ("graphs", self._captures) if self._replays else self._stage.kernels(batch)

    def release(self) -> None:
        """Free the graphs, between steps."""
        self._free.clear()

    def run(
        self, received: torch.Tensor | None, batch: MicroBatch
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As :meth:`Stage.run`; the output is overwritten some time after its backward."""
        if not self._replays:
            return self._stage.run(received, batch)
        hidden = self._stage.embed(batch) if received is None else received
        slot = self._free.pop()
        slot.batch.refilled(batch)
        output = apply(_Replay, hidden, slot, self)
        return output, None if slot.sums is None else slot.sums.clone()

    def forward(self, received: torch.Tensor | None, batch: MicroBatch) -> torch.Tensor:
        """As :meth:`Stage.forward`, without graphs."""
        return self._stage.forward(received, batch)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """As :meth:`Stage.logits`, without graphs."""
        return self._stage.logits(hidden)

    def replay_forward(self, slot: _Slot, hidden: torch.Tensor) -> torch.Tensor:
        """The output of ``slot``, whose batch is filled, for ``hidden``."""
        slot.hidden.copy_(hidden)
        for unit in slot.units:
            self._buffers.await_parameters(unit.name)
            self._replay(unit.forward, unit, slot)
        return slot.output.detach()

    def replay_backward(self, slot: _Slot, d_output: torch.Tensor) -> torch.Tensor:
        """The gradient of the hidden states; ``slot`` is free behind the weight gradients."""
        if slot.d_output is not None:
            slot.d_output.copy_(d_output)
        for unit in reversed(slot.units):
            self._replay(unit.backward, unit, slot)
            self._weight_gradients.run(partial(self._leave, unit))
        self._weight_gradients.run(partial(self._free.append, slot))
        # It may still be on its way to another stage in the slot's next backward.
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
        with self._tp.operation(slot.hidden):
            graph.replay()

    def _even(self) -> None:
        if self._transfers is not None:
            self._transfers.even()

    def _needed_room(self, documents: Documents) -> int:
        sequences = documents.shape[0]
        apart = self._config.data.document_attention and documents.number > sequences
        # More than sequences: a mask of as many documents as sequences has none.
        least = max(documents.number, sequences + 1, _LEAST_DOCUMENTS)
        return 1 << (least - 1).bit_length() if apart else 0

    def _copies(self, batch: MicroBatch) -> MicroBatch:
        """Memory for micro-batches like ``batch``, with room for documents: some are empty."""
        copies = batch.map(torch.clone)
        sequences, sequence = copies.documents.shape
        documents = replace(copies.documents, number=self._room or sequences, longest=sequence)
        return replace(copies, documents=documents)

    def _make_plans(self, batch: MicroBatch) -> None:
        """Run attention once for this number of documents: what it builds, a capture cannot."""
        model, tp = self._config.model, self._config.parallelism.tp
        sequences, sequence = batch.tokens.shape
        for context in self._stage.contexts(batch).values():
            query, key, value = (
                torch.zeros(
                    (sequences, heads // tp, sequence, model.head_size),
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
    """The virtual ``stages`` of a rank, replayed, with slots for its ``program`` of a step."""
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
    """Captures the units of a stage for one slot, on ``stream``; nothing is computed by it.

    ``weight_gradients``: those of its operators, where they get graphs of their own.
    """

    def __init__(
        self,
        stage: Stage,
        stream: torch.cuda.Stream,
        tp: Group,
        even: Callable[[], None],
        weight_gradients: WeightGradients | None,
    ) -> None:
        self._stage = stage
        self._stream = stream
        self._tp = tp
        self._even = even
        self._weight_gradients = weight_gradients
        self._pool = torch.cuda.graph_pool_handle()
        self._contexts: dict[int, Context[torch.Tensor]] = {}

    def slot(self, hidden: torch.Tensor, batch: MicroBatch) -> _Slot:
        """The slot that begins with ``hidden`` and reads ``batch``.

        All forwards are captured, then all backwards, then weight gradients that are apart: memory
        is shared in the order of the replays. What a forward keeps for its backward, and both for
        the weight gradients, stays referenced until these are captured.
        """
        stage, sums, y = self._stage, None, hidden
        indices: list[int | None] = [*stage.layers, *([None] if stage.last else [])]
        forwards: list[tuple[torch.cuda.CUDAGraph, torch.Tensor, list[torch.Tensor]]] = []
        for index in indices:
            d_x: list[torch.Tensor] = []
            graph, made = self._graph(partial(self._forward, index, batch, y.detach(), d_x))
            y, sums = made
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
            weights, _ = self._graph(partial(run_all, works))
            units[at] = replace(units[at], weights=weights)
        return _Slot(batch, hidden, d_y, output, d_output, sums, tuple(reversed(units)))

    def _forward(
        self, index: int | None, batch: MicroBatch, x: torch.Tensor, d_x: list[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not self._contexts:  # in the first unit's graph: masks and tables follow the batch
            self._contexts.update(self._stage.contexts(batch))
        with torch.enable_grad():
            entered = apply(_Entry, x.requires_grad_(), d_x)
            if index is None:
                return self._stage.head(entered, batch)
            return self._stage.layer(index, entered, self._contexts), None

    def _backward(self, y: torch.Tensor, d_y: torch.Tensor | None) -> deque[Work] | None:
        """Backward of a unit; returns its weight gradients where they are apart."""
        begin = y if d_y is None else given_gradient(y, d_y)
        if self._weight_gradients is None:
            torch.autograd.backward(begin)
            return None
        with self._weight_gradients.collected() as works:
            torch.autograd.backward(begin)
        return works

    def _graph(self, work: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream), self._tp.uncounted():
            # Other threads (snapshots, NCCL's watchdog) may go on with what a capture forbids.
            graph.capture_begin(self._pool, "thread_local")
            try:
                found = work()
                self._even()
            finally:
                graph.capture_end()
        return graph, found


class _Entry(torch.autograd.Function):
    """The identity; its backward keeps the gradient as it comes, and ends there.

    ``grad`` of a leaf would be a copy in another layout, without the notes that operators put on a
    gradient: so sums would have another order than without graphs.
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
