"""Loss curves on real text: what a change of the algorithm or of the numbers does to learning.

    python benchmarks/convergence.py --study algorithm --folder out --seeds 1,2,3 --at-once 4
    python benchmarks/convergence.py --study fp8 --folder out          # bf16, FP8 in both formats
    python benchmarks/convergence.py --study algorithm --folder out --read --plot out.png
    python benchmarks/convergence.py --study fp8 --folder out --quick  # a dry run on a CPU

The trainer itself, on one rank for each run. Runs of a seed begin with the same values and read the
same samples in the same order. The first run of a study is what the others are compared with;
"other sums" is the same run in micro-batches of half the size, and shows how far runs part that
differ in the order of sums alone. Runs with a larger batch read the same tokens in fewer steps. The
text is Python source, byte by byte, and no byte is read twice unless the corpus is too small. The
last line of stdout is one JSON object; exit status 1 if a run failed.
"""

from __future__ import annotations

import argparse
import csv
import json
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

from benchmarks.batches import Batches
from benchmarks.compare_losses import compare, read_losses

from megascale_common.job.config import JobConfig, from_accepted
from megascale_trainer.data.indexed import token_dtype
from megascale_trainer.data.indexed_writer import IndexedWriter
from megascale_trainer.process.bootstrap import create_groups, destroy_groups
from megascale_trainer.trainer import Trainer, set_determinism

END_OF_FILE = 256
VOCABULARY = 257
POINTS = 60  # of a curve with its band
_ADAMW = {"name": "adamw", "learning_rate": 1e-3}


@dataclass(frozen=True)
class Variant:
    """What one run changes: sections of the job, and the batch in multiples of the study's."""

    model: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=lambda: _ADAMW)
    batch: int = 1
    micro_batches: int = 1


def _lamb(rate: float) -> Variant:
    optimizer = {"name": "lamb", "learning_rate": rate, "epsilon": 1e-6, "weight_decay": 0.01}
    return Variant(optimizer=optimizer, batch=4)


def _fp8(kind: str) -> Variant:
    return Variant(training={"precision": "fp8", "fp8": {"format": kind}})


# Of each study the first is what the others are compared with.
STUDIES: Mapping[str, Mapping[str, Variant]] = {
    "algorithm": {
        "parallel block": Variant(),
        "parallel block, other sums": Variant(micro_batches=2),
        "serial block": Variant(model={"block": "serial"}),
        "sliding window": Variant(model={"window": 128}),
        "AdamW, 4 times the batch": Variant(batch=4),
        "AdamW, 4 times the batch, twice the rate": Variant(
            optimizer={**_ADAMW, "learning_rate": 2e-3}, batch=4
        ),
        **{f"LAMB {rate}, 4 times the batch": _lamb(rate) for rate in (0.005, 0.01, 0.02)},
    },
    "fp8": {
        "bf16": Variant(),
        "bf16, other sums": Variant(micro_batches=2),
        "fp8, hybrid": _fp8("hybrid"),
        "fp8, e4m3": _fp8("e4m3"),
    },
}


def main(arguments: Sequence[str]) -> int:
    """Train what was chosen, each run in a process of its own, and compare the curves."""
    options = _parser().parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.only:
        train(options.only, options)
        return 0
    failed, tokens = 0, None
    if not options.read:
        limit = 1 << 16 if options.quick else options.corpus_tokens
        tokens = write_corpus(options.folder, options.text, limit)
        failed = _train_all(options, arguments)
    rows = rows_of(options)
    if options.plot is not None:
        _plot(options)
    print(json.dumps({"corpus_tokens": tokens, "failed": failed, "rows": rows}), flush=True)
    return int(failed > 0)


