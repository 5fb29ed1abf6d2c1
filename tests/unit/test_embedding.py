"""The embedding of one tp rank: its own rows, zeros elsewhere, gradients that do not pile up."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megascale_trainer.model.blocks.ends import _lookup
from megascale_trainer.weights import Weight

ROWS, WIDTH = 100, 3


class _Places(TorchDispatchMode):
    """Where index_put adds."""

    def __init__(self) -> None:
        super().__init__()
        self.indices: list[torch.Tensor] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if "index_put" in str(function):
            self.indices += args[1]
        return function(*args, **(kwargs or {}))


def test_tokens_of_other_ranks_are_zeros_and_do_not_gather_in_one_row() -> None:
    """On CUDA one warp after the other adds what lands in the same row."""
    local = torch.arange(-ROWS, 3 * ROWS)[
        :, None
    ]  # each of 400 tokens once, on the second of four ranks
    table = Weight(torch.randn(ROWS, WIDTH).requires_grad_(), torch.ones(ROWS, WIDTH))
    own = local[:, 0].ge(0) & local[:, 0].lt(ROWS)
    found = _lookup(local, table)
    torch.testing.assert_close(found[own, 0], table.value, rtol=0, atol=0)
    assert not found[~own].any()
    gradient = torch.randn_like(found)
    with _Places() as places:
        found.backward(gradient)
    torch.testing.assert_close(table.main_grad, 1 + gradient[own, 0], rtol=0, atol=0)
    assert torch.cat([index.flatten() for index in places.indices]).bincount().max() <= 4
