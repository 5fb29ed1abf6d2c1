"""Attention by the optional package flash-attn-4 (extra ``flash-attn-4``), for Hopper and newer.

Its kernels are compiled when they are first called, in some 4 s each, and kept in a folder of the
machine. Its import alone takes 6 to 7 s and initialises CUDA, so it cannot happen before a fork.
Both happen in a thread of their own: see Note [A thread for the compiler].
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

import torch

from megascale_kernels.cache_folder import cache_folder
from megascale_kernels.documents import Documents

# Note [A thread for the compiler]
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
# The compiler of the package (NVIDIA's CuTe DSL) leaves cycles of stack frames behind, and a frame
# keeps all frames that called it alive. Called on a worker's main thread it would keep the first
# step's activations and autograd nodes: a worker collects no garbage between steps, and a capture
# of a CUDA graph fails while nodes of a step without graphs are alive. On a thread of its own the
# cycles hold only that thread's frames. So the work given to it must not refer to the caller's
# tensors, and _Kind.compile makes tensors of its own.

# In version 4.0.0b22 heads of 72 give wrong results on Hopper, and those of 8 and 192 do not
# compile.
HEAD_SIZES: Final = (64, 96, 128, 256)
_MODULE: Final = "flash_attn.cute.interface"
_CACHE: Final = "FLASH_ATTENTION_CUTE_DSL_CACHE"
T = TypeVar("T")


def begin_import() -> None:
    """Begin to import the package, if it is installed, on another thread.

    Only for a process that will not fork, after it has chosen its device.
    """
    if _import.result is None:
        _import.result = _on_new_thread(_imported)


def package() -> Any | None:
    """The package's module; None if it cannot be imported. Waits for the import."""
    begin_import()
    assert _import.result is not None
    return _import.result.result()


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    window: int,
    documents: Documents | None,
) -> torch.Tensor:
    """Causal attention inside documents and a window (arXiv 2307.08691, 2407.08608).

    Args:
        query: bf16 or fp16 [B, S, heads, d], the last stride 1; d is one of :data:`HEAD_SIZES`.
        key, value: [B, S, key/value heads, d], likewise.
        window: tokens that a query sees, itself among them; 0: all before it.
        documents: those of the B sequences; None: each sequence is one.

    Returns:
        [B, S, heads, d], contiguous.

    Raises:
        RuntimeError: the kernels could not be compiled.
    """
    kind = _Kind(
        query.dtype,
        query.shape[3],
        query.shape[1],
        query.shape[2] // key.shape[2],
        window,
        documents is not None,
        torch.are_deterministic_algorithms_enabled(),
    )
    if kind not in _compiled:
        _compile(kind, query.device)
    return _call(query, key, value, window, documents)


@dataclass(frozen=True)
class _Kind:
    """The key of compiled kernels; ``shared``: query heads of a key/value head."""

    dtype: torch.dtype
    size: int
    sequence: int
    shared: int
    window: int
    documents: bool
    deterministic: bool

    def compile(self, device: torch.device) -> None:
        """Run the kernels once, on one sequence of zeros.

        Forward with and without a gradient are two kernels. A layer that recomputes runs the first
        forward without one, and the second inside a backward: to compile there would start a
        backward on the thread that waits for it.
        """
        query, key, value = (
            torch.zeros(
                (1, self.sequence, heads, self.size),
                dtype=self.dtype,
                device=device,
                requires_grad=True,
            )
            for heads in (self.shared, 1, 1)
        )
        documents = None
        if self.documents:
            offsets = torch.full((self.sequence + 1,), self.sequence, dtype=torch.int32)
            offsets[0] = 0
            documents = Documents(offsets.to(device), (1, self.sequence), 1, self.sequence)
        with torch.no_grad():
            _call(query.detach(), key.detach(), value.detach(), self.window, documents)
        out = _call(query, key, value, self.window, documents)
        torch.autograd.grad(out, (query, key, value), torch.zeros_like(out))


@dataclass(slots=True)
class _Import:
    result: Future[Any | None] | None = None


_import = _Import()
_compiled: set[_Kind] = set()


def _compile(kind: _Kind, device: torch.device) -> None:
    try:
        _on_new_thread(partial(kind.compile, device)).result()
    except Exception as problem:
        raise RuntimeError(
            f"flash-attn-4 could not compile attention for heads of {kind.size}: install the"
            " versions that the extra flash-attn-4 names, or uninstall it"
        ) from problem
    _compiled.add(kind)


def _on_new_thread(work: Callable[[], T]) -> Future[T]:
    """Run ``work`` in a new thread, on the caller's current device.

    ``work`` must hold no tensor of the caller: see Note [A thread for the compiler].
    """
    device = torch.cuda.current_device() if torch.cuda.is_available() else -1

    def run() -> T:
        with torch.cuda.device(device):
            return work()

    threads = ThreadPoolExecutor(1, "flash-attn-4")
    try:
        return threads.submit(run)
    finally:
        threads.shutdown(wait=False)


def _imported() -> Any | None:
    _keep_kernels()
    try:
        return importlib.import_module(_MODULE)
    except Exception:  # a package that was built for another torch raises errors of any kind
        return None


def _keep_kernels() -> None:
    """Set the package to keep compiled kernels on disk, which it does not by default.

    It reads the setting when it is imported. With a folder that it cannot write it would fail to
    import or to compile, so in that case each process compiles for itself.
    """
    cache = cache_folder()
    if cache is None:
        return
    folder = cache / "flash-attn-4"
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    if folder.is_dir() and os.access(folder, os.W_OK):
        os.environ.setdefault(f"{_CACHE}_ENABLED", "1")
        os.environ.setdefault(f"{_CACHE}_DIR", str(folder))


def _call(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    window: int,
    documents: Documents | None,
) -> torch.Tensor:
    module = package()
    assert module is not None
    options: dict[str, Any] = {
        "causal": True,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    if window:
        options["window_size"] = (window - 1, 0)
    if documents is None:
        out, _ = module.flash_attn_func(query, key, value, **options)
        found: torch.Tensor = out
        return found
    # The package also chooses the kernel by the longest document. A whole sequence as the longest
    # always chooses the same one, which is compiled already.
    longest = query.shape[1]
    out, _ = module.flash_attn_varlen_func(
        *(x.flatten(0, 1) for x in (query, key, value)),
        cu_seqlens_q=documents.bounds,
        cu_seqlens_k=documents.bounds,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        **options,
    )
    found = out.view(query.shape)
    return found
