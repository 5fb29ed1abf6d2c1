"""A weight as an operator sees it: its value, and the float32 gradient that it adds into."""

from __future__ import annotations

from typing import Protocol

import torch


class Parameter(Protocol):
    """A weight whose gradient the operator adds to ``main_grad`` itself, without autograd."""

    @property
    def value(self) -> torch.Tensor:
        """The value to compute with: a leaf that requires grad, so that autograd records it."""

    @property
    def main_grad(self) -> torch.Tensor:
        """float32, the shape of ``value``: its gradient, summed over micro-batches."""

    def tracked(self) -> torch.Tensor:
        """``value`` for ordinary torch operations; its gradient arrives in ``main_grad``."""
