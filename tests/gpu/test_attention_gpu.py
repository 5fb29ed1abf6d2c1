"""Attention on CUDA: which backend runs, that it is right, and that it repeats where it must."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from tests.harness.kernels import relative_error

from megascale_kernels import cudnn_graph
from megascale_kernels.attention import AttentionMask, attention, attention_mask
from megascale_kernels.documents import Documents, documents_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SEQUENCE, BATCH, HEADS, WIDTH = 512, 2, 8, 128
FLASH_4 = bool(find_spec("flash_attn") and find_spec("flash_attn.cute"))
WITH_FLASH_4 = pytest.mark.skipif(not FLASH_4, reason="needs flash-attn-4 (extra flash-attn-4)")


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def _inputs(
    kv_heads: int, size: int = WIDTH, dtype: torch.dtype = torch.bfloat16
) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(1)
    return [
        torch.randn(BATCH, heads, SEQUENCE, size, generator=generator, device="cuda", dtype=dtype)
        .mul_(0.5)
        .requires_grad_()
        for heads in (HEADS, kv_heads, kv_heads)
    ]


def _operators(out: torch.Tensor) -> set[str]:
    """Names of the backward nodes behind ``out``."""
    found: set[str] = set()
    waiting = [out.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None:
            found.add(node.name())
            waiting += [following for following, _ in node.next_functions]
    return found


def _is_used(backend: str, out: torch.Tensor) -> bool:
    return any(f"ScaledDotProduct{backend}Attention" in name for name in _operators(out))


@pytest.mark.parametrize("kv_heads", [HEADS, 2])
def test_dense_causal_attention_takes_the_fastest_and_is_right(kv_heads: int) -> None:
    q, k, v = _inputs(kv_heads)
    out = attention(q, k, v, attention_mask(SEQUENCE))
    gradients = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    exact = [tensor.detach().double().requires_grad_() for tensor in (q, k, v)]
    expected = attention(*exact, attention_mask(SEQUENCE))
    wanted = torch.autograd.grad(expected, exact, torch.ones_like(expected))
    for ours, theirs in zip((out, *gradients), (expected, *wanted), strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=5e-2, rtol=2e-2)
    if torch.cuda.get_device_capability() >= (9, 0) and kv_heads == HEADS:
        assert "FlashAttnFuncBackward" in _operators(out) if FLASH_4 else _is_used("Cudnn", out)


@pytest.mark.usefixtures("deterministic")
def test_what_must_repeat_does_not_use_cudnn_and_repeats() -> None:
    q, k, v = _inputs(HEADS)
    runs = []
    for _ in range(3):
        out = attention(q, k, v, attention_mask(SEQUENCE))
        assert not _is_used("Cudnn", out)
        runs.append([out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))])
    for other in runs[1:]:
        assert all(torch.equal(one, two) for one, two in zip(runs[0], other, strict=True))


def test_gradients_of_any_layout_are_right() -> None:
    """One process has several: cuDNN's backward is cached for the first layout it gets."""
    q, k, v = _inputs(HEADS)
    gradient = torch.randn(BATCH, HEADS, SEQUENCE, WIDTH, device="cuda", dtype=torch.bfloat16)
    wide = torch.zeros(SEQUENCE, BATCH, 3 * HEADS * WIDTH, device="cuda", dtype=torch.bfloat16)
    columns = wide[..., : HEADS * WIDTH].unflatten(-1, (HEADS, WIDTH)).permute(1, 2, 0, 3)
    columns.copy_(gradient)
    transposed = gradient.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
    exact = [tensor.detach().double().requires_grad_() for tensor in (q, k, v)]
    wanted = torch.autograd.grad(
        attention(*exact, attention_mask(SEQUENCE)), exact, gradient.double()
    )
    for laid_out in (columns, gradient, transposed):
        found = torch.autograd.grad(
            attention(q, k, v, attention_mask(SEQUENCE)), (q, k, v), laid_out
        )
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours.double(), theirs, atol=5e-2, rtol=2e-2)


def _documents() -> Documents:
    """Documents of one token, of a block and one over, and the rest; the sequences differ."""
    begins = torch.zeros(BATCH, SEQUENCE, dtype=torch.bool)
    begins[0, [1, 130, 131, 400]] = True
    begins[1, [300, 511]] = True
    return documents_of(torch.where(begins, torch.arange(SEQUENCE), 0).cummax(1).values)


def _masked(documents: bool, window: int) -> AttentionMask:
    found = _documents().map(torch.Tensor.cuda) if documents else None
    return attention_mask(SEQUENCE, window=window, documents=found, device=torch.device("cuda"))


