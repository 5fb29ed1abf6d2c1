"""Data parallelism, overlapped: gradients leave during backward, parameters arrive in forward.

A bucket is reduce-scattered once per step, as soon as the last micro-batch's backward has left all
of its units, while the backward of earlier layers continues. After the update buckets are
all-gathered in the order of forward, and forward waits for each just before its first use: the
first ones travel while the next batch is read (MegaScale section 3.2). See Note [Order of
communication], Note [Streams of the overlapped step] and Note [Order of backward].
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

# Note [Order of communication]
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
# A communicator runs its operations in the order in which each rank starts them, and matches the
# ranks' operations by that order alone. Two ranks that start two buckets in different orders would
# add the gradients of one bucket to those of the other, or hang. Backward does not find buckets
# ready in the same order on all ranks, so the order is fixed beforehand, for every rank of a
# stage: gradients in the reverse order of forward (a finished bucket waits for those before it in
# that order), then the buffers that are replicated over tp, then, after the update, parameters in
# the order of forward. Replicated buffers come last because they are summed over tp first. They are
# small (norms, biases, learned positions), and that sum waits for the end of backward: the tp
# communicator carries the activations of every layer, so a message in between would delay a layer,
# while one after backward travels together with the last buckets.

# Note [Streams of the overlapped step]
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
# On CUDA four kinds of streams run at once, and the host waits for none of them:
#   compute       forward, backward, update: the current stream;
#   communicator  one per process group, of NCCL: a collective starts after everything that its
#                 starter's stream held at the call, so a bucket leaves after its own gradients;
#   side stream   copies between tp ranks (`megascale_kernels/overlap/side_stream.py`), and the
#                 snapshot's copy (see Note [Snapshots off the training thread]);
#   batch stream  the copy of the next step's batches (`data/device_batches.py`).
# Order between streams comes from events on the device: compute waits for a gather before the first
# use of its unit, for all reductions before the update, and for a snapshot's copy before the update
# that would overwrite the states. Nothing else is ordered, so all of this travels under
# computation. Buffers live as long as the trainer, so the caching allocator never takes memory back
# from a collective that is still running.

# Note [Order of backward]
# ~~~~~~~~~~~~~~~~~~~~~~~~
# A bucket of gradients may leave when backward has passed its units. This relies on an order: among
# the nodes that are ready, autograd runs the one that forward made last. The nodes of a unit, and
# those of the units after it, were made after the unit's boundary node and depend on nothing that
# was made before it. So when the boundary runs, all of them have run, including weight gradients
# off the path to the input. torch does not promise this order, so it is asserted: in the first
# backward of each unit the nodes that use a weight are counted in the graph, and again as they run.
# A stage's last unit, whose nodes are the first to run, is not counted.


class WrongOrder(RuntimeError):
    """autograd has left a unit before all of its weights had their gradients."""


class BackwardOrder:
    """Watches the first backward of each unit: Note [Order of backward].

    Args:
        boundary: the type of the autograd node in front of each unit, which has the unit's name as
            ``unit``.
    """

    def __init__(self, boundary: type[torch.autograd.Function]) -> None:
        self._boundary = boundary
        self.expected: dict[str, int] = {}  # nodes that use a weight, by unit
        self._ran: dict[str, int] = {}

    def watch(self, output: torch.Tensor) -> None:
        """Count the nodes of the unit that made ``output``, once per unit."""
        nodes = list(_nodes(output.grad_fn, self._is_boundary))
        unit = next((node.unit for node in nodes if self._is_boundary(node)), None)
        if unit is None or unit in self.expected:
            return  # an embedding has no boundary, because backward ends in it
        users = [node for node in nodes if _uses_a_weight(node) and not self._is_boundary(node)]
        self.expected[unit], self._ran[unit] = len(users), 0
        for node in users:
            node.register_hook(self._counter(unit))

    def left(self, unit: str) -> None:
        """Note that backward leaves ``unit``.

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
    """The nodes after ``begin``, each once, up to the nodes that ``ends`` accepts."""
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
    """True if an input of the node is a leaf; activations that are leaves lie after a boundary."""
    following = (each for each, _ in node.next_functions if each is not None)
    return any(each.name().endswith("AccumulateGrad") for each in following)


