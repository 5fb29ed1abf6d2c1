"""The fused split of q, k and v against the plain one in float64: heads, and their gradients."""

from __future__ import annotations

import pytest
import torch
from tests.harness.kernels import COMPILED_ROWS as ROWS
from tests.harness.kernels import DEVICE, blank, relative_error

from megascale_kernels.rotary import (
    Heads,
    RotaryTable,
    rotary_frequencies,
    rotary_table,
    split_heads,
)

pytest.importorskip("triton")

BATCH, SPARE = 2, 3


def _compile(
    heads: Heads,
    ffn: tuple[int, int],
    *,
    bias: bool,
    table: bool = True,
    find_amax: bool = False,
) -> None:
    """Each function of the module, as a block with ``ffn`` columns in and out calls it."""
    from megascale_kernels.fused import rotary as fused

    width = heads.width + ffn[0]
    inputs, joined = blank(*ROWS, width), blank(*ROWS, heads.query * heads.size + ffn[1])
    angles = blank(*ROWS, 1, heads.size // 2, dtype=torch.float32)
    rotary = RotaryTable(angles, angles) if table else None
    shift, sums = (blank(width), blank(width, dtype=torch.float32)) if bias else (None, None)
    for by_position in (True, False):
        found = fused.read_heads(inputs, shift, heads, rotary, by_position=by_position)
        fused.read_plain(joined, heads.query, heads.size, by_position=by_position)
    slot = blank(1, dtype=torch.int32) if find_amax else None
    fused.write_plain(joined, found[0].transpose(1, 2).contiguous().transpose(1, 2), slot)
    fused.write_head_gradients(inputs, sums, found, heads, rotary, slot)


def _compile_small() -> None:
    """At a size that is no power of two, in float32."""
    from megascale_kernels.fused import rotary as fused

    heads, width = Heads(4, 1, 18), 6 * 18 + 200
    inputs, shift, sums = (
        blank(*shape, dtype=torch.float32) for shape in ((8, 2, width), (width,), (width,))
    )
    angles = blank(8, 2, 1, 9, dtype=torch.float32)
    found = fused.read_heads(inputs, shift, heads, RotaryTable(angles, angles))
    fused.write_head_gradients(inputs, sums, found, heads, RotaryTable(angles, angles))


COMPILED = {
    "heads 7b tp2": lambda: _compile(Heads(16, 16, 128), (8192, 8192), bias=True),
    "heads 7b tp2, amax": lambda: _compile(
        Heads(16, 16, 128), (8192, 8192), bias=True, find_amax=True
    ),
    "small heads": _compile_small,
}
COMPILED_AT_LENGTH = {
    "heads 30b tp8": lambda: _compile(Heads(7, 7, 128), (3584, 3584), bias=False),
    "grouped heads": lambda: _compile(Heads(32, 1, 128), (21856, 10928), bias=False),
    "heads bias learned positions": lambda: _compile(
        Heads(8, 2, 64), (8192, 4096), bias=True, table=False
    ),
}


def _table(sequence: int, size: int) -> RotaryTable:
    generator = torch.Generator().manual_seed(6)
    position = torch.randint(0, 5000, (BATCH, sequence), generator=generator)
    # With a scale as of yarn, the gradient of a rotation is not its inverse.
    return rotary_table(position.to(DEVICE), rotary_frequencies(size, 10_000.0, DEVICE), 1.25)


KINDS = {
    "equal": (Heads(4, 4, 8), True),
    "grouped": (Heads(6, 2, 6), True),
    "odd size, learned positions": (Heads(9, 3, 7), False),
    "smallest": (Heads(2, 1, 2), True),
}


@pytest.mark.parametrize("bias", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("sequence", "heads", "turned"),
    [
        pytest.param(
            sequence,
            *kind,
            id=f"{sequence}-{name}",
            # One kind has several tiles in the short form.
            marks=[pytest.mark.slow] if sequence == 37 and name != "grouped" else [],
        )
        for sequence in (5, 37)
        for name, kind in KINDS.items()
    ],
)
def test_split_heads(sequence: int, heads: Heads, turned: bool, bias: bool) -> None:
    from megascale_kernels.fused.rotary import read_heads, write_head_gradients

    generator = torch.Generator().manual_seed(5)
    table = _table(sequence, heads.size) if turned else None
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 6e-3)):
        inputs = torch.randn(sequence, BATCH, heads.width + SPARE, generator=generator).to(
            DEVICE, dtype
        )
        shift = torch.randn(heads.width + SPARE, generator=generator).to(DEVICE, dtype) * bias
        exact = (inputs.double() + shift.double())[..., : heads.width].requires_grad_()
        expected = split_heads(exact, heads, table)
        found = read_heads(inputs, shift if bias else None, heads, table)
        gradients = [torch.randn(q.shape, generator=generator).to(DEVICE, dtype) for q in expected]
        # what backends return: a transposed layout, and one whose last stride is not 1
        gradients[0] = gradients[0].transpose(1, 2).contiguous().transpose(1, 2)
        gradients[1] = gradients[1].transpose(2, 3).contiguous().transpose(2, 3)
        [wanted] = torch.autograd.grad(expected, exact, [g.double() for g in gradients])
        d_inputs, bias_grad = (
            torch.full_like(inputs, 7.0),
            torch.ones(heads.width + SPARE, device=DEVICE),
        )
        write_head_gradients(
            d_inputs,
            bias_grad if bias else None,
            (gradients[0], gradients[1], gradients[2]),
            heads,
            table,
        )
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.is_contiguous()
            assert ours.dtype == dtype
            assert relative_error(ours, theirs) < tolerance
        assert relative_error(d_inputs[..., : heads.width], wanted) < tolerance
        assert (d_inputs[..., heads.width :] == 7.0).all(), "other columns are not its own"
        spread = read_heads(inputs, shift if bias else None, heads, table, by_position=True)
        for ours, same in zip(spread, found, strict=True):
            assert ours.transpose(1, 2).is_contiguous()
            assert torch.equal(ours, same)
        sums = 1 + wanted.sum((0, 1)) * bias
        assert relative_error(bias_grad[: heads.width], sums) < 1e-5, (
            "summed in float32, before rounding"
        )
        assert (bias_grad[heads.width :] == 1.0).all()
