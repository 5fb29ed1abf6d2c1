"""Do a layer's transfers hide when its GEMMs run in FP8? A parallel block on 2 and 4 ranks.

    torchrun --nproc-per-node 4 benchmarks/fp8_overlap.py --tp 4,2 --results rows.jsonl
    torchrun --nproc-per-node 2 benchmarks/fp8_overlap.py --tp 2 --quick      # a dry run on a CPU

One process per device; a smaller tensor-parallel size runs in several groups at once. Variants of
a layer run in turn, each for long enough to reach the clock that the power limit allows, so that
a slow drift meets all of them. Ways to communicate:

- none: the same GEMMs and casts without transfers, not cut, partial sums not added. What a way
  takes longer than this is its exposed communication;
- exposed: collectives of the library, one after the other with the GEMMs;
- overlapped, N: the peers' rows cut into N chunks that travel under the GEMMs;
- cut, N: the same cuts and sums with nothing that travels.

Times are those of the slowest rank, medians over rounds. Tables go to stderr, the last line of
stdout is one JSON object with all rows; --results gets each row as it comes.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # a script finds only what lies beside it
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton

from benchmarks.fp8_overlap_layers import (
    GATHER_IN,
    GATHER_OUT,
    SCATTER_IN,
    SCATTER_OUT,
    Bf16Layer,
    Fp8Layer,
    SilentFp8Gemms,
    SilentMatmuls,
)
from benchmarks.fp8_recipes import RECIPES, Layer, Run, Tensors, surroundings

from megascale_kernels.gemm import Gemm
from megascale_kernels.overlap.collective_matmul import CollectiveMatmuls
from megascale_kernels.overlap.fp8_matmul import OverlappedFp8Gemms, PlainFp8Gemms
from megascale_kernels.overlap.peer_memory import open_peer_memory
from megascale_kernels.overlap.row_transfers import RowTransfers, region_bytes
from megascale_trainer.parallel.groups import Group
from megascale_trainer.parallel.tensor.matmul import PlainMatmuls

HIDDEN = {"175b": 12288, "30b": 7168, "7b": 4096}
FORMATS = {
    "bf16": None,
    "fp8, e5m2 gradients": RECIPES["tensor, bounded norm, e5m2 gradients"],
    "fp8, e4m3 gradients by rows": RECIPES["tensor, bounded norm, gradients by rows"],
}
SECTIONS = ("check", "layers", "operators", "transfers")
TIMEOUT_S = 120.0
SETTLE = 0.6  # of a turn, before the part that is timed
Row = dict[str, Any]


class OverlapBench:
    """What one rank measures with, in a tensor-parallel group of ``tp`` ranks."""

    def __init__(self, tp: Group, options: argparse.Namespace, gemm: Gemm) -> None:
        self.tp, self.options, self.gemm = tp, options, gemm
        self.cuda = torch.cuda.is_available()
        index = int(os.environ.get("LOCAL_RANK", "0"))
        self.device = torch.device("cuda", index) if self.cuda else torch.device("cpu")

    def slowest(self, *values: float) -> list[float]:
        """The largest of each value over all ranks."""
        found = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return [float(value) for value in found.tolist()]

    def in_turn(self, runs: Mapping[str, Run]) -> dict[str, list[Row]]:
        """Every run once in each round: milliseconds of the slowest rank, clock and power."""
        counts = {name: self._count(run) for name, run in runs.items()}
        rounds: dict[str, list[Row]] = {name: [] for name in runs}
        for _ in range(self.options.rounds):
            for name, run in runs.items():
                rounds[name].append(self._turn(run, counts[name]))
        return rounds

    def host_ms(self, run: Run) -> float:
        """What the host needs to launch a run, the device idle before; the slowest rank's."""
        times = []
        for _ in range(1 if self.options.quick else 5):
            self.meet()
            begin = time.perf_counter()
            run()
            times.append(1e3 * (time.perf_counter() - begin))
        return self.slowest(statistics.median(times))[0]

    def _count(self, run: Run) -> int:
        """How many runs make a turn, the same on all ranks; warms up, and chooses algorithms."""
        run()
        self.meet()
        if self.options.quick:
            return 1
        begin = time.perf_counter()
        for _ in range(2):
            run()
        self._wait()
        each_s = self.slowest((time.perf_counter() - begin) / 2)[0]
        return max(2, round(self.options.turn_s / each_s))

    def _turn(self, run: Run, count: int) -> Row:
        self.meet()
        for _ in range(int(SETTLE * count)):
            run()
        if not self.cuda:
            begin = time.perf_counter()
            for _ in range(count):
                run()
            return {"ms": self.slowest(1e3 * (time.perf_counter() - begin) / count)[0]}
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(count):
            run()
        end.record()
        clocks, powers = [], []
        while not end.query():
            with contextlib.suppress(Exception):  # no sensors there: the times are worth having
                if start.query():
                    clocks.append(torch.cuda.clock_rate(self.device))
                    powers.append(torch.cuda.power_draw(self.device) / 1e3)
            time.sleep(0.01)
        row: Row = {"ms": self.slowest(start.elapsed_time(end) / count)[0]}
        if powers:
            row |= {"mhz": statistics.mean(clocks), "w": statistics.mean(powers)}
        return row

    def meet(self) -> None:
        """Wait until all ranks' devices have done all they were given."""
        self._wait()
        self.slowest(0.0)
        self._wait()

    def _wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)


