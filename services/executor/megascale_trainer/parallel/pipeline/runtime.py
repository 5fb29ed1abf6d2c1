"""Runs a rank's program of pipeline actions on tensors and communicators."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence

import torch

from megascale_common.node.spans.ops import BACKWARD, BACKWARD_WEIGHT, FORWARD, Op
from megascale_trainer.batch import MicroBatch
from megascale_trainer.optimizer.step_control import StageSums
from megascale_trainer.parallel.groups import Edges, Group, Receive, Send
from megascale_trainer.parallel.pipeline.schedule import Action, Kind, split_chunks
from megascale_trainer.parallel.pipeline.stage import VirtualStage, stage_backward
from megascale_trainer.telemetry.timer import StepTimer
from megascale_trainer.weights import WeightGradients, Work, run_all

# Note [Rehearsal]
# ~~~~~~~~~~~~~~~~
# Every kernel that a step will launch runs once before the step, while no message is in transit.
# CUDA loads a kernel at its first launch, and the host may then wait for all work on its device. If
# a receive is posted, that hangs two ranks: each device waits for a message, which the other rank
# sends only after the kernel that its host cannot load. So first launches happen ahead of time, as
# NVIDIA asks of programs whose kernels wait for each other (CUDA C++ Programming Guide, lazy
# loading). A rehearsal includes the collectives of tensor parallelism: the ranks of a tp group
# rehearse together, so none is ahead of the others.


class Rehearsal:
    """The rehearsals of one rank: Note [Rehearsal].

    Args:
        chunks: the rank's virtual stages.
        program: of a training step; a rehearsal splits backwards as the program does.
        weight_gradients: those of the chunks' operators.
        empty_hidden: makes an uninitialised [S / tp, B, H].
        forget: removes a backward's gradients from the buffers, and its count.
    """

    def __init__(
        self,
        chunks: Sequence[VirtualStage],
        program: Sequence[Action],
        weight_gradients: WeightGradients,
        empty_hidden: Callable[[], torch.Tensor],
        forget: Callable[[], None],
    ) -> None:
        self._chunks = chunks
        self._weight_gradients = weight_gradients
        self._empty_hidden = empty_hidden
        self._forget = forget
        self._split = split_chunks(program)
        self._seen: set[Hashable] = set()

    def before(self, batches: Sequence[MicroBatch]) -> None:
        """Rehearse the kernels of ``batches`` that are new; only forwards if gradients are off.

        A single micro-batch needs no rehearsal: no receive is posted ahead of a computation.
        """
        if len(batches) == 1:
            return
        for batch in batches:
            for chunk, stage in enumerate(self._chunks):
                kind = (torch.is_grad_enabled(), chunk, stage.kernels(batch))
                if kind not in self._seen:
                    self._seen.add(kind)
                    self._run(stage, batch, split=chunk in self._split)

    def _run(self, stage: VirtualStage, batch: MicroBatch, *, split: bool) -> None:
        outputs = [stage.run(self._received(stage), batch).output for _ in range(stage.at_once)]
        if not torch.is_grad_enabled():
            return
        for output in outputs:
            begin = output if stage.last else stage_backward(output, torch.zeros_like(output))
            if split:
                with self._weight_gradients.collected() as works:
                    torch.autograd.backward(begin)
                run_all(works)
            else:
                torch.autograd.backward(begin)
            # After each backward: otherwise the count of a whole step would be reached, and buckets
            # of gradients would leave.
            self._forget()

    def _received(self, stage: VirtualStage) -> torch.Tensor | None:
        if stage.first:
            return None
        return self._empty_hidden().zero_().requires_grad_(torch.is_grad_enabled())


_Place = tuple[int, int]  # micro-batch and chunk
# The span that measures each action; posts return at once and have none.
_OPS = {
    Kind.WAIT_ACTIVATION: Op("receive_activation", "p2p", "activation_in"),
    Kind.FORWARD: FORWARD,
    Kind.SEND_ACTIVATION: Op("send_activation", "p2p", "activation_out"),
    Kind.WAIT_GRADIENT: Op("receive_gradient", "p2p", "gradient_in"),
    Kind.BACKWARD: BACKWARD,
    Kind.BACKWARD_INPUT: BACKWARD,
    Kind.BACKWARD_WEIGHT: BACKWARD_WEIGHT,
    Kind.SEND_GRADIENT: Op("send_gradient", "p2p", "gradient_out"),
}
_SENDS_END = Op("wait_for_sends", "p2p")


class PipelineExecutor:
    """The forwards and backwards of one rank.

    Args:
        chunks: the rank's virtual stages; the one that ends the model also computes the loss.
        edges: the rank's communicators.
        weight_gradients: those of the chunks' operators.
        empty_hidden: makes an uninitialised [S / tp, B, H], the message between stages.
        on_forward: called with the number of each micro-batch as its forward begins (status page).
        timer: measures the actions.
        rehearsal: of the program's kernels; None: first launches need no care.
    """

    def __init__(
        self,
        chunks: Sequence[VirtualStage],
        edges: Edges,
        weight_gradients: WeightGradients,
        empty_hidden: Callable[[], torch.Tensor],
        on_forward: Callable[[int], None],
        timer: StepTimer,
        rehearsal: Rehearsal | None = None,
    ) -> None:
        self.chunks = self._chunks = chunks
        self._rehearsal = rehearsal
        self._edges = edges
        self._weight_gradients = weight_gradients
        self._timer = timer
        self._empty_hidden = empty_hidden
        self._on_forward = on_forward
        self._batches: Sequence[MicroBatch] = ()
        self._inputs: dict[_Place, torch.Tensor] = {}
        self._outputs: dict[_Place, torch.Tensor] = {}
        self._posted_inputs: dict[_Place, Receive] = {}
        self._posted_gradients: dict[_Place, Receive] = {}
        self._gradients: dict[_Place, torch.Tensor] = {}
        self._weights_left: dict[_Place, deque[Work]] = {}
        self._sends: deque[Send] = deque()
        self._sums = StageSums()
        self._actions: dict[Kind, Callable[[_Place], None]] = {
            Kind.POST_ACTIVATION: self._post_activation,
            Kind.WAIT_ACTIVATION: self._wait_activation,
            Kind.FORWARD: self._forward,
            Kind.SEND_ACTIVATION: self._send_activation,
            Kind.POST_GRADIENT: self._post_gradient,
            Kind.WAIT_GRADIENT: self._wait_gradient,
            Kind.BACKWARD: self._backward,
            Kind.BACKWARD_INPUT: self._backward_input,
            Kind.BACKWARD_WEIGHT: self._backward_weight,
            Kind.SEND_GRADIENT: self._send_gradient,
        }

    def run(self, program: Sequence[Action], batches: Sequence[MicroBatch]) -> StageSums:
        """Execute ``program``; its backwards add to the weights' ``main_grad``.

        A program of forwards alone runs under ``torch.no_grad()``, and nothing is kept for a
        backward.

        Returns:
            The sums of losses and auxiliary terms of every micro-batch, on the device.
        """
        self._batches = batches
        self._sums = StageSums()
        if self._rehearsal is not None:
            with self._timer.paused():
                self._rehearsal.before(batches)
        for action in program:
            place = (action.micro_batch, action.chunk)
            op = _OPS.get(action.kind)
            with self._timer.span(op, *place, shown=action.kind.value):
                self._actions[action.kind](place)
        # The only wait for sends: a wait right after a send could close a circle with the
        # partner's own send.
        if self._sends:
            with self._timer.span(_SENDS_END):
                for send in self._sends:
                    send.wait()
            self._sends.clear()
        return self._sums

    def _post_activation(self, place: _Place) -> None:
        self._posted_inputs[place] = self._post(self._edges.activation_in)

    def _wait_activation(self, place: _Place) -> None:
        # A leaf of this stage's graph: its gradient is the message to the stage before.
        self._inputs[place] = self._posted_inputs.pop(place).wait().requires_grad_()

    def _forward(self, place: _Place) -> None:
        number, chunk = place
        self._on_forward(number)
        batch, stage = self._batches[number], self._chunks[chunk]
        keep = torch.is_grad_enabled()
        received = self._inputs.get(place) if keep else self._inputs.pop(place, None)
        found = stage.run(received, batch)
        if found.losses is not None:
            self._sums.losses.append(found.losses)
        if found.terms is not None:
            self._sums.terms.append(found.terms)
        if keep or not stage.last:
            self._outputs[place] = found.output

    def _send_activation(self, place: _Place) -> None:
        self._send(self._edges.activation_out, self._outputs[place].detach())
        if not torch.is_grad_enabled():
            del self._outputs[place]

    def _post_gradient(self, place: _Place) -> None:
        self._posted_gradients[place] = self._post(self._edges.gradient_in)

    def _wait_gradient(self, place: _Place) -> None:
        self._gradients[place] = self._posted_gradients.pop(place).wait()

    def _backward(self, place: _Place) -> None:
        output, gradient = self._outputs.pop(place), self._gradients.pop(place, None)
        begin = output if gradient is None else stage_backward(output, gradient)
        torch.autograd.backward(begin)

    def _backward_input(self, place: _Place) -> None:
        with self._weight_gradients.collected() as self._weights_left[place]:
            self._backward(place)

    def _backward_weight(self, place: _Place) -> None:
        run_all(self._weights_left.pop(place))

    def _send_gradient(self, place: _Place) -> None:
        gradient = self._inputs.pop(place).grad
        assert gradient is not None, "the stage's input took part in its forward"
        self._send(self._edges.gradient_out, gradient)

    def _post(self, edge: Group | None) -> Receive:
        assert edge is not None, "the schedule receives where this stage has no neighbour"
        return edge.post_receive(self._empty_hidden())

    def _send(self, edge: Group | None, tensor: torch.Tensor) -> None:
        assert edge is not None, "the schedule sends where this stage has no neighbour"
        tensor = tensor.contiguous()
        # A tensor must outlive its send, or the allocator would give its memory to another tensor.
        # On CUDA, tensors whose sends have ended are released here; on a CPU they stay until the
        # end of the step, one per micro-batch, chunk and direction.
        while tensor.is_cuda and self._sends and self._sends[0].ended():
            self._sends.popleft()
        self._sends.append(edge.send(tensor))
