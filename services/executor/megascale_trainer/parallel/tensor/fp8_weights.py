"""Weights in FP8, and the scales of norms: made once per update and shared by its micro-batches.

The master values stay in float32 and the parameters in bf16; nothing here is part of a checkpoint.
A weight is cast when it is first used after an update, so after its parameters have arrived; one
that has arrived in FP8 needs its transposed copy alone, unless its place among the arrived bytes is
not aligned for GEMMs.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from megascale_job.sizes.parameter_table import OPERAND_ALIGNMENT
from megascale_kernels.casts import Casts
from megascale_kernels.parameter import Parameter
from megascale_kernels.quantize import E4M3, Operand, norm_bound, scale_of
from megascale_trainer.weights import Weight


class Fp8Weights:
    """This rank's weights as operands in e4m3, each under a scale of its own.

    An operand keeps its memory: graphs read it there.
    """

    def __init__(self, casts: Casts) -> None:
        self._casts = casts
        # By the address of the weight, which has a place of its own in the stage's buffers.
        self._operands: dict[int, Operand] = {}
        self._norm_scales: dict[int, tuple[torch.Tensor, Parameter | None]] = {}
        self._stale = set[int]()

    def forget(self) -> None:
        """The parameters have changed."""
        self._stale.update(self._operands, self._norm_scales)

    def renew(self, weights: Iterable[Weight]) -> None:
        """Those of ``weights`` that were cast before they changed are cast again, now."""
        for weight in weights if self._stale else ():
            key = weight.value.data_ptr()
            if key in self._operands:
                self.operand(weight)
            elif key in self._norm_scales:
                self.norm_scale(weight, self._norm_scales[key][1])

    def operand(self, weight: Weight) -> Operand:
        """``weight`` [rows, columns] with its transposed copy: GEMMs sum over either dimension."""
        key = weight.value.data_ptr()
        found = self._operands.get(key)
        if found is None or key in self._stale:
            cast = self._cast(weight, None if found is None else found.data)
            if found is None:
                found = self._operands[key] = cast
            else:
                assert found.transposed is not None and cast.transposed is not None
                found.transposed.copy_(cast.transposed)
                found.scale.copy_(cast.scale)
            self._stale.discard(key)
        return found

    def _cast(self, weight: Weight, out: torch.Tensor | None) -> Operand:
        value = weight.value.detach()
        if weight.scale is not None:
            if value.storage_offset() % OPERAND_ALIGNMENT:
                value = value.clone() if out is None else out.copy_(value)
            return self._casts.transpose(Operand(value, weight.scale))
        amax = self._casts.amax(value)
        return self._casts.tensor(value, E4M3, amax=amax, transposed=True, out=out)

    def norm_scale(self, weight: Parameter, bias: Parameter | None) -> torch.Tensor:
        """The scale that bounds a norm's result, float32 [1]; the same on all tp ranks."""
        key = weight.value.data_ptr()
        found = self._norm_scales.get(key)
        if found is not None and key not in self._stale:
            return found[0]
        bound = norm_bound(weight.value, None if bias is None else bias.value)
        scale = scale_of(bound, E4M3)
        if found is None:
            self._norm_scales[key] = scale, bias
        else:
            scale = found[0].copy_(scale)
        self._stale.discard(key)
        return scale