class _Cut(RowTransfers):
    """Cuts GEMMs and adds partial sums, and moves nothing: what was in memory is taken for rows."""

    def _pull(self, *arguments: object) -> None:
        pass

    def _push(self, *arguments: object) -> None:
        pass


class Ways:
    """How a layer of one shape can communicate, by name: objects with its two operators."""

    def __init__(self, bench: OverlapBench, layer: Layer) -> None:
        assert bench.tp.handle is not None
        whole_bytes = 2 * layer.tokens * layer.hidden
        memory = open_peer_memory(
            bench.tp.handle, region_bytes(whole_bytes), bench.device, timeout_s=TIMEOUT_S
        )
        tp, gemm = bench.tp, bench.gemm
        self.transfers = RowTransfers(memory, 1)
        self.bf16: dict[str, Any] = {
            "none": SilentMatmuls(tp.size, gemm),
            "exposed": PlainMatmuls(tp),
        }
        self.fp8: dict[str, Any] = {
            "none": SilentFp8Gemms(tp.size, gemm),
            "exposed": PlainFp8Gemms(tp, gemm),
        }
        # One memory for all: each has ended on all ranks before the next one runs, since turns
        # begin with a collective.
        for number in bench.options.chunks:
            for name, kind in (("overlapped", RowTransfers), ("cut", _Cut)):
                products = CollectiveMatmuls(memory, number)
                products.transfers = kind(memory, number)
                self.bf16[f"{name}, {number}"] = products
                self.fp8[f"{name}, {number}"] = OverlappedFp8Gemms(products.transfers, gemm)


def check(bench: OverlapBench, layer: Layer, t: Tensors, ways: Ways) -> Iterator[Row]:
    """How far overlapped results are from the exposed way's, which sums in another order."""
    for name, recipe in FORMATS.items():
        if recipe is None or name not in bench.options.formats:
            continue
        made = Fp8Layer(t, recipe, bench.gemm)
        wanted: dict[str, torch.Tensor] = {}
        for way, gemms in ways.fp8.items():
            if way == "none" or way.startswith("cut"):
                continue
            worst = 0.0
            for operator, run in made.operators(gemms).items():
                result = run()
                found = result[0] if isinstance(result, tuple) else result
                assert isinstance(found, torch.Tensor)
                reference = wanted.setdefault(operator, found.float())
                error = (found.float() - reference).norm() / reference.norm()
                worst = max(worst, float(error))
            yield {"format": name, "way": way, "error": bench.slowest(worst)[0]}


def layers(bench: OverlapBench, layer: Layer, t: Tensors, ways: Ways) -> Iterator[Row]:
    """A whole layer forward and backward, attention included, in every way."""
    others = surroundings(t, 16 if bench.options.quick else 128)
    runs: dict[str, Run] = {"surroundings": others}
    for name in bench.options.formats:
        made, several = _made(name, t, ways, bench.gemm)
        for way, one in several.items():
            runs[f"{name}; {way}"] = partial(_both, partial(made.run, one), others)
    yield from _rows(bench, runs, host=True)


