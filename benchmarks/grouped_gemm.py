"""Times an expert layer on one GPU: its GEMMs, the moves of its rows, and the whole layer.

    python benchmarks/grouped_gemm.py --quick                  # a dry run, on a CPU too
    python benchmarks/grouped_gemm.py --only products --shapes m2 --loads even,uneven
    python benchmarks/grouped_gemm.py --budget-s 240 > grouped.json

Parts (`--only`, in this order):
  products  GEMMs of all experts, forward, input gradient and weight gradient (added into float32),
            in bf16 and FP8: torch's grouped GEMM, and ours
  layer     an expert layer, forward and backward, in a CUDA graph

Shapes: m1 Mixtral 8x7B, m2 Qwen3-30B-A3B, m2-ep8 a device's share of it under EP8 without the
exchange, m3 DeepSeek-V2-Lite with plain attention; micro-batches of 16,384 tokens, in m2-32k
of 32,768. Loads are even, or uneven (log-normal, sigma 0.8, the same for all ways). Times are
medians of 5 runs of a piece, after it ran for as long, so that the clock has fallen to what the
power limit allows.

Each measurement goes to stderr as it comes; the last line of stdout is one JSON object with all.
Exit status: 0, 1 if a way failed that should work here.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

# A script finds only the modules in its own folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton

from megascale_kernels import grouped_gemm
from megascale_kernels.expert_rows import RowPlan, row_plan
from megascale_kernels.fused import expert_rows as fused_rows
from megascale_kernels.fused import grouped_gemm as fused_gemm
from megascale_kernels.fused import quantize as fused_quantize
from megascale_kernels.grouped_gemm import ExpertGroups, expert_groups
from megascale_kernels.quantize import E4M3, Factor, Operand, quantize

PARTS = ("products", "layer")


@dataclass(frozen=True)
class Shape:
    """The widths of a model's expert layer."""

    name: str
    hidden: int
    ffn: int
    experts: int
    top_k: int
    shared: int = 0
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


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("m1", 4096, 14336, 8, 2),
        Shape("m2", 2048, 768, 128, 8),
        Shape("m2-32k", 2048, 768, 128, 8, tokens=32_768),
        Shape("m2-ep8", 2048, 768, 16, 8),
        Shape("m3", 2048, 1408, 64, 6, shared=2),
    )
}
TINY = Shape("tiny", 64, 32, 4, 2, shared=1, tokens=128)


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
    x: torch.Tensor  # [rows, depth]
    w: torch.Tensor  # [experts, width, depth]
    d_y: torch.Tensor  # [rows, width]
    y: torch.Tensor
    d_x: torch.Tensor
    d_w: torch.Tensor  # float32


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
        operands = Product(groups, x, w, d_y, torch.empty_like(d_y), torch.empty_like(x), d_w)
        ways: dict[str, Callable[[Product], Passes]] = {"ours bf16": _ours}
        if bench.device.type == "cuda":
            ways |= {"torch bf16": _torch, "torch fp8": _torch_fp8, "ours fp8": _ours_fp8}
        largest = max(counts) * shape.experts / shape.rows
        for way, passes_of in ways.items():
            passes = passes_of(operands)
            for kind, run in passes.items():
                what = {"shape": shape.name, "product": name, "load": load, "largest": largest}
                flop = 2.0 * shape.rows * depth * width
                bench.time(way, {**what, "pass": kind}, run, flop=flop)
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
    for shape in shapes:
        for load in wanted_loads:
            if "products" in parts:
                products(bench, shape, load)
            if "layer" in parts:
                layer(bench, shape, load)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    result = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "lines": bench.lines,
    }
    print(json.dumps(result), flush=True)
    return 1 if bench.failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
