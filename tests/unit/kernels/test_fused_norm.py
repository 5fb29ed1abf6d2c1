"""The fused norms against the plain ones in float64: values and all gradients."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from tests.harness.kernels import (
    COMPILED_ROWS,
    DEVICE,
    blank,
    gradients_of,
    relative_error,
    weight,
)

from megascale_kernels import norm as plain
from megascale_kernels.norm import Kind
from megascale_trainer.weights import Weight

pytest.importorskip("triton")

EPSILON = 1e-5


def _compile(
    shape: tuple[int, ...],
    kind: Kind,
    dtype: torch.dtype = torch.bfloat16,
    *,
    added: bool,
    in_fp8: bool = False,
) -> None:
    """Forward and backward, with a residual and its bias if ``added``."""
    from megascale_kernels.fused import norm as fused
    from megascale_kernels.fused.norm_operand import NormInFp8

    x, residual = (blank(*shape, dtype=dtype).requires_grad_() for _ in range(2))
    gain, bias, shift = (weight(blank(shape[-1], dtype=dtype)) for _ in range(3))
    arguments = (
        x.clone(),
        residual if added else None,
        gain,
        bias if kind == "layernorm" else None,
        kind,
        EPSILON,
        [shift] if added else (),
    )
    if in_fp8:
        stream, normed = NormInFp8(torch.ones(1), empty_part)(*arguments)
        outputs = stream, normed.stand_in
    else:
        outputs = fused.norm(*arguments)
    torch.autograd.backward(outputs, [torch.zeros_like(out) for out in outputs])


def empty_part(like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Memory for a norm's result in FP8."""
    return torch.empty_like(like, dtype=dtype)


COMPILED = {
    "layernorm 4096": lambda: _compile((*COMPILED_ROWS, 4096), "layernorm", added=True),
    "rmsnorm 5120": lambda: _compile((*COMPILED_ROWS, 5120), "rmsnorm", added=False),
    "layernorm 7168": lambda: _compile((*COMPILED_ROWS, 7168), "layernorm", added=True),
    "layernorm 12288": lambda: _compile((*COMPILED_ROWS, 12288), "layernorm", added=False),
    "layernorm 4096, amax": lambda: _compile(
        (*COMPILED_ROWS, 4096), "layernorm", added=True, in_fp8=True
    ),
    "layernorm 12288, amax": lambda: _compile(
        (*COMPILED_ROWS, 12288), "layernorm", added=False, in_fp8=True
    ),
    "small norm": lambda: _compile((8, 2, 72), "layernorm", torch.float32, added=True),
}


