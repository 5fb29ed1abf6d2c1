"""Weights in FP8 are cast again after an update, into the memory that they had."""

from __future__ import annotations

import pytest
import torch

from megascale_job.sizes.parameter_table import OPERAND_ALIGNMENT
from megascale_kernels.casts import casts
from megascale_kernels.cublas_lt import ALIGNMENT_BYTES
from megascale_kernels.quantize import E4M3, Operand, norm_bound, quantize, scale_of
from megascale_trainer.parallel.tensor.fp8 import Fp8Weights
from megascale_trainer.weights import Weight


def _weight(*shape: int) -> Weight:
    value = torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))
    return Weight(value, torch.zeros(shape))


def _holds(operand: Operand, weight: Weight) -> bool:
    wanted = quantize(weight.value, E4M3, transposed=True)
    pairs = zip(
        (operand.data, operand.transposed, operand.scale, operand.transposed_scale),
        (wanted.data, wanted.transposed, wanted.scale, wanted.transposed_scale),
        strict=True,
    )
    return all(
        found is not None and made is not None and torch.equal(found.float(), made.float())
        for found, made in pairs
    )


def test_what_was_cast_is_renewed_in_place_once_the_parameters_have_changed() -> None:
    weights, matrix, other = Fp8Weights(casts("torch")), _weight(32, 16), _weight(16, 32)
    norm, bias = _weight(16), _weight(16)
    operand, scale = weights.operand(matrix), weights.norm_scale(norm, bias)
    before = scale.clone()
    for weight in (matrix, norm, bias):
        weight.value.mul_(3.0)
    weights.renew([matrix, norm])
    assert not _holds(operand, matrix), "nothing has said yet that they changed"
    weights.forget()
    weights.renew([other, matrix, norm, bias])
    assert _holds(operand, matrix)
    assert not torch.equal(scale, before)
    assert torch.equal(scale, scale_of(norm_bound(norm.value, bias.value), E4M3))
    assert weights.operand(matrix) is operand and weights.norm_scale(norm, bias) is scale


@pytest.mark.parametrize("start", [0, 64, 256, 448])
def test_a_weight_that_has_arrived_in_fp8_is_the_operand_where_it_is_aligned(start: int) -> None:
    """Elsewhere a copy is, which is renewed in place: GEMMs have fewer algorithms for it."""
    assert OPERAND_ALIGNMENT == ALIGNMENT_BYTES
    arrived = torch.zeros(1024, dtype=torch.uint8)
    place = arrived[start : start + 512].view(E4M3).view(32, 16)
    weights, scale = Fp8Weights(casts("torch")), torch.zeros(1)
    gathered = Weight(place, torch.zeros(32, 16), scale)
    matrix = _weight(32, 16)
    for factor in (1.0, 3.0):
        matrix.value.mul_(factor)
        made = quantize(matrix.value, E4M3)
        place.copy_(made.data)
        scale.copy_(made.scale)
        weights.forget()
        operand = weights.operand(gathered)
        assert _holds(operand, matrix)
        if factor == 1.0:
            first = operand
    assert operand is first
    assert (operand.data.data_ptr() == place.data_ptr()) == (start % 256 == 0)


def test_an_operator_renews_what_it_reads() -> None:
    weights, matrix, norm = Fp8Weights(casts("torch")), _weight(32, 16), _weight(16)
    operand, scale = weights.operand(matrix), weights.norm_scale(norm, None)
    for weight in (matrix, norm):
        weight.value.mul_(2.0)
    weights.forget()
    assert weights.operand(matrix) is operand and _holds(operand, matrix)
    assert weights.norm_scale(norm, None) is scale
    assert torch.equal(scale, scale_of(norm_bound(norm.value, None), E4M3))
