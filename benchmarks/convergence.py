"""Loss curves on real text: what a change of the algorithm or of the numbers does to learning.

    python benchmarks/convergence.py --study fp8 --folder out          # bf16, FP8 in both formats
    python benchmarks/convergence.py --study fp8 --folder out --quick  # a dry run on a CPU
    python benchmarks/convergence.py --study experts --folder out --seeds 1,2,3 --plot out.png
    python benchmarks/convergence.py --study experts-fp8 --folder out --steps 1500 --branch-at 500
    python benchmarks/convergence.py --study experts-fp8 --folder out --branch-at 500 --state 4

The trainer itself runs, one rank for each run. The runs of a seed begin with the same values and
read the same samples in the same order. Each run is compared with the first run of the study (or
with --against). One run changes nothing but the rounding or the order of sums: it shows how far
runs part by noise alone. The text is Python source, byte by byte, and no
byte is read twice unless the corpus is too small ("epochs" above 1). With --limit-s runs end where
they are, and pairs are compared up to the tokens that both have read.

With --branch-at the first run trains alone until that step, and all runs continue from its state:
runs from the start diverge by chance, these differ only by the change. With --state as well each
run first computes the losses and the gradients of that many batches with the values of that state,
which are compared with the first run's; where --steps is that state's, nothing more is trained. For
gradients g and those of the first run, r: error is |g - r| / |r|, cosine that of their angle,
length <g, r> / <r, r>. "Next batch" has as g the first run's gradients of the batch after.

Curves have the balance of experts, too: the largest load of an expert over the mean, averaged over
the layers. The last line of stdout is one JSON object; exit status 1 if a run failed.
"""

from __future__ import annotations

import argparse
import csv
import gc
import json
import math
import os
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._C._distributed_c10d import HashStore

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.product_loop import Batches

from megascale_job.config import Fp8Config, JobConfig
from megascale_job.loading import from_accepted
from megascale_trainer.data.indexed import IndexedWriter, token_dtype
from megascale_trainer.process.bootstrap import Rendezvous, create_groups, destroy_groups
from megascale_trainer.trainer import Trainer, set_determinism

END_OF_FILE = 256
_QUICK_TOKENS = 1 << 16
_END = 0.1  # share of the tokens whose mean loss is the end of a curve
VOCABULARY = 257  # bytes, and the end of a file


@dataclass(frozen=True, kw_only=True)
class Variant:
    """The changes of one run.

    Args:
        model, training, loss: fields of these sections of the job.
        experts: the feed-forward layers are experts that together compute as much for a token.
        micro_batches: of a step.
    """

    model: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    loss: Mapping[str, Any] = field(default_factory=dict)
    experts: Mapping[str, Any] | None = None
    micro_batches: int = 1


@dataclass(frozen=True, kw_only=True)
class Study:
    """Runs by name; the first is what the others are compared with unless another is chosen.

    Args:
        noise: the run that differs from the first in nothing that matters.
        model, data: fields of these sections of every run's job.
    """

    runs: Mapping[str, Variant]
    noise: str
    model: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a study's model and batch: ``sequence`` in tokens, ``batch`` in sequences a step."""

    steps: int
    layers: int
    hidden: int
    head_size: int
    sequence: int
    batch: int
    learning_rate: float = 1e-3


QUICK = {"layers": 3, "hidden": 64, "head_size": 16, "sequence": 32, "batch": 2}
# A layer with experts: two of them are as wide as the dense layer, 4 * hidden.
_EXPERTS = {"count": 16, "top_k": 2}


