"""What an operator sees of a weight: its value, and the float32 gradient that the operator itself
adds into.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Parameter(Protocol):
    """A weight whose gradient autograd does not carry. ``main_grad`` is float32, of the shape of
    ``value``.
    """

    @property
    def value(self) -> torch.Tensor:
        """What is computed with: a leaf that requires grad, so that autograd sees the operators on
        it.
        """

    @property
    def main_grad(self) -> torch.Tensor:
        """Where its gradient is summed over micro-batches."""

    def tracked(self) -> torch.Tensor:
        """``value`` for ordinary torch operations; its gradient arrives in ``main_grad``."""
