"""Attention against the formula in float64, and against what each mask promises."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from tests.harness.varlen import use_slow_varlen

from megascale_kernels import attention as module
from megascale_kernels.attention import BACKENDS, attention, attention_mask
from megascale_kernels.documents import documents_of

SEQUENCE, BATCH, WIDTH = 13, 2, 8
START = torch.tensor([[0] * 5 + [5] * 8, [0] * 12 + [12]])


def _reference(inputs: list[torch.Tensor], seen: torch.Tensor) -> torch.Tensor:
    q, k, v = inputs
    share = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    scores = q @ k.transpose(2, 3) / q.shape[-1] ** 0.5
    return scores.masked_fill(~seen[:, None], float("-inf")).softmax(-1) @ v


def _seen(window: int, start: torch.Tensor | None) -> torch.Tensor:
    seen = torch.zeros(BATCH, SEQUENCE, SEQUENCE, dtype=torch.bool)
    for b in range(BATCH):
        for query in range(SEQUENCE):
            first = int(start[b, query]) if start is not None else 0
            first = max(first, query - window + 1) if window else first
            seen[b, query, first : query + 1] = True
    return seen


@pytest.fixture
def varlen(monkeypatch: pytest.MonkeyPatch) -> None:
    use_slow_varlen(monkeypatch)


def _heads(generator: torch.Generator, dtype: torch.dtype, kv_heads: int) -> list[torch.Tensor]:
    return [
        torch.randn(BATCH, heads, SEQUENCE, WIDTH, generator=generator).to(dtype).requires_grad_()
        for heads in (4, kv_heads, kv_heads)
    ]


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("window", [0, 3, SEQUENCE])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_attention(
    kv_heads: int, window: int, documents: bool, dtype: torch.dtype, tolerance: float
) -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = _heads(generator, dtype, kv_heads)
    start = START if documents else None
    mask = attention_mask(
        SEQUENCE, window=window, documents=documents_of(START) if documents else None
    )
    out = attention(q, k, v, mask)
    gradient = torch.randn(out.shape, generator=generator)
    found = torch.autograd.grad(out, (q, k, v), gradient.to(dtype))
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    expected = _reference(exact, _seen(window, start))
    wanted = torch.autograd.grad(expected, exact, gradient.to(dtype).double())
    for ours, theirs in zip((out, *found), (expected, *wanted), strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=tolerance, rtol=tolerance)


def test_a_causal_mask_is_a_flag_and_not_a_matrix() -> None:
    assert attention_mask(SEQUENCE).dense is None
    assert attention_mask(SEQUENCE, window=SEQUENCE + 1).dense is None


def test_a_dense_mask_is_built_once() -> None:
    mask = attention_mask(SEQUENCE, window=3)
    assert mask.dense is mask.dense is not None


@pytest.mark.parametrize(("backend", "window"), [("flash", 0), ("math", 0), ("math", 3)])
def test_a_backend_by_name(backend: str, window: int) -> None:
    q, k, v = _heads(torch.Generator().manual_seed(2), torch.float32, 2)
    out = attention(q, k, v, attention_mask(SEQUENCE, window=window), backend)
    torch.testing.assert_close(
        out, _reference([q, k, v], _seen(window, None)), atol=2e-6, rtol=2e-6
    )


@pytest.mark.parametrize(
    ("backend", "window", "reason"),
    [
        ("cudnn", 0, "it needs a CUDA device; available here: flash, math"),
        ("flash", 3, "it takes no window and no documents; available here: math"),
        ("flash_attn_3", 3, "it needs a CUDA device; available here: math"),
        ("xformers", 0, "there is none of that name; available here: flash, math"),
    ],
)
def test_a_backend_that_cannot_run_here_is_refused(backend: str, window: int, reason: str) -> None:
    q, k, v = _heads(torch.Generator().manual_seed(2), torch.float32, 2)
    with pytest.raises(ValueError) as refused:
        attention(q, k, v, attention_mask(SEQUENCE, window=window), backend)
    assert str(refused.value) == f"attention backend {backend!r} cannot be used: {reason}"


@pytest.mark.parametrize("returns_sums", [True, False])
@pytest.mark.parametrize("window", [0, 3])
def test_the_flash_attn_packages_are_called_as_they_are_documented(
    window: int, returns_sums: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flash_attn_func(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        causal: bool,
        window_size: tuple[int, int] = (-1, -1),
    ) -> Any:
        """[B, S, heads, d]; a query at i sees i - left to i + right."""
        assert causal
        left = window_size[0] if window_size[0] >= 0 else SEQUENCE
        seen = _seen(left + 1, None)
        out = _reference([t.transpose(1, 2) for t in (q, k, v)], seen).transpose(1, 2)
        return (out, out) if returns_sums else out

    monkeypatch.setattr(module, "_imported", lambda name: flash_attn_func)
    monkeypatch.setattr(module, "_device_obstacle", lambda query, capability=None: None)
    q, k, v = _heads(torch.Generator().manual_seed(3), torch.float32, 2)
    expected = _reference([q, k, v], _seen(window, None))
    mask = attention_mask(SEQUENCE, window=window)
    for name in ("flash_attn_2", "flash_attn_3"):
        torch.testing.assert_close(attention(q, k, v, mask, name), expected, atol=2e-6, rtol=2e-6)
    if window:
        torch.testing.assert_close(attention(q, k, v, mask), expected, atol=2e-6, rtol=2e-6)
        assert "dense" not in vars(mask), "the package needs no matrix"


def test_packages_take_no_documents() -> None:
    q, _, _ = _heads(torch.Generator().manual_seed(3), torch.float32, 2)
    mask = attention_mask(SEQUENCE, documents=documents_of(START))
    assert all(
        BACKENDS[f"flash_attn_{n}"].obstacle(q, mask) == "it takes no documents" for n in (2, 3)
    )


@pytest.mark.usefixtures("varlen")
@pytest.mark.parametrize("by_position", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize(
    ("documents", "window"), [(False, 1), (False, 3), (True, 0), (True, 3), (True, 1)]
)
def test_documents_and_windows_without_a_matrix(
    documents: bool, window: int, kv_heads: int, by_position: bool
) -> None:
    leaves = _heads(torch.Generator().manual_seed(4), torch.float32, kv_heads)
    mask = attention_mask(
        SEQUENCE, window=window, documents=documents_of(START) if documents else None
    )
    assert mask.by_position
    given = (
        [x.transpose(1, 2).contiguous().transpose(1, 2) for x in leaves] if by_position else leaves
    )
    out = attention(*given, mask)
    gradient = torch.randn(out.shape, generator=torch.Generator().manual_seed(5))
    found = (out, *torch.autograd.grad(out, leaves, gradient))
    expected = _reference(leaves, _seen(window, START if documents else None))
    wanted = (expected, *torch.autograd.grad(expected, leaves, gradient))
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=2e-6)
    assert "dense" not in vars(mask)


@pytest.mark.usefixtures("varlen")
def test_varlen_reads_heads_that_lie_by_position_without_a_copy() -> None:
    x = torch.randn(BATCH, SEQUENCE, 4, WIDTH).transpose(1, 2)
    read: list[int] = []

    def noted(*arguments: torch.Tensor, **options: Any) -> torch.Tensor:
        read.extend(tensor.data_ptr() for tensor in arguments[:3])
        return arguments[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_varlen", lambda: noted)
        out = attention(x, x, x, attention_mask(SEQUENCE, documents=documents_of(START)))
    assert read == [x.data_ptr()] * 3
    assert out.data_ptr() == x.data_ptr() and torch.equal(out, x)


@pytest.mark.usefixtures("varlen")
def test_varlen_refuses_documents_of_another_batch() -> None:
    q, k, v = _heads(torch.Generator().manual_seed(3), torch.float32, 2)
    with pytest.raises(ValueError, match=r"documents of \(1, 13\) tokens cannot mask \(2, 13\)"):
        attention(q, k, v, attention_mask(SEQUENCE, documents=documents_of(START[:1])))


def test_sequences_of_one_document_each_are_plainly_causal() -> None:
    whole = attention_mask(
        SEQUENCE, documents=documents_of(torch.zeros(BATCH, SEQUENCE, dtype=torch.int64))
    )
    assert whole.causal
    assert not attention_mask(SEQUENCE, documents=documents_of(START)).causal


def test_varlen_is_refused_where_its_kernels_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    mask, q = attention_mask(SEQUENCE, window=3), torch.empty(1, 4, SEQUENCE, 12)
    assert BACKENDS["varlen"].obstacle(q, mask) == "it needs a CUDA device"
    monkeypatch.setattr(module, "_device_obstacle", lambda query, capability=None: None)
    obstacle = BACKENDS["varlen"].obstacle
    assert (
        obstacle(q, mask) == "it needs a head size that is a multiple of 8 and at most 256, got 12"
    )
    monkeypatch.setattr(module, "_varlen", lambda: None)
    assert obstacle(q[..., :8], mask) == "torch was built without flash attention"


def test_torch_has_the_function_that_we_call(monkeypatch: pytest.MonkeyPatch) -> None:
    module._varlen.cache_clear()
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    try:
        function = module._varlen()
        assert function is not None
        names = ["query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"]
        inspect.signature(function).bind(*names, window_size=(-1, 0))
        assert list(inspect.signature(function).parameters)[:7] == names
    finally:
        module._varlen.cache_clear()


@pytest.mark.parametrize("causal", [True, False])
def test_what_must_repeat_is_never_left_to_cudnn(causal: bool) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        with module._fastest(causal=causal):
            assert not torch.backends.cuda.cudnn_sdp_enabled()
            assert torch.backends.cuda.mem_efficient_sdp_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_a_backends_gradient_has_one_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN's cached backward assumes that of its first call."""
    contiguous: list[bool] = []

    def note(gradient: torch.Tensor) -> None:
        contiguous.append(gradient.is_contiguous())

    def watched(*arguments: Any, **options: Any) -> torch.Tensor:
        out = sdpa(*arguments, **options)
        out.register_hook(note)
        return out

    sdpa = module.F.scaled_dot_product_attention
    monkeypatch.setattr(module.F, "scaled_dot_product_attention", watched)
    q, k, v = _heads(torch.Generator().manual_seed(1), torch.float32, 4)
    out = attention(q, k, v, attention_mask(SEQUENCE))
    out.backward(torch.randn(SEQUENCE, BATCH, 4, WIDTH).permute(1, 2, 0, 3))
    assert contiguous == [True]
