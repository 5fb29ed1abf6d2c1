"""The time of an expert layer on one GPU: its GEMMs, the moves of its rows, and the whole step.

    python benchmarks/grouped_gemm.py --quick                  # a dry run, on a CPU too
    python benchmarks/grouped_gemm.py --only products --shapes m2 --loads even,uneven
    python benchmarks/grouped_gemm.py --budget-s 240 > grouped.json

Parts (`--only`, in this order):
  limits    a copy, and large GEMMs in bf16 and FP8
  products  GEMMs of all experts, forward, input gradient and weight gradient (added into float32),
            in bf16 and FP8: torch's grouped GEMM, a loop of cuBLAS in a CUDA graph, quack-kernels
            where it is installed, and ours
  rows      rows to experts and back, activation, casts and transposed copies, compared with a copy
  layer     an expert layer, forward and backward, in a CUDA graph, and the sum of its pieces
  rest      what else a transformer layer and a step have: attention, projections, norms, head,
            optimizer
and the projection: the pieces' sum for the rows of a training benchmark, as model TFLOP/s.

Shapes: m1 Mixtral 8x7B, m2 Qwen3-30B-A3B, m2-ep8 a device's share of it under EP8 without the
exchange, m3 DeepSeek-V2-Lite with plain attention; micro-batches of 16,384 tokens, in m2-32k
of 32,768. Even loads, and
uneven ones: log-normal, sigma 0.8, the same for all ways. Times: medians of 5 runs of a piece,
after it ran for as long, so that the clock has fallen to what the power limit allows.

Each measurement goes to stderr as it comes; the last line of stdout is one JSON object with all.
Exit status: 0, 1 if a way failed that should work here.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

# A script finds only the modules in its own folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton

from megascale_kernels import grouped_gemm
from megascale_kernels import router as plain_router
from megascale_kernels.adamw import AdamWUpdate, BiasCorrection
from megascale_kernels.attention import attention_mask
from megascale_kernels.block_inner import AttentionContext
from megascale_kernels.expert_rows import RowPlan, row_plan
from megascale_kernels.fused import expert_rows as fused_rows
from megascale_kernels.fused import grouped_gemm as fused_gemm
from megascale_kernels.fused import quantize as fused_quantize
from megascale_kernels.fused import router as fused_router
from megascale_kernels.fused.adamw import adamw
from megascale_kernels.grouped_gemm import ExpertGroups, expert_groups
from megascale_kernels.operators import triton_operators
from megascale_kernels.quantize import E4M3, Factor, Operand, quantize
from megascale_kernels.rotary import HeadNorms, Heads, rotary_frequencies, rotary_table
from megascale_kernels.router import RouterSettings, RoutingGradients
from megascale_trainer.weights import Weight

PARTS = ("limits", "products", "rows", "layer", "rest")
STEP_TOKENS = 65_536
HEAD_SIZE = 128
SEQUENCE = 4096


@dataclass(frozen=True)
class Shape:
    """A model of true widths with few layers; ``vocabulary`` is the model's, by the same share."""

    name: str
    hidden: int
    ffn: int
    experts: int
    top_k: int
    heads: int
    kv_heads: int
    layers: int
    vocabulary: int
    shared: int = 0
    head_norms: bool = False
    tokens: int = 16_384

    @property
    def rows(self) -> int:
        """Rows of all experts."""
        return self.tokens * self.top_k

    def products(self) -> dict[str, tuple[int, int]]:
        """Depth and width of each product of an expert."""
        return {"fc1": (self.hidden, 2 * self.ffn), "fc2": (self.ffn, self.hidden)}

    def expert_flop(self) -> float:
        """One pass through the routed experts of a layer: forward, or one of the gradients."""
        return 6.0 * self.rows * self.hidden * self.ffn

    def layer_weights(self, experts: int) -> int:
        """Weights of a layer's products with ``experts`` routed experts."""
        projections = self.hidden * HEAD_SIZE * 2 * (self.heads + self.kv_heads)
        ffn = 3 * self.hidden * self.ffn * (experts + self.shared)
        return projections + ffn + self.hidden * self.experts

    def flop_per_token(self) -> float:
        """6 x active weights of products, and the causal half of attention."""
        active = self.layers * self.layer_weights(self.top_k) + self.vocabulary * self.hidden
        return 6.0 * active + 6.0 * self.layers * SEQUENCE * self.heads * HEAD_SIZE

    def parameters(self) -> int:
        """All weights but those of norms."""
        return self.layers * self.layer_weights(self.experts) + 2 * self.vocabulary * self.hidden


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("m1", 4096, 14336, 8, 2, 32, 8, 2, 2048),
        Shape("m2", 2048, 768, 128, 8, 32, 4, 6, 18944, head_norms=True),
        Shape("m2-32k", 2048, 768, 128, 8, 32, 4, 6, 18944, head_norms=True, tokens=32_768),
        Shape("m2-ep8", 2048, 768, 16, 8, 32, 4, 6, 18944, head_norms=True),
        Shape("m3", 2048, 1408, 64, 6, 16, 16, 6, 22784, shared=2),
    )
}
TINY = Shape("tiny", 64, 32, 4, 2, 1, 1, 2, 128, shared=1, tokens=128)


