"""Loss curves of a small model in bf16 and with its layers' GEMMs in FP8, on real text.

    python benchmarks/fp8_losses.py --folder out              # the runs in parallel, by GPU
    python benchmarks/fp8_losses.py --folder out --quick      # a dry run on a CPU

The trainer itself, on one rank for each run. All runs of a seed begin with the same values and read
the same samples; "bf16, other sums" takes them in micro-batches of half the size, and shows how far
runs part that differ in the order of sums alone. The text is the Python source of the standard
library, byte by byte. The last line of stdout is one JSON object.
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
OTHER_SUMS = "bf16, other sums"


# The training section of each run, beside what all share.
FORMATS: Mapping[str, dict[str, Any]] = {
    "bf16": {},
    OTHER_SUMS: {},
    "fp8, hybrid": {"precision": "fp8", "fp8": {"format": "hybrid"}},
    "fp8, e4m3": {"precision": "fp8", "fp8": {"format": "e4m3"}},
}


def main(arguments: Sequence[str]) -> int:
    """Run every format in a process of its own, and compare the curves."""
    options = _parser().parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.only:
        train(options.only, options)
        return 0
    corpus = write_corpus(options.folder, options.text, limit=1 << (16 if options.quick else 25))
    devices, running = max(1, torch.cuda.device_count()), []
    chosen = [name for name in FORMATS if any(part in name for part in options.runs.split(","))]
    for number, name in enumerate(chosen):
        command = [sys.executable, __file__, *arguments, "--only", name]
        environment = {**os.environ, "FP8_LOSSES_DEVICE": str(number % devices)}
        running.append(subprocess.Popen(command, env=environment))
    failed = sum(process.wait() != 0 for process in running)
    curves = {
        name: read_losses(_curve(options, name))
        for name in FORMATS
        if _curve(options, name).exists()
    }
    found = {"tokens": corpus, "steps": options.steps, "failed": failed, "rows": _rows(curves)}
    print(json.dumps(found), flush=True)
    return failed


def train(name: str, options: argparse.Namespace) -> None:
    """Train as ``name`` says and write the losses step by step."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("FP8_LOSSES_DEVICE", "0")))
        torch.cuda.set_device(device)
    config = _job(options, name)
    set_determinism(config, device)
    groups = create_groups(config.layout, 0, HashStore(), device, timeout_s=60.0)
    trainer, batches = Trainer(config, 0, groups, device), Batches(config, 0, device)
    trainer.initialise()
    begin, previous = time.monotonic(), None
    with _curve(options, name).open("w") as file:
        for step in range(options.steps):
            result = trainer.train_step(batches.step(trainer.step))
            if previous is not None:
                _write(file, step, previous)
            previous = result
        _write(file, options.steps, previous)
    print(f"{name}: {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
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


def _rows(curves: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
    """Each curve beside that of bf16: differences over all steps, signed means by fifths, ends."""
    reference = curves["bf16"]
    rows = []
    for name, losses in curves.items():
        found = compare(reference, losses, 0.0)
        signed = [other - one for one, other in zip(reference, losses, strict=False)]
        fifth = max(1, math.ceil(len(signed) / 5))
        rows.append(
            {
                "run": name,
                "steps": len(losses),
                "first": losses[0],
                "last_fifth": statistics.mean(losses[-fifth:]),
                "mean_difference": found["mean_difference"],
                "max_difference": found["max_difference"],
                "max_at_step": 1 + max(range(len(signed)), key=lambda n: abs(signed[n])),
                "signed_by_fifths": [
                    statistics.mean(signed[first : first + fifth])
                    for first in range(0, len(signed), fifth)
                ],
            }
        )
    return rows


def _job(options: argparse.Namespace, name: str) -> JobConfig:
    small, micro_batches = options.quick, 2 if name == OTHER_SUMS else 1
    steps, batch = options.steps, 2 if small else options.batch
    return from_accepted(
        {
            "name": "fp8-losses",
            "model": {
                "layers": 2 if small else options.layers,
                "hidden_size": 64 if small else options.hidden,
                "heads": 4 if small else options.hidden // 128,
                "vocab_size": VOCABULARY,
                "sequence_length": 32 if small else 1024,
                "bias": True,
            },
            "training": {
                "steps": steps,
                "global_batch_size": batch,
                "micro_batch_size": batch // micro_batches,
                "seed": options.seed,
                **FORMATS[name],
            },
            "schedule": {"warmup_steps": max(1, steps // 20)},
            "data": {
                "seed": options.seed,
                "document_attention": False,
                "sources": [{"prefix": str(options.folder / "corpus")}],
            },
        }
    )


def _curve(options: argparse.Namespace, name: str) -> Path:
    folder: Path = options.folder
    return folder / f"{name.replace(', ', '-').replace(' ', '-')}.jsonl"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--folder", type=Path, required=True, help="for the corpus and the curves")
    add("--text", type=Path, default=Path(sysconfig.get_path("stdlib")), help="Python files")
    add("--steps", type=int, default=600)
    add("--layers", type=int, default=12)
    add("--hidden", type=int, default=1024)
    add("--batch", type=int, default=16, help="sequences of 1024 a step")
    add("--seed", type=int, default=1234, help="of the initial values and of the samples")
    add("--runs", default="", help="those runs whose names contain one of these, by commas")
    add("--only", choices=FORMATS, help="one run, in this process")
    add("--quick", action="store_true", help="a tiny model: a dry run")
    return parser


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
