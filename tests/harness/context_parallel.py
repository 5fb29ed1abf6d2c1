"""Programs of a rank: attention over cp next to attention over the whole sequence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tests.harness.training import CPU, _groups, tiny_job

from megascale_job.loading import from_accepted
from megascale_kernels.attention import AttentionMask, attention, attention_mask
from megascale_kernels.block_inner import Attend
from megascale_kernels.documents import documents_of
from megascale_trainer.parallel.context.sharding import ContextParallel
from megascale_trainer.process.bootstrap import destroy_groups

SIZE = 16  # of a head


def attend_any_documents(
    rank: int, world_size: int, folder: Path, *, cases: list[dict[str, Any]]
) -> list[str]:
    """Attention of each case over the cp ranks and alone; returns what differs in a bit.

    A case has ``seed``, ``sequences``, ``length`` of each rank's part, ``groups`` of heads for each
    rank, ``shared`` query heads for each key/value head, ``window``, and ``starts``: the first
    tokens of documents, by sequence.
    """
    model = {"heads": 4 * world_size, "hidden_size": 64 * world_size}
    config = from_accepted(tiny_job(model=model, parallelism={"cp": world_size}))
    cp = ContextParallel(_groups(config, rank, folder)["cp"])
    wrong = []
    for case in cases:
        whole, mask = _inputs(case, world_size)
        length = case["length"]
        own = slice(rank * length, (rank + 1) * length)
        parts = [x[:, :, own].contiguous() for x in whole[:3]]
        alone = _attended(attention, whole[:3], whole[3], mask)
        found = _attended(cp.attend, parts, whole[3][:, :, own], mask)
        for name, one, other in zip(("y", "d_q", "d_k", "d_v"), found, alone, strict=True):
            if not torch.equal(one, other[:, :, own]):
                wrong.append(f"{case}: {name} differs")
    destroy_groups()
    return wrong


def _inputs(case: dict[str, Any], ranks: int) -> tuple[list[torch.Tensor], AttentionMask]:
    """q, k, v and the gradient of the result, [B, heads, S, d], and the mask."""
    generator = torch.Generator().manual_seed(case["seed"])
    sequences, length = case["sequences"], case["length"] * ranks
    heads = case["groups"] * ranks
    start = torch.zeros(sequences, length, dtype=torch.int64)
    for row, starts in enumerate(case["starts"]):
        for begin in sorted(begin for begin in starts if begin < length):
            start[row, begin:] = begin
    mask = attention_mask(length, window=case["window"], documents=documents_of(start), device=CPU)
    shapes = [heads * case["shared"], heads, heads, heads * case["shared"]]
    tensors = [torch.randn(sequences, n, length, SIZE, generator=generator) for n in shapes]
    return tensors, mask


def _attended(
    attend: Attend, inputs: list[torch.Tensor], gradient: torch.Tensor, mask: AttentionMask
) -> list[torch.Tensor]:
    query, key, value = (x.detach().clone().requires_grad_() for x in inputs)
    y = attend(query, key, value, mask)
    torch.autograd.backward(y, gradient)
    assert query.grad is not None and key.grad is not None and value.grad is not None
    return [y.detach(), query.grad, key.grad, value.grad]
