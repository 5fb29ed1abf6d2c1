"""flash-attn-4 behind its contract: a stand-in for the package on a CPU, real ones on GPUs."""

from __future__ import annotations

import gc
import inspect
import itertools
import os
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from megascale_kernels import attention as backends
from megascale_kernels import flash_attention_4
from megascale_kernels.attention import AttentionMask, attention, attention_mask
from megascale_kernels.documents import documents_of

SEQUENCE, BATCH, SIZE = 12, 2, 64
START = torch.tensor([[0] * 5 + [5] * 7, [0] * 11 + [11]])


@dataclass
class StandIn:
    """Computes by the formula what the package would, and compiles as it does.

    ``deterministic``, ``shapes``: of each call, the latter of q; ``broken``: compiling fails.
    """

    deterministic: list[bool] = field(default_factory=list)
    shapes: list[torch.Size] = field(default_factory=list)
    broken: bool = False
    compiled: set[Any] = field(default_factory=set)

    def flash_attn_func(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        causal: bool,
        deterministic: bool,
        window_size: tuple[int | None, int | None] = (None, None),
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, S, heads, d]; a query at i sees i - left to i + right."""
        kind = (q.shape[2] // k.shape[2], window_size, deterministic, q.requires_grad)
        if kind not in self.compiled:
            frame = inspect.currentframe()  # a cycle, with all frames that called this one
            assert frame is not None
            self.compiled.add(kind)
        assert causal
        assert window_size == (None, None) or window_size[1] == 0
        if self.broken:
            raise ValueError("no such instruction")
        self.deterministic.append(deterministic)
        self.shapes.append(q.shape)
        window = 0 if window_size[0] is None else window_size[0] + 1
        mask = attention_mask(q.shape[1], window=window, device=q.device)
        out = attention(*(x.transpose(1, 2) for x in (q, k, v)), mask, "math").transpose(1, 2)
        return out, out

    def flash_attn_varlen_func(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[tokens, heads, d]."""
        assert max_seqlen_q == max_seqlen_k == SEQUENCE
        assert torch.equal(cu_seqlens_q, cu_seqlens_k) and cu_seqlens_q.dtype == torch.int32
        parts = [
            self.flash_attn_func(*(x[None, begin:end] for x in (q, k, v)), **options)[0][0]
            for begin, end in itertools.pairwise(cu_seqlens_q)
        ]
        return torch.cat(parts), torch.cat(parts)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    found = StandIn()
    monkeypatch.setattr(flash_attention_4, "package", lambda: found)
    monkeypatch.setattr(flash_attention_4, "_compiled", set())
    monkeypatch.setattr(backends, "_device_obstacle", lambda query, capability=None: None)
    return found


@pytest.fixture
def no_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def _inputs(kv_heads: int = 2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(BATCH, heads, SEQUENCE, SIZE, generator=generator).requires_grad_()
        for heads in (4, kv_heads, kv_heads)
    ]


def _mask(documents: bool, window: int) -> AttentionMask:
    found = documents_of(START) if documents else None
    return attention_mask(SEQUENCE, window=window, documents=found)


@pytest.mark.parametrize("by_position", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize(
    ("documents", "window"), [(False, 0), (False, 3), (False, 1), (True, 0), (True, 3)]
)
def test_it_is_chosen_for_every_mask_and_called_as_documented(
    documents: bool, window: int, kv_heads: int, by_position: bool, package: StandIn
) -> None:
    leaves, mask = _inputs(kv_heads), _mask(documents, window)
    given = leaves
    if by_position:
        given = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in leaves]
    out = attention(*given, mask)
    assert package.deterministic, "another backend was chosen"
    expected = attention(*leaves, mask, "math")
    gradient = torch.randn(out.shape)
    for ours, theirs in zip(
        (out, *torch.autograd.grad(out, leaves, gradient)),
        (expected, *torch.autograd.grad(expected, leaves, gradient)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-5)


def test_deterministic_jobs_ask_for_it(package: StandIn) -> None:
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic)
        try:
            attention(*_inputs(), _mask(False, 0))
        finally:
            torch.use_deterministic_algorithms(False)
        assert set(package.deterministic) == {deterministic}
        package.deterministic.clear()


def test_other_head_sizes_go_elsewhere(package: StandIn) -> None:
    leaves = [x[..., :40].detach() for x in _inputs()]
    attention(*leaves, _mask(False, 0))
    assert not package.deterministic
    with pytest.raises(ValueError, match="it needs a head size of 64, 96, 128, 256, got 40"):
        attention(*leaves, _mask(False, 0), "flash_attn_4")


def test_causal_heads_of_256_go_to_cudnn_unless_bits_must_repeat(package: StandIn) -> None:
    leaves = [x.detach().repeat(1, 1, 1, 4) for x in _inputs()]
    attention(*leaves, _mask(False, 0))
    assert not package.deterministic
    attention(*leaves, _mask(False, 3))
    assert package.deterministic.pop() is False
    torch.use_deterministic_algorithms(True)
    try:
        attention(*leaves, _mask(False, 0))
    finally:
        torch.use_deterministic_algorithms(False)
    assert package.deterministic.pop() is True


def test_each_kind_is_compiled_once_on_one_short_call(package: StandIn) -> None:
    for _ in range(2):
        attention(*_inputs(), _mask(False, 3))
    whole, small = (BATCH, SEQUENCE, 4, SIZE), (1, SEQUENCE, 2, SIZE)
    assert [tuple(shape) for shape in package.shapes] == [small, small, whole, whole]


def test_a_second_forward_inside_of_a_backward_compiles_nothing(package: StandIn) -> None:
    """On a GPU compiling would wait there: its own backward needs the thread that called it."""
    query, key, value = _inputs()
    with torch.no_grad():
        attention(query, key, value, _mask(False, 0))
    before = set(package.compiled)
    attention(query, key, value, _mask(False, 0)).sum().backward()  # type: ignore[no-untyped-call]
    assert package.compiled == before


@pytest.mark.usefixtures("no_collections")
def test_what_compiles_keeps_nothing_of_the_step(package: StandIn) -> None:
    """Its frames live on in cycles: those of a step hold its activations and autograd nodes."""

    def step() -> weakref.ref[torch.Tensor]:
        query, key, value = _inputs()
        hidden = query * 2
        attention(hidden, key, value, _mask(False, 0))
        return weakref.ref(hidden)

    assert step()() is None
    assert package.compiled, "nothing was compiled"


def test_a_package_that_cannot_compile_names_the_remedy(package: StandIn) -> None:
    package.broken = True
    with pytest.raises(RuntimeError, match="for heads of 64: install the versions that the extra"):
        attention(*_inputs(), _mask(False, 0))


@pytest.mark.parametrize("writable", [True, False])
def test_kernels_are_kept_where_they_can_be(
    writable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {"XDG_CACHE_HOME": str(tmp_path)})
    if not writable:
        (tmp_path / "megascale").write_text("a file in the way")
    flash_attention_4._keep_kernels()
    kept = str(tmp_path / "megascale" / "flash-attn-4") if writable else None
    assert os.environ.get("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR") == kept
    assert os.environ.get("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED") == ("1" if writable else None)
