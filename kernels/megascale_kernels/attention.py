"""Scaled dot-product attention under a mask description: causal, sliding window, documents.

Several backends compute it. Unless the caller names one, the mask, the device and determinism
choose:

- On Hopper all masks go to flash-attn-4 if that package is installed, deterministic ones too.
- Without it a purely causal mask is passed as a flag, so that torch can use its fused backends,
  cuDNN's first: it is the fastest of them on Hopper.
- Documents and sliding windows go to cuDNN's graphs if that package is installed, else to torch's
  variable-length attention; a window without documents goes to FlashAttention-3 before that.
- Inputs that those cannot take (32-bit floats, odd head sizes) go to a kernel in Triton on CUDA. On
  a CPU they run under a dense boolean mask, built once per micro-batch and shared by all layers.

For jobs that must repeat see Note [Deterministic attention].
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from megascale_kernels import cudnn_graph, flash_attention_4
from megascale_kernels.documents import Documents, RaggedDocuments
from megascale_kernels.torch_calls import apply

# Note [Deterministic attention]
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
# In backward the gradient of a query is a sum over blocks of keys, and that of a key is a sum over
# blocks of queries. A kernel whose programs own only one of the two adds the other atomically, in
# the order in which its programs happen to end, and the result of float additions depends on their
# order. Backends differ under torch.use_deterministic_algorithms (trainer.training.deterministic):
#
# - cuDNN's causal backward does not repeat, so it is left out, also from torch's own choice.
# - cuDNN's graphs can repeat, but need many times the memory of the activations: left out.
# - flash-attn 2, 3 and 4 and torch's variable-length attention add in a fixed order if told so.
# - The kernel in Triton runs two kernels, one that owns queries and one that owns keys. It never
#   adds atomically, and repeats at all times.

_REPEATABLE = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_HALF = (torch.bfloat16, torch.float16)
_HOPPER = (9, 0)
_FLASH_HEAD_SIZE = 256
_TRITON_HEAD_SIZE = 512  # masked.forward.MAX_HEAD_SIZE; that module needs Triton


@dataclass(frozen=True, eq=False)
class AttentionMask:
    """The keys that each query sees; made by :func:`attention_mask`.

    With ``window`` 0 and no ``documents`` it is purely causal.
    """

    sequence: int
    window: int
    documents: Documents | None
    device: torch.device | None

    @property
    def causal(self) -> bool:
        """Every query sees all tokens up to its own."""
        return self.window == 0 and self.documents is None

    @property
    def by_position(self) -> bool:
        """Whether [B, S, heads, d] is the best layout of q, k, v and the result's gradient.

        Backends that take windows and documents read this layout; torch's backends for causal
        attention read [B, heads, S, d].
        """
        return not self.causal

    @functools.cached_property
    def dense(self) -> torch.Tensor | None:
        """bool [B or 1, 1, S, S], True where a query (row) sees a key; None: purely causal.

        Built on first use.
        """
        if self.causal:
            return None
        first = self.first
        index = torch.arange(self.sequence, device=first.device)
        seen = (index[None] <= index[:, None]) & (index[None, None] >= first[:, :, None])
        return seen[:, None]

    @functools.cached_property
    def first(self) -> torch.Tensor:
        """int32 [B or 1, S]: the first key that a query sees. Along a sequence it never falls."""
        if self.documents is None:
            start = torch.zeros(1, self.sequence, dtype=torch.int32, device=self.device)
        else:
            start = self.documents.starts()
        if not self.window:
            return start
        oldest = torch.arange(
            1 - self.window,
            1 - self.window + self.sequence,
            dtype=torch.int32,
            device=start.device,
        )
        return torch.maximum(start, oldest)

    @functools.cached_property
    def until(self) -> torch.Tensor:
        """int32 [B or 1, S]: the first query after those that see a key."""
        # ``first`` never falls, so the queries that see a key are a run: it ends before the first
        # query whose own first key is larger.
        key = torch.arange(self.sequence, dtype=torch.int32, device=self.first.device)
        keys = key.expand(self.first.shape).contiguous()
        return torch.searchsorted(self.first, keys, right=True, out_int32=True)

    @functools.cached_property
    def ragged(self) -> RaggedDocuments | None:
        """The documents in the form that cuDNN takes."""
        return None if self.documents is None else RaggedDocuments(self.documents)


def attention_mask(
    sequence: int,
    *,
    window: int = 0,
    documents: Documents | None = None,
    device: torch.device | None = None,
) -> AttentionMask:
    """Describe a causal mask over ``sequence`` tokens.

    Args:
        sequence: S, the length of the sequence.
        window: a query sees itself and the ``window - 1`` tokens before it; 0 means all before it.
        documents: those of the B sequences, on the device that computes; None: each sequence is
            one.
        device: the device that builds a mask without documents.

    Raises:
        ValueError: ``documents`` are of sequences of another length.
    """
    if documents is not None and documents.shape[1] != sequence:
        raise ValueError(
            f"documents of sequences of {documents.shape[1]} tokens"
            f" cannot mask sequences of {sequence}"
        )
    if documents is not None and documents.number == documents.shape[0]:
        documents = None  # each sequence is one document: the fastest backends take it
    return AttentionMask(sequence, window if window < sequence else 0, documents, device)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: AttentionMask,
    backend: str | None = None,
) -> torch.Tensor:
    """softmax(q k^T / sqrt(d)) v under ``mask``; query heads share key/value heads in equal groups.

    Args:
        query: [B, heads, S, d], in any layout; the one that :attr:`AttentionMask.by_position`
            names spares a copy.
        key, value: [B, key/value heads, S, d], likewise.
        backend: one of :data:`BACKENDS`; None: the fastest that can run.

    Returns:
        [B, heads, S, d], not always contiguous.

    Raises:
        ValueError: ``backend`` is unknown or cannot run these inputs here; names those that can.
    """
    if backend is not None:
        return _named(backend, query, mask)(query, key, value, mask)
    chosen = chosen_backend(query, mask)
    if chosen is not None:
        return BACKENDS[chosen].run(query, key, value, mask)
    return _torch_attention(_fastest(causal=mask.causal), query, key, value, mask)


def chosen_backend(query: torch.Tensor, mask: AttentionMask) -> str | None:
    """The fastest of :data:`BACKENDS` for queries like this one, [B, heads, S, d], of any values.

    None: torch chooses among its own.
    """
    able = (name for name in _order(query, mask) if BACKENDS[name].obstacle(query, mask) is None)
    return next(able, None)


def _order(query: torch.Tensor, mask: AttentionMask) -> tuple[str, ...]:
    if not mask.causal:
        return _MASKED
    # For heads wider than 128 cuDNN's backward is faster than flash-attn-4's by a fifth.
    wide = query.shape[-1] > 128 and not torch.are_deterministic_algorithms_enabled()
    return () if wide else _CAUSAL


Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, AttentionMask], torch.Tensor]


@dataclass(frozen=True)
class Backend:
    """One way to compute attention.

    Args:
        run: takes the arguments of :func:`attention`.
        obstacle: the reason why it cannot run a query under a mask here, or None.
    """

    run: Run
    obstacle: Callable[[torch.Tensor, AttentionMask], str | None]


def _named(name: str, query: torch.Tensor, mask: AttentionMask) -> Run:
    backend = BACKENDS.get(name)
    obstacle = "there is none of that name" if backend is None else backend.obstacle(query, mask)
    if backend is None or obstacle is not None:
        able = ", ".join(
            other for other, found in BACKENDS.items() if found.obstacle(query, mask) is None
        )
        raise ValueError(
            f"attention backend {name!r} cannot be used: {obstacle}; available here: {able}"
        )
    return backend.run


def _fastest(*, causal: bool) -> AbstractContextManager[None]:
    """The order in which torch tries its backends; it skips those that cannot take the inputs."""
    if torch.are_deterministic_algorithms_enabled():
        # See Note [Deterministic attention]. For dense masks as well: torch's own order can choose
        # cuDNN.
        return sdpa_kernel(_REPEATABLE, set_priority=True)
    if not causal:
        return nullcontext()
    return sdpa_kernel([SDPBackend.CUDNN_ATTENTION, *_REPEATABLE], set_priority=True)


def _torch_attention(
    choice: AbstractContextManager[None],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: AttentionMask,
) -> torch.Tensor:
    # One layout into the backends and, by _ContiguousGradient, one back: cuDNN's cached plans
    # depend on it.
    q, k, v = query.contiguous(), key.contiguous(), value.contiguous()
    dense, shared = mask.dense, q.shape[1] // k.shape[1]
    if shared > 1 and dense is not None:  # no fused backend takes both a mask and shared heads
        k, v = k.repeat_interleave(shared, dim=1), v.repeat_interleave(shared, dim=1)
        shared = 1
    with choice:
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=dense, is_causal=dense is None, enable_gqa=shared > 1
        )
    contiguous: torch.Tensor = apply(_ContiguousGradient, out)
    return contiguous


class _ContiguousGradient(torch.autograd.Function):
    """The identity; its gradient comes out contiguous.

    torch caches cuDNN's plan of a backward by the shapes and strides of q, k and v, not by the
    gradient's. If a gradient has another layout than the first one, cuDNN reads past it: wrong
    gradients, or an illegal memory access. So the gradient always has one layout.
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
        return "its backward does not repeat bit for bit, and trainer.training.deterministic is set"
    return _device_obstacle(query) or _causal_obstacle(mask)


