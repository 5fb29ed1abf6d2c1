"""FP8 beside bf16 on one GPU: GEMMs, casts, layers by recipe, errors, and autograd's overhead.

    python benchmarks/fp8_gemms.py --quick                  # a dry run at tiny shapes, on a CPU too
    python benchmarks/fp8_gemms.py --only products,layers --models "175b tp4,7b tp1" \\
        --duration-s 0.5

Everything is repeated until the device has settled at the clock that its power limit allows; clock
and power stand beside the times. Rows go to stderr as they are measured; the last line of stdout is
one JSON object with all of them. Exit status: 0, 1 if a way to compute a GEMM failed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

# A script finds only the modules in its own folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton

from benchmarks.fp8_errors import KINDS, Bf16Linear, Fp8Linear, data, errors
from benchmarks.fp8_recipes import (
    LAYERS,
    RECIPES,
    Layer,
    Run,
    Tensors,
    activation_cast,
    bf16_layer,
    cast,
    fp8_layer,
    norm_cast,
    plain_activation,
    random,
    surroundings,
)
from benchmarks.operator_timing import Meter
from benchmarks.power import Sustained, sustained

from megascale_kernels.cublas_lt import (
    WORKSPACE_BYTES,
    CublasLtError,
    GemmPlan,
    current_stream,
    loaded_library,
    problem_of,
)
from megascale_kernels.fused import quantize as casts
from megascale_kernels.fused.activation_operand import activation_operand, activation_with_amax
from megascale_kernels.gemm import DURATION_S, PROPOSALS, Gemm, multiply_by_torch, time_algorithm
from megascale_kernels.quantize import E4M3, E5M2, Factor, norm_bound, scale_of

SECTIONS = ("products", "algorithms", "chunks", "casts", "layers", "stages", "errors", "linear")
BURST_S = 0.02  # a measurement that ends before the clock falls
Row = dict[str, Any]


class Bench:
    """What all sections measure with."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.quick, self.duration_s = options.quick, options.duration_s
        self.gemm = Gemm(options.choices, duration_s=options.choose_s)
        self.meter = Meter(self.device, 2 if options.quick else 15, quick=options.quick)
        self.layers = [
            _small(LAYERS[name]) if options.quick else LAYERS[name] for name in options.models
        ]

    def sustain(self, operation: Run) -> Sustained:
        """The operation at the clock that the device sustains."""
        return sustained(operation, self.device, self.duration_s)

    def once_us(self, operation: Run) -> float:
        """Microseconds of the operation by itself, with cold caches."""
        times_s = self.meter.times_s(operation)
        return 1e6 * times_s[len(times_s) // 2]


def main(arguments: Sequence[str]) -> int:
    """Measure what the command line names; returns 1 if a way to compute a GEMM failed."""
    options = _parser().parse_args(arguments)
    torch.manual_seed(0)
    bench = Bench(options)
    found: dict[str, Any] = {"machine": _machine(bench, options)}
    sections: dict[str, Callable[[Bench], Iterator[Row]]] = {
        "products": gemms,
        "algorithms": algorithms,
        "chunks": chunks,
        "casts": cast_times,
        "layers": layers,
        "stages": stages,
        "errors": error_rows,
        "linear": linear,
    }
    end = time.monotonic() + options.budget_s if options.budget_s else math.inf
    for name in options.only:
        found[name] = []
        for row in sections[name](bench):
            found[name].append(row)
            print(
                f"{name}: " + ", ".join(f"{key} {_text(value)}" for key, value in row.items()),
                file=sys.stderr,
            )
            if time.monotonic() > end:
                break
    print(json.dumps(found), flush=True)
    return int(any("problem" in row for name in options.only for row in found[name]))


def _machine(bench: Bench, options: argparse.Namespace) -> Row:
    cuda = bench.device.type == "cuda"
    version: int | str
    try:
        version = loaded_library().version
    except CublasLtError as obstacle:
        version = str(obstacle)
    return {
        "device": torch.cuda.get_device_name(bench.device) if cuda else "cpu",
        "torch": torch.__version__,
        "cublas_lt": version,
        "copy_gb_per_s": round(bench.meter.bandwidth() / 1e9, 1),
        "duration_s": options.duration_s,
    }


def gemms(bench: Bench) -> Iterator[Row]:
    """Each GEMM of each layer in each way, by itself and sustained."""
    for layer in bench.layers:
        for name, (rows, columns, depth) in layer.gemms().items():
            accumulate = name.endswith("wgrad")
            out = torch.zeros(
                rows,
                columns,
                dtype=torch.float32 if accumulate else torch.bfloat16,
                device=bench.device,
            )
            for way, run in _ways(bench, name, rows, columns, depth, out, accumulate):
                row: Row = {
                    "layer": layer.name,
                    "product": name,
                    "shape": f"{rows}x{columns}x{depth}",
                    "way": way,
                }
                try:
                    took = bench.sustain(run)
                except RuntimeError as obstacle:
                    yield {**row, "problem": str(obstacle).splitlines()[0][:120]}
                    continue
                tflops = 2e-9 * rows * columns * depth / took.median_ms
                yield {**row, **asdict(took), "tflop_per_s": tflops}


def _ways(
    bench: Bench,
    name: str,
    rows: int,
    columns: int,
    depth: int,
    out: torch.Tensor,
    accumulate: bool,
) -> Iterator[tuple[str, Run]]:
    """The ways to compute one GEMM."""
    factors = _factors(bench, name, rows, columns, depth)
    _, a, b = next(factors)
    yield "bf16, torch", partial(multiply_by_torch, a, b, out, accumulate=accumulate)
    yield "bf16, chosen", partial(bench.gemm.multiply, a, b, out, accumulate=accumulate)
    left, right = a.data.contiguous(), b.data.contiguous()
    _, a, b = next(factors)
    yield "fp8, torch", partial(multiply_by_torch, a, b, out, accumulate=accumulate)
    yield "fp8, chosen", partial(bench.gemm.multiply, a, b, out, accumulate=accumulate)
    yield (
        "fp8, chosen, accurate sums",
        partial(bench.gemm.multiply, a, b, out, accumulate=accumulate, fast=False),
    )
    if not name.endswith("forward"):
        gradient = casts.quantize(
            left, E5M2, amax=casts.amax(left), transposed=False
        ).over_columns()
        yield (
            "fp8, chosen, e5m2 gradient",
            partial(bench.gemm.multiply, gradient, b, out, accumulate=accumulate),
        )
    if not accumulate:
        a, b = (casts.quantize_rows(one).over_columns() for one in (left, right))
        yield "fp8 by rows, torch", partial(multiply_by_torch, a, b, out)
        yield "fp8 by rows, chosen", partial(bench.gemm.multiply, a, b, out)


def algorithms(bench: Bench) -> Iterator[Row]:
    """Every proposal of the library for each GEMM, in a burst and sustained."""
    if bench.device.type != "cuda":
        return
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=bench.device)
    for layer in bench.layers:
        for name, (rows, columns, depth) in layer.gemms().items():
            accumulate = name.endswith("wgrad")
            dtype = torch.float32 if accumulate else torch.bfloat16
            out = torch.zeros(rows, columns, dtype=dtype, device=bench.device)
            for kind, left, right in _factors(bench, name, rows, columns, depth):
                problem = problem_of(left, right, out, accumulate=accumulate, fast=True)
                plan = GemmPlan(loaded_library(), problem, bench.device)
                proposed = plan.algorithms(PROPOSALS)
                timed = partial(
                    time_algorithm, left=left, right=right, scratch=out, workspace=workspace
                )
                short_ms = [timed(plan, one, duration_s=BURST_S) for one in proposed]
                for number, (algorithm, burst_ms) in enumerate(
                    zip(proposed, short_ms, strict=True)
                ):
                    run = partial(plan.run, algorithm, left, right, out, workspace)
                    took = bench.sustain(partial(run, stream=current_stream(out.get_device())))
                    row = {"layer": layer.name, "product": name, "dtype": kind, "proposal": number}
                    yield {**row, "burst_ms": burst_ms, **asdict(took)}


