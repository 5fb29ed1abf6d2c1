"""A norm whose result leaves the kernel in FP8, against plain operator and cast."""

from __future__ import annotations

import math

import pytest
import torch
from tests.harness.fp8 import right_fp8_conversion  # noqa: F401
from tests.harness.kernels import COMPILED_ROWS, DEVICE, blank, relative_error

from megascale_kernels.norm import Kind, layer_norm, rms_norm
from megascale_kernels.quantize import E4M3, dequantize, scale_of

pytest.importorskip("triton")

pytestmark = pytest.mark.usefixtures("right_fp8_conversion")

EPSILON = 1e-5
# Relative, root mean square, of normal numbers: e4m3 has 0.026, bf16 0.0017 (truncated, as in the
# interpreter, 0.004).
FP8_ERROR, BF16_ERROR = 0.035, 6e-3


def _compile(width: int) -> None:
    from megascale_kernels.fused.norm_operand import norm_operand

    x, vector = blank(math.prod(COMPILED_ROWS), width), blank(width)
    out = torch.empty_like(x, dtype=E4M3)
    norm_operand(x, x, vector, vector, vector, "layernorm", EPSILON, torch.ones(1), out)


COMPILED = {
    "operands 7b": lambda: _compile(4096),
    "operands grouped swiglu": lambda: _compile(5120),
}
COMPILED_AT_LENGTH = {"operands 175b tp4": lambda: _compile(12288)}


def _random(*shape: int, seed: int = 5) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE).bfloat16()


@pytest.mark.parametrize("residual", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("kind", "bias"), [("layernorm", True), ("rmsnorm", False)])
def test_norm(kind: Kind, bias: bool, residual: bool) -> None:
    from megascale_kernels.fused.norm_operand import norm_operand
    from megascale_kernels.quantize import norm_bound

    rows, width = 9, 200
    x, weight = _random(rows, width), 1 + _random(width, seed=6) / 10
    shift = _random(width, seed=7) if bias else None
    other = _random(rows, width, seed=8) if residual else None
    scale = scale_of(norm_bound(weight, shift), E4M3)
    out = torch.empty_like(x, dtype=E4M3)
    found = norm_operand(x, other, None, weight, shift, kind, EPSILON, scale, out)
    assert (
        relative_error(found.stream, x.double() if other is None else x.double() + other.double())
        < BF16_ERROR
    )
    wide = found.stream.double()
    if kind == "layernorm":
        exact = layer_norm(
            wide, weight.double(), None if shift is None else shift.double(), EPSILON
        )
    else:
        exact = rms_norm(wide, weight.double(), EPSILON)
    assert relative_error(dequantize(found.operand.over_columns()), exact) < FP8_ERROR
    assert found.operand.scale is scale
    assert found.operand.data.float().abs().max() <= 448


def test_no_norm_exceeds_its_bound() -> None:
    from megascale_kernels.quantize import norm_bound

    x = torch.zeros(2, 64, device=DEVICE)
    x[0, 3] = 1.0  # as far from the mean as possible
    weight, bias = _random(64).float(), _random(64, seed=2).float()
    bound = norm_bound(weight, bias)
    assert layer_norm(x, weight, bias, 0.0)[0].abs().max() <= bound
    assert rms_norm(x[:1], weight, 0.0).abs().max() <= norm_bound(weight, None)
    assert norm_bound(weight.new_tensor([2.0, 2.0]), None).tolist() == pytest.approx([8.0**0.5])
