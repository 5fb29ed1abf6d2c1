"""The AdamW update of a run of parameters in one pass: 16 bytes read and 14 written per parameter
of a bf16 model.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megascale_kernels.adamw import AdamWUpdate

_BLOCK = 1024  # 8 elements per thread of 4 warps: two wide loads of each float32 operand
_WARPS = 4


def adamw(
    states: torch.Tensor,
    gradient: torch.Tensor,
    parameters: torch.Tensor,
    scale: torch.Tensor,
    apply: torch.Tensor,
    update: AdamWUpdate,
) -> None:
    """:func:`megascale_kernels.adamw.adamw`; ``gradient`` stays as it is. Every element is computed
    alone, in float32.

    Against the same formula in float64 an update of a parameter is off by a few float32 roundings
    of the parameter and of the step taken.
    """
    size = gradient.numel()
    correction1, correction2 = update.corrections
    _kernel[(triton.cdiv(size, _BLOCK),)](
        states,
        gradient,
        parameters,
        scale,
        apply,
        states.stride(0),
        size,
        update.learning_rate,
        1.0 - update.beta1,
        1.0 - update.beta2,
        1.0 / correction1,
        1.0 / correction2,
        update.epsilon,
        update.weight_decay,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )


@triton.jit
def _kernel(
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
    factor1: tl.tensor,
    factor2: tl.tensor,
    epsilon: tl.tensor,
    weight_decay: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    # A skipped step has no elements: it reads and writes nothing, and nothing non-finite can get
    # through.
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
    change = tl.div_rn(mean * factor1, tl.sqrt_rn(square * factor2) + epsilon)
    master -= learning_rate * (change + weight_decay * master)
    tl.store(means, mean, mask=inside)
    tl.store(squares, square, mask=inside)
    tl.store(masters, master, mask=inside)
    tl.store(parameters + index, master.to(parameters.dtype.element_ty), mask=inside)