def _factors(
    bench: Bench, name: str, rows: int, columns: int, depth: int
) -> Iterator[tuple[str, Factor, Factor]]:
    """The sides of a GEMM in both formats, as they lie in a layer."""
    left, right = random(bench.device, rows, depth), random(bench.device, columns, depth)
    across = left.t().contiguous().t() if name.endswith("wgrad") else left
    yield (
        "bf16",
        Factor(across),
        Factor(right if name.endswith("forward") else right.t().contiguous().t()),
    )
    a, b = (
        casts.quantize(one, amax=casts.amax(one), transposed=False).over_columns()
        for one in (left, right)
    )
    yield "fp8", a, b


def chunks(bench: Bench) -> Iterator[Row]:
    """GEMMs in runs of rows, as overlapped tensor parallelism computes them, beside the whole."""
    for layer in bench.layers:
        for name in ("in, forward", "out, forward", "in, dgrad", "out, dgrad"):
            rows, columns, depth = layer.gemms()[name]
            out = torch.empty(rows, columns, dtype=torch.bfloat16, device=bench.device)
            for kind, left, right in _factors(bench, name, rows, columns, depth):
                for parts in (1, 2, 4, 8):
                    run = partial(_in_parts, bench.gemm, left, right, out, parts)
                    row = {"layer": layer.name, "product": name, "dtype": kind, "parts": parts}
                    yield {**row, **asdict(bench.sustain(run))}