class OverlappedBuffers(FlatBuffers):
    """Flat buffers that communicate under computation, with the plain version's bits.

    See Note [Streams of the overlapped step]. Backward starts collectives from autograd's thread,
    which runs a node on the stream of its forward: the bucket's weight gradients were enqueued
    there before.

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
        # Note [Order of communication]: the reverse of forward, replicated buckets last.
        self._in_backward_order = sorted(
            (
                placed
                for placed in reversed(self._in_forward_order)
                if not placed.plan.copies  # these are summed at the end
            ),
            key=lambda placed: bool(placed.plan.replicated_over),
        )
        self._early = sum(not placed.plan.replicated_over for placed in self._in_backward_order)
        self._backwards: dict[str, int] = {}  # backwards of each unit so far in this step
        self._order = BackwardOrder(_Boundary)
        self._entered = set[str]()
        self._reductions: list[Pending | None] = []
        self._gathers: dict[PlacedBucket, Pending] = {}

    def await_parameters(self, unit: str | None = None) -> None:
        """As the plain version; the first user of a gather waits for it, and no one after."""
        for placed in [
            placed for placed in self._gathers if unit is None or unit in placed.bucket.units
        ]:
            self._gathers.pop(placed).wait()

    def enter(self, unit: str, hidden: torch.Tensor) -> torch.Tensor:
        """As the plain version; a backward that passes here counts as one of the unit."""
        if unit not in self._entered:
            self._entered.add(unit)
            self._order.watch(hidden)
        passed: torch.Tensor = apply(_Boundary, super().enter(unit, hidden), unit, self._passed)
        return passed

    def left(self, unit: str) -> None:
        """As the plain version; after the last micro-batch the unit's buckets leave."""
        # A bucket is ready when each of its units has seen every micro-batch of the step. Ready
        # buckets leave from the front of the order only: all ranks start them in the same order.
        self._backwards[unit] = self._backwards.get(unit, 0) + 1
        while len(self._reductions) < self._early and self._is_complete(len(self._reductions)):
            self._start_until(len(self._reductions) + 1)

    def _passed(self, unit: str) -> None:
        """Note that backward has passed the operators of ``unit``.

        The unit is left only when its weight gradients have run, now or later in the schedule.
        """
        self._order.left(unit)
        self._weight_gradients.run(partial(self.left, unit))

    def zero_gradients(self) -> None:
        """As the plain version. Earlier reductions have ended: the last update waited for them."""
        super().zero_gradients()
        self._backwards.clear()
        self._reductions.clear()

    def reduce_gradients(self) -> None:
        """As the plain version, for the buckets that did not leave during backward; waits for all.

        The embedding's bucket is among them: the embedding has no input through which backward
        could leave it, and its own backward is the last of the first stage.
        """
        self._start_until(self._early)
        # The sum over tp runs while the last sharded buckets travel; replicated buckets follow it.
        self._sum_replicas()
        self._start_until(len(self._in_backward_order))
        for reduction in self._reductions:
            if reduction is not None:
                reduction.wait()
        self._sum_in_order()
        self._sum_tied()

    def gather_parameters(self) -> None:
        """As the plain version, without waiting for the gathers that it starts."""
        for placed, whole, own in self._packed():
            # All weights of a buffer share one version counter, and gloo advances it whenever a
            # gather ends. autograd would then believe that an earlier layer's weights, which
            # forward has already used, were modified. `data` has a counter of its own.
            gather = self._group(placed).start_all_gather(whole.data, own.data)
            if gather is not None:
                self._gathers[placed] = gather

    def _is_complete(self, number: int) -> bool:
        units = self._in_backward_order[number].bucket.units
        return all(self._backwards.get(unit) == self._micro_batches for unit in units)

    def _start_until(self, number: int) -> None:
        """Start those of the first ``number`` reduce-scatters that have not started."""
        for placed in self._in_backward_order[len(self._reductions) : number]:
            own, whole = placed.own(self.gradients), placed.whole(self.gradients)
            self._reductions.append(self._group(placed).start_reduce_scatter(own, whole))


class _Boundary(torch.autograd.Function):
    """The identity; its backward reports that backward has left a unit: Note [Order of backward].

    A hook on the input tensor would not do: the hook of a leaf (a received activation) runs ahead
    of that order, before the weights of the unit's norm have their gradients. Recomputation adds no
    nodes to this backward.
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
