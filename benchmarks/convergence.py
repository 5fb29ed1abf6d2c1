"""Loss curves on real text: what a change of the algorithm or of the numbers does to learning.

    python benchmarks/convergence.py --study algorithm --folder out --seeds 1,2,3 --at-once 4
    python benchmarks/convergence.py --study fp8 --folder out          # bf16, FP8 in both formats
    python benchmarks/convergence.py --study fp8 --folder out --quick  # a dry run on a CPU

The trainer itself runs, one rank for each run. The runs of a seed begin with the same values and
read the same samples in the same order. Each run is compared with the first run of the study (or
with --against). One run changes nothing but the rounding or the order of sums: it shows how far
runs part by noise alone. The text is Python source, byte by byte, and no
byte is read twice unless the corpus is too small ("epochs" above 1). With --limit-s runs end where
they are, and pairs are compared up to the tokens that both have read. The last line of stdout is
one JSON object; exit status 1 if a run failed.
"""

from __future__ import annotations

import argparse
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
        model, training: fields of these sections of the job.
        micro_batches: of a step.
    """

    model: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    micro_batches: int = 1


@dataclass(frozen=True, kw_only=True)
class Study:
    """Runs by name; the first is what the others are compared with unless another is chosen.

    Args:
        noise: the run that differs from the first in nothing that matters.
        data: fields of this section of every run's job.
    """

    runs: Mapping[str, Variant]
    noise: str
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
    window: int = 128
    learning_rate: float = 1e-3


QUICK = {"layers": 3, "hidden": 64, "head_size": 16, "sequence": 32, "batch": 2, "window": 8}


def job_of(study: Study, variant: Variant, sizes: Sizes, seed: int, corpus: str) -> JobConfig:
    """The job of one run on the corpus with that prefix; one device."""
    model = {
        "layers": sizes.layers,
        "hidden_size": sizes.hidden,
        "heads": sizes.hidden // sizes.head_size,
        "vocab_size": VOCABULARY,
        "sequence_length": sizes.sequence,
        "bias": True,
        **variant.model,
    }
    if "window" in model:
        model["window"] = sizes.window
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
            "optimizer": {"name": "adamw", "learning_rate": sizes.learning_rate},
            "schedule": {"warmup_steps": max(1, sizes.steps // 20)},
            "data": {"seed": seed, "document_attention": False, "sources": sources, **study.data},
        }
    )


def _fp8(
    kind: str, *, first: int = 0, last: int = 0, fast: str = Fp8Config().fast_accumulation
) -> Variant:
    """``first`` and ``last``: layers in bf16."""
    fp8 = {
        "format": kind,
        "fast_accumulation": fast,
        "layers_at_start_in_bf16": first,
        "layers_at_end_in_bf16": last,
    }
    return Variant(training={"precision": "fp8", "fp8": fp8})


STUDIES: Mapping[str, Study] = {
    "algorithm": Study(
        runs={
            "parallel block": Variant(),
            "parallel block, other sums": Variant(micro_batches=2),
            "serial block": Variant(model={"block": "serial"}),
            "sliding window": Variant(model={"window": 128}),
        },
        noise="parallel block, other sums",
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
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.only:
        train(options.only, options)
        return 0
    failed, tokens = 0, None
    if not options.read:
        limit = _QUICK_TOKENS if options.quick else options.corpus_tokens
        tokens = write_corpus(options.folder, options.text, limit)
        failed = _train_all(options, arguments, begin)
    rows = rows_of(_curves(options), against, study.noise)
    print(table(rows), file=sys.stderr)
    found = {"study": options.study, "against": against, "corpus_tokens": tokens, "failed": failed}
    if tokens and rows:
        found["epochs"] = max(row["tokens"] for row in rows) / tokens
    print(json.dumps({**found, "seconds": time.time() - begin, "rows": rows}), flush=True)
    return int(failed > 0)


def _train_all(options: argparse.Namespace, arguments: Sequence[str], begin: float) -> int:
    """Train all runs, ``--at-once`` on each device; returns how many failed."""
    runs = STUDIES[options.study].runs
    names = [name for name in runs if any(part in name for part in options.runs.split(","))]
    chosen = [(name, seed) for seed in options.seeds for name in names]
    for run in chosen:
        _path(options, *run).unlink(missing_ok=True)
    deadline = begin + options.limit_s if options.limit_s else None
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
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("CONVERGENCE_DEVICE", "0")))
        torch.cuda.set_device(device)
    config = job(options, name, seed)
    set_determinism(config, device)
    groups = create_groups(config.layout, 0, Rendezvous(HashStore(), device, 60.0))
    trainer, batches = Trainer(config, 0, groups, device), Batches(config, 0, device)
    trainer.initialise()
    path, begin = _path(options, name, seed), time.monotonic()
    _steps(trainer, batches, path)
    taken = time.monotonic() - begin
    text = f"{trainer.step} steps, {taken:.0f} s, {1e3 * taken / trainer.step:.2f} ms a step"
    print(f"{path.stem}: {text}", file=sys.stderr, flush=True)
    destroy_groups()


def _steps(trainer: Trainer, batches: Batches, path: Path) -> None:
    """Train to the last step or the deadline; a step is read after the next one is launched."""
    deadline = float(os.environ.get("CONVERGENCE_DEADLINE", "inf"))
    config = trainer.config
    tokens = config.training.global_batch_size * config.model.sequence_length
    previous = None
    with path.open("w") as file:

        def write(step: int, result: Any) -> None:
            record = result.read()
            line = {"step": step, "tokens": step * tokens, "loss": record.loss}
            line |= {"norm": record.gradient_norm, "skipped": record.skipped}
            file.write(json.dumps(line) + "\n")

        while trainer.step < config.training.steps:
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
    given = {key: getattr(options, key) for key in QUICK if key != "window"}
    chosen = QUICK if options.quick else given
    sizes = Sizes(steps=options.steps, learning_rate=options.learning_rate, **chosen)
    return job_of(study, study.runs[name], sizes, seed, str(options.folder.absolute() / "corpus"))


def read_curve(path: Path) -> Curve:
    """The curve of a file of JSON lines with ``tokens`` and ``loss``."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [(line["tokens"], line["loss"]) for line in lines]


def _curves(options: argparse.Namespace) -> Curves:
    """The curves of the study's runs that have been written."""
    found: dict[str, dict[int, Curve]] = {}
    for name in STUDIES[options.study].runs:
        for seed in sorted(options.seeds):
            path = _path(options, name, seed)
            if path.exists() and (curve := read_curve(path)):
                found.setdefault(name, {})[seed] = curve
    return found


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
    add("--only", help=argparse.SUPPRESS)
    add("--quick", action="store_true", help="a tiny model: a dry run")
    return found


def _seeds(text: str) -> list[int]:
    return [int(seed) for seed in text.split(",")]


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