def _in_parts(gemm: Gemm, left: Factor, right: Factor, out: torch.Tensor, parts: int) -> None:
    for rows, result in zip(left.data.chunk(parts), out.chunk(parts), strict=True):
        gemm.multiply(Factor(rows, left.scale), right, result)


def cast_times(bench: Bench) -> Iterator[Row]:
    """Casts and producers of each layer, caches cold, beside the time that their bytes take."""
    bandwidth = bench.meter.bandwidth()
    for layer in bench.layers:
        t = Tensors(layer, bench.device)
        for name, run, moved in _casts(t):
            us = bench.once_us(run)
            yield {"layer": layer.name, "cast": name, "us": us, "floor_us": 1e6 * moved / bandwidth}
        del t


def _casts(t: Tensors) -> Iterator[tuple[str, Run, int]]:
    """(name, operation, bytes that it moves at least)."""
    own, whole, into, joined = t.x.numel(), t.gathered.numel(), t.d_inputs.numel(), t.joined.numel()
    bound = scale_of(norm_bound(t.norm_weight, t.vector), E4M3)
    for recipe, per in (
        ("separate", 2 + 2 + 2 + 2 + 2 + 2 + 1),
        ("fused", 9 + 2),
        ("bound", 7),
        ("rows", 7),
    ):
        yield f"norm, {recipe}", partial(norm_cast, t, _recipe(recipe), bound), per * own
    amax_in = casts.amax(t.d_inputs)
    amax_joined = casts.amax(t.attended)
    rows = casts.quantize_rows(t.gathered)
    tensor = casts.quantize(t.gathered, amax=amax_in, transposed=False)
    yield "transpose of gathered fp8, by rows", partial(casts.transpose, rows), 2 * whole
    yield "transpose of gathered fp8", partial(casts.transpose, tensor), 2 * whole
    ffn, bias, attended = t.ffn, t.bias, t.attended
    yield "activation in bf16 beside attention", partial(plain_activation, t), 4 * joined
    yield (
        "the same with amax",
        partial(activation_with_amax, ffn, bias, "gelu", attended),
        4 * joined,
    )
    yield (
        "the same to fp8 by rows",
        partial(activation_operand, ffn, bias, "gelu", attended),
        3 * joined,
    )
    yield (
        "activation to fp8 twice, separate",
        partial(activation_cast, t, _recipe("separate")),
        10 * joined,
    )
    yield (
        "activation to fp8 twice, fused",
        partial(activation_cast, t, _recipe("fused")),
        8 * joined,
    )
    yield "activation to fp8 twice, rows", partial(activation_cast, t, _recipe("rows")), 5 * joined
    yield "amax of joined", partial(casts.amax, t.joined), 2 * joined
    yield "cast of joined, twice", partial(casts.quantize, t.joined, amax=amax_joined), 4 * joined
    yield "amax of d_inputs", partial(casts.amax, t.d_inputs), 2 * into
    yield "cast of d_inputs, twice", partial(casts.quantize, t.d_inputs, amax=amax_in), 4 * into
    by_rows = partial(cast, t.d_inputs, _recipe("rows"), transposed=True)
    yield "cast of d_inputs, twice, by rows", by_rows, 5 * into
    yield "cast of d_part", partial(cast, t.d_part, _recipe("fused"), transposed=False), 5 * own
    yield (
        "cast of d_part by rows",
        partial(cast, t.d_part, _recipe("rows"), transposed=False),
        3 * own,
    )
    weights = t.weight_in, t.weight_out
    size = sum(weight.numel() for weight in weights)
    yield (
        "weights, amax and cast twice, once a step",
        lambda: [_weight(one) for one in weights],
        6 * size,
    )


def _recipe(scaling: str) -> Any:
    return next(recipe for recipe in RECIPES.values() if recipe.scaling == scaling)


def _weight(weight: torch.Tensor) -> object:
    return casts.quantize(weight, amax=casts.amax(weight))


def layers(bench: Bench) -> Iterator[Row]:
    """All GEMMs and casts of a layer one after the other, sustained: what a layer gains."""
    for layer in bench.layers:
        t = Tensors(layer, bench.device)
        base_ms = math.nan
        for name, gemm in (("bf16, torch", None), ("bf16, chosen", bench.gemm)):
            took = bench.sustain(bf16_layer(t, gemm))
            base_ms = took.median_ms if gemm is None else base_ms
            yield _layer_row(layer, name, took, base_ms)
        for name, recipe in RECIPES.items():
            both, alone = fp8_layer(t, recipe, bench.gemm)
            took = bench.sustain(both)
            yield {
                **_layer_row(layer, name, took, base_ms),
                "casts_ms": bench.sustain(alone).median_ms,
            }
            del both, alone
        del t


