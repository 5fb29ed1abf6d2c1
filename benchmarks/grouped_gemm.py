"""The pieces of an expert layer on one GPU: its GEMMs, and the moves of its rows.

    python benchmarks/grouped_gemm.py --quick                  # a dry run, on a CPU too
    python benchmarks/grouped_gemm.py --only products --shapes m2 --loads even,uneven
    python benchmarks/grouped_gemm.py --budget-s 240 > grouped.json

Parts (`--only`, in this order):
  limits    a copy, and large GEMMs in bf16 and FP8
  products  GEMMs of all experts, forward, input gradient and weight gradient (added into float32),
            in bf16 and FP8: torch's grouped GEMM, quack-kernels where it is installed, and ours
  rows      rows to experts and back, activation, casts and transposed copies, compared with a copy

For a whole step: `throughput.py --preset m2 --profile`.

Shapes: m1 Mixtral 8x7B, m2 Qwen3-30B-A3B, m2-ep8 a device's share of it under EP8 without the
exchange, m3 DeepSeek-V2-Lite; micro-batches of 16,384 tokens, in m2-32k of 32,768. Even loads, and
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

# A script finds only the modules in its own folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton

from megascale_kernels import grouped_gemm
from megascale_kernels import router as plain_router
from megascale_kernels.expert_rows import row_plan
from megascale_kernels.fused import expert_rows as fused_rows
from megascale_kernels.fused import grouped_gemm as fused_gemm
from megascale_kernels.fused import quantize as fused_quantize
from megascale_kernels.fused import router as fused_router
from megascale_kernels.grouped_gemm import ExpertGroups, expert_groups
from megascale_kernels.quantize import E4M3, Factor, Operand, quantize
from megascale_kernels.router import RouterSettings, RoutingGradients

PARTS = ("limits", "products", "rows")
SEQUENCE = 4096


@dataclass(frozen=True)
class Shape:
    """The widths of a layer with experts, and the tokens of a micro-batch."""

    name: str
    hidden: int
    ffn: int
    experts: int
    top_k: int
    tokens: int = 16_384

    @property
    def rows(self) -> int:
        """Rows of all experts."""
        return self.tokens * self.top_k

    def products(self) -> dict[str, tuple[int, int]]:
        """Depth and width of each product of an expert."""
        return {"fc1": (self.hidden, 2 * self.ffn), "fc2": (self.ffn, self.hidden)}


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("m1", 4096, 14336, 8, 2),
        Shape("m2", 2048, 768, 128, 8),
        Shape("m2-32k", 2048, 768, 128, 8, tokens=32_768),
        Shape("m2-ep8", 2048, 768, 16, 8),
        Shape("m3", 2048, 1408, 64, 6),
    )
}
TINY = Shape("tiny", 64, 32, 4, 2, tokens=128)


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
            if importlib.util.find_spec("quack") is not None:
                ways["quack bf16"] = _quack
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
        if "rows" in parts:
            rows(bench, shape)
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
