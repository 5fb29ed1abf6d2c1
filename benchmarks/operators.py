"""Compares fused operators with plain and compiled torch: error against float64, time, floor.

    python benchmarks/operators.py --quick                  # a dry run at tiny shapes, on a CPU too
    python benchmarks/operators.py --only cross_entropy,adamw --hidden 4096 --tp 1,2
    python benchmarks/operators.py --budget-s 540 > operators.json

The floor of a pass is the larger of its bytes over the device's copy bandwidth and its FLOP over
the device's rate in a large GEMM, both measured here. Times are the device's own: cold caches, no
waiting for the host. Errors are those of all results, gradients included, over the size of the
exact result: root mean square, and largest over largest.

Rows go to stderr as they are measured; the last line of stdout is one JSON object with all of them.
Exit status: 0, 1 if a way failed that should work here.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

# A script finds only the modules in its own folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton

from typing import Any

from benchmarks.operator_cases import CASES, REFERENCE, Case, Operation, Shape, Tensors

HEADS = {4096: 32, 5120: 40, 7168: 56, 12288: 96}  # hidden size to heads: 7B, 13B, 30B, 175B
SEQUENCE, MICRO_BATCH, VOCABULARY = 2048, 4, 51200


WAYS = (
    "eager",
    "compile",
    "torch_fused",
    "plain",
    "fused",
    "cudnn",
    "flash",
    "cudnn_graph",
    "varlen",
    "triton",
    "flash_attn_3",
    "flash_attn_4",
)


@dataclass(frozen=True)
class Row:
    """One way's figures of one pass.

    ``problem`` is why it has none; ``failed``: it should have some here.
    """

    operator: str
    shape: str
    work: str
    way: str
    error_rms: float | None = None
    error_max: float | None = None
    median_us: float | None = None
    low_us: float | None = None
    high_us: float | None = None
    floor_us: float | None = None
    problem: str = ""
    failed: bool = False


def main(arguments: Sequence[str]) -> int:
    """Measure what the command line names; 1 if a way failed that should work here."""
    options = _parser().parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    repeats = 2 if options.quick else options.repeats
    meter = Meter(device, repeats, quick=options.quick)
    limits = (meter.bandwidth(), meter.gemm_rate(dtype))
    machine = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "dtype": str(dtype).removeprefix("torch."),
        "copy_gb_per_s": round(limits[0] / 1e9, 1),
        "gemm_tflop_per_s": round(limits[1] / 1e12, 3),
        "repeats": repeats,
    }
    about = ", ".join(f"{name} {value}" for name, value in machine.items())
    _report([json.dumps(machine)] if options.json else [about, *_header()])
    rows: list[Row] = []
    end = time.monotonic() + options.budget_s if options.budget_s else math.inf
    for name in options.only:
        done = set()  # shapes; some depend on tp alone, or on the hidden size alone
        for shape in _shapes(options, device, dtype):
            if time.monotonic() > end:
                break
            case = CASES[name](shape)
            if case.shape in done:
                continue
            done.add(case.shape)
            ways = (way for way in options.ways if time.monotonic() < end)
            for row in measure(name, case, dtype, meter, limits, ways):
                _report([json.dumps(asdict(row)) if options.json else _line(row)])
                rows.append(row)
    print(json.dumps({"machine": machine, "rows": [asdict(row) for row in rows]}), flush=True)
    return int(any(row.failed for row in rows))


def _report(lines: Iterable[str]) -> None:
    print(*lines, sep="\n", file=sys.stderr, flush=True)


def measure(
    operator: str,
    case: Case,
    dtype: torch.dtype,
    meter: Meter,
    limits: tuple[float, float],
    ways: Iterable[str],
) -> Iterator[Row]:
    """The rows of one case: every pass of every way, until ``ways`` ends (at the budget)."""
    exact: Tensors | None = None
    try:
        exact = _results(case.ways[REFERENCE](torch.float64))
    except torch.OutOfMemoryError:
        pass  # times are still useful
    for way in (name for name in ways if name in case.ways):
        try:
            passes = case.ways[way](dtype)
            errors = _errors(_results(passes), exact) if exact is not None else (None, None)
            for work, cost in case.passes.items():
                times_us = [1e6 * time_s for time_s in meter.times_s(passes[work])]
                floor_us = 1e6 * max(cost.bytes / limits[0], cost.flops / limits[1])
                found = (times_us[len(times_us) // 2], times_us[0], times_us[-1], floor_us)
                yield Row(operator, case.shape, work, way, *errors, *found)
        # Not installed, or not for this device.
        except (ImportError, NotImplementedError) as problem:
            yield Row(operator, case.shape, "", way, problem=_short(problem))
        except Exception as problem:  # the other ways are still useful
            yield Row(operator, case.shape, "", way, problem=_short(problem), failed=True)


def _results(passes: Mapping[str, Operation]) -> Tensors:
    """The results of the last pass, from inputs that nothing has run on yet."""
    return [result.detach() for result in list(passes.values())[-1]()]


def _errors(found: Tensors, exact: Tensors) -> tuple[float, float]:
    """The worst of all results: (root mean square, largest) difference over the exact one's."""
    differences = [ours.double() - wanted for ours, wanted in zip(found, exact, strict=True)]
    rms = [float(d.norm() / wanted.norm()) for d, wanted in zip(differences, exact, strict=True)]
    largest = [
        float(d.abs().max() / wanted.abs().max())
        for d, wanted in zip(differences, exact, strict=True)
    ]
    return max(rms), max(largest)


