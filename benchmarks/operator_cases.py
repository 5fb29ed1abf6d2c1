"""The operators that are measured: the ways to compute each, and what it costs at least.

An operator is a function here that returns its :class:`Case` for a shape of training. ``CASES``
lists them by name; updates of optimizers are in :mod:`benchmarks.operator_updates`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F

from megascale_kernels.attention import attention_mask
from megascale_kernels.cross_entropy import CrossEntropy, cross_entropy
from megascale_kernels.documents import documents_of
from megascale_trainer.compat import accumulate_matmul
from megascale_trainer.weights import Weight

Tensors = Sequence[torch.Tensor]
Operation = Callable[[], Tensors]
Way = Callable[[torch.dtype], Mapping[str, Operation]]  # passes by name, on fresh inputs
Function = Callable[..., tuple[torch.Tensor, ...]]
REFERENCE = "eager"  # the way that is also run in float64
EPSILON = 1e-5
DOCUMENT_TOKENS = 512  # mean length of packed documents
WINDOWS = 8  # sliding windows in a sequence


@dataclass(frozen=True)
class Shape:
    """A model's sizes, of which one tp rank computes its share for a micro-batch.

    ``tokens`` of the micro-batch, in sequences of ``sequence``; widths are the whole model's.
    """

    hidden: int
    heads: int
    tp: int
    sequence: int
    tokens: int
    vocabulary: int
    device: torch.device
    dtype: torch.dtype

    def random(
        self, *shape: int, seed: int, scale: float = 1.0, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Normal numbers of the device's own generator."""
        generator = torch.Generator(self.device).manual_seed(seed)
        return (
            torch.randn(shape, generator=generator, device=self.device)
            .mul_(scale)
            .to(dtype or self.dtype)
        )


@dataclass(frozen=True)
class Cost:
    """The least that a pass moves and computes: every operand once."""

    bytes: int
    flops: int = 0


@dataclass(frozen=True)
class Case:
    """An operator at a shape.

    Args:
        shape: in words.
        passes: what each costs at least; the last one computes everything.
        ways: each makes fresh inputs of a dtype and returns all passes, ready to run.
    """

    shape: str
    passes: Mapping[str, Cost]
    ways: Mapping[str, Way]


def differentiable(
    plain: Function, inputs: Tensors, vectors: Tensors, others: Mapping[str, Callable[[], Function]]
) -> dict[str, Way]:
    """Ways of a function of ``inputs`` and parameter ``vectors``.

    ``plain``, the same compiled, and ``others``, which take each vector as a :class:`Weight`, add
    its gradient to ``main_grad``, and are imported when called.
    """

    def compiled() -> Function:
        torch.compiler.reset()
        return torch.compile(plain, fullgraph=True, dynamic=False)

    return {
        REFERENCE: lambda dtype: _passes(plain, inputs, vectors, dtype, weights=False),
        "compile": lambda dtype: _passes(compiled(), inputs, vectors, dtype, weights=False),
        **{
            name: partial(
                lambda load, dtype: _passes(load(), inputs, vectors, dtype, weights=True), load
            )
            for name, load in others.items()
        },
    }


def _passes(
    function: Function, inputs: Tensors, vectors: Tensors, dtype: torch.dtype, *, weights: bool
) -> dict[str, Operation]:
    leaves = [tensor.to(dtype, copy=True).requires_grad_() for tensor in inputs]
    values = [tensor.to(dtype, copy=True).requires_grad_() for tensor in vectors]
    sums = [torch.zeros_like(value, dtype=torch.float32) for value in values]
    arguments = [*leaves, *(map(Weight, values, sums) if weights else values)]

    def forward() -> Tensors:
        with torch.no_grad():
            return function(*arguments)

    generator = torch.Generator(leaves[0].device).manual_seed(0)
    d_outputs = [
        torch.randn(out.shape, generator=generator, device=out.device).bfloat16().to(out.dtype)
        for out in forward()
    ]

    kept: list[Tensors] = []  # outputs whose graph is used again

    def backward() -> Tensors:
        if not kept:
            kept.append(function(*arguments))
        return _gradients(kept[0], retain_graph=True)

    def both() -> Tensors:
        outputs = function(*arguments)
        return [*outputs, *_gradients(outputs)]

    def _gradients(outputs: Tensors, retain_graph: bool = False) -> Tensors:
        found = torch.autograd.grad(
            outputs, [*leaves, *values], d_outputs, allow_unused=True, retain_graph=retain_graph
        )
        return [*found[: len(leaves)], *(sums if weights else found[len(leaves) :])]

    return {"forward": forward, "backward": backward, "forward + backward": both}