class Bench:
    """Times pieces and keeps their lines."""

    def __init__(self, device: torch.device, duration_s: float, budget_s: float) -> None:
        self.device = device
        self._duration_s = duration_s
        self._deadline = time.monotonic() + budget_s
        self.lines: list[dict[str, Any]] = []
        self.failed = False

    def random(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        """Normal numbers in bf16; float32 where the interpreter multiplies, which lacks bf16."""
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        return torch.randn(shape, device=self.device, dtype=dtype) * scale

    def time(
        self,
        piece: str,
        what: dict[str, Any],
        run: Callable[[], Any],
        *,
        flop: float = 0.0,
        moved: float = 0.0,
        graph: bool = False,
    ) -> float | None:
        """Milliseconds of ``run``, noted under ``piece`` and ``what``; None: it failed, or no time.

        Args:
            flop, moved: what it computes, and the bytes that it moves at least.
            graph: launch it from a CUDA graph.
        """
        if time.monotonic() > self._deadline:
            return None
        line: dict[str, Any] = {"piece": piece, **what}
        try:
            times = self._times_ms(self._captured(run) if graph else run)
            milliseconds = statistics.median(times)
            line |= {"ms": milliseconds, "spread": (max(times) - min(times)) / milliseconds}
            if flop:
                line["tflops"] = flop / milliseconds / 1e9
            if moved:
                line["gb_per_s"] = moved / milliseconds / 1e6
        except Exception as error:  # a way that a version lacks must not end the others
            self.failed |= piece.startswith("ours")
            line["failed"] = f"{type(error).__name__}: {str(error)[:200]}"
        self.lines.append(line)
        print(json.dumps(line), file=sys.stderr, flush=True)
        return line.get("ms")

    def found(self, piece: str, **what: Any) -> float | None:
        """Milliseconds of a piece that was timed; of several, the smallest."""
        times = [
            line["ms"]
            for line in self.lines
            if line["piece"] == piece
            and "ms" in line
            and all(line.get(key) == value for key, value in what.items())
        ]
        return min(times, default=None)

    def _captured(self, run: Callable[[], Any]) -> Callable[[], Any]:
        if self.device.type != "cuda":
            return run
        run()  # compiles, and sets up libraries
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return graph.replay

    def _times_ms(self, run: Callable[[], Any]) -> list[float]:
        rounds = 5
        if self.device.type != "cuda":
            begin = time.perf_counter()
            run()
            return [(time.perf_counter() - begin) * 1e3]
        start, end = _event(), _event()
        run()
        start.record()
        run()
        end.record()
        end.synchronize()
        each = max(1, round(500 * self._duration_s / rounds / max(start.elapsed_time(end), 1e-3)))
        for _ in range(each * rounds):
            run()
        times = []
        for _ in range(rounds):
            start.record()
            for _ in range(each):
                run()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / each)
        return times


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def limits(bench: Bench, quick: bool) -> None:
    """The ceilings of this device."""
    source = torch.randint(0, 9, (2**16 if quick else 2**31,), dtype=torch.int8)
    source = source.to(bench.device)
    target = torch.empty_like(source)
    bench.time("copy", {}, lambda: target.copy_(source), moved=2.0 * source.numel())
    size = 64 if quick else 8192
    left, right = bench.random(size, size), bench.random(size, size)
    bench.time("dense bf16", {"size": size}, lambda: left @ right.t(), flop=2.0 * size**3)
    if quick:
        return
    one, left8, right8 = torch.ones((), device=bench.device), left.to(E4M3), right.to(E4M3)
    for fast in (True, False):
        bench.time(
            "dense fp8",
            {"size": size, "fast": fast},
            lambda fast=fast: torch._scaled_mm(  # type: ignore[misc]
                left8, right8.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=fast
            ),
            flop=2.0 * size**3,
        )


