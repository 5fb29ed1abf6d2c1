"""The fused operator between a block's GEMMs: against float64, recomputed, and what it keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from tests.harness.kernels import DEVICE, gradients_of, relative_error
from torch.utils.checkpoint import checkpoint

from megascale_kernels import block_inner as plain
from megascale_kernels.activation import Activation
from megascale_kernels.attention import AttentionMask, attention_mask
from megascale_kernels.block_inner import AttentionContext
from megascale_kernels.rotary import (
    HeadNorms,
    Heads,
    NormedOver,
    RotaryTable,
    rotary_frequencies,
    rotary_table,
)
from megascale_trainer.weights import Weight

pytest.importorskip("triton")

SEQUENCE, BATCH, FFN = 21, 2, 11
# CUDA's own float32 attention is less exact than a CPU's.
TOLERANCE = 3e-6 if DEVICE.type == "cpu" else 1e-3


def _table(size: int) -> RotaryTable:
    position = torch.arange(SEQUENCE, device=DEVICE).expand(BATCH, -1)
    return rotary_table(position, rotary_frequencies(size, 10_000.0, DEVICE))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("bias", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("heads", "activation", "window", "turned"),
    [
        (Heads(4, 4, 8), "gelu", 0, True),
        (Heads(4, 2, 6), "swiglu", 5, True),
        (Heads(3, 1, 8), None, 0, False),
    ],
    ids=["gelu", "grouped swiglu window", "attention alone, learned positions"],
)
def test_block_inner(
    heads: Heads,
    activation: Activation | None,
    window: int,
    turned: bool,
    bias: bool,
    recompute: bool,
) -> None:
    from megascale_kernels.fused import block_inner as fused

    generator = torch.Generator().manual_seed(8)
    width = heads.width + {"gelu": FFN, "swiglu": 2 * FFN, None: 0}[activation]
    inputs = torch.randn(SEQUENCE, BATCH, width, generator=generator).to(DEVICE)
    out = heads.query * heads.size + FFN * (activation is not None)
    gradient = torch.randn(SEQUENCE, BATCH, out, generator=generator).to(DEVICE)
    shift = [torch.randn(width, generator=generator).to(DEVICE)] if bias else []
    mask = attention_mask(SEQUENCE, window=window, device=DEVICE)
    table = _table(heads.size) if turned else None

    def computed(module: object, dtype: torch.dtype, *, again: bool) -> list[torch.Tensor]:
        def run(leaves: Sequence[torch.Tensor], bound: Sequence[Weight]) -> torch.Tensor:
            function = partial(
                module.block_inner,  # type: ignore[attr-defined]
                bias=bound[0] if bound else None,
                context=AttentionContext(heads, table, mask),
                activation=activation,
            )
            kept: torch.Tensor = (
                checkpoint(function, leaves[0], use_reentrant=False)
                if again
                else function(leaves[0])
            )
            return kept

        return gradients_of(run, [inputs], shift, [gradient], dtype)

    found = computed(fused, torch.float32, again=recompute)
    for ours, theirs in zip(found, computed(plain, torch.float64, again=False), strict=True):
        assert relative_error(ours, theirs) < TOLERANCE
    assert found[0].is_contiguous()


@pytest.mark.parametrize("recompute", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("heads", "turned", "over", "window"),
    [
        (Heads(4, 2, 6), True, "heads", 5),
        (Heads(3, 1, 7), False, "heads", 5),
        (Heads(4, 2, 6), True, "projection", 0),
        (Heads(3, 1, 7), False, "projection", 5),
    ],
)
def test_q_and_k_are_normalised(
    heads: Heads, turned: bool, over: NormedOver, window: int, recompute: bool
) -> None:
    from megascale_kernels.fused import block_inner as fused

    generator = torch.Generator().manual_seed(9)
    inputs = torch.randn(SEQUENCE, BATCH, heads.width + FFN, generator=generator).to(DEVICE)
    out = heads.query * heads.size + FFN
    gradient = torch.randn(SEQUENCE, BATCH, out, generator=generator).to(DEVICE)
    numbers = (heads.query, heads.key_value) if over == "projection" else (1, 1)
    weights = [
        1 + torch.randn(number * heads.size, generator=generator).to(DEVICE) for number in numbers
    ]
    shift = torch.randn(heads.width + FFN, generator=generator).to(DEVICE)
    mask = attention_mask(SEQUENCE, window=window, device=DEVICE)
    table = _table(heads.size) if turned else None

    def computed(module: object, dtype: torch.dtype, *, again: bool) -> list[torch.Tensor]:
        def run(leaves: Sequence[torch.Tensor], bound: Sequence[Weight]) -> torch.Tensor:
            norms = HeadNorms(bound[0], bound[1], 1e-5, over)
            arguments = (bound[2], AttentionContext(heads, table, mask, norms), "gelu")
            function = module.block_inner  # type: ignore[attr-defined]
            kept: torch.Tensor = (
                checkpoint(function, leaves[0], *arguments, use_reentrant=False)
                if again
                else function(leaves[0], *arguments)
            )
            return kept

        return gradients_of(run, [inputs], [*weights, shift], [gradient], dtype)

    found = computed(fused, torch.float32, again=recompute)
    for ours, theirs in zip(found, computed(plain, torch.float64, again=False), strict=True):
        assert relative_error(ours, theirs) < TOLERANCE


@pytest.mark.parametrize("window", [0, 5])
def test_heads_and_their_gradient_lie_as_the_mask_has_them(window: int) -> None:
    from megascale_kernels.fused import block_inner as fused

    laid: list[bool] = []

    def noted(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: AttentionMask
    ) -> torch.Tensor:
        for tensor in (q, k, v):
            laid.append((tensor.transpose(1, 2) if window else tensor).is_contiguous())
        out = q + k + v
        out.register_hook(
            lambda gradient: laid.append(
                (gradient.transpose(1, 2) if window else gradient).is_contiguous()
            )
        )
        return out

    mask = attention_mask(SEQUENCE, window=window, device=DEVICE)
    inputs = torch.randn(SEQUENCE, BATCH, 96 + FFN, device=DEVICE, requires_grad=True)
    context = AttentionContext(Heads(4, 4, 8), _table(8), mask, attend=noted)
    fused.block_inner(inputs, None, context, "gelu").sum().backward()
    assert laid == [True] * 4


def _kept(module: object, mask: AttentionMask) -> int:
    """Bytes of distinct storages that the operator keeps for backward."""
    heads = Heads(4, 4, 8)
    inputs = torch.randn(SEQUENCE, BATCH, heads.width + 2 * FFN, device=DEVICE, requires_grad=True)
    storages: dict[int, torch.UntypedStorage] = {}
    context = AttentionContext(heads, _table(heads.size), mask)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module.block_inner(inputs, None, context, "swiglu")  # type: ignore[attr-defined]
    return sum(storage.nbytes() for storage in storages.values())


def test_it_keeps_its_input_and_what_attention_keeps() -> None:
    from megascale_kernels.fused import block_inner as fused

    mask = attention_mask(SEQUENCE, device=DEVICE)
    heads, token = 4 * 8, SEQUENCE * BATCH * 4
    attention = token * (4 * heads) + token * 4  # q, k, v, result; logarithm of the sums
    own = token * (3 * heads + 2 * FFN)
    spare = 1024  # some backends pad the sums; silu(gate), which the plain one keeps, takes more
    assert _kept(fused, mask) <= own + attention + spare
    assert _kept(plain, mask) > own + attention + spare


@pytest.mark.parametrize("recompute", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_it_repeats_bit_for_bit(recompute: bool) -> None:
    from megascale_kernels.fused import block_inner as fused

    heads, width = Heads(4, 2, 8), 64 + FFN
    generator = torch.Generator().manual_seed(9)
    inputs, gradient, shift = (
        torch.randn(size, generator=generator).to(DEVICE)
        for size in ((SEQUENCE, BATCH, width), (SEQUENCE, BATCH, 32 + FFN), (width,))
    )
    mask = attention_mask(SEQUENCE, device=DEVICE)

    def run(leaves: Sequence[torch.Tensor], bound: Sequence[Weight]) -> torch.Tensor:
        function = partial(
            fused.block_inner,
            bias=bound[0],
            context=AttentionContext(heads, _table(8), mask),
            activation="gelu",
        )
        kept: torch.Tensor = (
            checkpoint(function, leaves[0], use_reentrant=False)
            if recompute
            else function(leaves[0])
        )
        return kept

    one, two = (gradients_of(run, [inputs], [shift], [gradient], torch.float32) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_recomputing_does_no_activation_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from megascale_kernels.fused import block_inner as fused

    calls: list[str] = []
    for name in ("read_heads", "write_activation"):
        original = getattr(fused, name)

        def counted(
            *arguments: object,
            name: str = name,
            original: Callable[..., object] = original,
            **options: object,
        ) -> object:
            calls.append(name)
            return original(*arguments, **options)

        monkeypatch.setattr(fused, name, counted)
    heads, mask = Heads(2, 2, 4), attention_mask(SEQUENCE, device=DEVICE)
    inputs = torch.randn(SEQUENCE, BATCH, heads.width + FFN, device=DEVICE, requires_grad=True)
    context = AttentionContext(heads, _table(4), mask)
    function = partial(fused.block_inner, bias=None, context=context, activation="gelu")
    checkpoint(function, inputs, use_reentrant=False).sum().backward()
    assert calls == ["read_heads", "write_activation", "read_heads"]