def _costs(
    forward: int, backward: int, flops: int = 0, backward_flops: int = 0, *, alone: bool = False
) -> dict[str, Cost]:
    """Costs of the passes from bytes and FLOP of each.

    ``alone``: the backward is measured by itself, too. Not of operators whose backward overwrites
    what it reads.
    """
    only = {"backward": Cost(backward, backward_flops)} if alone else {}
    return {
        "forward": Cost(forward, flops),
        **only,
        "forward + backward": Cost(forward + backward, flops + backward_flops),
    }


def norm(shape: Shape, kind: Literal["layernorm", "rmsnorm"], added: bool = False) -> Case:
    """The norm of a sum with the residual (and a bias, ``added``); tp cuts the sequence."""
    rows, width = shape.tokens // shape.tp, shape.hidden
    inputs = [shape.random(rows, width, seed=seed) for seed in (1, 2)]
    seeds = [5] * added + [4] * (kind == "layernorm")
    vectors = [1.0 + shape.random(width, seed=3, scale=0.1)]
    vectors += [shape.random(width, seed=seed) for seed in seeds]

    def plain(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *others: torch.Tensor
    ) -> tuple[Any, ...]:
        stream = x + others[0] + residual if added else x + residual
        if kind == "layernorm":
            return stream, F.layer_norm(stream, (width,), weight, others[-1], EPSILON)
        return stream, F.rms_norm(stream, (width,), weight, EPSILON)

    def fused() -> Function:
        from megascale_kernels.fused import norm as module

        def run(
            x: torch.Tensor, residual: torch.Tensor, weight: Weight, *others: Weight
        ) -> tuple[torch.Tensor, ...]:
            bias = others[-1] if kind == "layernorm" else None
            return module.norm(x, residual, weight, bias, kind, EPSILON, others[:added])

        return run

    ways = differentiable(plain, inputs, vectors, {"fused": fused})
    size = inputs[0].nbytes
    return Case(f"{rows} x {width}", _costs(4 * size, 4 * size, alone=True), ways)


def residual(shape: Shape) -> Case:
    """The residual stream with an output projection's result and its bias; tp cuts the sequence."""
    rows, width = shape.tokens // shape.tp, shape.hidden
    inputs = [shape.random(rows, width, seed=seed) for seed in (1, 2)]

    def plain(stream: torch.Tensor, x: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor]:
        return (stream + (x + bias),)

    def fused() -> Function:
        from megascale_kernels.fused import residual as module

        return lambda stream, x, bias: (module.add(stream, x, [bias]),)

    # Backward hands its gradient on, and reads it for the bias.
    ways = differentiable(plain, inputs, [shape.random(width, seed=3)], {"fused": fused})
    size = inputs[0].nbytes
    return Case(f"{rows} x {width}", _costs(3 * size, size, alone=True), ways)


def activation(shape: Shape, kind: Literal["gelu", "swiglu"]) -> Case:
    """The activation with its bias."""
    ffn = 4 * shape.hidden // shape.tp
    width = ffn if kind == "gelu" else 2 * ffn
    inputs, vectors = [shape.random(shape.tokens, width, seed=1)], [shape.random(width, seed=2)]

    def plain(x: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor]:
        x = x + bias
        if kind == "gelu":
            return (F.gelu(x, approximate="tanh"),)
        gate, up = x.chunk(2, dim=-1)
        return (F.silu(gate) * up,)

    def fused() -> Function:
        from megascale_kernels.fused import activation as module

        return lambda x, bias: (module.activate(x, bias, kind),)

    out, size = shape.tokens * ffn * shape.dtype.itemsize, inputs[0].nbytes
    ways = differentiable(plain, inputs, vectors, {"fused": fused})
    return Case(f"{shape.tokens} x {width}", _costs(size + out, 2 * size + out), ways)