def loads(shape: Shape, even: bool) -> list[int]:
    """Rows of each expert."""
    if even:
        return [shape.rows // shape.experts] * shape.experts
    share = torch.exp(0.8 * torch.randn(shape.experts, generator=torch.Generator().manual_seed(3)))
    found = (share / share.sum() * shape.rows).floor().long()
    found[int(found.argmax())] += shape.rows - int(found.sum())
    return [int(count) for count in found]


@dataclass(frozen=True)
class Product:
    """The operands of one product of all experts: y = x @ w^T."""

    groups: ExpertGroups
    counts: list[int]
    x: torch.Tensor  # [rows, depth]
    w: torch.Tensor  # [experts, width, depth]
    d_y: torch.Tensor  # [rows, width]
    y: torch.Tensor
    d_x: torch.Tensor
    d_w: torch.Tensor  # float32

    def segments(self) -> Iterator[tuple[int, int, int]]:
        """The number and the rows of each expert."""
        begin = 0
        for expert, count in enumerate(self.counts):
            yield expert, begin, begin + count
            begin += count


Passes = dict[str, Callable[[], Any]]


def products(bench: Bench, shape: Shape, load: str) -> None:
    """All ways, products and passes of a shape."""
    counts = loads(shape, load == "even")
    offsets = torch.tensor([0, *counts], device=bench.device).cumsum(0).to(torch.int32)
    groups = expert_groups(offsets, shape.rows)
    for name, (depth, width) in shape.products().items():
        x = bench.random(shape.rows, depth)
        w = bench.random(shape.experts, width, depth, scale=0.02)
        d_y = bench.random(shape.rows, width)
        d_w = torch.zeros(w.shape, device=bench.device)
        operands = Product(
            groups, counts, x, w, d_y, torch.empty_like(d_y), torch.empty_like(x), d_w
        )
        ways: dict[str, Callable[[Product], Passes]] = {"ours bf16": _ours}
        if bench.device.type == "cuda":
            ways |= {"torch bf16": _torch, "cublas loop bf16": _loop}
            ways |= {"torch fp8": _torch_fp8, "ours fp8": _ours_fp8}
            if importlib.util.find_spec("quack") is not None:
                ways["quack bf16"] = _quack
        largest = max(counts) * shape.experts / shape.rows
        for way, passes_of in ways.items():
            passes = passes_of(operands)
            for kind, run in passes.items():
                what = {"shape": shape.name, "product": name, "load": load, "largest": largest}
                flop = 2.0 * shape.rows * depth * width
                bench.time(way, {**what, "pass": kind}, run, flop=flop, graph="loop" in way)
            passes.clear()  # with its operands
        del operands, x, w, d_y, d_w


# Triton's interpreter lacks sums through descriptors: there the plain loop adds.
add_weight_gradients = (
    fused_gemm.add_weight_gradients
    if torch.cuda.is_available()
    else grouped_gemm.add_weight_gradients
)


def _ours(p: Product) -> Passes:
    x, w, d_y = Factor(p.x, None), Factor(p.w, None), Factor(p.d_y, None)
    return {
        "forward": lambda: fused_gemm.multiply(x, w, p.groups, p.y),
        "dgrad": lambda: fused_gemm.multiply(d_y, w, p.groups, p.d_x, over_rows=True),
        "wgrad": lambda: add_weight_gradients(p.d_y, p.x, p.groups, p.d_w),
    }


def _ours_fp8(p: Product) -> Passes:
    x, d_y = (fused_quantize.quantize_rows(one) for one in (p.x, p.d_y))
    w, w_t = _weights_fp8(p.w), _weights_fp8(p.w.transpose(1, 2))
    flipped = fused_rows.flip(d_y, p.groups), fused_rows.flip(x, p.groups)
    return {
        "forward": lambda: fused_gemm.multiply(x.over_columns(), w, p.groups, p.y),
        "forward, exact sums": lambda: fused_gemm.multiply(
            x.over_columns(), w, p.groups, p.y, fast=False
        ),
        "dgrad": lambda: fused_gemm.multiply(d_y.over_columns(), w_t, p.groups, p.d_x),
        "wgrad": lambda: fused_gemm.add_weight_gradients_in_fp8(*flipped, p.groups, p.d_w),
    }


def _weights_fp8(w: torch.Tensor) -> Factor:
    """Experts' matrices with one scale for each of their rows."""
    data = torch.empty(w.shape, dtype=E4M3, device=w.device)
    scale = torch.empty(w.shape[:2], device=w.device)
    for expert in range(w.shape[0]):
        operand = quantize(w[expert], per="row")
        data[expert].copy_(operand.data)
        scale[expert].copy_(operand.scale)
    return Factor(data, scale)


def _torch(p: Product) -> Passes:
    ends = p.groups.offsets[1:].contiguous()
    return {
        "forward": lambda: torch._grouped_mm(p.x, p.w.transpose(1, 2), offs=ends),
        "dgrad": lambda: torch._grouped_mm(p.d_y, p.w, offs=ends),
        # It has no float32 result.
        "wgrad, bf16 result": lambda: torch._grouped_mm(p.d_y.t(), p.x, offs=ends),
    }


def _torch_fp8(p: Product) -> Passes:
    ends = p.groups.offsets[1:].contiguous()
    x, d_y = (fused_quantize.quantize_rows(one) for one in (p.x, p.d_y))
    w, w_t = _weights_fp8(p.w), _weights_fp8(p.w.transpose(1, 2))

    def forward(rows: Operand, weights: Factor, *, fast: bool = True) -> torch.Tensor:
        return torch._scaled_grouped_mm(
            rows.data,
            weights.data.transpose(1, 2),
            rows.scale,
            weights.scale,  # type: ignore[arg-type]
            offs=ends,
            out_dtype=torch.bfloat16,
            use_fast_accum=fast,
        )

    return {
        "forward": lambda: forward(x, w),
        "forward, exact sums": lambda: forward(x, w, fast=False),
        "dgrad": lambda: forward(d_y, w_t),
    }


def _loop(p: Product) -> Passes:
    def forward() -> None:
        for expert, begin, end in p.segments():
            torch.mm(p.x[begin:end], p.w[expert].t(), out=p.y[begin:end])

    def dgrad() -> None:
        for expert, begin, end in p.segments():
            torch.mm(p.d_y[begin:end], p.w[expert], out=p.d_x[begin:end])

    def wgrad() -> None:
        for expert, begin, end in p.segments():
            left, right, out = p.d_y[begin:end].t(), p.x[begin:end], p.d_w[expert]
            torch.addmm(out, left, right, out_dtype=torch.float32, out=out)

    return {"forward": forward, "dgrad": dgrad, "wgrad": wgrad}


def _quack(p: Product) -> Passes:
    from quack.gemm_config import GemmConfig
    from quack.gemm_interface import gemm_tuned

    def config(rows: int, columns: int, pingpong: bool) -> GemmConfig:
        return GemmConfig(
            tile_m=rows,
            tile_n=columns,
            pingpong=pingpong,
            cluster_m=2,
            cluster_n=1,
            is_dynamic_persistent=False,
        )

    # The best of a sweep over its own configurations (the dated file has it).
    rows, weights = config(128, 192, True), config(128, 128, True)
    offsets, run = p.groups.offsets, gemm_tuned.fn
    return {
        "forward": lambda: run(p.x, p.w.mT, p.y, cu_seqlens_m=offsets, config=rows),
        "dgrad": lambda: run(p.d_y, p.w, p.d_x, cu_seqlens_m=offsets, config=rows),
        "wgrad": lambda: run(
            p.d_y.t(), p.x, p.d_w, cu_seqlens_k=offsets, add_to_output=True, config=weights
        ),
    }


def chosen_experts(bench: Bench, shape: Shape, load: str) -> torch.Tensor:
    """int64 [tokens, top_k]: random choices, by uneven shares or so that all loads are equal."""
    tokens, experts, top_k = shape.tokens, shape.experts, shape.top_k
    generator = torch.Generator().manual_seed(5)
    if load == "even":
        # Each token has experts a fixed stride apart from a first one; firsts are shuffled.
        first = torch.randperm(tokens, generator=generator).view(-1, 1) % experts
        chosen = (first + torch.arange(top_k) * (experts // top_k)) % experts
    else:
        shares = torch.exp(0.8 * torch.randn(experts, generator=generator)).log()
        noise = -torch.log(-torch.log(torch.rand(tokens, experts, generator=generator)))
        chosen = (shares + noise).topk(top_k, dim=-1).indices
    return chosen.to(bench.device)


def rows(bench: Bench, shape: Shape) -> None:
    """The way of the rows; a copy of the rows, and of the tokens, are what they may take."""
    hidden, ffn, count = shape.hidden, shape.ffn, shape.rows
    chosen = chosen_experts(bench, shape, "even")
    plan = row_plan(chosen, shape.experts)
    x, expanded = bench.random(shape.tokens, hidden), bench.random(count, hidden)
    h, d_a = bench.random(count, 2 * ffn), bench.random(count, ffn)
    weights = torch.rand(count, device=bench.device)
    logits = torch.randn(shape.tokens, shape.experts, device=bench.device)
    large, small = 2.0 * count * hidden, 2.0 * shape.tokens * hidden
    settings = RouterSettings(shape.top_k)
    sequences = max(1, shape.tokens // SEQUENCE)
    router = bench.random(shape.experts, hidden)
    routing = fused_router.choose(logits, None, sequences, settings)
    slopes = RoutingGradients(routing.weights, routing.score_sums, routing.z_sums)
    scored = 4.0 * shape.tokens * shape.experts
    out = torch.empty_like(expanded)
    x8, a8 = fused_rows.spread_in_fp8(x, plan), fused_rows.activate_in_fp8(h, weights)
    h8 = fused_quantize.quantize_rows(h)
    pieces: dict[str, tuple[Callable[[], Any], float]] = {
        "copy of the rows": (lambda: out.copy_(expanded), 2 * large),
        "top-k": (lambda: logits.topk(shape.top_k, dim=-1), 0.0),
        "router product": (lambda: _logits(x, router), small),
        "route": (lambda: fused_router.choose(logits, None, sequences, settings), scored),
        "route by torch": (lambda: plain_router.choose(logits, None, sequences, settings), scored),
        "route gradient": (
            lambda: fused_router.gradient(slopes, logits, routing.chosen, settings),
            2 * scored,
        ),
        "route gradient by torch": (
            lambda: plain_router.gradient(slopes, logits, routing.chosen, settings),
            2 * scored,
        ),
        "plan": (lambda: row_plan(chosen, shape.experts), 0.0),
        "gather by torch": (lambda: torch.index_select(x, 0, plan.source, out=out), large + small),
        "spread": (lambda: fused_rows.spread(x, plan), large + small),
        "spread in fp8": (lambda: fused_rows.spread_in_fp8(x, plan), large / 2 + small),
        "join": (lambda: fused_rows.join(expanded, plan), large + small),
        "activate": (lambda: fused_rows.activate(h, weights), 6.0 * count * ffn),
        "activate in fp8": (lambda: fused_rows.activate_in_fp8(h, weights), 5.0 * count * ffn),
        "activation gradient": (
            lambda: fused_rows.activation_gradient(d_a, h, weights),
            10.0 * count * ffn,
        ),
        "activation gradient in fp8": (
            lambda: fused_rows.activation_gradient_in_fp8(d_a, h, weights),
            8.0 * count * ffn,
        ),
        "flip hidden": (lambda: fused_rows.flip(x8, plan.groups), large),
        "flip ffn": (lambda: fused_rows.flip(a8, plan.groups), 2.0 * count * ffn),
        "flip gate and up": (lambda: fused_rows.flip(h8, plan.groups), 4.0 * count * ffn),
    }
    for name, (run, moved) in pieces.items():
        bench.time(name, {"shape": shape.name}, run, moved=moved, graph=name in IN_A_GRAPH)


# Pieces of several short kernels, which the host would not launch fast enough.
IN_A_GRAPH = ("plan", "router product", "route", "route by torch", "route gradient")


def _logits(x: torch.Tensor, router: torch.Tensor) -> torch.Tensor:
    """float32 logits of hidden states and a router in bf16."""
    if x.is_cuda:
        return torch.mm(x, router.t(), out_dtype=torch.float32)
    return x.float() @ router.float().t()


class ExpertLayer:
    """Forward and backward of the routed experts of a layer, as a trainer would launch them."""

    def __init__(self, bench: Bench, shape: Shape, load: str) -> None:
        hidden, ffn = shape.hidden, shape.ffn
        self.chosen, self.experts = chosen_experts(bench, shape, load), shape.experts
        self.x, self.d_y = bench.random(shape.tokens, hidden), bench.random(shape.tokens, hidden)
        self.weights = torch.rand(shape.tokens, shape.top_k, device=bench.device)
        self.w1 = bench.random(shape.experts, 2 * ffn, hidden, scale=0.02)
        self.w2 = bench.random(shape.experts, hidden, ffn, scale=0.02)
        self.d_w1 = torch.zeros(self.w1.shape, device=bench.device)
        self.d_w2 = torch.zeros(self.w2.shape, device=bench.device)
        if bench.device.type == "cuda":
            self.w1_fp8, self.w2_fp8 = _weights_fp8(self.w1), _weights_fp8(self.w2)
            self.w1_flipped = _weights_fp8(self.w1.transpose(1, 2))
            self.w2_flipped = _weights_fp8(self.w2.transpose(1, 2))

    def _plan(self) -> tuple[RowPlan, torch.Tensor]:
        plan = row_plan(self.chosen, self.experts)
        return plan, self.weights.flatten()[plan.choice]

    def bf16(self) -> torch.Tensor:
        """One micro-batch; returns the gradient of ``x``."""
        plan, weights = self._plan()
        groups, made = plan.groups, self.x.new_empty
        w1, w2 = Factor(self.w1, None), Factor(self.w2, None)
        rows = fused_rows.spread(self.x, plan)
        h, out = made((rows.shape[0], self.w1.shape[1])), made(rows.shape)
        fused_gemm.multiply(Factor(rows, None), w1, groups, h)
        a = fused_rows.activate(h, weights)
        fused_gemm.multiply(Factor(a, None), w2, groups, out)
        fused_rows.join(out, plan)
        d_out = fused_rows.spread(self.d_y, plan)
        d_a, d_rows = made(a.shape), made(rows.shape)
        fused_gemm.multiply(Factor(d_out, None), w2, groups, d_a, over_rows=True)
        add_weight_gradients(d_out, a, groups, self.d_w2)
        d_h, _ = fused_rows.activation_gradient(d_a, h, weights)
        fused_gemm.multiply(Factor(d_h, None), w1, groups, d_rows, over_rows=True)
        add_weight_gradients(d_h, rows, groups, self.d_w1)
        return fused_rows.join(d_rows, plan)

    def fp8(self) -> torch.Tensor:
        """The same with all products in FP8; weights are in FP8 already, both ways."""
        plan, weights = self._plan()
        groups, made = plan.groups, self.x.new_empty
        rows = fused_rows.spread_in_fp8(self.x, plan)
        count = rows.data.shape[0]
        h, out = made((count, self.w1.shape[1])), made(rows.data.shape)
        fused_gemm.multiply(rows.over_columns(), self.w1_fp8, groups, h)
        a = fused_rows.activate_in_fp8(h, weights)
        fused_gemm.multiply(a.over_columns(), self.w2_fp8, groups, out)
        fused_rows.join(out, plan)
        d_out = fused_rows.spread_in_fp8(self.d_y, plan)
        d_a, d_rows = made(a.data.shape), made(rows.data.shape)
        fused_gemm.multiply(d_out.over_columns(), self.w2_flipped, groups, d_a)
        self._add(d_out, a, groups, self.d_w2)
        d_h, _ = fused_rows.activation_gradient_in_fp8(d_a, h, weights)
        fused_gemm.multiply(d_h.over_columns(), self.w1_flipped, groups, d_rows)
        self._add(d_h, rows, groups, self.d_w1)
        return fused_rows.join(d_rows, plan)

    def _add(
        self, gradient: Operand, rows: Operand, groups: ExpertGroups, out: torch.Tensor
    ) -> None:
        left, right = fused_rows.flip(gradient, groups), fused_rows.flip(rows, groups)
        fused_gemm.add_weight_gradients_in_fp8(left, right, groups, out)


def layer(bench: Bench, shape: Shape, load: str) -> None:
    """The routed experts, and the shared ones as a single expert that takes every token."""
    made = ExpertLayer(bench, shape, load)
    what = {"shape": shape.name, "load": load}
    runs = {"bf16": made.bf16}
    if bench.device.type == "cuda":
        runs["fp8"] = made.fp8
    for precision, run in runs.items():
        case = {**what, "precision": precision}
        bench.time("ours layer", case, run, flop=3 * shape.expert_flop(), graph=True)
    if shape.shared and load == "even":
        single = replace(shape, ffn=shape.ffn * shape.shared, experts=1, top_k=1)
        made = ExpertLayer(bench, single, load)
        runs = {"bf16": made.bf16}
        if bench.device.type == "cuda":
            runs["fp8"] = made.fp8
        for precision, run in runs.items():
            bench.time(
                "ours shared experts",
                {"shape": shape.name, "precision": precision},
                run,
                flop=3 * single.expert_flop(),
                graph=True,
            )


def rest(bench: Bench, shape: Shape) -> None:
    """What else a layer and a step have."""
    hidden, tokens = shape.hidden, shape.tokens
    heads = Heads(shape.heads, shape.kv_heads, HEAD_SIZE)
    for name, depth, width in (
        ("qkv", hidden, heads.width),
        ("projection", shape.heads * HEAD_SIZE, hidden),
        ("head", hidden, shape.vocabulary),
    ):
        _dense(bench, shape, name, depth, width)
    sequence = min(SEQUENCE, tokens)
    batch = tokens // sequence
    operators = triton_operators()
    position = torch.arange(sequence, device=bench.device).expand(batch, -1)
    table = rotary_table(position, rotary_frequencies(HEAD_SIZE, 1e6, bench.device))
    mask = attention_mask(sequence, device=bench.device)
    norms = None
    if shape.head_norms:
        norms = HeadNorms(_ones(bench, HEAD_SIZE), _ones(bench, HEAD_SIZE), 1e-6)
    x = bench.random(sequence, batch, heads.width).requires_grad_()

    def attention() -> None:
        x.grad = None
        y = operators.block_inner(x, None, AttentionContext(heads, table, mask, norms), None)
        torch.autograd.backward(y, torch.ones_like(y))

    what = {"shape": shape.name}
    bench.time("attention", what, attention, flop=7.0 * tokens * sequence * shape.heads * HEAD_SIZE)
    stream = bench.random(sequence, batch, hidden).requires_grad_()
    residual = bench.random(sequence, batch, hidden).requires_grad_()
    scale = _ones(bench, hidden)

    def norm() -> None:
        both = operators.norm(stream, residual, scale, None, "rmsnorm", 1e-6)
        torch.autograd.backward(both, [torch.ones_like(one) for one in both])
        stream.grad, residual.grad = None, None

    bench.time("norm", what, norm, graph=True)
    router = bench.random(shape.experts, hidden)
    flat = bench.random(tokens, hidden)
    d_router = torch.zeros(shape.experts, hidden, device=bench.device)
    settings = RouterSettings(shape.top_k)

    def route() -> torch.Tensor:
        logits = _logits(flat, router)
        routing = fused_router.choose(logits, None, batch, settings)
        slopes = RoutingGradients(routing.weights, routing.score_sums, routing.z_sums)
        d_logits = fused_router.gradient(slopes, logits, routing.chosen, settings).to(flat.dtype)
        d_router.add_(d_logits.t() @ flat)
        return d_logits @ router

    bench.time("router", what, route, graph=True)
    logits = bench.random(tokens, shape.vocabulary)
    targets = torch.randint(0, shape.vocabulary, (tokens,), device=bench.device)

    def loss() -> None:
        leaf = logits.detach().requires_grad_()
        found, _ = operators.cross_entropy(
            leaf * 1.0, targets, 0, shape.vocabulary, lambda one: None, lambda one: None
        )
        torch.autograd.backward(found.sum())

    bench.time("loss", what, loss, graph=True)
    size = 2**12 if shape is TINY else 2**28
    states = torch.zeros(3, size, device=bench.device)
    gradient = torch.randn(size, device=bench.device)
    parameters = torch.empty(size, dtype=torch.bfloat16, device=bench.device)
    one = torch.ones((), device=bench.device)
    none_skipped = torch.zeros((), dtype=torch.float64, device=bench.device)
    update = AdamWUpdate(3e-4, 1e-8, 0.1, BiasCorrection(0.9, 0.95, 7, none_skipped))
    bench.time(
        "optimizer",
        {"shape": shape.name, "parameters": size},
        lambda: adamw(states, gradient, parameters, one, one, update),
        moved=30.0 * size,
    )
    bench.time(
        "zeroing", {"shape": shape.name, "parameters": size}, gradient.zero_, moved=4.0 * size
    )


def _ones(bench: Bench, size: int) -> Weight:
    value = bench.random(size).fill_(1.0).requires_grad_()
    return Weight(value, torch.zeros(size, device=bench.device))


def _dense(bench: Bench, shape: Shape, name: str, depth: int, width: int) -> None:
    """A dense product: forward, input gradient and weight gradient, the last added into float32."""
    tokens = shape.tokens
    x, w, d_y = bench.random(tokens, depth), bench.random(width, depth), bench.random(tokens, width)
    d_w = torch.zeros(width, depth, device=bench.device)

    def bf16() -> None:
        torch.mm(x, w.t())
        torch.mm(d_y, w)
        if bench.device.type == "cuda":
            torch.addmm(d_w, d_y.t(), x, out_dtype=torch.float32, out=d_w)
        else:
            d_w.addmm_(d_y.t(), x)

    flop, what = 6.0 * tokens * depth * width, {"shape": shape.name, "product": name}
    bench.time("dense passes bf16", what, bf16, flop=flop)
    if bench.device.type != "cuda":
        return
    w8, w8_t, one = w.to(E4M3), w.t().contiguous().to(E4M3), torch.ones((), device=bench.device)
    amax = torch.full((1,), 8.0, device=bench.device)

    def fp8() -> None:
        left = fused_quantize.quantize(x, amax=amax)
        gradient = fused_quantize.quantize(d_y, amax=amax)
        assert left.transposed is not None and gradient.transposed is not None
        for a, b in (
            (left.data, w8),
            (gradient.data, w8_t),
            (gradient.transposed, left.transposed),
        ):
            torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)

    bench.time("dense passes fp8", what, fp8, flop=flop)


def projection(bench: Bench, shape: Shape, precision: str) -> dict[str, Any] | None:
    """Milliseconds of a step as the sum of its pieces, without a gap; None: a piece is missing.

    Of dense products in FP8 the head stays in bf16. Gradients of FP8 projections are written in
    bf16 here; adding them into float32 takes 6 bytes a weight more.
    """
    what = {"shape": shape.name}
    of_dense = f"dense passes {precision}"
    of_layer = {
        "experts": bench.found("ours layer", **what, load="even", precision=precision),
        "qkv": bench.found(of_dense, **what, product="qkv"),
        "projection": bench.found(of_dense, **what, product="projection"),
        "attention": bench.found("attention", **what),
        "norms": bench.found("norm", **what),
        "router": bench.found("router", **what),
    }
    if shape.shared:
        of_layer["shared experts"] = bench.found("ours shared experts", **what, precision=precision)
    once = {
        "head": bench.found("dense passes bf16", **what, product="head"),
        "loss": bench.found("loss", **what),
    }
    update, zero = bench.found("optimizer", **what), bench.found("zeroing", **what)
    if update is None or zero is None or None in [*of_layer.values(), *once.values()]:
        return None
    measured = next(line["parameters"] for line in bench.lines if line["piece"] == "optimizer")
    batches = STEP_TOKENS // shape.tokens
    parts = {key: value * shape.layers * batches for key, value in of_layer.items() if value}
    parts["norms"] *= 2
    parts |= {key: value * batches for key, value in once.items() if value}
    parts["optimizer and zeroing"] = (update + zero) * shape.parameters() / measured
    total = sum(parts.values())
    return {
        **what,
        "precision": precision,
        "step_ms": total,
        "tokens_per_s": STEP_TOKENS / total * 1e3,
        "model_tflops": STEP_TOKENS * shape.flop_per_token() / total / 1e9,
        "parts_ms": parts,
    }


def main(arguments: Sequence[str]) -> int:
    """Measure what the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--loads", default="even,uneven", help="of products and layer")
    parser.add_argument("--duration-s", type=float, default=0.3, help="of a measurement")
    parser.add_argument("--budget-s", type=float, default=600, help="then nothing more is begun")
    parser.add_argument("--quick", action="store_true", help="a dry run at a tiny shape")
    options = parser.parse_args(arguments)
    parts, wanted_loads = options.only.split(","), options.loads.split(",")
    unknown = {*parts} - {*PARTS} | {*options.shapes.split(",")} - {*SHAPES}
    if unknown or {*wanted_loads} - {"even", "uneven"}:
        parser.error(f"unknown: {', '.join(sorted(unknown)) or options.loads}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not options.quick:
        parser.error("there is no CUDA device: --quick is a dry run")
    bench = Bench(device, 0.0 if options.quick else options.duration_s, options.budget_s)
    torch.manual_seed(1)
    shapes = [TINY] if options.quick else [SHAPES[name] for name in options.shapes.split(",")]
    if "limits" in parts:
        limits(bench, options.quick)
    for shape in shapes:
        for load in wanted_loads:
            if "products" in parts:
                products(bench, shape, load)
            if "layer" in parts:
                layer(bench, shape, load)
        if "rows" in parts:
            rows(bench, shape)
        if "rest" in parts:
            rest(bench, shape)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    sums = [projection(bench, shape, kind) for shape in shapes for kind in ("bf16", "fp8")]
    result = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "lines": bench.lines,
        "projection": [one for one in sums if one is not None],
    }
    print(json.dumps(result), flush=True)
    return 1 if bench.failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
