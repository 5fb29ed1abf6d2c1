"""The fused casts against the plain ones, bit for bit.

In the interpreter torch converts to FP8 (tests/harness/fp8.py).
"""

from __future__ import annotations

import pytest
import torch
from tests.harness.fp8 import right_fp8_conversion  # noqa: F401
from tests.harness.kernels import DEVICE, blank

from megascale_kernels import quantize as plain
from megascale_kernels.quantize import E4M3, E5M2, Operand

pytest.importorskip("triton")

pytestmark = pytest.mark.usefixtures("right_fp8_conversion")


def _compile(width: int) -> None:
    from megascale_kernels.fused import quantize as fused

    x, one = blank(8192, width), torch.ones(1)
    fused.amax(x)
    fused.transpose(fused.quantize(x, amax=one))
    fused.quantize(x, E5M2, amax=one, power_of_two=True, straight=False)
    fused.quantize_rows(x, transposed=True)


COMPILED = {"casts 4096": lambda: _compile(4096)}
COMPILED_AT_LENGTH = {"casts 12288": lambda: _compile(12288)}


def _random(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    x[rows // 2] *= 30
    return x.to(dtype)


def _is_same(found: Operand, wanted: Operand) -> None:
    assert torch.equal(found.scale, wanted.scale)
    assert torch.equal(found.data.view(torch.uint8), wanted.data.view(torch.uint8))
    if wanted.transposed is not None:
        assert found.transposed is not None and found.transposed_scale is not None
        assert torch.equal(found.transposed_scale, wanted.transposed_scale)  # type: ignore[arg-type]
        assert torch.equal(found.transposed.view(torch.uint8), wanted.transposed.view(torch.uint8))


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("shape", [(130, 200), (64, 128), (3, 7)])
def test_one_scale(shape: tuple[int, int], dtype: torch.dtype, power_of_two: bool) -> None:
    from megascale_kernels.fused import quantize as fused

    x = _random(*shape)
    found = fused.quantize(x, dtype, amax=fused.amax(x), power_of_two=power_of_two)
    _is_same(found, plain.quantize(x, dtype, power_of_two=power_of_two, transposed=True))
    alone = fused.quantize(x, dtype, amax=fused.amax(x), power_of_two=power_of_two, straight=False)
    assert alone.data.numel() == 0
    assert torch.equal(
        alone.over_rows().data.view(torch.uint8), found.over_rows().data.view(torch.uint8)
    )


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_a_scale_for_each_row(dtype: torch.dtype) -> None:
    from megascale_kernels.fused import quantize as fused

    x = _random(70, 100)
    wanted = plain.quantize(x, dtype, per="row", power_of_two=True, transposed=True)
    _is_same(fused.quantize_rows(x, dtype, transposed=True), wanted)
    wanted = plain.quantize(x, dtype, per="row")
    _is_same(fused.quantize_rows(x, dtype, power_of_two=False), wanted)


def test_rows_of_a_wider_matrix() -> None:
    from megascale_kernels.fused import quantize as fused

    x = _random(40, 96)[:, 32:]
    _is_same(fused.quantize(x, amax=plain.amax_of(x)), plain.quantize(x, transposed=True))
    _is_same(fused.quantize_rows(x, power_of_two=False), plain.quantize(x, per="row"))


def test_a_copy_of_what_is_fp8_already() -> None:
    from megascale_kernels.fused import quantize as fused

    operand = plain.quantize(_random(65, 33))
    _is_same(fused.transpose(operand), plain.transpose(operand))


@pytest.mark.parametrize("count", [1, 5000, 33_000])
def test_the_largest_magnitude(count: int) -> None:
    from megascale_kernels.fused import quantize as fused

    x = -torch.rand(count, generator=torch.Generator().manual_seed(count)).to(DEVICE)
    assert torch.equal(fused.amax(x), plain.amax_of(x))
    for broken in (float("inf"), float("nan")):
        x[count // 2] = broken
        assert not bool(fused.amax(x).isfinite())
    assert bool(fused.amax(x).isnan())


def test_a_broken_tensor_has_a_broken_scale() -> None:
    from megascale_kernels.fused import quantize as fused

    x = _random(8, 16)
    x[3, 4] = float("nan")
    assert not bool(fused.quantize(x, amax=fused.amax(x)).finite())
    assert fused.quantize_rows(x).scale.isnan().tolist() == [row == 3 for row in range(8)]
    zeros = torch.zeros(8, 16, device=DEVICE)
    assert bool(fused.quantize(zeros, amax=fused.amax(zeros)).finite())