def operators(bench: OverlapBench, layer: Layer, t: Tensors, ways: Ways) -> Iterator[Row]:
    """Each operator by itself, its operands cast before."""
    for operator in (GATHER_IN, SCATTER_OUT, GATHER_OUT, SCATTER_IN):
        runs: dict[str, Run] = {}
        for name in bench.options.formats:
            made, several = _made(name, t, ways, bench.gemm)
            for way, one in several.items():
                runs[f"{name}; {way}"] = made.operators(one)[operator]
        for row in _rows(bench, runs, host=False):
            yield {"operator": operator, **row}


def _made(name: str, t: Tensors, ways: Ways, gemm: Gemm) -> tuple[Any, dict[str, Any]]:
    """The layer in the format ``name``, and the ways for it."""
    recipe = FORMATS[name]
    if recipe is None:
        return Bf16Layer(t), ways.bf16
    return Fp8Layer(t, recipe, gemm), ways.fp8


def transfers(bench: OverlapBench, layer: Layer, t: Tensors, ways: Ways) -> Iterator[Row]:
    """Transfers alone, and what gathered FP8 operands cost besides."""
    moved = ways.transfers
    bytes_of_x = torch.zeros_like(t.x, dtype=torch.uint8)
    amax = torch.ones(1, device=bench.device)
    runs: dict[str, Run] = {
        "all-gather in bf16, collective": partial(_gathered, bench.tp, t.x),
        "all-gather in FP8, collective": partial(_gathered, bench.tp, bytes_of_x),
        "reduce-scatter in bf16, collective": partial(_scattered, bench.tp, t.gathered),
        "all-gather in bf16, peer memory": partial(moved.gather, [t.x], _nothing),
        "all-gather in FP8, peer memory": partial(moved.gather, [bytes_of_x], _nothing),
        "reduce-scatter in bf16, peer memory": partial(moved.scatter, t.gathered, _nothing),
        "largest amax, peer memory": partial(moved.largest, amax),
    }
    for name, recipe in FORMATS.items():
        if recipe is not None and name in bench.options.formats:
            extras = Fp8Layer(t, recipe, bench.gemm).extras()
            runs |= {f"{extra}, {name}": run for extra, run in extras.items()}
    for name, turns in bench.in_turn(runs).items():
        yield {"transfer": name, **_figures([turn["ms"] for turn in turns])}


def _rows(bench: OverlapBench, runs: Mapping[str, Run], *, host: bool) -> Iterator[Row]:
    """A row for each run, with its exposed communication over the same format's "none"."""
    rounds = bench.in_turn(runs)
    for name, turns in rounds.items():
        times = [turn["ms"] for turn in turns]
        row: Row = {"run": name, **_figures(times)}
        base = rounds.get(f"{name.split(';')[0]}; none")
        if base is not None:
            exposed = [one - other["ms"] for one, other in zip(times, base, strict=True)]
            share = 100 * statistics.median(exposed) / row["ms"]
            row |= {"exposed_ms": statistics.median(exposed), "exposed_percent": share}
            row |= {"exposed_low_ms": min(exposed), "exposed_high_ms": max(exposed)}
        for sensor in ("mhz", "w"):
            if found := [turn[sensor] for turn in turns if sensor in turn]:
                row[sensor] = statistics.mean(found)
        if host:
            row["host_ms"] = bench.host_ms(runs[name])
        yield row


def _figures(times_ms: Sequence[float]) -> Row:
    return {"ms": statistics.median(times_ms), "low_ms": min(times_ms), "high_ms": max(times_ms)}


def _both(first: Run, second: Run) -> None:
    first()
    second()


def _nothing(*arguments: object) -> None:
    pass


def _gathered(tp: Group, part: torch.Tensor) -> None:
    tp.all_gather(part.new_empty((part.shape[0] * tp.size, *part.shape[1:])), part)