def _short(problem: Exception) -> str:
    first = str(problem).strip().splitlines()[0] if str(problem) else ""
    return f"{type(problem).__name__}: {first}"[:120]


def _header() -> tuple[str, str]:
    names = (
        "operator",
        "shape",
        "pass",
        "way",
        "error rms",
        "error max",
        "median us",
        "low - high us",
        "floor us",
    )
    return f"| {' | '.join(names)} | of floor |", "|---" * (len(names) + 1) + "|"


def _line(row: Row) -> str:
    start = f"| {row.operator} | {row.shape} | {row.work} | {row.way} |"
    if row.median_us is None or row.floor_us is None:
        return f"{start} {'failed: ' if row.failed else ''}{row.problem} | | | | | |"
    errors = " | ".join(
        "-" if error is None else f"{error:.1e}" for error in (row.error_rms, row.error_max)
    )
    times = f"{row.median_us:.1f} | {row.low_us:.1f} - {row.high_us:.1f} | {row.floor_us:.1f}"
    return f"{start} {errors} | {times} | {row.floor_us / row.median_us:.0%} |"


def _shapes(
    options: argparse.Namespace, device: torch.device, dtype: torch.dtype
) -> Iterator[Shape]:
    if options.quick:
        yield Shape(128, 4, 2, 32, 64, 160, device, dtype)
        return
    for hidden in map(int, options.hidden):
        for tp in map(int, options.tp):
            yield Shape(
                hidden,
                HEADS[hidden],
                tp,
                options.sequence,
                max(options.sequence, SEQUENCE * MICRO_BATCH),
                VOCABULARY,
                device,
                dtype,
            )


def _choice(known: Sequence[str]) -> Callable[[str], list[str]]:
    """A parser of some of ``known``, separated by commas."""

    def parse(text: str) -> list[str]:
        if unknown := set(text.split(",")) - set(known):
            raise argparse.ArgumentTypeError(
                f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(known)}"
            )
        return text.split(",")

    return parse


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    lists = {
        "only": list(CASES),
        "ways": list(WAYS),
        "hidden": [str(hidden) for hidden in HEADS],
        "tp": ["1", "2", "8"],
    }
    for name, known in lists.items():
        parser.add_argument(
            f"--{name}", type=_choice(known), default=known, help=f"of {', '.join(known)}"
        )
    parser.add_argument(
        "--sequence",
        type=int,
        choices=(2048, 4096, 8192),
        default=SEQUENCE,
        help=f"tokens of a sequence; {SEQUENCE * MICRO_BATCH} in all (%(default)s)",
    )
    parser.add_argument("--repeats", type=int, default=20, help="measurements of each pass")
    parser.add_argument(
        "--quick", action="store_true", help="one tiny shape, two repeats: a dry run"
    )
    parser.add_argument(
        "--budget-s", type=float, default=0.0, help="start nothing new after this time"
    )
    parser.add_argument(
        "--json", action="store_true", help="rows on stderr as JSON lines instead of a table"
    )
    return parser


WARMUP = 3
# About a millisecond: while the device sleeps the host enqueues the operation, so that the time of
# launching is not measured.
SLEEP_CYCLES = 2_000_000


class Meter:
    """Measures times on one device.

    ``quick`` makes the measurements of the device's limits tiny: for a dry run, not for figures.
    """

    def __init__(self, device: torch.device, repeats: int, *, quick: bool) -> None:
        self.device, self._repeats, self._quick = device, repeats, quick
        # Written before each repeat, twice the size of the cache: operands come from memory.
        self._flush = torch.empty(0)
        if device.type == "cuda":
            cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
            self._flush = torch.empty(2 * cache_bytes, dtype=torch.int8, device=device)

    def times_s(self, operation: Callable[[], Any]) -> list[float]:
        """Seconds of each repeat, ascending; with cold caches, and without waiting for the host."""
        for _ in range(WARMUP):
            operation()
        timed = self._cuda_time_s if self.device.type == "cuda" else _host_time_s
        return sorted(timed(operation) for _ in range(self._repeats))

    def bandwidth(self) -> float:
        """Bytes per second of a large copy on the device, those read plus those written."""
        source = torch.zeros(2**22 if self._quick else 2**31, dtype=torch.int8, device=self.device)
        target = torch.empty_like(source)
        times = self.times_s(lambda: target.copy_(source))
        return 2 * source.numel() / times[len(times) // 2]

    def gemm_rate(self, dtype: torch.dtype) -> float:
        """FLOP per second of a large GEMM of random numbers (zeros draw less power, run faster)."""
        size = 128 if self._quick else 8192
        left, right = (torch.randn(size, size, device=self.device).to(dtype) for _ in range(2))
        times = self.times_s(lambda: left @ right)
        return 2 * size**3 / times[len(times) // 2]

    def _cuda_time_s(self, operation: Callable[[], Any]) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flush.zero_()
        torch.cuda._sleep(SLEEP_CYCLES)
        begin.record()
        operation()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


def _host_time_s(operation: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    operation()
    return time.perf_counter() - begin


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