def _flash_obstacle(query: torch.Tensor, mask: AttentionMask) -> str | None:
    return (_device_obstacle(query) if query.is_cuda else None) or _causal_obstacle(mask)


def _causal_obstacle(mask: AttentionMask) -> str | None:
    # torch passes no window and no document bounds to these backends, only a flag for causality.
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
    """The package's attention function; None if it cannot be imported."""
    try:
        found: Callable[..., Any] | None = getattr(
            importlib.import_module(module), "flash_attn_func", None
        )
    except Exception:  # a package that was built for another torch raises errors of any kind
        return None
    return found


def _of_package(module: str, capability: tuple[int, int], *, repeats: bool) -> Backend:
    """An adapter to a generation of the flash-attn package (arXiv 2307.08691, 2407.08608).

    All generations have the same call, in different modules. ``repeats``: the call takes
    ``deterministic``.
    """

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: AttentionMask) -> torch.Tensor:
        function = _imported(module)
        assert function is not None
        options: dict[str, Any] = {"window_size": (mask.window - 1, 0)} if mask.window else {}
        if torch.are_deterministic_algorithms_enabled():
            options["deterministic"] = True
        # The package shares heads by itself; some generations also return the logarithm of the
        # sums.
        found = function(*_by_position(q, k, v), causal=True, **options)
        out: torch.Tensor = found[0] if isinstance(found, tuple) else found
        return out.transpose(1, 2)

    def obstacle(query: torch.Tensor, mask: AttentionMask) -> str | None:
        if mask.documents is not None:
            return "it takes no documents"
        if torch.are_deterministic_algorithms_enabled() and not repeats:
            return (
                "its backward is not known to repeat bit for bit, and "
                "trainer.training.deterministic is set"
            )
        missing = _device_obstacle(query, capability)
        if missing is None and _imported(module) is None:
            return f"{module}.flash_attn_func cannot be imported"
        return missing

    return Backend(run, obstacle)


