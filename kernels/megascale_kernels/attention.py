"""Scaled dot-product attention under a mask description: causal, sliding window, documents.

Several backends compute it; unless one is asked for by name, the mask, the device and determinism choose. A purely
causal mask is passed as a flag, so that torch's fused backends apply, cuDNN's first: the fastest on Hopper. Its
backward is not deterministic, so it is left out where deterministic algorithms are asked for. A sliding window without
documents goes to the flash-attn package where that is installed. All else needs a dense boolean mask, built once per
micro-batch and shared by all layers.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

_REPEATABLE = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_HALF = (torch.bfloat16, torch.float16)
_HOPPER = (9, 0)


@dataclass(frozen=True, eq=False)
class AttentionMask:
    """Who may look at whom; made by :func:`attention_mask`. ``window`` 0 and no ``document_start``: all causal."""

    sequence: int
    window: int
    document_start: torch.Tensor | None
    device: torch.device | None

    @property
    def causal(self) -> bool:
        """Every query sees all tokens up to its own."""
        return self.window == 0 and self.document_start is None

    @functools.cached_property
    def dense(self) -> torch.Tensor | None:
        """bool [B or 1, 1, S, S], True where a query (row) sees a key; None: all causal. Built on first use."""
        if self.causal:
            return None
        start = self.document_start
        index = torch.arange(self.sequence, device=self.device if start is None else start.device)
        query, key = index[:, None], index[None, :]
        seen = (key <= query)[None]
        if self.window:
            seen = seen & (key > query - self.window)[None]
        if start is not None:
            seen = seen & (key[None] >= start[:, :, None])
        return seen[:, None]


def attention_mask(
    sequence: int, *, window: int = 0, document_start: torch.Tensor | None = None, device: torch.device | None = None
) -> AttentionMask:
    """Describe a causal mask over ``sequence`` tokens.

    Args:
        sequence: S, the length of the sequence.
        window: a query sees itself and the ``window - 1`` tokens before it; 0 means all before it.
        document_start: integer [B, S], where in the sequence the token's document starts; None: one document.
        device: where a mask without documents is built.
    """
    return AttentionMask(sequence, window if window < sequence else 0, document_start, device)


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: AttentionMask, backend: str | None = None
) -> torch.Tensor:
    """softmax(q k^T / sqrt(d)) v under ``mask``; query heads share key/value heads in equal groups.

    Args:
        query: [B, heads, S, d].
        key, value: [B, key/value heads, S, d].
        backend: one of :data:`BACKENDS`; None: the one that suits.

    Returns:
        [B, heads, S, d], not always contiguous.

    Raises:
        ValueError: ``backend`` is unknown or cannot run these inputs here; names those that can.
    """
    # The fused backends get contiguous tensors: strided views have crashed cuDNN attention on Hopper.
    q, k, v = query.contiguous(), key.contiguous(), value.contiguous()
    if backend is not None:
        return _named(backend, q, mask)(q, k, v, mask)
    if mask.window and mask.document_start is None:
        for name in _WINDOWED:
            if BACKENDS[name].obstacle(q, mask) is None:
                return BACKENDS[name].run(q, k, v, mask)
    return _torch_attention(_fastest(causal=mask.causal), q, k, v, mask)


Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, AttentionMask], torch.Tensor]


@dataclass(frozen=True)
class Backend:
    """``run`` takes what :func:`attention` takes, contiguous; ``obstacle`` says why it cannot run a query, or None."""

    run: Run
    obstacle: Callable[[torch.Tensor, AttentionMask], str | None]


def _named(name: str, query: torch.Tensor, mask: AttentionMask) -> Run:
    backend = BACKENDS.get(name)
    obstacle = "there is none of that name" if backend is None else backend.obstacle(query, mask)
    if backend is None or obstacle is not None:
        able = ", ".join(other for other, found in BACKENDS.items() if found.obstacle(query, mask) is None)
        raise ValueError(f"attention backend {name!r} cannot be used: {obstacle}; available here: {able}")
    return backend.run


def _fastest(*, causal: bool) -> AbstractContextManager[None]:
    """The order in which torch tries its backends; those that cannot take the inputs are passed over."""
    if torch.are_deterministic_algorithms_enabled():
        return sdpa_kernel(_REPEATABLE, set_priority=True)  # torch's own order may have cuDNN take a dense mask
    if not causal:
        return nullcontext()
    return sdpa_kernel([SDPBackend.CUDNN_ATTENTION, *_REPEATABLE], set_priority=True)


def _torch_attention(
    choice: AbstractContextManager[None], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: AttentionMask
) -> torch.Tensor:
    dense, shared = mask.dense, q.shape[1] // k.shape[1]
    if shared > 1 and dense is not None:  # no fused backend takes both a mask and shared heads
        k, v = k.repeat_interleave(shared, dim=1), v.repeat_interleave(shared, dim=1)
        shared = 1
    with choice:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=dense, is_causal=dense is None, enable_gqa=shared > 1)
    contiguous: torch.Tensor = _ContiguousGradient.apply(out)  # type: ignore[no-untyped-call]
    return contiguous


class _ContiguousGradient(torch.autograd.Function):
    """The identity; its gradient comes out contiguous.

    torch keeps cuDNN's plan of a backward by the shapes and strides of q, k and v, not by the gradient's: given another
    layout than the first time, cuDNN reads beside it (wrong gradients, or an illegal memory access). So there is one.
    """

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor) -> torch.Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, d_out: torch.Tensor) -> torch.Tensor:
        return d_out.contiguous()


def _of_torch(kind: SDPBackend) -> Run:
    return lambda q, k, v, mask: _torch_attention(sdpa_kernel(kind), q, k, v, mask)


def _cudnn_obstacle(query: torch.Tensor, mask: AttentionMask) -> str | None:
    if torch.are_deterministic_algorithms_enabled():
        return "its backward does not repeat bit for bit, and training.deterministic is set"
    return _device_obstacle(query) or _causal_obstacle(mask)


def _flash_obstacle(query: torch.Tensor, mask: AttentionMask) -> str | None:
    return (_device_obstacle(query) if query.is_cuda else None) or _causal_obstacle(mask)


def _causal_obstacle(mask: AttentionMask) -> str | None:
    return None if mask.causal else "it takes no window and no documents"


def _device_obstacle(query: torch.Tensor, capability: tuple[int, int] = (8, 0)) -> str | None:
    if not query.is_cuda:
        return "it needs a CUDA device"
    if query.dtype not in _HALF:
        return f"it needs 16-bit floats, got {query.dtype}"
    if torch.cuda.get_device_capability(query.device) < capability:
        return f"it needs compute capability {capability[0]}.{capability[1]}"
    return None


@functools.cache
def _imported(module: str) -> Callable[..., Any] | None:
    """The package's attention function; None where it cannot be imported."""
    try:
        found: Callable[..., Any] | None = getattr(importlib.import_module(module), "flash_attn_func", None)
    except Exception:  # one that was built for another torch fails in its own way
        return None
    return found