def job_of(study: Study, variant: Variant, sizes: Sizes, seed: int, corpus: str) -> JobConfig:
    """The job of one run on the corpus with that prefix; one device."""
    model = {
        "layers": sizes.layers,
        "hidden_size": sizes.hidden,
        "heads": sizes.hidden // sizes.head_size,
        "vocab_size": VOCABULARY,
        "sequence_length": sizes.sequence,
        **study.model,
        **variant.model,
    }
    if variant.experts is not None:
        width = 4 * sizes.hidden // _EXPERTS["top_k"]
        model["experts"] = {**_EXPERTS, "ffn_size": width, **variant.experts}
    training = {
        "steps": sizes.steps,
        "global_batch_size": sizes.batch,
        "micro_batch_size": sizes.batch // variant.micro_batches,
        "seed": seed,
        **variant.training,
    }
    sources = [{"prefix": corpus}]
    return from_accepted(
        {
            "name": "convergence",
            "model": model,
            "training": training,
            "loss": variant.loss,
            "optimizer": {"name": "adamw", "learning_rate": sizes.learning_rate},
            "schedule": {"warmup_steps": max(1, sizes.steps // 20)},
            "data": {"seed": seed, "document_attention": False, "sources": sources, **study.data},
        }
    )


def _fp8(
    kind: str,
    *,
    first: int = 0,
    last: int = 0,
    fast: str = Fp8Config().fast_accumulation,
    **further: Any,
) -> Variant:
    """``first`` and ``last``: layers in bf16."""
    fp8 = {
        "format": kind,
        "fast_accumulation": fast,
        "layers_at_start_in_bf16": first,
        "layers_at_end_in_bf16": last,
    }
    return Variant(training={"precision": "fp8", "fp8": fp8}, **further)


_BALANCED: dict[str, Any] = {"experts": {}, "loss": {"global_balance": 0.01, "router_z_loss": 1e-3}}
_SERIAL = {"block": "serial", "mlp": "swiglu", "norm": "rmsnorm"}
STUDIES: Mapping[str, Study] = {
    "experts": Study(
        runs={
            "dense": Variant(),
            "dense, other sums": Variant(micro_batches=2),
            "experts": Variant(**_BALANCED),
            "experts, bias": Variant(experts={"score": "sigmoid", "bias_rate": 1e-3}),
            "experts, no balance": Variant(experts={}),
        },
        noise="dense, other sums",
        model=_SERIAL,
        data={"shuffle": "samples"},
    ),
    "experts-fp8": Study(
        runs={
            "bf16": Variant(**_BALANCED),
            "bf16, other sums": Variant(micro_batches=2, **_BALANCED),
            "fp8": _fp8("hybrid", **_BALANCED),
            "fp8, all sums fast": _fp8("hybrid", fast="all", **_BALANCED),
            "fp8, no sums fast": _fp8("hybrid", fast="none", **_BALANCED),
        },
        noise="bf16, other sums",
        model=_SERIAL,
        data={"shuffle": "samples"},
    ),
    "fp8": Study(
        runs={
            "bf16": Variant(),
            "bf16, other sums": Variant(micro_batches=2),
            "fp8, hybrid": _fp8("hybrid"),
            "fp8, hybrid, all sums fast": _fp8("hybrid", fast="all"),
            "fp8, hybrid, forward sums fast": _fp8("hybrid", fast="forward"),
            "fp8, hybrid, input projections fast": _fp8("hybrid", fast="input_projections"),
            "fp8, hybrid, no sums fast": _fp8("hybrid", fast="none"),
            "fp8, e4m3": _fp8("e4m3"),
            "fp8, hybrid, ends in bf16": _fp8("hybrid", first=1, last=1),
            "fp8, hybrid, first layer in bf16": _fp8("hybrid", first=1),
            "fp8, hybrid, last layer in bf16": _fp8("hybrid", last=1),
        },
        noise="bf16, other sums",
        model={"bias": True},
        data={"shuffle": "samples"},  # documents would raise the noise: a batch is part of one file
    ),
}


Curve = list[tuple[int, float]]  # tokens after each step, and the loss of the step
Curves = Mapping[str, Mapping[int, Curve]]  # by run and seed


def main(arguments: Sequence[str]) -> int:
    """Train the chosen runs, each in a process of its own, and compare the curves."""
    begin = time.time()
    options = _parser().parse_args(arguments)
    study = STUDIES[options.study]
    against = options.against or next(iter(study.runs))
    if against not in study.runs:
        names = ", ".join(study.runs)
        print(f"convergence.py: --against {against!r}: give one of {names}", file=sys.stderr)
        return 2
    if options.state and not options.branch_at:
        print("convergence.py: --state: give --branch-at as well", file=sys.stderr)
        return 2
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.only:
        one = compare_state if options.only == _STATE else train
        one(options.only, options)
        return 0
    failed, tokens = 0, None
    if not options.read:
        limit = _QUICK_TOKENS if options.quick else options.corpus_tokens
        tokens = write_corpus(options.folder, options.text, limit)
        failed = _train_all(options, arguments, begin)
    rows = rows_of(_curves(options), against, study.noise)
    print(table(rows), file=sys.stderr)
    if options.plot and rows:
        draw(options, against)
    found = {"study": options.study, "against": against, "corpus_tokens": tokens, "failed": failed}
    states = [_path(options, _STATE, seed) for seed in options.seeds if options.state]
    found["at_state"] = [
        json.loads(line)
        for path in states
        if path.exists()
        for line in path.read_text().splitlines()
    ]
    if tokens and rows:
        found["epochs"] = max(row["tokens"] for row in rows) / tokens
    print(json.dumps({**found, "seconds": time.time() - begin, "rows": rows}), flush=True)
    return int(failed > 0)


_TRUNK, _STATE = "trunk", "state"


def _train_all(options: argparse.Namespace, arguments: Sequence[str], begin: float) -> int:
    """Train all runs, and before them the trunk of each seed; returns how many failed."""
    runs = STUDIES[options.study].runs
    names = [name for name in runs if any(part in name for part in options.runs.split(","))]
    deadline = begin + options.limit_s if options.limit_s else None
    failed = 0
    further = names if options.branch_at < options.steps else []
    stages = [_TRUNK] if options.branch_at else [], [_STATE] if options.state else [], further
    for stage in stages:
        chosen = [(name, seed) for seed in options.seeds for name in stage]
        for run in chosen:
            _path(options, *run).unlink(missing_ok=True)
        failed += _in_slots(options, arguments, chosen, deadline)
        if failed:
            break
    return failed


def _in_slots(
    options: argparse.Namespace,
    arguments: Sequence[str],
    chosen: list[tuple[str, int]],
    deadline: float | None,
) -> int:
    """Make the ``chosen`` runs, ``--at-once`` on each device; returns how many failed."""
    devices = max(1, torch.cuda.device_count())
    slots: list[subprocess.Popen[bytes] | None] = [None] * (devices * options.at_once)
    failed = 0
    while chosen or any(slots):
        if deadline and time.time() > deadline:
            chosen.clear()
        for number, process in enumerate(slots):
            if process is not None:
                if process.poll() is None:
                    continue
                failed += process.returncode != 0
                slots[number] = None
            if chosen:
                name, seed = chosen.pop(0)
                command = [*(sys.executable, __file__, *arguments), "--only", name]
                environment = {"OMP_NUM_THREADS": "1", **os.environ}
                environment["CONVERGENCE_DEVICE"] = str(number % devices)
                if deadline:
                    environment["CONVERGENCE_DEADLINE"] = str(deadline)
                slots[number] = subprocess.Popen([*command, "--seeds", str(seed)], env=environment)
        time.sleep(0.1)
    return failed


def train(name: str, options: argparse.Namespace) -> None:
    """Train the run ``name`` from the first of the seeds; writes the loss of each step."""
    (seed,) = options.seeds
    trunk = name == _TRUNK
    run = next(iter(STUDIES[options.study].runs)) if trunk else name
    trainer, batches = _started(
        options, run, seed, from_state=bool(options.branch_at) and not trunk
    )
    path, begin, first = _path(options, name, seed), time.monotonic(), trainer.step
    _steps(trainer, batches, path, options.branch_at if trunk else options.steps)
    taken = time.monotonic() - begin
    if trunk:
        size = trainer.state.shard_layout().slot_bytes
        slot = torch.empty(size, dtype=torch.uint8, device=trainer.state.master.device)
        trainer.state.state_copy_to(slot)
        torch.save(slot, _state_path(options, seed))
    each = 1e3 * taken / (trainer.step - first)
    text = f"{trainer.step} steps, {taken:.0f} s, {each:.2f} ms a step"
    print(f"{path.stem}: {text}", file=sys.stderr, flush=True)
    destroy_groups()


def _started(
    options: argparse.Namespace, name: str, seed: int, *, from_state: bool
) -> tuple[Trainer, Batches]:
    """The trainer of a run, with initial values or those of the trunk, and its batches."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("CONVERGENCE_DEVICE", "0")))
        torch.cuda.set_device(device)
    config = job(options, name, seed)
    set_determinism(config, device)
    groups = create_groups(config.layout, 0, Rendezvous(HashStore(), device, 60.0))
    trainer, batches = Trainer(config, 0, groups, device), Batches(config, 0, device)
    if from_state:
        trainer.state.load_from(torch.load(_state_path(options, seed), map_location=device))
        trainer.finish_load(options.branch_at)
    else:
        trainer.initialise()
    return trainer, batches


def _state_path(options: argparse.Namespace, seed: int) -> Path:
    return Path(options.folder) / f"state-{seed}.pt"


class _Kept:
    """Takes the optimizer's place: it keeps gradients and changes nothing."""

    def __init__(self) -> None:
        self.gradients: list[torch.Tensor] = []

    def update(self, gradients: Sequence[torch.Tensor], *_: object) -> None:
        """See :class:`megascale_trainer.optimizer.interface.Optimizer`."""
        self.gradients = [shard.clone() for shard in gradients]


_KINDS = {
    "experts_in": "experts, first product",
    "experts_out": "experts, second product",
    "router": "router",
    **dict.fromkeys(("q", "k", "v", "up", "gate"), "input projections"),
    **dict.fromkeys(("attention_out", "ffn_out"), "output projections"),
}


def compare_state(name: str, options: argparse.Namespace) -> None:
    """Losses and gradients of the next batches at the trunk's state, by run and kind of weight."""
    (seed,) = options.seeds
    runs = STUDIES[options.study].runs
    names = [run for run in runs if any(part in run for part in options.runs.split(","))]
    reference = list(_at_state(options, next(iter(runs)), seed))
    with _path(options, name, seed).open("w") as file:

        def write(run: str, pairs: Sequence[tuple[_AtState, _AtState]]) -> None:
            for number, (own, wanted) in enumerate(pairs):
                line = {"seed": seed, "run": run, "batch": number, "loss": own.loss}
                line |= {"difference": own.loss - wanted.loss}
                line |= {"gradients": _compared(own, wanted), "norm": own.norm}
                file.write(json.dumps(line) + "\n")
            print(_state_table(run, pairs), file=sys.stderr, flush=True)

        write("next batch", list(zip(reference[1:], reference, strict=False)))
        for run in names[1:]:
            write(run, list(zip(_at_state(options, run, seed), reference, strict=True)))


@dataclass(frozen=True)
class _AtState:
    """One batch: its loss, the norm of its gradients, and these by kind of weight."""

    loss: float
    norm: float
    gradients: Mapping[str, Sequence[torch.Tensor]]


def _at_state(options: argparse.Namespace, name: str, seed: int) -> list[_AtState]:
    trainer, batches = _started(options, name, seed, from_state=True)
    trainer._optimizer = kept = _Kept()
    found = []
    for step in range(options.branch_at, options.branch_at + options.state):
        record = trainer.train_step(batches.step(step)).read()
        gradients = _by_kind(trainer, kept.gradients)
        found.append(_AtState(record.loss, record.gradient_norm, gradients))
    destroy_groups()
    del trainer, batches
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return found


def _by_kind(trainer: Trainer, shards: Sequence[torch.Tensor]) -> dict[str, list[torch.Tensor]]:
    table, found = trainer._table, dict[str, list[torch.Tensor]]()
    numbers = {owned: number for number, owned in enumerate(table.shard_ranges)}
    for owned, piece, start, stop in table.overlaps():
        *_, weight, part = ("", *piece.name.split("."))
        kind = _KINDS.get(weight, "others") if part == "weight" else "others"
        own = shards[numbers[owned]][start - owned.start : stop - owned.start]
        found.setdefault(kind, []).append(own)
    return found


def _compared(found: _AtState, reference: _AtState) -> dict[str, dict[str, float]]:
    """``error``, ``cosine`` and ``length`` of each kind."""
    rows = {}
    for kind, wanted in reference.gradients.items():
        apart = along = own = size = 0.0
        for left, right in zip(found.gradients[kind], wanted, strict=True):
            apart += float((left - right).double().square().sum())
            along += float((left.double() * right.double()).sum())
            own += float(left.double().square().sum())
            size += float(right.double().square().sum())
        error, cosine = math.sqrt(apart / size), along / math.sqrt(own * size)
        rows[kind] = {"error": error, "cosine": cosine, "length": along / size}
    return rows


def _state_table(run: str, pairs: Sequence[tuple[_AtState, _AtState]]) -> str:
    """One row of means over the batches."""
    apart = statistics.fmean(own.loss - wanted.loss for own, wanted in pairs)
    each = [_compared(own, wanted) for own, wanted in pairs]
    cosines = {kind: statistics.fmean(one[kind]["cosine"] for one in each) for kind in each[0]}
    cells = [f"{kind} {cosine:.4f}" for kind, cosine in cosines.items()]
    return f"{run}: loss {apart:+.5f}; cosine: {', '.join(cells)}"


def _steps(trainer: Trainer, batches: Batches, path: Path, last: int) -> None:
    """Train to step ``last`` or the deadline; a step is read after the next one is launched."""
    deadline = float(os.environ.get("CONVERGENCE_DEADLINE", "inf"))
    config = trainer.config
    tokens = config.training.global_batch_size * config.model.sequence_length
    previous = None
    with path.open("w") as file:

        def write(step: int, result: Any) -> None:
            record = result.read()
            line = {"step": step, "tokens": step * tokens, "loss": record.loss}
            line |= {"norm": record.gradient_norm, "skipped": record.skipped}
            if loads := [max(layer) for layer in record.expert_loads]:
                # These are the loads of the step before; a first step counts as even.
                line["balance"] = max(1.0, statistics.fmean(loads))
            file.write(json.dumps(line) + "\n")

        while trainer.step < last:
            result = trainer.train_step(batches.step(trainer.step))
            if previous is not None:
                write(trainer.step - 1, previous)
            previous = result
            if time.time() > deadline:
                break
        write(trainer.step, previous)


def write_corpus(folder: Path, text: Path, limit: int) -> int:
    """Bytes of the Python files under ``text`` as a tokenised corpus; returns its tokens."""
    with IndexedWriter(folder / "corpus", token_dtype(VOCABULARY)) as writer:
        for path in sorted(text.rglob("*.py")):
            if writer.tokens < limit:
                data = np.frombuffer(path.read_bytes(), np.uint8)
                writer.add_document(np.append(data.astype(np.int64), END_OF_FILE))
    return writer.tokens


def job(options: argparse.Namespace, name: str, seed: int) -> JobConfig:
    """The job of the study's run with that name."""
    study = STUDIES[options.study]
    given = {key: getattr(options, key) for key in QUICK}
    chosen = QUICK if options.quick else given
    sizes = Sizes(steps=options.steps, learning_rate=options.learning_rate, **chosen)
    return job_of(study, study.runs[name], sizes, seed, str(options.folder.absolute() / "corpus"))


def _lines(options: argparse.Namespace) -> dict[str, dict[int, list[dict[str, Any]]]]:
    """The steps of the study's runs that have been written, by run and seed."""
    found: dict[str, dict[int, list[dict[str, Any]]]] = {}
    for name in STUDIES[options.study].runs:
        for seed in sorted(options.seeds):
            path = _path(options, name, seed)
            lines = path.read_text().splitlines() if path.exists() else []
            if lines:
                found.setdefault(name, {})[seed] = [json.loads(line) for line in lines]
    return found


def _curves(options: argparse.Namespace) -> Curves:
    """The curves of :func:`_lines`."""
    return {
        name: {
            seed: [(line["tokens"], line["loss"]) for line in lines]
            for seed, lines in by_seed.items()
        }
        for name, by_seed in _lines(options).items()
    }


def _path(options: argparse.Namespace, name: str, seed: int) -> Path:
    folder: Path = options.folder
    return folder / f"{name.replace(', ', '-').replace(' ', '-')}-{seed}.jsonl"


def rows_of(curves: Curves, against: str, noise: str) -> list[dict[str, Any]]:
    """Each run compared with the run ``against``, seed by seed.

    Two runs are compared up to the tokens that both have read. ``last_tenth`` is the mean loss over
    the last tenth of these; a difference below 0 means that the run learnt more. ``within_noise``:
    the mean difference is at most the largest distance, of any seed, between ``against`` and the
    run ``noise``; None where one of these is missing.
    """
    found = {name: _row(name, curves[name], curves.get(against, {})) for name in curves}
    apart = found[noise]["differences"] if noise in found else []
    limit = max(map(abs, apart), default=None)
    for row in found.values():
        missing = limit is None or row["difference"] is None
        row["within_noise"] = None if missing else row["difference"] <= limit
    return list(found.values())


def _row(name: str, found: Mapping[int, Curve], reference: Mapping[int, Curve]) -> dict[str, Any]:
    ends, lengths, apart = {}, {}, []
    for seed, curve in found.items():
        other = reference.get(seed)
        lengths[seed] = min(curve[-1][0], other[-1][0]) if other else curve[-1][0]
        ends[seed] = curve_end(curve, lengths[seed])
        if other:
            apart.append(ends[seed] - curve_end(other, lengths[seed]))
    first = next(iter(found.values()))
    many = len(apart) > 1
    return {
        "run": name,
        "seeds": list(found),
        "steps": len(first),
        "tokens": min(lengths.values()),
        "first": first[0][1],
        "last_tenth": statistics.mean(ends.values()),
        "last_tenth_by_seed": list(ends.values()),
        "difference": statistics.mean(apart) if apart else None,
        "differences": apart,
        "standard_error": statistics.stdev(apart) / math.sqrt(len(apart)) if many else None,
    }


def curve_end(curve: Curve, length: int) -> float:
    """Mean loss over the last tenth of the first ``length`` tokens, of one step at least."""
    read = [(tokens, loss) for tokens, loss in curve if tokens <= length]
    last = [loss for tokens, loss in read if tokens > (1 - _END) * length]
    return statistics.fmean(last or [read[-1][1]])


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table of :func:`rows_of`."""
    lines = [
        "| run | steps | M tokens | loss by seed | difference | by seed | standard error |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        apart, error = row["differences"], row["standard_error"]
        cells = [
            row["run"],
            f"{row['steps']:,}",
            f"{row['tokens'] / 1e6:.1f}",
            ", ".join(f"{end:.4f}" for end in row["last_tenth_by_seed"]),
            "" if not apart else f"{row['difference']:+.5f}",
            ", ".join(f"{difference:+.5f}" for difference in apart),
            "" if error is None else f"{error:.5f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


_POINTS = 60  # of a curve in a picture


def draw(options: argparse.Namespace, against: str) -> None:
    """Losses, differences from ``against`` and balance over tokens, as a picture and as CSV.

    A line is the mean over the seeds, its band their range. Needs the extra plot.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = _lines(options)
    length = min(len(found) for by_seed in lines.values() for found in by_seed.values())
    figures: dict[str, dict[str, np.ndarray[Any, Any]]] = {"loss": {}, "difference": {}}
    for run, by_seed in lines.items():
        for key in ("loss", "balance"):
            values = [[line.get(key) for line in found[:length]] for found in by_seed.values()]
            if all(value is not None for one in values for value in one):
                figures.setdefault(key, {})[run] = _binned(values)
        if all(seed in lines[against] for seed in by_seed):
            base = [lines[against][seed][:length] for seed in by_seed]
            wanted = _binned([[line["loss"] for line in found] for found in base])
            figures["difference"][run] = figures["loss"][run] - wanted
    first = next(iter(lines[against].values()))
    tokens = _binned([[line["tokens"] for line in first[:length]]])[0]
    colours = {run: f"C{number}" for number, run in enumerate(lines)}
    figure, axes = pyplot.subplots(len(figures), 1, figsize=(9, 4 * len(figures)), sharex=True)
    with options.plot.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("figure", "run", "tokens", "mean", "lowest", "highest"))
        for (key, runs), axis in zip(figures.items(), axes, strict=True):
            for run, values in runs.items():
                band, colour = (values.mean(0), values.min(0), values.max(0)), colours[run]
                axis.plot(tokens / 1e6, band[0], label=run, linewidth=1.4, color=colour)
                axis.fill_between(tokens / 1e6, *band[1:], alpha=0.2, color=colour)
                for at, *cells in zip(tokens, *band, strict=True):
                    writer.writerow((key, run, f"{at:.0f}", *(f"{cell:.5f}" for cell in cells)))
            axis.set_ylabel(f"difference from {against}" if key == "difference" else key)
            axis.grid(alpha=0.25)
    axes[0].legend(frameon=False, fontsize="small")
    axes[-1].set_xlabel("tokens (millions)")
    figure.tight_layout()
    figure.savefig(options.plot)


def _binned(values: Sequence[Sequence[float]]) -> np.ndarray[Any, Any]:
    """[seeds, points]: means of consecutive steps."""
    parts = np.array_split(np.array(values), min(_POINTS, len(values[0])), axis=1)
    return np.stack([part.mean(1) for part in parts], axis=1)


def _parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = found.add_argument
    add("--study", choices=STUDIES, required=True)
    add("--folder", type=Path, required=True, help="for the corpus and the curves")
    add("--text", type=Path, default=Path(sysconfig.get_path("stdlib")), help="Python files")
    add("--corpus-tokens", type=int, default=1 << 25, help="the most that is taken from --text")
    add("--steps", type=int, default=600, help="of the study's batch")
    add("--branch-at", type=int, default=0, help="continue from the first run's state there")
    add("--state", type=int, default=0, help="with --branch-at: compare so many batches there")
    add("--limit-s", type=float, default=0.0, help="end all runs this long after the start")
    add("--layers", type=int, default=12)
    add("--hidden", type=int, default=1024)
    add("--head-size", type=int, default=128)
    add("--sequence", type=int, default=1024, help="tokens of a sequence")
    add("--batch", type=int, default=16, help="sequences a step")
    add("--learning-rate", type=float, default=1e-3)
    add("--seeds", type=_seeds, default=[1234], help="of initial values and samples: 1,2,3")
    add("--at-once", type=int, default=1, help="runs at the same time on a device")
    add("--runs", default="", help="those runs whose names contain one of these, by commas")
    add("--read", action="store_true", help="train nothing: compare the curves of the folder")
    add("--against", default="", help="compare the others with this run (default: the first)")
    add("--plot", type=Path, help="curves with bands as a picture, and as CSV (extra plot)")
    add("--only", help=argparse.SUPPRESS)
    add("--quick", action="store_true", help="a tiny model: a dry run")
    return found


def _seeds(text: str) -> list[int]:
    return [int(seed) for seed in text.split(",")]


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