def _train_all(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """How many runs failed; ``--at-once`` of them run on each device."""
    chosen = [
        (name, seed)
        for seed in options.seeds
        for name in STUDIES[options.study]
        if any(part in name for part in options.runs.split(","))
    ]
    devices = max(1, torch.cuda.device_count())
    slots: list[subprocess.Popen[bytes] | None] = [None] * (devices * options.at_once)
    failed = 0
    while chosen or any(slots):
        for number, process in enumerate(slots):
            if process is not None:
                if process.poll() is None:
                    continue
                failed += process.returncode != 0
                slots[number] = None
            if chosen:
                name, seed = chosen.pop(0)
                command = [*(sys.executable, __file__, *arguments), "--only", name]
                environment = {**os.environ, "CONVERGENCE_DEVICE": str(number % devices)}
                slots[number] = subprocess.Popen([*command, "--seeds", str(seed)], env=environment)
        time.sleep(0.1)
    return failed


def train(name: str, options: argparse.Namespace) -> None:
    """Train as ``name`` says from the first of the seeds, and write the losses step by step."""
    (seed,) = options.seeds
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("CONVERGENCE_DEVICE", "0")))
        torch.cuda.set_device(device)
    config = job_of(options, name, seed)
    set_determinism(config, device)
    groups = create_groups(config.layout, 0, HashStore(), device, timeout_s=60.0)
    trainer, batches = Trainer(config, 0, groups, device), Batches(config, 0, device)
    trainer.initialise()
    begin, previous = time.monotonic(), None
    with _curve(options, name, seed).open("w") as file:
        last = min(config.training.steps, options.stop_after or config.training.steps)
        for step in range(last):
            result = trainer.train_step(batches.step(trainer.step))
            if previous is not None:
                _write(file, step, previous)
            previous = result
        _write(file, last, previous)
    print(f"{name}, {seed}: {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
    destroy_groups()


def _write(file: Any, step: int, result: Any) -> None:
    record = result.read()
    line = {"step": step, "loss": record.loss, "norm": record.gradient_norm}
    file.write(json.dumps({**line, "skipped": record.skipped}) + "\n")
    file.flush()


def write_corpus(folder: Path, text: Path, limit: int) -> int:
    """Bytes of the Python files under ``text`` as a tokenised corpus; returns its tokens."""
    with IndexedWriter(folder / "corpus", token_dtype(VOCABULARY)) as writer:
        for path in sorted(text.rglob("*.py")):
            if writer.tokens < limit:
                data = np.frombuffer(path.read_bytes(), np.uint8)
                writer.add_document(np.append(data.astype(np.int64), END_OF_FILE))
    return writer.tokens


def rows_of(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Each run of the study beside its first, seed by seed: ends, and differences step by step.

    ``last_tenth`` is the mean loss over the last tenth of the tokens; a difference below 0 means
    that the run learnt more than the first.
    """
    curves = {name: _curves(options, name) for name in STUDIES[options.study]}
    reference = next(iter(curves.values()))
    rows = []
    for name, found in curves.items():
        if not found:
            continue
        ends = {seed: _end(losses) for seed, losses in found.items()}
        apart = [ends[seed] - _end(reference[seed]) for seed in ends if seed in reference]
        steps = [
            compare(reference[seed], losses, 0.0)
            for seed, losses in found.items()
            if seed in reference and len(losses) == len(reference[seed])
        ]
        rows.append(
            {
                "run": name,
                "seeds": sorted(found),
                "steps": len(next(iter(found.values()))),
                "first": next(iter(found.values()))[0],
                "last_tenth": statistics.mean(ends.values()),
                "last_tenth_by_seed": [ends[seed] for seed in sorted(ends)],
                "difference": statistics.mean(apart) if apart else None,
                "difference_range": [min(apart), max(apart)] if apart else None,
                "mean_step_difference": max((x["mean_difference"] for x in steps), default=None),
                "max_step_difference": max((x["max_difference"] for x in steps), default=None),
            }
        )
    return rows


def _end(losses: Sequence[float]) -> float:
    return statistics.mean(losses[-max(1, len(losses) // 10) :])


def _curves(options: argparse.Namespace, name: str) -> dict[int, list[float]]:
    """By seed."""
    paths = {seed: _curve(options, name, seed) for seed in options.seeds}
    return {seed: read_losses(path) for seed, path in paths.items() if path.exists()}


def _plot(options: argparse.Namespace) -> None:
    """Curves with their band over the seeds as a picture, and beside it as CSV."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5.5), dpi=120)
    with options.plot.with_suffix(".csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(("run", "share_of_tokens", "mean_loss", "lowest", "highest"))
        for name in STUDIES[options.study]:
            curves = [np.array(losses) for losses in _curves(options, name).values()]
            if not curves:
                continue
            points = min(POINTS, *(len(curve) for curve in curves))
            cut = [[part.mean() for part in np.array_split(curve, points)] for curve in curves]
            mean, low, high = np.mean(cut, 0), np.min(cut, 0), np.max(cut, 0)
            share = (np.arange(points) + 0.5) / points
            (line,) = axes.plot(share, mean, label=name, linewidth=1.4)
            axes.fill_between(share, low, high, alpha=0.2, color=line.get_color())
            for row in zip(share, mean, low, high, strict=True):
                table.writerow((name, *(f"{value:.5f}" for value in row)))
    axes.set(xlabel="share of the tokens", ylabel="training loss (nats a byte)", ylim=(None, 3.0))
    axes.legend(frameon=False)
    axes.grid(alpha=0.25)
    figure.tight_layout()
    figure.savefig(options.plot)


def job_of(options: argparse.Namespace, name: str, seed: int) -> JobConfig:
    """The job of one run."""
    small, variant = options.quick, STUDIES[options.study][name]
    batch = (2 if small else options.batch) * variant.batch
    steps = max(1, options.steps // variant.batch)
    model = {
        "layers": 2 if small else options.layers,
        "hidden_size": 64 if small else options.hidden,
        "heads": 4 if small else options.hidden // options.head_size,
        "vocab_size": VOCABULARY,
        "sequence_length": 32 if small else options.sequence,
        "bias": True,
        **variant.model,
    }
    if small and "window" in model:
        model["window"] = 8
    return from_accepted(
        {
            "name": "convergence",
            "model": model,
            "training": {
                "steps": steps,
                "global_batch_size": batch,
                "micro_batch_size": batch // variant.micro_batches,
                "seed": seed,
                **variant.training,
            },
            "optimizer": dict(variant.optimizer),
            "schedule": {"warmup_steps": max(1, steps // 20)},
            "data": {
                "seed": seed,
                "document_attention": False,
                "sources": [{"prefix": str(options.folder / "corpus")}],
            },
        }
    )


def _curve(options: argparse.Namespace, name: str, seed: int) -> Path:
    folder: Path = options.folder
    return folder / f"{name.replace(', ', '-').replace(' ', '-')}-{seed}.jsonl"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--study", choices=STUDIES, required=True)
    add("--folder", type=Path, required=True, help="for the corpus and the curves")
    add("--text", type=Path, default=Path(sysconfig.get_path("stdlib")), help="Python files")
    add("--corpus-tokens", type=int, default=1 << 25, help="at most so many are taken from --text")
    add("--steps", type=int, default=600, help="of the study's batch")
    add("--stop-after", type=int, default=0, help="end runs after so many of their --steps")
    add("--layers", type=int, default=12)
    add("--hidden", type=int, default=1024)
    add("--head-size", type=int, default=128)
    add("--sequence", type=int, default=1024, help="tokens of a sequence")
    add("--batch", type=int, default=16, help="sequences a step")
    add("--seeds", type=_seeds, default=[1234], help="of initial values and samples: 1,2,3")
    add("--at-once", type=int, default=1, help="runs beside each other on a device")
    add("--runs", default="", help="those runs whose names contain one of these, by commas")
    add("--read", action="store_true", help="train nothing: compare the curves that are there")
    add("--plot", type=Path, help="curves with bands as a picture, and as CSV (extra plot)")
    add("--only", help=argparse.SUPPRESS)
    add("--quick", action="store_true", help="a tiny model: a dry run")
    return parser


def _seeds(text: str) -> list[int]:
    return [int(seed) for seed in text.split(",")]


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
