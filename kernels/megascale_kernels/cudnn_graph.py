"""cuDNN's attention for documents and sliding windows, through its graph interface.

torch passes only causal attention to cuDNN. The optional package nvidia-cudnn-frontend (extra
``cudnn``) passes the rest to the same library: packed documents are a ragged tensor, a window is a
band of the scores (NVIDIA cuDNN frontend, "Attention"). A plan is built once per shape, in 0.04 to
2 s; documents are padded with empty ones to a power of two, so that few numbers of them occur.
"""

from __future__ import annotations

import functools
import importlib
import math
import threading
from dataclasses import dataclass
from typing import Any, Final

import torch

from megascale_kernels.documents import RaggedDocuments
from megascale_kernels.torch_calls import apply

LEAST_VERSION: Final = 91_002  # earlier ones have known errors in backward
MAX_PLANS: Final = 128  # kept; each has its kernels loaded
_MAX_OFFSET: Final = 2**31 - 1
_NAMES: Final = (
    *("q", "k", "v", "out", "sums", "d_out", "d_q", "d_k", "d_v"),
    *("lengths", "q_at", "k_at", "sums_at"),
)
_UIDS: Final = {name: uid for uid, name in enumerate(_NAMES, start=1)}
_this_thread = threading.local()


@functools.cache
def frontend() -> Any | None:
    """The package ``cudnn``; None where it, or a library that is new enough, is missing."""
    try:
        module = importlib.import_module("cudnn")
        return module if module.backend_version() >= LEAST_VERSION else None
    except Exception:  # a package that finds no library raises errors of any kind
        return None


def _package() -> Any:
    """The package, where :func:`frontend` has found it."""
    module = frontend()
    assert module is not None
    return module


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    window: int,
    documents: RaggedDocuments | None,
) -> torch.Tensor:
    """Causal attention inside documents and a window.

    Args:
        query: bf16 or fp16 [B, S, heads, d], contiguous.
        key, value: [B, S, key/value heads, d], contiguous.
        window: tokens that a query sees, itself among them; 0: all before it.
        documents: those of the B sequences; None: each sequence is one.

    Returns:
        [B, S, heads, d].
    """
    out: torch.Tensor = apply(_Attend, query, key, value, window, documents)
    return out


def too_large(query: torch.Tensor) -> bool:
    """Whether a row of ``query`` [B, heads, S, d] lies beyond what an offset can hold."""
    return query.numel() > _MAX_OFFSET


@dataclass(frozen=True)
class _Shape:
    """What a plan is built for; ``tokens`` is 0 without documents."""

    batch: int
    heads: int
    key_heads: int
    sequence: int
    size: int
    dtype: torch.dtype
    window: int
    tokens: int
    device: int


@dataclass(frozen=True)
class _Plan:
    graph: Any
    workspace_bytes: int


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        window: int,
        documents: RaggedDocuments | None,
    ) -> torch.Tensor:
        batch, sequence, heads, size = query.shape
        shape = _Shape(
            batch=batch if documents is None else documents.number,
            heads=heads,
            key_heads=key.shape[2],
            sequence=sequence,
            size=size,
            dtype=query.dtype,
            window=window,
            tokens=0 if documents is None else batch * sequence,
            device=query.get_device(),
        )
        out = torch.empty_like(query)
        # By position for documents, as the rows of a ragged tensor lie.
        rows = (batch, heads, sequence) if documents is None else (batch, sequence, heads)
        sums = torch.empty(rows, dtype=torch.float32, device=query.device)
        tensors = {"q": query, "k": key, "v": value, "out": out, "sums": sums}
        _run(_forward_plan(shape), tensors, shape, documents)
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.shape = shape
        ctx.documents = documents
        return out

    @staticmethod
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved = ctx.saved_tensors  # read once: where recomputed, a second time is an error
        d_query, d_key, d_value = (torch.empty_like(x) for x in saved[:3])
        names = ("q", "k", "v", "out", "sums", "d_out", "d_q", "d_k", "d_v")
        found = (d_out.contiguous(), d_query, d_key, d_value)
        tensors = dict(zip(names, (*saved, *found), strict=True))
        _run(_backward_plan(ctx.shape), tensors, ctx.shape, ctx.documents)
        return d_query, d_key, d_value, None, None


def _run(
    plan: _Plan, tensors: dict[str, torch.Tensor], shape: _Shape, documents: RaggedDocuments | None
) -> None:
    """Put a plan's kernels into the current stream."""
    if documents is not None:
        tensors = {
            **tensors,
            "lengths": documents.lengths,
            "q_at": documents.offsets(shape.heads * shape.size),
            "k_at": documents.offsets(shape.key_heads * shape.size),
            "sums_at": documents.offsets(shape.heads),
        }
    device = tensors["q"].device
    workspace = torch.empty(max(plan.workspace_bytes, 1), dtype=torch.uint8, device=device)
    module, handle = _package(), _handle(shape.device)
    with torch.cuda.device(device):
        module.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
        plan.graph.execute(
            {_UIDS[name]: tensor.data_ptr() for name, tensor in tensors.items()},
            workspace.data_ptr(),
            handle=handle,
        )


def _handle(device: int) -> Any:
    """cuDNN's handle of this thread: autograd runs backward in a thread of its own."""
    handles: dict[int, Any] = _this_thread.__dict__.setdefault("handles", {})
    if device not in handles:
        with torch.cuda.device(device):
            handles[device] = _package().create_handle()
    return handles[device]


