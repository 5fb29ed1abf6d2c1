"""The fused activations against the plain ones in float64, also on columns of wider matrices."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from tests.harness.kernels import COMPILED_ROWS as ROWS
from tests.harness.kernels import DEVICE, blank, gradients_of, relative_error

from megascale_kernels import activation as plain
from megascale_kernels.activation import Activation
from megascale_trainer.weights import Weight

pytest.importorskip("triton")


def _compile(
    shape: tuple[int, ...],
    beside: tuple[int, int],
    activation: Activation,
    dtype: torch.dtype = torch.bfloat16,
    *,
    bias: bool,
    find_amax: bool = False,
) -> None:
    """Both ways, on columns behind those of ``beside``: q, k and v, and the attention's result."""
    from megascale_kernels.fused.activation import write_activation, write_gradients

    *rows, ffn = shape
    wide = ffn * (2 if activation == "swiglu" else 1)
    x = blank(*rows, beside[0] + wide, dtype=dtype)[..., beside[0] :]
    y = blank(*rows, beside[1] + ffn, dtype=dtype)[..., beside[1] :]
    shift, sums = (None, None)
    if bias:
        shift = blank(beside[0] + wide, dtype=dtype)[beside[0] :]
        sums = blank(beside[0] + wide, dtype=torch.float32)[beside[0] :]
    slot = blank(1, dtype=torch.int32) if find_amax else None
    write_activation(y, x, shift, activation, slot)
    write_gradients(x, sums, y, x, shift, activation, slot)


COMPILED = {
    "gelu 7b tp2": lambda: _compile((*ROWS, 8192), (6144, 2048), "gelu", bias=True),
    "swiglu, amax": lambda: _compile(
        (*ROWS, 10928), (4352, 4096), "swiglu", bias=False, find_amax=True
    ),
    "small activation": lambda: _compile(
        (8, 2, 100), (108, 72), "swiglu", torch.float32, bias=True
    ),
}
COMPILED_AT_LENGTH = {
    "gelu 7b tp2, amax": lambda: _compile(
        (*ROWS, 8192), (6144, 2048), "gelu", bias=True, find_amax=True
    ),
    "gelu 30b tp8": lambda: _compile((*ROWS, 3584), (2688, 896), "gelu", bias=False),
    "swiglu": lambda: _compile((*ROWS, 10928), (4352, 4096), "swiglu", bias=False),
    "swiglu bias": lambda: _compile((*ROWS, 4096), (768, 512), "swiglu", bias=True),
}


# numpy's warning, in the interpreter; the result is right.
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize(
    "shape", [(7, 3, 37), pytest.param((37, 2, 5), marks=pytest.mark.slow), (1, 1, 300)]
)
def test_activate(shape: tuple[int, int, int], activation: Activation, bias: bool) -> None:
    from megascale_kernels.fused import activation as fused

    generator = torch.Generator().manual_seed(3)
    wide = shape[-1] * (2 if activation == "swiglu" else 1)
    x = (3 * torch.randn(*shape[:2], wide, generator=generator)).to(DEVICE)
    x[0, 0, 0], x[-1, -1, -1] = 90.0, -90.0  # where an exponential of float32 overflows
    weights = [torch.randn(wide, generator=generator).to(DEVICE)] if bias else []
    gradient = torch.randn(shape, generator=generator).to(DEVICE)

    def computed(module: object, dtype: torch.dtype, through: torch.dtype) -> list[torch.Tensor]:
        def run(inputs: Sequence[torch.Tensor], bound: Sequence[Weight]) -> torch.Tensor:
            out: torch.Tensor = module.activate(inputs[0], bound[0] if bound else None, activation)  # type: ignore[attr-defined]
            return out

        rounded = [x.to(through)], [w.to(through) for w in weights], [gradient.to(through)]
        return gradients_of(run, *rounded, dtype)

    for dtype, tolerance in ((torch.float32, 3e-6), (torch.bfloat16, 6e-3)):
        exact = computed(plain, torch.float64, dtype)
        for ours, theirs in zip(computed(fused, dtype, dtype), exact, strict=True):
            assert ours.isfinite().all()
            assert relative_error(ours, theirs) < tolerance


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_columns_of_wider_matrices_leave_the_others_alone(activation: Activation) -> None:
    from megascale_kernels.fused.activation import write_activation, write_gradients

    wide = 22 if activation == "swiglu" else 11
    inputs, d_inputs, y, d_y = (
        torch.randn(5, 2, width, device=DEVICE) for width in (wide + 6, wide + 6, 20, 20)
    )
    before = d_inputs.clone(), y.clone()
    x = inputs[..., 6:].clone().requires_grad_()
    expected = plain.activate(x, None, activation)
    [gradient] = torch.autograd.grad(expected, x, d_y[..., 9:])
    write_activation(y[..., 9:], inputs[..., 6:], None, activation)
    write_gradients(d_inputs[..., 6:], None, d_y[..., 9:], inputs[..., 6:], None, activation)
    torch.testing.assert_close(y[..., 9:], expected.detach(), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(d_inputs[..., 6:], gradient, atol=2e-6, rtol=1e-5)
    assert torch.equal(d_inputs[..., :6], before[0][..., :6])
    assert torch.equal(y[..., :9], before[1][..., :9])