def _of_package(module: str, capability: tuple[int, int], *, repeats: bool) -> Backend:
    """An adapter to a generation of the flash-attn package (arXiv 2307.08691, 2407.08608): same call, other homes.

    ``repeats`` says that it can be asked for a deterministic backward.
    """

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: AttentionMask) -> torch.Tensor:
        function = _imported(module)
        assert function is not None
        options: dict[str, Any] = {"window_size": (mask.window - 1, 0)} if mask.window else {}
        if torch.are_deterministic_algorithms_enabled():
            options["deterministic"] = True
        # It takes [B, S, heads, d] with any strides but the last, shares heads by itself, and some generations also
        # return the logarithm of the sums.
        found = function(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=True, **options)
        out: torch.Tensor = found[0] if isinstance(found, tuple) else found
        return out.transpose(1, 2)

    def obstacle(query: torch.Tensor, mask: AttentionMask) -> str | None:
        if mask.document_start is not None:
            return "it takes no documents"
        if torch.are_deterministic_algorithms_enabled() and not repeats:
            return "its backward is not known to repeat bit for bit, and training.deterministic is set"
        missing = _device_obstacle(query, capability)
        if missing is None and _imported(module) is None:
            return f"{module}.flash_attn_func cannot be imported"
        return missing

    return Backend(run, obstacle)


BACKENDS: Mapping[str, Backend] = {
    "cudnn": Backend(_of_torch(SDPBackend.CUDNN_ATTENTION), _cudnn_obstacle),
    "flash": Backend(_of_torch(SDPBackend.FLASH_ATTENTION), _flash_obstacle),
    "flash_attn_3": _of_package("flash_attn_interface", _HOPPER, repeats=True),
    "flash_attn_4": _of_package("flash_attn.cute.interface", _HOPPER, repeats=False),
    "flash_attn_2": _of_package("flash_attn", (8, 0), repeats=True),
    "math": Backend(_of_torch(SDPBackend.MATH), lambda query, mask: None),
}
_WINDOWED = ("flash_attn_3", "flash_attn_4", "flash_attn_2")