def _computed(
    module: object, kind: Kind, tensors: dict[str, list[torch.Tensor]], dtype: torch.dtype
) -> list[torch.Tensor]:
    def run(inputs: Sequence[torch.Tensor], weights: Sequence[Weight]) -> tuple[torch.Tensor, ...]:
        residual = inputs[1] if len(inputs) > 1 else None
        added = weights[1:3] if residual is not None else ()
        bias = weights[-1] if kind == "layernorm" and len(weights) % 2 == 0 else None
        stream, normed = module.norm(  # type: ignore[attr-defined]
            inputs[0], residual, weights[0], bias, kind, EPSILON, added
        )
        return stream, normed

    return gradients_of(run, tensors["inputs"], tensors["weights"], tensors["gradients"], dtype)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(
    ("kind", "bias"), [("layernorm", True), ("layernorm", False), ("rmsnorm", False)]
)
@pytest.mark.parametrize(
    ("shape", "kept"), [((7, 3, 37), True), ((7, 3, 37), False), ((1, 1, 64), True)]
)
def test_norm(
    shape: tuple[int, ...],
    kept: bool,
    kind: Kind,
    bias: bool,
    residual: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from megascale_kernels.fused import norm as fused

    _few_programs(kept, monkeypatch)
    generator = torch.Generator().manual_seed(2)

    def random(*size: int) -> torch.Tensor:
        return (1 + torch.randn(size, generator=generator)).to(DEVICE)

    tensors = {
        "inputs": [random(*shape) for _ in range(1 + residual)],
        "weights": [random(shape[-1]) for _ in range(1 + 2 * residual + bias)],
        "gradients": [random(*shape), random(*shape)],
    }
    exact = _computed(plain, kind, tensors, torch.float64)
    for dtype, tolerance in ((torch.float32, 3e-6), (torch.bfloat16, 2e-2)):
        rounded = {name: [t.to(dtype) for t in found] for name, found in tensors.items()}
        reference = (
            exact if dtype == torch.float32 else _computed(plain, kind, rounded, torch.float64)
        )
        found = _computed(fused, kind, rounded, dtype)
        for ours, theirs in zip(found, reference, strict=True):
            assert relative_error(ours, theirs) < tolerance


def _few_programs(kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 21 rows three programs of six rows and one of three, which read each once if ``kept``."""
    from megascale_kernels.fused import norm as fused

    monkeypatch.setattr(fused, "_MULTIPROCESSORS", 1 if kept else 4)
    if not kept:
        monkeypatch.setattr(fused, "_KEPT_WIDTH", 32)


@pytest.mark.parametrize("kept", [True, False])
def test_gradients_repeat_bit_for_bit(kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from megascale_kernels.fused import norm as fused

    _few_programs(kept, monkeypatch)
    generator = torch.Generator().manual_seed(3)
    tensors = {
        name: [torch.randn(size, generator=generator).to(DEVICE) for _ in range(number)]
        for name, number, size in (
            ("inputs", 2, (21, 37)),
            ("weights", 4, (37,)),
            ("gradients", 2, (21, 37)),
        )
    }
    runs = [_computed(fused, "layernorm", tensors, torch.bfloat16) for _ in range(2)]
    assert all(torch.equal(once, again) for once, again in zip(*runs, strict=True))


@pytest.mark.parametrize("targets", [1, 2, 3])
def test_partial_sums_of_several_gradients_are_added_at_once(targets: int) -> None:
    from megascale_kernels.fused.partial_sums import add_stacked_sums

    generator = torch.Generator().manual_seed(5)
    # Several tiles of parts and of columns, the last ones not full.
    partial = torch.randn(targets, 150, 70, generator=generator).to(DEVICE)
    before = torch.randn(targets, 70, generator=generator).to(DEVICE)
    found = before.clone()
    add_stacked_sums(list(found), partial)
    assert relative_error(found, before.double() + partial.double().sum(1)) < 1e-6


def test_the_stream_need_not_be_used() -> None:
    from megascale_kernels.fused import norm as fused

    x = torch.randn(5, 2, 8, device=DEVICE)
    ones = torch.ones(8, device=DEVICE)

    def run(inputs: Sequence[torch.Tensor], weights: Sequence[Weight]) -> torch.Tensor:
        return fused.norm(inputs[0], None, weights[0], None, "rmsnorm", EPSILON)[1]

    def plainly(inputs: Sequence[torch.Tensor], weights: Sequence[Weight]) -> torch.Tensor:
        return plain.norm(inputs[0], None, weights[0], None, "rmsnorm", EPSILON)[1]

    found, wanted = (
        gradients_of(one, [x], [ones], [x + 1], torch.float32) for one in (run, plainly)
    )
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("fused", [False, True])
def test_biases_without_a_residual_are_refused(fused: bool) -> None:
    """They would be missing in the sum, and the fused backward would still give them a gradient."""
    from megascale_kernels.fused import norm as module

    x, one = torch.ones(2, 16, device=DEVICE), weight(torch.ones(16, device=DEVICE))
    with pytest.raises(ValueError, match="there is none"):
        (module if fused else plain).norm(x, None, one, None, "rmsnorm", EPSILON, [one])
