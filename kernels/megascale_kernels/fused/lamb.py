"""LAMB's two passes over a shard in one launch each, and the sums between them in a third.

Per parameter of a bf16 model the first pass reads 16 bytes (master, moments, gradient) and writes
12 (moments, direction), the second reads 8 and writes 6. A program owns the part of a block that
one parameter fills, so that its sums of squares are of that parameter. They are added in a fixed
order, without atomics.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from megascale_kernels.adamw import AdamWUpdate
from megascale_kernels.lamb import Segment

BLOCK = 1024  # 8 elements per thread of 4 warps: two 16-byte loads of each float32 operand
_WARPS = 4
_WIDE = 8  # elements: 16 bytes of bf16
_TILE = 1024  # partial sums that a program adds at once


class LambRuns:
    """Fused :class:`megascale_kernels.lamb.LambRuns`.

    Squares are added in float32 within a block of 1024 and in float64 over blocks.
    """

    def __init__(self, segments: Sequence[Segment], device: torch.device) -> None:
        blocks = [range(one.start // BLOCK, triton.cdiv(one.stop, BLOCK)) for one in segments]
        counts = torch.tensor([len(run) for run in blocks], dtype=torch.int64)
        ends = counts.cumsum(0)
        self._size = int(counts.sum())
        firsts = torch.tensor([run.start for run in blocks], dtype=torch.int64) - (ends - counts)
        owners = torch.repeat_interleave(torch.arange(len(blocks)), counts)
        numbers = torch.arange(self._size) + firsts[owners]
        bounds = torch.tensor([(one.start, one.stop) for one in segments], dtype=torch.int64)
        self._numbers = numbers.to(device, torch.int32)
        self._owners = owners.to(device, torch.int32)
        self._bounds = bounds.reshape(-1, 2).to(device)
        self._ends = ends.to(device)
        self._decays = torch.tensor([float(one.decay) for one in segments], device=device)
        self._partial = torch.empty((2, self._size), dtype=torch.float32, device=device)
        # Two parameters that share a block have a program each, which skips the other's elements.
        # With odd bounds the result is right, but memory is read value by value, which is slow.
        self._multiple = _WIDE if not bool((bounds % _WIDE).any()) else 1

    def direction(
        self,
        states: torch.Tensor,
        gradient: torch.Tensor,
        scale: torch.Tensor,
        apply: torch.Tensor,
        update: AdamWUpdate,
        sums: torch.Tensor,
    ) -> None:
        """See :class:`megascale_kernels.lamb.LambKernel`."""
        if not self._size:
            return
        _lamb_direction_kernel[(self._size,)](
            states=states,
            gradient=gradient,
            partial=self._partial,
            scale=scale,
            apply=apply,
            numbers=self._numbers,
            owners=self._owners,
            bounds=self._bounds,
            decays=self._decays,
            stride=states.stride(0),
            size=self._size,
            weight1=1.0 - update.beta1,
            weight2=1.0 - update.beta2,
            factors=update.bias.factors,
            epsilon=update.epsilon,
            weight_decay=update.weight_decay,
            BLOCK=BLOCK,
            MULTIPLE=self._multiple,
            num_warps=_WARPS,
        )
        _lamb_sum_kernel[(sums.shape[1], 2)](
            self._partial, self._ends, sums, self._size, sums.stride(0), TILE=_TILE
        )

    def apply(
        self,
        states: torch.Tensor,
        direction: torch.Tensor,
        parameters: torch.Tensor,
        ratios: torch.Tensor,
        apply: torch.Tensor,
        learning_rate: float,
    ) -> None:
        """See :class:`megascale_kernels.lamb.LambKernel`."""
        if not self._size:
            return
        _lamb_apply_kernel[(self._size,)](
            states=states,
            direction=direction,
            parameters=parameters,
            ratios=ratios,
            apply=apply,
            numbers=self._numbers,
            owners=self._owners,
            bounds=self._bounds,
            learning_rate=learning_rate,
            BLOCK=BLOCK,
            MULTIPLE=self._multiple,
            num_warps=_WARPS,
        )


@triton.jit
def _block(
    numbers: tl.tensor,
    owner: tl.tensor,
    bounds: tl.tensor,
    apply: tl.tensor,
    BLOCK: tl.constexpr,
    MULTIPLE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The elements of this program's block, and which of them are its parameter's.

    In a skipped step none are: it reads and writes nothing, so that no value that is not finite
    gets through.
    """
    index = tl.load(numbers + tl.program_id(0)).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    start = tl.multiple_of(tl.load(bounds + 2 * owner), MULTIPLE)
    stop = tl.load(bounds + 2 * owner + 1)
    stop = tl.multiple_of(tl.where(tl.load(apply) != 0, stop, 0), MULTIPLE)
    return index, (index >= start) & (index < stop)


