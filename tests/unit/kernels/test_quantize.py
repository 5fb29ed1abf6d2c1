"""FP8 operands in plain torch: scales, rounding, non-finite and zero tensors, transposed copies."""

from __future__ import annotations

import pytest
import torch

from megascale_kernels.quantize import (
    E4M3,
    E5M2,
    LARGEST,
    Operand,
    amax_of,
    cast,
    dequantize,
    quantize,
    scale_of,
    transpose,
)

HALF_STEP = {E4M3: 2.0**-4, E5M2: 2.0**-3}  # of a value, at most


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("per", ["tensor", "row"])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_values_come_back_within_half_a_step(
    dtype: torch.dtype, per: str, power_of_two: bool
) -> None:
    x = 3.0 * _random(16, 64)
    operand = quantize(x, dtype, per=per, power_of_two=power_of_two)  # type: ignore[arg-type]
    found = dequantize(operand.over_columns())
    smallest = operand.scale.max() * 2.0**-9
    assert ((found - x).abs() <= HALF_STEP[dtype] * x.abs() + smallest).all()
    largest = operand.data.float().abs().max()
    assert LARGEST[dtype] / 2 <= largest <= LARGEST[dtype], "the range is used"
    if power_of_two:
        assert (operand.scale.log2() % 1 == 0).all()


def test_the_largest_value_is_the_largest_number() -> None:
    x = _random(4, 8)
    operand = quantize(x)
    assert operand.data.float().abs().max() == LARGEST[E4M3]
    assert amax_of(x, "row").shape == (4,)
    assert quantize(x, per="row").data.float().abs().amax(-1).tolist() == [LARGEST[E4M3]] * 4


def test_values_beyond_a_given_amax_are_limited() -> None:
    found = quantize(torch.tensor([[1.0, -8.0, 0.5]]), amax=torch.tensor([2.0]))
    torch.testing.assert_close(
        dequantize(found.over_columns()), torch.tensor([[1.0, -2.0, 0.5]]), rtol=0.07, atol=0
    )


@pytest.mark.parametrize("broken", [float("inf"), float("nan")])
def test_what_is_not_finite_breaks_the_scale(broken: float) -> None:
    x = _random(4, 8)
    assert bool(quantize(x).finite())
    x[2, 3] = broken
    assert not bool(quantize(x).finite())
    by_row = quantize(x, per="row")
    assert by_row.scale.isnan().tolist() == [False, False, True, False]
    assert not bool(by_row.finite())


def test_zeros_stay_zeros() -> None:
    operand = quantize(torch.zeros(4, 8))
    assert bool(operand.finite())
    assert not dequantize(operand.over_columns()).any()


def test_a_power_of_two_is_kept_and_anything_above_it_goes_to_the_next() -> None:
    amax = LARGEST[E4M3] * torch.tensor([1.0, 1.01, 2.0, 2.0**-8])
    assert scale_of(amax, E4M3, power_of_two=True).tolist() == [1.0, 2.0, 2.0, 2.0**-8]


def test_the_transposed_copy_of_rows_has_one_scale_and_the_same_values() -> None:
    x = _random(6, 32) * torch.tensor([1.0, 0.5, 2.0, 4.0, 8.0, 0.25]).view(-1, 1)
    operand = quantize(x, per="row", power_of_two=True, transposed=True)
    straight, over_rows = dequantize(operand.over_columns()), dequantize(operand.over_rows())
    assert operand.over_rows().data.is_contiguous()
    assert operand.over_rows().scale.tolist() == [float(operand.scale.max())]  # type: ignore[union-attr]
    near = straight.abs() > 2.0**-6 * operand.scale.max()
    assert torch.equal(over_rows.t()[near], straight[near]), "a power of two moves no mantissa"
    assert (over_rows.t() - straight).abs().max() <= 2.0**-10 * operand.scale.max()


def test_a_sum_over_rows_needs_the_copy() -> None:
    operand = quantize(_random(4, 8))
    with pytest.raises(ValueError, match="transposed copy"):
        operand.over_rows()
    assert torch.equal(transpose(operand).over_rows().data.float(), operand.data.float().t())


def test_nan_stays_nan_in_a_cast() -> None:
    found = cast(torch.tensor([[float("nan"), 1.0, float("-inf")]]), torch.ones(1), E4M3).float()
    assert found[0, 0].isnan() and found[0, 1:].tolist() == [1.0, -448.0]
    assert isinstance(quantize(_random(2, 2)), Operand)
