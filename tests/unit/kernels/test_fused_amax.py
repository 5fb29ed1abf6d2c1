"""The largest magnitudes that kernels note: those of a separate pass, and of nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.harness.kernels import DEVICE, blank, weight

from megascale_kernels.activation import Activation
from megascale_kernels.attention import attention_mask
from megascale_kernels.block_inner import AttentionContext
from megascale_kernels.quantize import amax_of, norm_bound, scale_of
from megascale_kernels.rotary import Heads, rotary_frequencies, rotary_table

pytest.importorskip("triton")

SEQUENCE, BATCH, FFN = 37, 2, 40
HEADS = Heads(4, 2, 8)


def _compile_parts() -> None:
    from megascale_kernels.fused.partial_sums import sum_of_parts

    sum_of_parts(blank(4, 2048, 4096))


COMPILED = {"partial sums of 4 ranks": _compile_parts}


def _random(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE).bfloat16()


def _noted(x: torch.Tensor) -> torch.Tensor:
    from megascale_kernels.fused.amax import noted_amax

    found = noted_amax(x)
    assert found is not None
    return found


class _Seen(torch.autograd.Function):
    """The identity, which keeps the gradient that reaches it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kept: list[torch.Tensor]) -> torch.Tensor:
        ctx.kept = kept
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.kept.append(gradient)
        return gradient, None


def _seen(x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    kept: list[torch.Tensor] = []
    passed: torch.Tensor = _Seen.apply(x.requires_grad_(), kept)  # type: ignore[no-untyped-call]
    return passed, kept


@pytest.mark.parametrize(
    ("activation", "bias"),
    [
        pytest.param(None, False, marks=pytest.mark.slow),
        ("gelu", True),
        ("swiglu", False),
        pytest.param(None, True, marks=pytest.mark.slow),
        pytest.param("gelu", False, marks=pytest.mark.slow),
        pytest.param("swiglu", True, marks=pytest.mark.slow),
    ],
)
def test_of_a_block_and_its_gradient(activation: Activation | None, bias: bool) -> None:
    from megascale_kernels.fused.block_inner import block_inner

    wide = {None: 0, "gelu": FFN, "swiglu": 2 * FFN}[activation]
    inputs, kept = _seen(_random(SEQUENCE, BATCH, HEADS.width + wide))
    shift = weight(_random(HEADS.width + wide, seed=4)) if bias else None
    position = torch.arange(SEQUENCE, device=DEVICE).expand(BATCH, -1)
    table = rotary_table(position, rotary_frequencies(HEADS.size, 10_000.0, DEVICE))
    context = AttentionContext(HEADS, table, attention_mask(SEQUENCE))
    y = block_inner(inputs, shift, context, activation, find_amax=True)
    assert torch.equal(_noted(y), amax_of(y))
    torch.autograd.backward(y, _random(*y.shape, seed=5))
    assert torch.equal(_noted(kept[0]), amax_of(kept[0]))


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_of_an_activation_and_its_gradient(activation: Activation) -> None:
    from megascale_kernels.fused.activation import activate

    x, kept = _seen(_random(SEQUENCE, BATCH, FFN * (2 if activation == "swiglu" else 1)))
    y = activate(x, None, activation, find_amax=True)
    assert torch.equal(_noted(y), amax_of(y))
    torch.autograd.backward(y, _random(*y.shape, seed=5))
    assert torch.equal(_noted(kept[0]), amax_of(kept[0]))


@pytest.mark.parametrize("residual", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_of_the_gradient_of_a_norm_in_fp8(residual: bool) -> None:
    from megascale_kernels.fused.norm_operand import NormInFp8

    x, kept = _seen(_random(SEQUENCE, BATCH, 72))
    gain, shift = weight(1 + _random(72, seed=6) / 10), weight(_random(72, seed=7))
    scale = scale_of(norm_bound(gain.value, shift.value), torch.float8_e4m3fn)
    other = _random(SEQUENCE, BATCH, 72, seed=8) if residual else None
    norm_in_fp8 = NormInFp8(scale, lambda like, dtype: torch.empty_like(like, dtype=dtype))
    stream, normed = norm_in_fp8(x, other, gain, shift, "layernorm", 1e-5)
    gradients = [_random(*x.shape, seed=9), _random(*x.shape, seed=10)]
    torch.autograd.backward([stream, normed.stand_in], gradients)
    assert torch.equal(_noted(kept[0]), amax_of(kept[0]))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_spreads(value: float) -> None:
    from megascale_kernels.fused.activation import activate

    x = _random(SEQUENCE, BATCH, FFN)
    x[3, 1, 5] = value
    found = _noted(activate(x, None, "gelu", find_amax=True))
    assert not found.isfinite().all()


def test_a_note_ends_with_the_next_write() -> None:
    from megascale_kernels.fused.activation import activate
    from megascale_kernels.fused.amax import noted_amax
    from megascale_kernels.fused.quantize import amax

    y = activate(_random(SEQUENCE, BATCH, FFN), None, "gelu", find_amax=True)
    y.mul_(2.0)
    assert noted_amax(y) is None
    assert torch.equal(amax(y), amax_of(y)), "found by a pass of its own"
