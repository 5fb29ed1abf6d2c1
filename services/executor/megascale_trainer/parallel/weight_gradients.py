"""When the gradients of weights are computed: in backward, or later, as a schedule asks for it.

The gradient of a layer's input is needed at once, by the stage before; that of its weights at the
end of the step. A schedule with split backwards (Qi et al., Zero Bubble Pipeline Parallelism, arXiv
2401.10241) runs the first alone and fills waits with the second.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

Work = Callable[[], object]


class WeightGradients:
    """Where operators hand in what they do for their weights; one for all operators of a rank.

    What is handed in holds the tensors that it reads until it has run.
    """

    def __init__(self) -> None:
        self._collected: deque[Work] | None = None

    def run(self, work: Work) -> None:
        """Run ``work`` now, or when the caller of :meth:`collected` runs it."""
        if self._collected is None:
            work()
        else:
            self._collected.append(work)

    @contextmanager
    def collected(self) -> Iterator[deque[Work]]:
        """What is handed in inside, in its order, for :func:`run_all`; nothing of it is run."""
        assert self._collected is None, "weight gradients are collected once"
        self._collected = found = deque[Work]()
        try:
            yield found
        finally:
            self._collected = None


def run_all(works: deque[Work]) -> None:
    """Run ``works`` in their order; each is released, with its tensors, when it has run."""
    # As inside a backward: tensors that forward kept may belong to a graph.
    with torch.no_grad():
        while works:
            works.popleft()()