def _layer_row(layer: Layer, name: str, took: Sustained, base_ms: float) -> Row:
    tflops = 1e-9 * layer.flops / took.median_ms
    return {
        "layer": layer.name,
        "recipe": name,
        **asdict(took),
        "tflop_per_s": tflops,
        "faster_than_bf16": base_ms / took.median_ms,
    }


def stages(bench: Bench) -> Iterator[Row]:
    """A whole layer forward and backward, sustained; with attention and without transfers."""
    names = [
        name
        for name in RECIPES
        if name not in ("tensor, fused amax", "tensor, bounded norm, accurate sums")
    ]
    for layer in bench.layers:
        t = Tensors(layer, bench.device)
        others = surroundings(t, 16 if bench.quick else 128)
        runs: dict[str, Run] = {"surroundings alone": others, "bf16, torch": bf16_layer(t, None)}
        runs.update((name, fp8_layer(t, RECIPES[name], bench.gemm)[0]) for name in names)
        base_ms = math.nan
        for name, run in runs.items():
            took = bench.sustain(partial(_together, run, others) if run is not others else others)
            base_ms = took.median_ms if name.startswith("bf16") else base_ms
            yield _layer_row(layer, name, took, base_ms)
        del t, runs, others


def _together(first: Run, second: Run) -> None:
    first()
    second()


def error_rows(bench: Bench) -> Iterator[Row]:
    """Relative Frobenius errors against float64 at the input projection's shape."""
    for layer in (bench.layers[0], bench.layers[-1])[: len(bench.layers)]:
        for kind in KINDS:
            drawn = data(kind, layer.tokens, layer.hidden, layer.width_in, bench.device)
            for row in errors(drawn, bench.gemm):
                yield {"layer": layer.name, "data": kind, **row}


def linear(bench: Bench) -> Iterator[Row]:
    """The input projection under autograd, both ways, with all casts but the weight's."""
    for layer in bench.layers:
        drawn = data("normal", layer.tokens, layer.hidden, layer.width_in, bench.device)
        x, anchor = drawn.x.requires_grad_(), drawn.w.requires_grad_()
        main_grad = torch.zeros(drawn.w.shape, device=bench.device)
        weight = casts.quantize(drawn.w.detach(), amax=casts.amax(drawn.w.detach()))

        def run(
            apply: Callable[[], torch.Tensor], x: torch.Tensor = x, dy: torch.Tensor = drawn.dy
        ) -> None:
            torch.autograd.grad(apply(), x, dy)

        bf16 = bench.sustain(partial(run, partial(Bf16Linear.apply, x, anchor, main_grad)))
        fp8 = bench.sustain(
            partial(run, partial(Fp8Linear.apply, x, anchor, weight, main_grad, bench.gemm))
        )
        for name, took in (("bf16", bf16), ("fp8", fp8)):
            ratio = bf16.median_ms / took.median_ms
            yield {"layer": layer.name, "linear": name, **asdict(took), "faster_than_bf16": ratio}


def _small(layer: Layer) -> Layer:
    return Layer(layer.name, 64 * layer.tp, layer.tp, 32, sequence=16)


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _some_of(known: Sequence[str] | Mapping[str, object]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        if unknown := set(text.split(",")) - set(known):
            raise argparse.ArgumentTypeError(
                f"unknown: {', '.join(unknown)}; known: {', '.join(known)}"
            )
        return text.split(",")

    return parse


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", type=_some_of(SECTIONS), default=list(SECTIONS), help=f"of {', '.join(SECTIONS)}"
    )
    parser.add_argument(
        "--models", type=_some_of(LAYERS), default=list(LAYERS), help=f"of {', '.join(LAYERS)}"
    )
    parser.add_argument(
        "--duration-s",
        type=float,
        default=0.5,
        help="of a sustained measurement, with its warm-up",
    )
    parser.add_argument(
        "--choose-s", type=float, default=DURATION_S, help="how long each algorithm is timed"
    )
    parser.add_argument(
        "--choices", type=Path, default=None, help="the file of the chosen algorithms"
    )
    parser.add_argument(
        "--budget-s", type=float, default=0.0, help="end each section after this time in all"
    )
    parser.add_argument("--quick", action="store_true", help="tiny shapes: a dry run")
    return parser


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
