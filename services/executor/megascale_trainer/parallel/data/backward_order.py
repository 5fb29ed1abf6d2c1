"""Counts, once a run, that a unit's weight gradients are there when backward leaves the unit.

A bucket of gradients leaves as soon as backward has passed its units, because of the nodes that are
ready autograd runs the one that forward made last. torch does not promise that order, so it is
asserted: in the first backward of each unit the nodes that use a weight are counted in the graph,
and again as they run. A stage's last unit, whose nodes are the first to run, is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from megascale_job.visible import counted


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