def _flash_4_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: AttentionMask
) -> torch.Tensor:
    _check_documents(q, mask)
    query, key, value = _by_position(q, k, v, copy=mask.documents is not None)
    found = flash_attention_4.attend(query, key, value, mask.window, mask.documents)
    return found.transpose(1, 2)


def _by_position(*tensors: torch.Tensor, copy: bool = False) -> list[torch.Tensor]:
    """[B, S, heads, d], dense in either order of positions and heads; ``copy``: contiguous."""
    # The flash kernels take any strides of positions and heads, so a dense [B, heads, S, d] tensor
    # is only viewed in the other order.
    turned = [x.transpose(1, 2) for x in tensors]
    kept = [x.is_contiguous() and not copy for x in tensors]
    return [x if keep else x.contiguous() for x, keep in zip(turned, kept, strict=True)]


def _flash_4_obstacle(query: torch.Tensor, mask: AttentionMask) -> str | None:
    if missing := _device_obstacle(query, _HOPPER):
        return missing
    if query.shape[-1] not in flash_attention_4.HEAD_SIZES:
        sizes = ", ".join(map(str, flash_attention_4.HEAD_SIZES))
        return f"it needs a head size of {sizes}, got {query.shape[-1]}"
    return None if flash_attention_4.package() else "flash-attn-4 cannot be imported"


def _graph_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: AttentionMask
) -> torch.Tensor:
    _check_documents(q, mask)
    query, key, value = _by_position(q, k, v, copy=True)
    return cudnn_graph.attend(query, key, value, mask.window, mask.ragged).transpose(1, 2)


def _graph_obstacle(query: torch.Tensor, mask: AttentionMask) -> str | None:
    if torch.are_deterministic_algorithms_enabled():
        return "its deterministic backward needs many times the memory of the activations"
    if missing := _device_obstacle(query, _HOPPER) or _size_obstacle(query):
        return missing
    if cudnn_graph.too_large(query):
        return "a micro-batch of 2^31 elements or more is beyond its offsets"
    if cudnn_graph.frontend() is None:
        return "nvidia-cudnn-frontend with cuDNN 9.10.2 or newer cannot be imported"
    return None


def _triton_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: AttentionMask
) -> torch.Tensor:
    from megascale_kernels.masked.attention import masked_attention

    _check_documents(q, mask)
    first, until = (x.expand(q.shape[0], -1).contiguous() for x in (mask.first, mask.until))
    query, key, value = _by_position(q, k, v, copy=True)
    return masked_attention(query, key, value, first, until).transpose(1, 2)


