"""Data parallelism, overlapped: gradients leave during backward, parameters arrive in forward.

A bucket is reduce-scattered once per step, as soon as the last micro-batch's backward has left all
of its units, while the backward of earlier layers goes on. After the update buckets are
all-gathered in the order of forward, and forward waits for each just before its first use: the
first ones travel while the next batch is read (MegaScale section 3.2).

Every rank of a dp group starts the same operations in the same order, whatever order its backward
finds buckets ready in: gradients leave in the reverse order of forward (a finished bucket waits for
those after it), then those of the buffers that are replicated over tp, then parameters in the order
of forward. The replicated buffers wait for the end of backward because they are summed over tp
first. They are small (norms, biases, learned positions), and on the tp communicator, which carries
the activations of every layer, one message after backward delays no layer; it travels beside the
last buckets.

Note [Order of backward]
~~~~~~~~~~~~~~~~~~~~~~~~
A bucket of gradients leaves as soon as backward has passed its units, because of the nodes that are
ready autograd runs the one that forward made last. torch does not promise that order, so it is
asserted: in the first backward of each unit the nodes that use a weight are counted in the graph,
and again as they run. A stage's last unit, whose nodes are the first to run, is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from megascale_job.visible import counted
from megascale_kernels.torch_calls import apply
from megascale_trainer.parallel.data.bucket_parameters import Fp8Gather, PlacedBucket
from megascale_trainer.parallel.data.buffers import FlatBuffers, Place
from megascale_trainer.parallel.groups import Pending
from megascale_trainer.weights import WeightGradients


class WrongOrder(RuntimeError):
    """autograd has left a unit before all of its weights had their gradients."""


class BackwardOrder:
    """Watches the first backward of each unit.

    Args:
        boundary: the type of the autograd nodes that stand before each unit; they have its name as
            ``unit``.
    """

    def __init__(self, boundary: type[torch.autograd.Function]) -> None:
        self._boundary = boundary
        self.expected: dict[str, int] = {}  # nodes that use a weight, by unit
        self._ran: dict[str, int] = {}

    def watch(self, output: torch.Tensor) -> None:
        """Count the nodes of the unit that made ``output``; of each unit the first time alone."""
        nodes = list(_nodes(output.grad_fn, self._is_boundary))
        unit = next((node.unit for node in nodes if self._is_boundary(node)), None)
        if unit is None or unit in self.expected:
            return  # an embedding has no boundary: nothing leaves before it
        users = [node for node in nodes if _uses_a_weight(node) and not self._is_boundary(node)]
        self.expected[unit], self._ran[unit] = len(users), 0
        for node in users:
            node.register_hook(self._counter(unit))

    def left(self, unit: str) -> None:
        """Backward leaves ``unit``.

        Raises:
            WrongOrder: weight gradients are missing.
        """
        ran = self._ran.pop(unit, None)
        if ran is not None and ran != self.expected[unit]:
            raise WrongOrder(
                f"backward has left {unit} when {ran} of its "
                f"{counted(self.expected[unit], 'operator')} with "
                "weights had run: this torch runs nodes in another order than overlapping data "
                "parallelism relies on; set trainer.parallelism.overlap.dp to false"
            )

    def _is_boundary(self, node: Any) -> bool:
        # The node of a Python function is an instance of a class made from it.
        return getattr(type(node), "_forward_cls", None) is self._boundary

    def _counter(self, unit: str) -> Callable[[Any, Any], None]:
        def count(inputs: Any, outputs: Any) -> None:
            if unit in self._ran:
                self._ran[unit] += 1

        return count


def _nodes(begin: Any, ends: Callable[[Any], bool]) -> Iterator[Any]:
    """The nodes behind ``begin``, each once; behind one that ``ends`` nothing is looked at."""
    waiting, seen = [begin], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        if not ends(node):
            waiting += [following for following, _ in node.next_functions]


def _uses_a_weight(node: Any) -> bool:
    """Whether one of its inputs is a leaf: activations that are leaves lie behind a boundary."""
    following = (each for each, _ in node.next_functions if each is not None)
    return any(each.name().endswith("AccumulateGrad") for each in following)


class OverlappedBuffers(FlatBuffers):
    """Flat buffers that communicate under computation, with the plain version's bits.

    On CUDA a collective runs on its communicator's stream, after what its starter's stream held at
    that moment, and waiting for one holds back the current stream, never the host. Backward starts
    collectives from autograd's thread: autograd runs a node on the stream of its forward, where the
    bucket's weight gradients were enqueued before it. The buffers live as long as the trainer, so
    that the caching allocator never takes them back from a running collective.

    Args:
        micro_batches: backwards of every unit in a step.
        weight_gradients: those of the units' operators; a unit is left when they have run.
    """

    def __init__(
        self,
        place: Place,
        micro_batches: int,
        weight_gradients: WeightGradients,
        fp8: Fp8Gather | None = None,
    ) -> None:
        super().__init__(place, fp8)
        self._micro_batches = micro_batches
        self._weight_gradients = weight_gradients
        # The one order in which all ranks start reductions: the reverse of forward, replicated
        # buckets last.
        self._in_backward_order = sorted(
            reversed(self._in_forward_order), key=lambda placed: bool(placed.plan.replicated_over)
        )
        self._early = sum(not placed.plan.replicated_over for placed in self._sharded)
        self._backwards: dict[str, int] = {}  # of each unit, in this step
        self._order = BackwardOrder(_Boundary)
        self._entered = set[str]()
        self._reductions: list[Pending | None] = []
        self._gathers: dict[PlacedBucket, Pending] = {}

    def await_parameters(self, unit: str | None = None) -> None:
        """As the plain version; a gather is waited for once, by its first user."""
        for placed in [
            placed for placed in self._gathers if unit is None or unit in placed.bucket.units
        ]:
            self._gathers.pop(placed).wait()

    def enter(self, unit: str, hidden: torch.Tensor) -> torch.Tensor:
        """As the plain version; the backward through here counts as the unit's."""
        if unit not in self._entered:
            self._entered.add(unit)
            self._order.watch(hidden)
        passed: torch.Tensor = apply(_Boundary, super().enter(unit, hidden), unit, self._passed)
        return passed

    def left(self, unit: str) -> None:
        """As the plain version; the last micro-batch's has the unit's buckets leave."""
        # A bucket is ready when each of its units has seen every micro-batch of the step. Ready
        # buckets leave from the front of the order only: all ranks start them in the same order.
        self._backwards[unit] = self._backwards.get(unit, 0) + 1
        while len(self._reductions) < self._early and self._is_complete(len(self._reductions)):
            self._start_until(len(self._reductions) + 1)

    def _passed(self, unit: str) -> None:
        """Backward has passed the operators of ``unit``, which have handed in their weights."""
        self._order.left(unit)
        self._weight_gradients.run(partial(self.left, unit))

    def zero_gradients(self) -> None:
        """As the plain version. Earlier reductions have ended: that update waited for them."""
        super().zero_gradients()
        self._backwards.clear()
        self._reductions.clear()

    def reduce_gradients(self) -> None:
        """As the plain version, for the buckets that did not leave during backward; waits for all.

        The embedding's is among them: it has no input that backward could leave through, and its
        backward ends the last one of the first stage.
        """
        self._start_until(self._early)
        # The sum over tp runs while the last sharded buckets travel; replicated buckets follow it.
        self._sum_replicas()
        self._start_until(len(self._in_backward_order))
        for reduction in self._reductions:
            if reduction is not None:
                reduction.wait()
        self._sum_tied()

    def gather_parameters(self) -> None:
        """As the plain version, without waiting for the gathers that it starts."""
        for placed, whole, own in self._packed():
            # All weights of a buffer share one version counter, and gloo advances it whenever a
            # gather ends. autograd would then take an earlier layer's weights, already used by
            # forward, for modified. `data` has a counter of its own.
            gather = self._dp.start_all_gather(whole.data, own.data)
            if gather is not None:
                self._gathers[placed] = gather

    def _is_complete(self, number: int) -> bool:
        units = self._in_backward_order[number].bucket.units
        return all(self._backwards.get(unit) == self._micro_batches for unit in units)

    def _start_until(self, number: int) -> None:
        """Start those of the first ``number`` reduce-scatters (backward order) not yet started."""
        for placed in self._in_backward_order[len(self._reductions) : number]:
            own, whole = placed.own(self.gradients), placed.whole(self.gradients)
            self._reductions.append(self._dp.start_reduce_scatter(own, whole))


class _Boundary(torch.autograd.Function):
    """The identity; its backward reports that backward has left a unit.

    Of the nodes that are ready, autograd runs the one that forward made last. The unit's nodes, and
    those of the units after it, were made after this one and depend on nothing that was made before
    them: when this one runs, all of them have run, those of weight gradients off the path to the
    input included. A hook on the input tensor would not do: that of a leaf (a received activation)
    runs ahead of this order, before the weights of the unit's norm have their gradients.
    Recomputation adds no nodes to this backward.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, unit: str, note: Callable[[str], None]
    ) -> torch.Tensor:
        ctx.unit = unit
        ctx.note = note
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.note(ctx.unit)
        return gradient, None, None
