"""The AdamW update of a run of parameters in one pass over memory.

Per parameter of a bf16 model 16 bytes are read (master, moments, gradient) and 14 written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megascale_kernels.adamw import AdamWUpdate

_BLOCK = 1024  # 8 elements per thread of 4 warps: two 16-byte loads of each float32 operand
_WARPS = 4


def adamw(
    states: torch.Tensor,
    gradient: torch.Tensor,
    parameters: torch.Tensor,
    scale: torch.Tensor,
    apply: torch.Tensor,
    update: AdamWUpdate,
) -> None:
    """Fused :func:`megascale_kernels.adamw.adamw`; ``gradient`` is not overwritten.

    Each element is computed on its own, in float32. An update differs from the same formula in
    float64 by a few float32 roundings of the parameter and of its change.
    """
    size = gradient.numel()
    # Numbers that change from step to step are floats: for an integer that becomes 1 or a multiple
    # of 16 Triton would compile the kernel again.
    _adamw_kernel[(triton.cdiv(size, _BLOCK),)](
        states=states,
        gradient=gradient,
        parameters=parameters,
        scale=scale,
        apply=apply,
        stride=states.stride(0),
        size=size,
        learning_rate=update.learning_rate,
        weight1=1.0 - update.beta1,
        weight2=1.0 - update.beta2,
        factors=update.bias.factors,
        epsilon=update.epsilon,
        weight_decay=update.weight_decay,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )


@triton.jit
def _adamw_kernel(
    states: tl.tensor,
    gradient: tl.tensor,
    parameters: tl.tensor,
    scale: tl.tensor,
    apply: tl.tensor,
    stride: tl.tensor,
    size: tl.tensor,
    learning_rate: tl.tensor,
    weight1: tl.tensor,
    weight2: tl.tensor,
    factors: tl.tensor,
    epsilon: tl.tensor,
    weight_decay: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """One block; rows of ``states`` are ``stride`` apart: master, first and second moment."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    # A skipped step has no elements: it reads and writes nothing, so that no value that is not
    # finite gets through and no bit changes.
    inside = index < tl.where(tl.load(apply) != 0, size, 0)
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
    master -= learning_rate * (change + weight_decay * master)
    tl.store(means, mean, mask=inside)
    tl.store(squares, square, mask=inside)
    tl.store(masters, master, mask=inside)
    tl.store(parameters + index, master.to(parameters.dtype.element_ty), mask=inside)
