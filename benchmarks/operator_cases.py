"""The operators that are measured: the ways to compute each, and what it costs at least.

An operator is a function here that returns its :class:`Case` for a shape of training. ``CASES``
lists them by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F

from megascale_kernels.adamw import AdamWKernel, AdamWUpdate, BiasCorrection, adamw
from megascale_kernels.attention import BACKENDS, AttentionMask, attention_mask
from megascale_kernels.attention import attention as masked_attention
from megascale_kernels.block_inner import AttentionContext
from megascale_kernels.cross_entropy import CrossEntropy, cross_entropy
from megascale_kernels.documents import documents_of
from megascale_kernels.rotary import Heads, RotaryTable
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
        from torch._functorch import config

        config.donated_buffer = False  # the backward of one forward is measured many times
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


def norm(shape: Shape, kind: Literal["layernorm", "rmsnorm"]) -> Case:
    """The norm of a sum with the residual; tp cuts the sequence."""
    rows, width = shape.tokens // shape.tp, shape.hidden
    inputs = [shape.random(rows, width, seed=seed) for seed in (1, 2)]
    vectors = [1.0 + shape.random(width, seed=3, scale=0.1)]
    vectors += [shape.random(width, seed=4)] * (kind == "layernorm")

    def plain(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *bias: torch.Tensor
    ) -> tuple[Any, ...]:
        stream = x + residual
        if kind == "layernorm":
            return stream, F.layer_norm(stream, (width,), weight, bias[0], EPSILON)
        return stream, F.rms_norm(stream, (width,), weight, EPSILON)

    def fused() -> Function:
        from megascale_kernels.fused import norm as module

        def run(
            x: torch.Tensor, residual: torch.Tensor, weight: Weight, bias: Weight | None = None
        ) -> tuple[torch.Tensor, ...]:
            return module.norm(x, residual, weight, bias, kind, EPSILON)

        return run

    ways = differentiable(plain, inputs, vectors, {"fused": fused})
    size = inputs[0].nbytes
    return Case(f"{rows} x {width}", _costs(4 * size, 4 * size, alone=True), ways)


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


def block_inner(shape: Shape) -> Case:
    """The part of a block between its GEMMs: rotation, attention and activation."""
    size, heads = shape.hidden // shape.heads, shape.heads // shape.tp
    ffn = 4 * shape.hidden // shape.tp
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
        attended = (
            F.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3).flatten(2)
        )
        return (torch.cat((attended, F.gelu(rest, approximate="tanh")), dim=-1),)

    def fused() -> Function:
        from megascale_kernels.fused import block_inner as module

        split, table = Heads(heads, heads, size), RotaryTable(cos, sin)
        mask = attention_mask(shape.sequence)
        context = AttentionContext(split, table, mask)
        return lambda x, bias: (module.block_inner(x, bias, context, "gelu"),)

    read = inputs[0].nbytes
    ways = differentiable(plain, inputs, vectors, {"fused": fused})
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

    mask = attention_mask(shape.sequence)
    names = ("cudnn", "flash", "flash_attn_3", "flash_attn_4")
    ways = differentiable(plain, inputs, [], {name: _backend(name, mask) for name in names})
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

    first = mask.first.expand(batch, -1)
    position = torch.arange(shape.sequence, device=first.device)
    flops = int((position - first + 1).sum()) * 4 * heads * size
    one = inputs[0].nbytes
    costs = _costs(4 * one, 8 * one, flops, 5 * flops // 2)
    names = ("cudnn_graph", "varlen", "triton", "flash_attn_3", "flash_attn_4")
    ways = differentiable(plain, inputs, [], {name: _backend(name, mask) for name in names})
    return Case(f"{batch} x {heads} x {shape.sequence} x {size}, {described}", costs, ways)


def _backend(name: str, mask: AttentionMask) -> Callable[[], Function]:
    """Attention under ``mask`` by one backend; NotImplementedError where it cannot run."""

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor]:
        if obstacle := BACKENDS[name].obstacle(q, mask):
            raise NotImplementedError(obstacle)
        return (masked_attention(q, k, v, mask, name),)

    return lambda: run


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


_REPLICAS = 8  # that share a layer's update


def _numbers(device: torch.device) -> AdamWUpdate:
    skipped = torch.zeros((), dtype=torch.float64, device=device)
    return AdamWUpdate(3e-4, 1e-8, 0.1, BiasCorrection(0.9, 0.95, 7, skipped))


def adamw_update(shape: Shape) -> Case:
    """AdamW of one layer's parameters over tp and 8 replicas."""
    size, wide = _values(shape)
    scale = apply = torch.ones((), device=shape.device)
    numbers = _numbers(shape.device)
    number = torch.tensor(float(numbers.bias.number), device=shape.device)

    def way(load: Callable[[], AdamWKernel], dtype: torch.dtype) -> dict[str, Operation]:
        kernel = load()
        states = torch.stack(wide[:3]).to(torch.promote_types(dtype, torch.float32))
        gradient = wide[3].to(states.dtype, copy=True)
        parameters = torch.empty(size, dtype=dtype, device=shape.device)

        def run() -> Tensors:
            kernel(states, gradient, parameters, scale, apply, numbers)
            return states.unbind()  # not the parameters: their rounding would hide any error

        return {"update": run}

    def of_torch(
        states: torch.Tensor,
        gradient: torch.Tensor,
        parameters: torch.Tensor,
        *rest: torch.Tensor | AdamWUpdate,
    ) -> None:
        master, mean, square = ([row] for row in states)
        torch._fused_adamw_(
            *(master, [gradient], mean, square, [], [number]),
            lr=numbers.learning_rate,
            beta1=numbers.beta1,
            beta2=numbers.beta2,
            weight_decay=numbers.weight_decay,
            eps=numbers.epsilon,
            amsgrad=False,
            maximize=False,
        )
        parameters.copy_(states[0])

    def fused() -> AdamWKernel:
        from megascale_kernels.fused import adamw as module

        return module.adamw

    def compiled() -> AdamWKernel:
        torch.compiler.reset()
        return torch.compile(adamw, dynamic=False)

    loads = {
        REFERENCE: lambda: adamw,
        "compile": compiled,
        "torch_fused": lambda: of_torch,
        "fused": fused,
    }
    ways = {name: partial(way, load) for name, load in loads.items()}
    return Case(f"{size}", {"update": Cost(size * (7 * 4 + shape.dtype.itemsize))}, ways)


def _values(shape: Shape) -> tuple[int, list[torch.Tensor]]:
    """The number of parameters; their masters, both moments and gradients, float32."""
    size = 12 * shape.hidden**2 // shape.tp // _REPLICAS
    wide = [shape.random(size, seed=seed, dtype=torch.float32) for seed in (1, 2, 3, 4)]
    wide[2] = wide[2].square()
    return size, wide


CASES: Mapping[str, Callable[[Shape], Case]] = {
    "layernorm": partial(norm, kind="layernorm"),
    "rmsnorm": partial(norm, kind="rmsnorm"),
    "gelu": partial(activation, kind="gelu"),
    "swiglu": partial(activation, kind="swiglu"),
    "block_inner": block_inner,
    "attention": attention,
    "documents": partial(masked, kind="documents"),
    "window": partial(masked, kind="window"),
    "cross_entropy": loss,
    "adamw": adamw_update,
}