def _by_position(leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    return [leaf.transpose(1, 2).contiguous().transpose(1, 2) for leaf in leaves]


@pytest.mark.parametrize("by_position", [False, True])
@pytest.mark.parametrize("kv_heads", [HEADS, 2])
@pytest.mark.parametrize(
    ("documents", "window"), [(True, 0), (True, 100), (False, 100), (False, 2), (False, 0)]
)
def test_varlen_is_right(documents: bool, window: int, kv_heads: int, by_position: bool) -> None:
    leaves = _inputs(kv_heads)
    given = _by_position(leaves) if by_position else leaves
    out = attention(*given, _masked(documents, window), "varlen")
    gradient = torch.randn(out.shape, device="cuda", dtype=out.dtype)
    found = (out, *torch.autograd.grad(out, leaves, gradient))
    exact = [tensor.detach().double().requires_grad_() for tensor in leaves]
    expected = attention(*exact, _masked(documents, window), "math")
    wanted = (expected, *torch.autograd.grad(expected, exact, gradient.double()))
    for ours, theirs in zip(found, wanted, strict=True):
        assert relative_error(ours, theirs) < 2e-2


@pytest.mark.parametrize(("documents", "window"), [(True, 0), (True, 100), (False, 100)])
def test_documents_and_windows_need_no_matrix_and_no_wait(documents: bool, window: int) -> None:
    leaves, mask = _inputs(2), _masked(documents, window)
    attention(*leaves, mask)  # what is made once is made here
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = attention(*leaves, mask)
        torch.autograd.grad(out, leaves, torch.ones_like(out))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert "dense" not in vars(mask)


@pytest.mark.parametrize("backend", ["varlen", pytest.param("flash_attn_4", marks=WITH_FLASH_4)])
def test_empty_documents_change_nothing(backend: str) -> None:
    """CUDA graphs have room for more documents than most micro-batches have."""
    leaves, documents = _inputs(2), _documents().map(torch.Tensor.cuda)
    runs = []
    for number in (documents.number, 64):
        mask = attention_mask(SEQUENCE, documents=replace(documents, number=number))
        out = attention(*leaves, mask, backend)
        runs.append((out, *torch.autograd.grad(out, leaves, torch.ones_like(out))))
    for ours, theirs in zip(*runs, strict=True):
        assert relative_error(ours, theirs.double()) < 1e-3


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("kv_heads", [HEADS, 2])
@pytest.mark.parametrize(("documents", "window"), [(True, 0), (True, 100), (False, 100)])
def test_varlen_repeats_where_it_must(documents: bool, window: int, kv_heads: int) -> None:
    runs = _repeated(_inputs(kv_heads), _masked(documents, window), "varlen")
    for other in runs[1:]:
        assert all(torch.equal(one, two) for one, two in zip(runs[0], other, strict=True))


MASKS = [(True, 0), (True, 100), (False, 100), (False, 1)]
WITH_GRAPHS = pytest.mark.skipif(
    cudnn_graph.frontend() is None, reason="needs nvidia-cudnn-frontend (extra cudnn)"
)


def _repeated(
    leaves: list[torch.Tensor], mask: AttentionMask, backend: str, number: int = 5
) -> list[list[torch.Tensor]]:
    """Results and gradients of one call after the other."""
    runs = []
    for _ in range(number):
        out = attention(*leaves, mask, backend)
        runs.append([out, *torch.autograd.grad(out, leaves, torch.ones_like(out))])
    return runs


def _check(
    backend: str,
    leaves: list[torch.Tensor],
    mask: AttentionMask,
    most: float,
    *,
    by_position: bool = True,
) -> None:
    """Result and gradients against the formula in float64, and no dense mask."""
    given = _by_position(leaves) if by_position else leaves
    out = attention(*given, mask, backend)
    gradient = torch.randn(out.shape, device="cuda", dtype=out.dtype)
    found = (out, *torch.autograd.grad(out, leaves, gradient))
    assert "dense" not in vars(mask)
    exact = [tensor.detach().double().requires_grad_() for tensor in leaves]
    expected = attention(*exact, mask, "math")
    wanted = (expected, *torch.autograd.grad(expected, exact, gradient.double()))
    for ours, theirs in zip(found, wanted, strict=True):
        error = float((ours.double() - theirs).abs().max())
        assert relative_error(ours, theirs) < most or error < 1e-5


@WITH_GRAPHS
@pytest.mark.parametrize("kv_heads", [HEADS, 2])
@pytest.mark.parametrize(("documents", "window"), MASKS)
def test_cudnns_graphs_are_right(documents: bool, window: int, kv_heads: int) -> None:
    _check("cudnn_graph", _inputs(kv_heads), _masked(documents, window), 2e-2)


@WITH_GRAPHS
@pytest.mark.parametrize("size", [64, 72, 256])
def test_cudnns_graphs_take_other_head_sizes(size: int) -> None:
    _check("cudnn_graph", _inputs(2, size=size), _masked(True, 100), 2e-2)


@WITH_GRAPHS
def test_cudnns_graphs_are_taken_but_not_where_bits_must_repeat() -> None:
    mask, leaves = _masked(True, 0), _inputs(2, size=72)  # heads that flash-attn-4 does not take
    assert "_AttendBackward" in _operators(attention(*leaves, mask))
    torch.use_deterministic_algorithms(True)
    try:
        assert "_AttendBackward" not in _operators(attention(*leaves, mask))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("dtype", "size", "most"),
    [
        (torch.bfloat16, 128, 2e-2),
        (torch.bfloat16, 36, 2e-2),
        (torch.bfloat16, 512, 2e-2),
        (torch.float32, 128, 1e-5),
        (torch.float32, 20, 1e-5),
        (torch.float32, 256, 1e-5),
    ],
)
@pytest.mark.parametrize(("documents", "window"), MASKS[:3])
def test_triton_is_right(
    documents: bool, window: int, dtype: torch.dtype, size: int, most: float
) -> None:
    _check("triton", _inputs(2, size=size, dtype=dtype), _masked(documents, window), most)


