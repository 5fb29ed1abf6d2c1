"""Vocabulary-parallel cross entropy against float64, with the vocabulary cut over 1 to 4 ranks in lock-step threads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from megascale_kernels.cross_entropy import Reduce, cross_entropy

TOKENS, VOCABULARY = 11, 37


class _Lockstep:
    """Reductions over threads that stand for ranks."""

    def __init__(self, ranks: int) -> None:
        self._barrier, self._parts = threading.Barrier(ranks, timeout=10), [torch.empty(0)] * ranks

    def reducer(self, rank: int, *, maximum: bool) -> Reduce:
        def reduce(tensor: torch.Tensor) -> None:
            self._parts[rank] = tensor.clone()
            self._barrier.wait()
            stacked = torch.stack(self._parts)
            tensor.copy_(stacked.amax(0) if maximum else stacked.sum(0))
            self._barrier.wait()

        return reduce


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_cross_entropy(ranks: int, dtype: torch.dtype, tolerance: float) -> None:
    width = 16 if ranks == 4 else -(-VOCABULARY // ranks) + 3  # with 4 ranks the last one holds padding alone
    generator = torch.Generator().manual_seed(6)
    logits = (20 * torch.randn(TOKENS, VOCABULARY, generator=generator)).to(dtype)
    targets = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    weight, z_weight = torch.rand(2, TOKENS, generator=generator)
    exact = logits.double().requires_grad_()
    log_z = exact.logsumexp(-1)
    loss = log_z - exact[torch.arange(TOKENS), targets]
    [wanted] = torch.autograd.grad((weight * loss + z_weight * log_z.square()).sum(), exact)
    lockstep = _Lockstep(ranks)

    def rank_part(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        first = min(rank * width, VOCABULARY)
        columns = max(0, min(width, VOCABULARY - first))
        local = torch.full((TOKENS, width), 50.0, dtype=dtype)  # padding is larger than any logit
        local[:, :columns] = logits[:, first : first + columns]
        local.requires_grad_()
        found_loss, found_z = cross_entropy(
            local,
            targets,
            rank * width,
            columns,
            lockstep.reducer(rank, maximum=True),
            lockstep.reducer(rank, maximum=False),
        )
        [gradient] = torch.autograd.grad((weight * found_loss + z_weight * found_z.square()).sum(), local)
        assert not gradient[:, columns:].any(), "padding must have no gradient"
        return found_loss, found_z, gradient[:, :columns]

    with ThreadPoolExecutor(ranks) as pool:
        parts = list(pool.map(rank_part, range(ranks)))
    for found_loss, found_z, _ in parts:
        torch.testing.assert_close(found_loss.double(), loss.detach(), atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(found_z.double(), log_z.detach(), atol=2e-5, rtol=1e-5)
    gradient = torch.cat([part for *_, part in parts], dim=1)
    scale = float(wanted.abs().max())
    torch.testing.assert_close(gradient.double() / scale, wanted / scale, atol=tolerance, rtol=tolerance)
