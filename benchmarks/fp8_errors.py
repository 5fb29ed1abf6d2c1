"""Errors of GEMMs in FP8 against float64, by recipe; and one linear layer under autograd."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from benchmarks.fp8_recipes import random

from megascale_kernels import quantize as plain
from megascale_kernels.fused import quantize as casts
from megascale_kernels.gemm import Gemm, multiply_by_torch
from megascale_kernels.quantize import E4M3, E5M2, Factor, Operand

OUTLIERS, OUTLIER_SCALE = 8, 50.0
TOKEN_SPREAD = 2.5
KINDS = ("normal", "outliers", "tokens", "one sign")


@dataclass(frozen=True)
class Linear:
    """One linear layer's data: x [tokens, in], w [out, in], dy [tokens, out]."""

    x: torch.Tensor
    w: torch.Tensor
    dy: torch.Tensor


@dataclass(frozen=True)
class Numbers:
    """How operands are quantised, and how GEMMs sum."""

    per: plain.Per = "tensor"
    gradients: torch.dtype = E4M3
    fast: bool = True
    power_of_two: bool = False


NUMBERS: Mapping[str, Numbers | None] = {
    "bf16": None,
    "tensor, e4m3": Numbers(),
    "tensor, e4m3, accurate sums": Numbers(fast=False),
    "tensor, e4m3, powers of two": Numbers(power_of_two=True),
    "tensor, e5m2 gradients": Numbers(gradients=E5M2),
    "rows, e4m3": Numbers(per="row", power_of_two=True),
    "rows, e4m3, accurate sums": Numbers(per="row", power_of_two=True, fast=False),
}


def data(kind: str, tokens: int, into: int, out: int, device: torch.device) -> Linear:
    """Random operands.

    "outliers": a few channels of x, and a few tokens and channels of dy, are 50 times as large.
    "tokens": gradients of tokens are scaled by exp of normal numbers of deviation TOKEN_SPREAD:
    most of them are far below the largest.
    "one sign": x and dy are positive, so that the sums of dw over tokens grow with their number.
    """
    x, w, dy = (
        random(device, tokens, into),
        random(device, out, into, scale=0.02),
        random(device, tokens, out, scale=1e-4),
    )
    if kind == "outliers":
        x[:, :: into // OUTLIERS] *= OUTLIER_SCALE
        dy[:: tokens // OUTLIERS] *= OUTLIER_SCALE
        dy[:, :: out // OUTLIERS] *= OUTLIER_SCALE
    if kind == "tokens":
        dy *= torch.randn(tokens, 1, device=device).mul_(TOKEN_SPREAD).exp_().bfloat16()
    if kind == "one sign":
        x, dy = x.abs(), dy.abs()
    return Linear(x, w, dy)


def errors(linear: Linear, gemm: Gemm) -> Iterator[dict[str, Any]]:
    """Relative Frobenius errors of y, dx and dw by recipe.

    Of dx also token by token: the median, and what the worst tenth exceeds.
    """
    x, w, dy = (tensor.double() for tensor in (linear.x, linear.w, linear.dy))
    exact = {"y": x @ w.t(), "dx": dy @ w, "dw": dy.t() @ x}
    del x, w, dy
    for name, numbers in NUMBERS.items():
        found = _bf16(linear) if numbers is None else _fp8(linear, numbers, gemm)
        by_token = (found["dx"].double() - exact["dx"]).norm(dim=1) / exact["dx"].norm(dim=1)
        median, worst = by_token.quantile(by_token.new_tensor([0.5, 0.9])).tolist()
        frobenius = {key: _error(found[key], exact[key]) for key in exact}
        yield {
            "recipe": name,
            **frobenius,
            "dx by token": median,
            "dx by token, worst tenth": worst,
        }


def _error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def _results(linear: Linear) -> dict[str, torch.Tensor]:
    """Where GEMMs write, poisoned; the weight's gradient, which they add to, is zero."""
    found = {
        "y": linear.dy.new_empty(linear.dy.shape),
        "dx": linear.x.new_empty(linear.x.shape),
        "dw": torch.zeros(linear.w.shape, device=linear.w.device),
    }
    for name in ("y", "dx"):
        found[name].fill_(float("nan"))
    return found


def _bf16(linear: Linear) -> dict[str, torch.Tensor]:
    found = _results(linear)
    multiply_by_torch(Factor(linear.x), Factor(linear.w), found["y"])
    multiply_by_torch(Factor(linear.dy), Factor(linear.w.t()), found["dx"])
    multiply_by_torch(Factor(linear.dy.t()), Factor(linear.x.t()), found["dw"], accumulate=True)
    return found


def _fp8(linear: Linear, numbers: Numbers, gemm: Gemm) -> dict[str, torch.Tensor]:
    found = _results(linear)
    x, dy = (
        _operand(one, dtype, numbers)
        for one, dtype in ((linear.x, E4M3), (linear.dy, numbers.gradients))
    )
    w = _operand(linear.w, E4M3, Numbers(power_of_two=numbers.power_of_two))
    multiply, fast = gemm.multiply, numbers.fast
    multiply(x.over_columns(), w.over_columns(), found["y"], fast=fast)
    multiply(dy.over_columns(), w.over_rows(), found["dx"], fast=fast)
    multiply(dy.over_rows(), x.over_rows(), found["dw"], accumulate=True, fast=fast)
    return found


def _operand(x: torch.Tensor, dtype: torch.dtype, numbers: Numbers) -> Operand:
    if numbers.per == "row":
        return casts.quantize_rows(x, dtype, power_of_two=numbers.power_of_two, transposed=True)
    return casts.quantize(x, dtype, amax=casts.amax(x), power_of_two=numbers.power_of_two)


class Fp8Linear(torch.autograd.Function):
    """A linear layer in FP8 with current scaling of tensors: a prototype, to measure its time."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        anchor: torch.Tensor,
        weight: Operand,
        main_grad: torch.Tensor,
        gemm: Gemm,
    ) -> torch.Tensor:
        operand = casts.quantize(x, amax=casts.amax(x))
        y = x.new_empty(x.shape[0], weight.data.shape[0])
        gemm.multiply(operand.over_columns(), weight.over_columns(), y)
        ctx.operand, ctx.weight, ctx.main_grad, ctx.gemm = operand, weight, main_grad, gemm
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        operand, weight, gemm = ctx.operand, ctx.weight, ctx.gemm
        gradient = casts.quantize(dy, amax=casts.amax(dy))
        dx = dy.new_empty(operand.data.shape)
        gemm.multiply(gradient.over_columns(), weight.over_rows(), dx)
        gemm.multiply(gradient.over_rows(), operand.over_rows(), ctx.main_grad, accumulate=True)
        return dx, None, None, None, None


class Bf16Linear(torch.autograd.Function):
    """The same in bf16, as torch computes it."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, main_grad: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.main_grad = main_grad
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        multiply_by_torch(Factor(dy.t()), Factor(x.t()), ctx.main_grad, accumulate=True)
        return dy @ weight, None, None
