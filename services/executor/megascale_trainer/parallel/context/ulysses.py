"""Attention over a sequence that is cut over the cp ranks: by an exchange of heads (Ulysses).

Every rank has a part of the sequence with all heads of its tp rank. Before the attention the ranks
exchange queries, keys and values so that each has the whole sequence for a part of the heads; after
it they exchange back (Jacobs et al., DeepSpeed Ulysses, arXiv 2309.14509). Each head sees the whole
sequence, so masks, windows and documents are those of one rank, and every attention backend works.

This is the plain version: one all-to-all each way, which nothing hides.
"""

from __future__ import annotations

from typing import Any

import torch

from megascale_kernels.attention import AttentionMask, attention
from megascale_kernels.torch_calls import apply
from megascale_trainer.parallel.groups import Group


class Ulysses:
    """Attention over ``group``: see :class:`megascale_kernels.block_inner.Attend`."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: AttentionMask
    ) -> torch.Tensor:
        """[B, heads, S / cp, d] of this rank's part of the sequence, to the same."""
        query, key, value = apply(_ToHeads, query, key, value, self._group, mask.by_position)
        attended = attention(query, key, value, mask)
        part: torch.Tensor = apply(_ToSequence, attended, self._group, mask.by_position)
        return part


class _ToHeads(torch.autograd.Function):
    """q, k, v [B, heads, S / cp, d] to [B, heads / cp, S, d]."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        group: Group,
        by_position: bool,
    ) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        ctx.by_position = by_position
        return _to_heads((query, key, value), group, by_position=by_position)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *_to_sequence(gradients, ctx.group, by_position=ctx.by_position), None, None


class _ToSequence(torch.autograd.Function):
    """The reverse of :class:`_ToHeads`, of one tensor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, by_position: bool) -> torch.Tensor:
        ctx.group = group
        ctx.by_position = by_position
        return _to_sequence((x,), group, by_position=by_position)[0]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _to_heads((gradient,), ctx.group, by_position=ctx.by_position)[0], None, None


def _to_heads(
    parts: tuple[torch.Tensor, ...], group: Group, *, by_position: bool
) -> tuple[torch.Tensor, ...]:
    """Each [B, heads, S / cp, d] to [B, heads / cp, S, d], all in one message for each rank."""
    size = group.size
    # For each rank its heads, and of them the sequence first: so the parts of a sequence, which
    # arrive from the ranks in their order, are the whole sequence without another copy.
    sent = torch.cat([_by_head_groups(x, size) for x in parts], dim=1)
    arrived = _exchanged(sent, group)  # [cp, (heads / cp) of all parts, S / cp, B, d]
    found = []
    for x in torch.split(arrived, [x.shape[1] // size for x in parts], dim=1):
        whole = x.transpose(0, 1).flatten(1, 2)  # [heads / cp, S, B, d]
        found.append(_laid_out(whole.permute(2, 0, 1, 3), by_position=by_position))
    return tuple(found)


def _to_sequence(
    parts: tuple[torch.Tensor, ...], group: Group, *, by_position: bool
) -> tuple[torch.Tensor, ...]:
    """The reverse of :func:`_to_heads`."""
    size = group.size
    sent = torch.cat(
        [_cut(x.permute(1, 2, 0, 3), size, dim=1).transpose(0, 1) for x in parts], dim=1
    )
    arrived = _exchanged(sent, group)
    return tuple(
        _laid_out(x.flatten(0, 1).permute(2, 0, 1, 3), by_position=by_position)
        for x in torch.split(arrived, [x.shape[1] for x in parts], dim=1)
    )


def _by_head_groups(x: torch.Tensor, size: int) -> torch.Tensor:
    """[B, heads, s, d] to [size, heads / size, s, B, d]."""
    return _cut(x.permute(1, 2, 0, 3), size, dim=0)


def _cut(x: torch.Tensor, parts: int, dim: int) -> torch.Tensor:
    """``dim`` as two: the number of the part, and the place in it."""
    shape = x.shape
    return x.reshape(*shape[:dim], parts, shape[dim] // parts, *shape[dim + 1 :])


def _exchanged(sent: torch.Tensor, group: Group) -> torch.Tensor:
    """``sent[i]`` goes to rank i; the result's i-th part comes from rank i."""
    sent = sent.contiguous()
    arrived = torch.empty_like(sent)
    sizes = [sent[0].numel() * sent.element_size()] * group.size
    # As bytes: a communicator need not know the dtype.
    group.all_to_all(
        arrived.view(-1).view(torch.uint8), sent.view(-1).view(torch.uint8), sizes, sizes
    )
    return arrived


def _laid_out(x: torch.Tensor, *, by_position: bool) -> torch.Tensor:
    """``x`` [B, heads, S, d] in the layout that the attention reads without a copy."""
    if by_position:
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    return x.contiguous()