def block_inner(shape: Shape, part: Literal["heads", "all"]) -> Case:
    """What lies between a block's GEMMs: the split into rotated ``heads``, or ``all`` of it."""
    size, heads = shape.hidden // shape.heads, shape.heads // shape.tp
    ffn = 4 * shape.hidden // shape.tp if part == "all" else 0
    width, batch = 3 * heads * size, shape.tokens // shape.sequence
    inputs = [shape.random(shape.sequence, batch, width + ffn, seed=1)]
    vectors = [shape.random(width + ffn, seed=2)]
    position = torch.arange(shape.sequence, device=shape.device).expand(batch, -1)
    pair = torch.arange(size // 2, device=shape.device, dtype=torch.float64)
    angle = position.t()[:, :, None, None] * 10_000.0 ** (-2.0 * pair / size)
    cos, sin = angle.cos().float(), angle.sin().float()

    def turned(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(
            x.dtype
        )

    def plain(x: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, ...]:
        columns, rest = (x + bias).split((width, ffn), dim=-1)
        q, k, v = columns.unflatten(-1, (-1, size)).chunk(3, dim=2)
        q, k, v = (t.permute(1, 2, 0, 3).contiguous() for t in (turned(q), turned(k), v))
        if part == "heads":
            return q, k, v
        attended = (
            F.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3).flatten(2)
        )
        return (torch.cat((attended, F.gelu(rest, approximate="tanh")), dim=-1),)

    def fused() -> Function:
        from benchmarks import operator_fused as module

        split, table = module.Heads(heads, heads, size), module.RotaryTable(cos, sin)
        if part == "heads":
            return module.fused_heads(split, table)
        return module.fused_block_inner(split, table, shape.sequence)

    read = inputs[0].nbytes
    ways = differentiable(plain, inputs, vectors, {"fused": fused})
    if part == "heads":
        return Case(f"{shape.tokens} x {width}", _costs(2 * read, 2 * read), ways)
    written = shape.tokens * (heads * size + ffn) * shape.dtype.itemsize
    flops = _causal_flops(shape)
    costs = _costs(read + written, 2 * read + written, flops, 5 * flops // 2)
    return Case(f"{shape.tokens} x ({width} + {ffn})", costs, ways)


def attention(shape: Shape) -> Case:
    """Dense causal attention, by each backend that is available."""
    size, heads, batch = (
        shape.hidden // shape.heads,
        shape.heads // shape.tp,
        shape.tokens // shape.sequence,
    )
    inputs = [shape.random(batch, heads, shape.sequence, size, seed=seed) for seed in (1, 2, 3)]

    def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor]:
        return (F.scaled_dot_product_attention(q, k, v, is_causal=True),)

    def backend(name: str) -> Function:
        from benchmarks import operator_fused as module

        return module.backend(name, attention_mask(shape.sequence))

    names = ("cudnn", "flash", "flash_attn_2", "flash_attn_3", "flash_attn_4")
    ways = differentiable(plain, inputs, [], {name: partial(backend, name) for name in names})
    flops, one = _causal_flops(shape), inputs[0].nbytes
    return Case(
        f"{batch} x {heads} x {shape.sequence} x {size}",
        _costs(4 * one, 8 * one, flops, 5 * flops // 2),
        ways,
    )


def masked(shape: Shape, kind: str) -> Case:
    """Causal attention inside packed documents or a window: under a dense mask, and without.

    q, k and v lie by position, as fused.block_inner writes them for such a mask.
    """
    size, heads, batch = (
        shape.hidden // shape.heads,
        shape.heads // shape.tp,
        shape.tokens // shape.sequence,
    )
    inputs = [
        shape.random(batch, shape.sequence, heads, size, seed=seed).transpose(1, 2)
        for seed in (1, 2, 3)
    ]
    if kind == "documents":
        generator = torch.Generator().manual_seed(4)
        begins = torch.rand(batch, shape.sequence, generator=generator) < 1 / DOCUMENT_TOKENS
        starts = torch.where(begins, torch.arange(shape.sequence), 0).cummax(1).values
        found = documents_of(starts).map(lambda offsets: offsets.to(shape.device))
        mask = attention_mask(shape.sequence, documents=found)
        described = f"{found.number} documents"
    else:
        window = max(shape.sequence // WINDOWS, 2)
        mask = attention_mask(shape.sequence, window=window, device=shape.device)
        described = f"window {window}"
    dense = mask.dense

    def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor]:
        return (F.scaled_dot_product_attention(q, k, v, attn_mask=dense),)

    def backend(name: str) -> Function:
        from benchmarks import operator_fused as module

        return module.backend(name, mask)

    first = mask.first.expand(batch, -1)
    position = torch.arange(shape.sequence, device=first.device)
    flops = int((position - first + 1).sum()) * 4 * heads * size
    one = inputs[0].nbytes
    costs = _costs(4 * one, 8 * one, flops, 5 * flops // 2)
    names = ("cudnn_graph", "varlen", "triton", "flash_attn_3", "flash_attn_4")
    ways = differentiable(plain, inputs, [], {name: partial(backend, name) for name in names})
    return Case(f"{batch} x {heads} x {shape.sequence} x {size}, {described}", costs, ways)


def _causal_flops(shape: Shape) -> int:
    """FLOP of two GEMMs over half of the square of positions; backward has five such GEMMs."""
    return 2 * shape.tokens * shape.sequence * shape.hidden // shape.tp


def loss(shape: Shape) -> Case:
    """Cross entropy of one tp rank's logits, without the reductions over tp."""
    columns = shape.vocabulary // shape.tp
    inputs = [shape.random(shape.tokens, columns, seed=1, scale=4.0)]
    generator = torch.Generator(shape.device).manual_seed(2)
    targets = torch.randint(0, columns, (shape.tokens,), generator=generator, device=shape.device)

    def plain(logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        log_z = wide.logsumexp(-1)
        return log_z - wide.gather(1, targets[:, None])[:, 0], log_z

    def alone(tensor: torch.Tensor) -> None:
        """The reduction of one rank."""

    def of(kernel: CrossEntropy) -> Function:
        return lambda logits: kernel(logits, targets, 0, columns, alone, alone)

    def fused() -> Function:
        from megascale_kernels.fused import cross_entropy as module

        return of(module.cross_entropy)

    size = inputs[0].nbytes
    ways = differentiable(plain, inputs, [], {"plain": lambda: of(cross_entropy), "fused": fused})
    return Case(f"{shape.tokens} x {columns}", _costs(size, 2 * size), ways)


def weight_gradient(shape: Shape) -> Case:
    """float32 main_grad += d_y^T x of the merged input projection."""
    rows = 7 * shape.hidden // shape.tp
    d_y, x = (shape.random(shape.tokens, width, seed=width) for width in (rows, shape.hidden))

    def plain(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
        total.add_(left @ right)

    def way(load: Callable[[], Callable[..., None]], dtype: torch.dtype) -> dict[str, Operation]:
        function, wide = load(), torch.promote_types(dtype, torch.float32)
        total = torch.zeros(rows, shape.hidden, dtype=wide, device=shape.device)
        left, right = d_y.to(dtype).t(), x.to(dtype)

        def run() -> Tensors:
            function(total, left, right)
            return [total]

        return {"backward": run}

    def compiled() -> Callable[..., None]:
        torch.compiler.reset()
        return torch.compile(plain, dynamic=False)

    loads = {REFERENCE: lambda: plain, "compile": compiled, "fused": lambda: accumulate_matmul}
    ways = {name: partial(way, load) for name, load in loads.items()}
    moved, flops = (
        d_y.nbytes + x.nbytes + 8 * rows * shape.hidden,
        2 * rows * shape.hidden * shape.tokens,
    )
    return Case(f"{rows} x {shape.hidden} x {shape.tokens}", {"backward": Cost(moved, flops)}, ways)


CASES: Mapping[str, Callable[[Shape], Case]] = {
    "layernorm": partial(norm, kind="layernorm"),
    "rmsnorm": partial(norm, kind="rmsnorm"),
    "layernorm_bias": partial(norm, kind="layernorm", added=True),
    "residual": residual,
    "gelu": partial(activation, kind="gelu"),
    "swiglu": partial(activation, kind="swiglu"),
    "heads": partial(block_inner, part="heads"),
    "block_inner": partial(block_inner, part="all"),
    "attention": attention,
    "documents": partial(masked, kind="documents"),
    "window": partial(masked, kind="window"),
    "cross_entropy": loss,
    "weight_gradient": weight_gradient,
}