def test_triton_repeats() -> None:
    runs = _repeated(_inputs(2), _masked(True, 100), "triton")
    for other in runs[1:]:
        assert all(torch.equal(one, two) for one, two in zip(runs[0], other, strict=True))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("dtype", "size"),
    [(torch.float32, 128), (torch.bfloat16, 36), (torch.bfloat16, 264), (torch.bfloat16, 128)],
)
def test_nothing_on_a_gpu_needs_a_matrix(
    dtype: torch.dtype, size: int, deterministic: bool
) -> None:
    leaves, mask = _inputs(2, size=size, dtype=dtype), _masked(True, 100)
    torch.use_deterministic_algorithms(deterministic)
    try:
        out = attention(*leaves, mask)
        torch.autograd.grad(out, leaves, torch.ones_like(out))
    finally:
        torch.use_deterministic_algorithms(False)
    assert "dense" not in vars(mask)


ALL_MASKS = [(False, 0), *MASKS]


@WITH_FLASH_4
@pytest.mark.parametrize("by_position", [False, True])
@pytest.mark.parametrize("kv_heads", [HEADS, 2])
@pytest.mark.parametrize(("documents", "window"), ALL_MASKS)
def test_flash_4_is_right(documents: bool, window: int, kv_heads: int, by_position: bool) -> None:
    leaves = _inputs(kv_heads)
    _check("flash_attn_4", leaves, _masked(documents, window), 2e-2, by_position=by_position)


@WITH_FLASH_4
@pytest.mark.parametrize("size", [64, 96, 256])
@pytest.mark.parametrize(("documents", "window"), ALL_MASKS[:3])
def test_flash_4_takes_other_head_sizes(documents: bool, window: int, size: int) -> None:
    _check("flash_attn_4", _inputs(2, size=size), _masked(documents, window), 2e-2)


@WITH_FLASH_4
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("kv_heads", [HEADS, 2])
@pytest.mark.parametrize(("documents", "window"), ALL_MASKS)
def test_flash_4_repeats_where_it_must(documents: bool, window: int, kv_heads: int) -> None:
    mask = _masked(documents, window)
    runs = _repeated(_inputs(kv_heads), mask, "flash_attn_4")
    for other in runs[1:]:
        assert all(torch.equal(one, two) for one, two in zip(runs[0], other, strict=True))


@WITH_FLASH_4
@pytest.mark.parametrize(("documents", "window"), ALL_MASKS[:4])
def test_flash_4_can_be_captured(documents: bool, window: int) -> None:
    """Replayed on other values it gives what it gives without a graph."""
    leaves, mask = _inputs(2), _masked(documents, window)
    _repeated(leaves, mask, "flash_attn_4", number=1)  # compiles and loads its kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = _repeated(leaves, mask, "flash_attn_4", number=1)[0]
    with torch.no_grad():
        for leaf in leaves:
            leaf.copy_(torch.randn_like(leaf))
    graph.replay()
    torch.cuda.synchronize()
    (expected,) = _repeated(leaves, mask, "flash_attn_4", number=1)
    for ours, theirs in zip(captured, expected, strict=True):
        assert relative_error(ours, theirs.double()) < 1e-2