@triton.jit
def _lamb_direction_kernel(
    states: tl.tensor,
    gradient: tl.tensor,
    partial: tl.tensor,
    scale: tl.tensor,
    apply: tl.tensor,
    numbers: tl.tensor,
    owners: tl.tensor,
    bounds: tl.tensor,
    decays: tl.tensor,
    stride: tl.tensor,
    size: tl.tensor,
    weight1: tl.tensor,
    weight2: tl.tensor,
    factors: tl.tensor,
    epsilon: tl.tensor,
    weight_decay: tl.tensor,
    BLOCK: tl.constexpr,
    MULTIPLE: tl.constexpr,
) -> None:
    """One block; rows of ``states`` are ``stride`` apart: master, first and second moment."""
    program = tl.program_id(0)
    owner = tl.load(owners + program)
    index, inside = _block(numbers, owner, bounds, apply, BLOCK, MULTIPLE)
    masters = states + index
    means = masters + stride
    squares = means + stride
    grad = tl.load(gradient + index, mask=inside, other=0.0) * tl.load(scale)
    master = tl.load(masters, mask=inside, other=0.0)
    mean = tl.load(means, mask=inside, other=0.0)
    square = tl.load(squares, mask=inside, other=0.0)
    mean += (grad - mean) * weight1
    square += (grad * grad - square) * weight2
    # Correctly rounded: the / and sqrt of Triton are approximations of float32 on a GPU.
    root = tl.sqrt_rn(square * tl.load(factors + 1))
    change = tl.div_rn(mean * tl.load(factors), root + epsilon)
    change += weight_decay * tl.load(decays + owner) * master
    tl.store(means, mean, mask=inside)
    tl.store(squares, square, mask=inside)
    tl.store(gradient + index, change, mask=inside)
    tl.store(partial + program, tl.sum(master * master))
    tl.store(partial + size + program, tl.sum(change * change))


@triton.jit
def _lamb_sum_kernel(
    partial: tl.tensor,
    ends: tl.tensor,
    sums: tl.tensor,
    size: tl.tensor,
    stride: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    """Row ``program_id(1)`` of ``sums`` for one segment, whose blocks are neighbours."""
    owner, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first = tl.where(owner > 0, tl.load(ends + tl.maximum(owner - 1, 0)), 0)
    end = tl.load(ends + owner)
    total = tl.zeros([TILE], dtype=tl.float64)
    for begin in range(first, end, TILE):
        at = begin + tl.arange(0, TILE)
        found = tl.load(partial + row * size + at, mask=at < end, other=0.0)
        total += found.to(tl.float64)
    tl.store(sums + row * stride + owner, tl.sum(total))


@triton.jit
def _lamb_apply_kernel(
    states: tl.tensor,
    direction: tl.tensor,
    parameters: tl.tensor,
    ratios: tl.tensor,
    apply: tl.tensor,
    numbers: tl.tensor,
    owners: tl.tensor,
    bounds: tl.tensor,
    learning_rate: tl.tensor,
    BLOCK: tl.constexpr,
    MULTIPLE: tl.constexpr,
) -> None:
    """One block of masters and of the parameters that are rounded from them."""
    owner = tl.load(owners + tl.program_id(0))
    index, inside = _block(numbers, owner, bounds, apply, BLOCK, MULTIPLE)
    change = tl.load(direction + index, mask=inside, other=0.0)
    master = tl.load(states + index, mask=inside, other=0.0)
    master -= learning_rate * tl.load(ratios + owner) * change
    tl.store(states + index, master, mask=inside)
    tl.store(parameters + index, master.to(parameters.dtype.element_ty), mask=inside)