def _scattered(tp: Group, whole: torch.Tensor) -> None:
    tp.reduce_scatter(whole.new_empty((whole.shape[0] // tp.size, *whole.shape[1:])), whole)


def main(arguments: Sequence[str]) -> int:
    """Measure what the command line says, on every rank; rank 0 reports."""
    options = _parser().parse_args(arguments)
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cuda else "gloo")
    gemm = Gemm(timed=cuda, duration_s=options.choose_s)
    benches = {tp: OverlapBench(_group(tp), options, gemm) for tp in options.tp}
    end = time.monotonic() + options.budget_s
    gc.disable()  # as the trainer does
    rows: list[Row] = []
    for section, tp, model in _program(options):
        bench = benches[tp]
        if bench.slowest(time.monotonic() - end)[0] > 0:
            break
        for row in _measured(bench, section, tp, model):
            rows.append({"section": section, "model": model, "tp": tp, **row})
            _report(rows[-1], options)
        gc.collect()
    if dist.get_rank() == 0:
        name = torch.cuda.get_device_name() if cuda else "cpu"
        about = {"device": name, "ranks": dist.get_world_size(), "torch": torch.__version__}
        print(json.dumps({**about, "turn_s": options.turn_s, "rows": rows}), flush=True)
    dist.destroy_process_group()
    return 0


def _program(options: argparse.Namespace) -> Iterator[tuple[str, int, str]]:
    for tp in options.tp:
        for model in options.models:
            for section in options.only:
                yield section, tp, model


def _measured(bench: OverlapBench, section: str, tp: int, model: str) -> Iterator[Row]:
    measures: dict[str, Callable[[OverlapBench, Layer, Tensors, Ways], Iterator[Row]]] = {
        "check": check,
        "layers": layers,
        "operators": operators,
        "transfers": transfers,
    }
    layer = Layer(model, HIDDEN[model], tp, 8192, sequence=4096 if model == "30b" else 2048)
    if bench.options.quick:
        layer = Layer(model, 64 * tp, tp, 32, sequence=16)
    torch.manual_seed(0)  # norms' weights are the same on all ranks
    t = Tensors(layer, bench.device)
    ways = Ways(bench, layer)
    yield from measures[section](bench, layer, t, ways)
    bench.meet()  # only then may a rank free the memory that its peers reach


def _group(tp: int) -> Group:
    """This rank's tensor-parallel group; all ranks create all groups."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = None
    for first in range(0, world, tp):
        ranks = tuple(range(first, first + tp))
        handle = dist.new_group(list(ranks))
        if rank in ranks:
            assert isinstance(handle, dist.ProcessGroup)
            mine = Group("tp", ranks, rank, handle, None)
    assert mine is not None
    return mine


def _report(row: Row, options: argparse.Namespace) -> None:
    if dist.get_rank():
        return
    figures = (
        f"{key} {value:.4g}" if isinstance(value, float) else f"{value}"
        for key, value in row.items()
    )
    print(" | ".join(figures), file=sys.stderr, flush=True)
    if options.results is not None:
        with options.results.open("a") as file:
            file.write(json.dumps(row) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def some_of(known: Sequence[str], separator: str = ",") -> Callable[[str], list[str]]:
        def parse(text: str) -> list[str]:
            if unknown := set(text.split(separator)) - set(known):
                raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}")
            return text.split(separator)

        return parse

    def sizes(text: str) -> list[int]:
        return [int(size) for size in text.split(",")]

    formats = some_of(list(FORMATS), ";")

    add = parser.add_argument
    add("--tp", type=sizes, default=[2], help="tensor-parallel sizes, each a divisor of the ranks")
    add("--models", type=some_of(list(HIDDEN)), default=list(HIDDEN), help=", ".join(HIDDEN))
    add("--only", type=some_of(SECTIONS), default=list(SECTIONS), help=", ".join(SECTIONS))
    add("--formats", type=formats, default=list(FORMATS), help="; ".join(FORMATS))
    add("--chunks", type=sizes, default=[1, 2, 3, 4], help="into which peers' rows are cut")
    add("--turn-s", type=float, default=0.25, help="of the timed part of a turn")
    add("--rounds", type=int, default=5, help="turns of each variant")
    add("--choose-s", type=float, default=0.03, help="for which each FP8 algorithm is timed")
    add("--budget-s", type=float, default=500.0, help="begin no further section after this time")
    add("--results", type=Path, default=None, help="file that gets each row as a JSON line")
    add("--quick", action="store_true", help="tiny shapes, one run each: a dry run")
    return parser


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
