"""Weights in FP8, and the scales of norms: made once per update and shared by its micro-batches.

The master values stay in float32 and the parameters in bf16; nothing here is part of a checkpoint.
A weight is cast when it is first used after an update, so after its parameters have arrived.
"""

from __future__ import annotations

import torch

from megascale_kernels.casts import Casts
from megascale_kernels.parameter import Parameter
from megascale_kernels.quantize import E4M3, Operand, norm_bound, scale_of


class Fp8Weights:
    """This rank's weights as operands in e4m3, each under a scale of its own."""

    def __init__(self, casts: Casts) -> None:
        self._casts = casts
        # By the address of the weight, which has a place of its own in the stage's buffers.
        self._operands: dict[int, Operand] = {}
        self._norm_scales: dict[int, torch.Tensor] = {}

    def forget(self) -> None:
        """The parameters have changed."""
        self._operands.clear()
        self._norm_scales.clear()

    def operand(self, weight: Parameter) -> Operand:
        """``weight`` [rows, columns] with its transposed copy: GEMMs sum over either dimension."""
        key = weight.value.data_ptr()
        found = self._operands.get(key)
        if found is None:
            value = weight.value.detach()
            amax = self._casts.amax(value)
            found = self._casts.tensor(value, E4M3, amax=amax, transposed=True)
            self._operands[key] = found
        return found

    def norm_scale(self, weight: Parameter, bias: Parameter | None) -> torch.Tensor:
        """The scale that bounds a norm's result, float32 [1]; the same on all tp ranks."""
        key = weight.value.data_ptr()
        found = self._norm_scales.get(key)
        if found is None:
            bound = norm_bound(weight.value, None if bias is None else bias.value)
            found = self._norm_scales[key] = scale_of(bound, E4M3)
        return found