def _triton_obstacle(query: torch.Tensor, mask: AttentionMask) -> str | None:
    if query.dtype not in (*_HALF, torch.float32):
        return f"it needs floats of 16 or 32 bits, got {query.dtype}"
    if not query.is_cuda:
        return "it needs a CUDA device"
    if query.shape[-1] > _TRITON_HEAD_SIZE:
        return f"it needs a head size of at most {_TRITON_HEAD_SIZE}, got {query.shape[-1]}"
    return None if importlib.util.find_spec("triton") else "triton is not installed"


def _check_documents(query: torch.Tensor, mask: AttentionMask) -> None:
    batch, _, sequence, _ = query.shape
    documents = mask.documents
    if documents is not None and documents.shape != (batch, sequence):
        # A kernel would read past the tensors.
        raise ValueError(f"documents of {documents.shape} tokens cannot mask {(batch, sequence)}")


@functools.cache
def _varlen() -> Callable[..., Any] | None:
    """torch's variable-length attention; None if torch was built without it."""
    if not torch.backends.cuda.is_flash_attention_available():
        return None
    from torch.nn.attention.varlen import varlen_attn  # takes a second: only where it is used

    # In torch 2.11 query heads may share key/value heads; newer versions require enable_gqa.
    named = "enable_gqa" in inspect.signature(varlen_attn).parameters
    return functools.partial(varlen_attn, enable_gqa=True) if named else varlen_attn


def _varlen_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: AttentionMask
) -> torch.Tensor:
    """FlashAttention-2 over the documents of all sequences in one row of tokens [B * S, heads, d].

    It gets the real documents alone, without empty ones that round their number: each empty one
    would cost blocks without work, 128 rows of working memory in backward and, in a deterministic
    backward, a share of the parallel work. Its kernels are not compiled anew for new sizes. The
    grid covers the longest document.
    """
    function, documents = _varlen(), mask.documents
    assert function is not None
    _check_documents(q, mask)
    batch, _, sequence, _ = q.shape
    if documents is None:
        bounds = torch.arange(
            0, (batch + 1) * sequence, sequence, dtype=torch.int32, device=q.device
        )
        longest = sequence
    else:
        bounds, longest = documents.bounds, documents.longest
    # Contiguous: its 16-byte loads need strides that are multiples of 16 bytes.
    rows = [x.transpose(1, 2).flatten(0, 1).contiguous() for x in (q, k, v)]
    left = mask.window - 1 if mask.window else -1
    out: torch.Tensor = function(*rows, bounds, bounds, longest, longest, window_size=(left, 0))
    return out.view(batch, sequence, *out.shape[1:]).transpose(1, 2)


def _varlen_obstacle(query: torch.Tensor, mask: AttentionMask) -> str | None:
    # Deterministic mode is no obstacle: aten's _flash_attention_backward then makes the kernel add
    # in a fixed order.
    if missing := _device_obstacle(query) or _size_obstacle(query):
        return missing
    return "torch was built without flash attention" if _varlen() is None else None


def _size_obstacle(query: torch.Tensor) -> str | None:
    size = query.shape[-1]
    if size % 8 == 0 and size <= _FLASH_HEAD_SIZE:
        return None
    return (
        f"it needs a head size that is a multiple of 8 and at most {_FLASH_HEAD_SIZE}, got {size}"
    )


BACKENDS: Mapping[str, Backend] = {
    "cudnn": Backend(_of_torch(SDPBackend.CUDNN_ATTENTION), _cudnn_obstacle),
    "flash": Backend(_of_torch(SDPBackend.FLASH_ATTENTION), _flash_obstacle),
    "flash_attn_3": _of_package("flash_attn_interface", _HOPPER, repeats=True),
    "flash_attn_4": Backend(_flash_4_attention, _flash_4_obstacle),
    "cudnn_graph": Backend(_graph_attention, _graph_obstacle),
    "varlen": Backend(_varlen_attention, _varlen_obstacle),
    "triton": Backend(_triton_attention, _triton_obstacle),
    "flash_attn_2": _of_package("flash_attn", (8, 0), repeats=True),
    "math": Backend(_of_torch(SDPBackend.MATH), lambda query, mask: None),
}
# The fastest first (benchmarks/results, attention). flash_attn_2 has the same kernels as varlen,
# for a torch built without them. Causal masks that these cannot take go to torch's own backends.
_CAUSAL = ("flash_attn_4",)
_MASKED = ("flash_attn_4", "cudnn_graph", "flash_attn_3", "varlen", "flash_attn_2", "triton")