@functools.lru_cache(maxsize=MAX_PLANS)
def _forward_plan(shape: _Shape) -> _Plan:
    graph, inputs, options, ragged = _inputs(shape)
    out, sums = graph.sdpa(
        **{name: inputs[name] for name in "qkv"}, generate_stats=True, name="forward", **options
    )
    out.set_output(True).set_uid(_UIDS["out"]).set_dim(_dim(shape)).set_stride(_stride(shape))
    sums.set_output(True).set_uid(_UIDS["sums"]).set_data_type(_package().data_type.FLOAT)
    sums.set_dim([*_dim(shape)[:3], 1]).set_stride(_sums_stride(shape))
    if ragged:
        out.set_ragged_offset(inputs["q_at"])
        sums.set_ragged_offset(inputs["sums_at"])
    return _built(graph, shape)


@functools.lru_cache(maxsize=MAX_PLANS)
def _backward_plan(shape: _Shape) -> _Plan:
    graph, inputs, options, ragged = _inputs(shape)
    module = _package()
    dim, stride = _dim(shape), _stride(shape)
    for name in ("out", "d_out"):
        inputs[name] = _tensor(graph, name, dim, stride, _kind(shape.dtype))
    sums_dim = [*dim[:3], 1]
    inputs["sums"] = _tensor(graph, "sums", sums_dim, _sums_stride(shape), module.data_type.FLOAT)
    if ragged:
        for name in ("out", "d_out"):
            inputs[name].set_ragged_offset(inputs["q_at"])
        inputs["sums"].set_ragged_offset(inputs["sums_at"])
        # Else its working memory would grow with the padding.
        options |= {"max_total_seq_len_q": shape.tokens, "max_total_seq_len_kv": shape.tokens}
    found = graph.sdpa_backward(
        **{name: inputs[name] for name in "qkv"},
        o=inputs["out"],
        dO=inputs["d_out"],
        stats=inputs["sums"],
        name="backward",
        **options,
    )
    for name, gradient in zip(("d_q", "d_k", "d_v"), found, strict=True):
        keys = name != "d_q"
        gradient.set_output(True).set_uid(_UIDS[name])
        gradient.set_dim(_dim(shape, keys=keys)).set_stride(_stride(shape, keys=keys))
        if ragged:
            gradient.set_ragged_offset(inputs["k_at" if keys else "q_at"])
    return _built(graph, shape)


def _inputs(shape: _Shape) -> tuple[Any, dict[str, Any], dict[str, Any], bool]:
    """A graph, its tensors q, k and v, the options of its mask, and whether they are ragged."""
    module = _package()
    kind, ragged = _kind(shape.dtype), shape.tokens > 0
    graph = module.pygraph(
        io_data_type=kind,
        intermediate_data_type=module.data_type.FLOAT,
        compute_data_type=module.data_type.FLOAT,
        handle=_handle(shape.device),
    )
    inputs = {
        name: _tensor(graph, name, _dim(shape, keys=keys), _stride(shape, keys=keys), kind)
        for name, keys in (("q", False), ("k", True), ("v", True))
    }
    options: dict[str, Any] = {
        "attn_scale": 1 / math.sqrt(shape.size),
        "diagonal_alignment": module.diagonal_alignment.TOP_LEFT,
        "diagonal_band_right_bound": 0,
    }
    if shape.window:
        options["diagonal_band_left_bound"] = shape.window
    if ragged:
        number = shape.batch
        integer = module.data_type.INT32
        inputs["lengths"] = _tensor(graph, "lengths", [number, 1, 1, 1], [1] * 4, integer)
        for name in ("q_at", "k_at", "sums_at"):
            inputs[name] = _tensor(graph, name, [number + 1, 1, 1, 1], [1] * 4, integer)
        for name, at in (("q", "q_at"), ("k", "k_at"), ("v", "k_at")):
            inputs[name].set_ragged_offset(inputs[at])
        options |= {
            "use_padding_mask": True,
            "seq_len_q": inputs["lengths"],
            "seq_len_kv": inputs["lengths"],
        }
    return graph, inputs, options, ragged


def _built(graph: Any, shape: _Shape) -> _Plan:
    module = _package()
    with torch.cuda.device(shape.device):
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([module.heur_mode.A])
        graph.check_support()
        graph.build_plans()
        return _Plan(graph, graph.get_workspace_size())


def _tensor(graph: Any, name: str, dim: list[int], stride: list[int], kind: Any) -> Any:
    return graph.tensor(name=name, dim=dim, stride=stride, data_type=kind).set_uid(_UIDS[name])


def _kind(dtype: torch.dtype) -> Any:
    module = _package()
    return module.data_type.BFLOAT16 if dtype is torch.bfloat16 else module.data_type.HALF


def _dim(shape: _Shape, *, keys: bool = False) -> list[int]:
    heads = shape.key_heads if keys else shape.heads
    return [shape.batch, heads, shape.sequence, shape.size]


def _stride(shape: _Shape, *, keys: bool = False) -> list[int]:
    """Of [B, heads, S, d] in memory that lies by position."""
    row = (shape.key_heads if keys else shape.heads) * shape.size
    return [shape.sequence * row, shape.size, row, 1]


def _sums_stride(shape: _Shape) -> list[int]:
    if shape.tokens:
        return [shape.sequence * shape.heads, 1, shape.heads, 1]
    return [shape.heads * shape.sequence, shape.sequence, 1, 1]
