"""In how many chunks should ranks cut their peers' rows? Answered for many ranks on one device.

It times the GEMMs of one rank's plan, for each number of chunks, without transfers, and computes
what the transfers add from their bytes and the links' rate (``--gbps``):

    python benchmarks/tensor_plan.py --ranks 8
    python benchmarks/tensor_plan.py --ranks 8 --device cpu --shrink 32 --turn-s 0.001 --rounds 1

Four products of a layer are timed in bf16: both projections of the parallel block and both input
gradients. A gather's step starts when its rows have arrived, one after the other behind a barrier;
a scatter's rows leave when their step has ended, and the sum of the partial results (timed) waits
for the last of them and a barrier. Two ranks are timed, one whose cyclic order leaps from the last
row to the first and one whose does not; the slower counts. GEMMs that transfers slow, at the power
limit, are not in it: what a chunk costs is measured, what it hides is computed. In milliseconds;
the last line is one JSON object, whose ``best`` has the chunks of the least sum over the products.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megascale_kernels.overlap.plan import Step, gather_plan, scatter_plan

# hidden size, sequence, micro-batch, one rank's widths of the merged input and output projections
MODELS: dict[str, tuple[int, int, int, int, int]] = {
    "175b": (12288, 2048, 4, 10752, 7680),
    "30b": (7168, 4096, 2, 6272, 4480),
    "30b, sequence 2048": (7168, 2048, 2, 6272, 4480),
}
# an all-gather over peer memory on 4 H200s: benchmarks/results/2026-11-22-fp8-overlap-2x-and-4xh200
_GBPS = 310.0
_BARRIER_MS = 0.01
Run = Callable[[], object]


@dataclass(frozen=True)
class Product:
    """[S, B, ``inner``] x [``inner``, ``outer``], of which the hidden states travel."""

    name: str
    gathers: bool
    inner: int
    outer: int


def main() -> None:
    """Time all models; print a line for each product and the object with all of them."""
    arguments = _parser().parse_args()
    device = torch.device(arguments.device)
    torch.manual_seed(0)
    rows = [row for model in arguments.models for row in _measure(model, device, arguments)]
    best = {
        model: min(
            map(str, arguments.chunks),
            key=lambda chunks, model=model: sum(
                row["chunks"][chunks]["with_transfers_ms"] for row in rows if row["model"] == model
            ),
        )
        for model in arguments.models
    }
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    about = {"device": name, "torch": torch.__version__, "ranks": arguments.ranks}
    print(json.dumps({**about, "gbps": arguments.gbps, "best": best, "rows": rows}), flush=True)


def _measure(
    model: str, device: torch.device, arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """The products of a model."""
    hidden, sequence, batch, width_in, width_out = MODELS[model]
    hidden, sequence, width_in, width_out = (
        size // arguments.shrink for size in (hidden, sequence, width_in, width_out)
    )
    part_rows = max(sequence // arguments.ranks, 1)
    found = []
    for product in (
        Product("gather, input projection", True, hidden, width_in),
        Product("output projection, scatter", False, width_out, hidden),
        Product("gather, output projection's gradient", True, hidden, width_out),
        Product("input projection's gradient, scatter", False, width_in, hidden),
    ):
        times = _Times(product, part_rows, batch, device, arguments)
        row = {"model": model, "product": product.name, **times.row()}
        print(json.dumps(row), flush=True)
        found.append(row)
    return found


class _Times:
    """GEMM times of one product by number of chunks, and what they make with transfers."""

    def __init__(
        self,
        product: Product,
        part_rows: int,
        batch: int,
        device: torch.device,
        arguments: argparse.Namespace,
    ) -> None:
        self._product, self._part_rows, self._arguments = product, part_rows, arguments
        self._device, ranks = device, arguments.ranks
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=device, dtype=dtype)

        self._x = random(ranks * part_rows, batch, product.inner)
        self._factor = random(product.outer, product.inner).t()
        self._out = random(ranks * part_rows, batch, product.outer)
        self._partials = self._out.view(ranks, part_rows, batch, product.outer)
        travels = self._x if product.gathers else self._out
        self._row_ms = travels[0].nbytes / arguments.gbps / 1e6

    def row(self) -> dict[str, Any]:
        """Times of the whole product and of each number of chunks, in milliseconds."""
        ranks = self._arguments.ranks
        runs: dict[str, Run] = {"whole": lambda: self._multiply(0, len(self._x))}
        if not self._product.gathers:
            runs["sum"] = lambda: self._partials.sum(0)
        lengths = set()
        for chunks in self._arguments.chunks:
            for index in self._indices():
                steps = self._plan(index, chunks)
                runs[f"{chunks} of {index}"] = lambda steps=steps: [
                    self._multiply(step.start, step.stop) for step in steps
                ]
                lengths |= {step.stop - step.start for step in steps}
        for length in lengths:
            runs[f"step {length}"] = lambda length=length: self._multiply(0, length)
        times = _medians(runs, self._device, self._arguments)
        travelling = (ranks - 1) * self._part_rows * self._row_ms
        return {
            "whole_ms": times["whole"],
            "transfers_ms": travelling,
            **({} if self._product.gathers else {"sum_ms": times["sum"]}),
            "chunks": {
                str(chunks): {
                    "gemms_ms": max(times[f"{chunks} of {index}"] for index in self._indices()),
                    "with_transfers_ms": max(
                        self._with_transfers(
                            self._plan(index, chunks), times, f"{chunks} of {index}"
                        )
                        for index in self._indices()
                    ),
                }
                for chunks in self._arguments.chunks
            },
        }

    def _indices(self) -> list[int]:
        return sorted({self._arguments.ranks // 2 - 1, self._arguments.ranks - 1})

    def _plan(self, index: int, chunks: int) -> tuple[Step, ...]:
        plan = gather_plan if self._product.gathers else scatter_plan
        return plan(index, self._arguments.ranks, self._part_rows, chunks)

    def _multiply(self, start: int, stop: int) -> None:
        rows, out = self._x[start:stop], self._out[start:stop]
        torch.mm(rows.flatten(0, 1), self._factor, out=out.flatten(0, 1))

    def _with_transfers(self, steps: tuple[Step, ...], times: dict[str, float], run: str) -> float:
        """When the plan ends whose GEMMs together take ``times[run]``.

        Its steps share that time as they take it alone.
        """
        alone = [times[f"step {step.stop - step.start}"] for step in steps]
        scale = times[run] / sum(alone)
        takes = [one * scale for one in alone]
        moves = [(step.stop - step.start) * self._row_ms for step in steps]
        return (
            gather_ms(takes, moves)
            if self._product.gathers
            else scatter_ms(takes, moves, times["sum"])
        )


def gather_ms(takes: Sequence[float], moves: Sequence[float]) -> float:
    """When the last GEMM of a gather ends; the first step's rows are there, the others arrive one
    after the other behind a barrier.
    """
    now, arrived = takes[0], _BARRIER_MS
    for taken, moved in zip(takes[1:], moves[1:], strict=True):
        arrived += moved
        now = max(now, arrived) + taken
    return now


def scatter_ms(takes: Sequence[float], moves: Sequence[float], sum_ms: float) -> float:
    """When the sum of a scatter ends: rows leave one after the other, each behind its GEMM; those
    of the last step stay.
    """
    now = left = 0.0
    for taken, moved in zip(takes[:-1], moves[:-1], strict=True):
        now += taken
        left = max(left, now) + moved
    return max(now + takes[-1], left + _BARRIER_MS) + sum_ms


def _medians(
    runs: dict[str, Run], device: torch.device, arguments: argparse.Namespace
) -> dict[str, float]:
    """Milliseconds of each run: the median of rounds in which all of them take turns."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    repeats = {}
    for name, run in runs.items():  # warms up as well
        run()
        once_s = _seconds(run, 1, device)
        repeats[name] = max(1, min(1000, int(arguments.turn_s / max(once_s, 1e-6))))
    for _ in range(arguments.rounds):
        for name, run in runs.items():
            found[name].append(_seconds(run, repeats[name], device) * 1000)
    return {name: statistics.median(values) for name, values in found.items()}


def _seconds(run: Run, repeats: int, device: torch.device) -> float:
    """Of one run, back to back."""
    _wait(device)
    begin = time.perf_counter()
    for _ in range(repeats):
        run()
    _wait(device)
    return (time.perf_counter() - begin) / repeats


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--chunks", nargs="+", type=int, default=[1, 2, 3, 4, 5, 6, 7])
    parser.add_argument(
        "--gbps", type=float, default=_GBPS, help="what one rank receives in a second, 10^9 bytes"
    )
    parser.add_argument("--turn-s", type=float, default=0.03, help="seconds of one timed turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--shrink", type=int, default=1, help="divide widths and sequence by this (dry runs)"
    )
    return parser


if __name__ == "__main__":
    main()
