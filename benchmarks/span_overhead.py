"""What timers that are always on cost a step: toggled every 20 steps within one process.

    python benchmarks/span_overhead.py               # on a GPU where there is one
    python benchmarks/span_overhead.py --device cpu --steps-per-block 20 --pairs 20

One trainer of one rank takes blocks of steps in turn, without and with its timer, each pair in
another order, so that drifts of the device affect both alike. Spans go into a real ring, which is
emptied between blocks. The overhead is the mean of the pairs; a bound stands above it with 95 %
confidence (one-sided, Student's t). The last line of stdout is one JSON object; exit status: 0, 1
if the bound is above ``--most-percent``, 2 for a command line that cannot run here.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# A script finds only the modules in its own folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from benchmarks.loop_overhead import overhead

from megascale_common.node.spans.ring import SpanRingReader, SpanRingWriter
from megascale_job.config import JobConfig
from megascale_job.loading import from_accepted
from megascale_trainer.batch import MicroBatch
from megascale_trainer.parallel.groups import single_process_groups
from megascale_trainer.telemetry.timer import StepTimer, step_timer
from megascale_trainer.trainer import Trainer

STEPS, PAIRS, LEAST_PAIRS = 20, 20, 20
MOST_PERCENT = 0.3
_WARM_UP_STEPS = 10
_CAPACITY = 1 << 16


def job_of(options: argparse.Namespace) -> JobConfig:
    """A job of one rank with the options' sizes."""
    return from_accepted(
        {
            "name": "spans",
            "model": {
                "layers": options.layers,
                "hidden_size": options.hidden,
                "heads": max(options.hidden // 64, 1),
                "vocab_size": options.vocab,
                "sequence_length": options.seq,
            },
            "training": {
                "steps": 1_000_000,
                "micro_batch_size": options.micro_batch,
                "global_batch_size": options.micro_batch * options.micro_batches,
                "precision": "bf16" if options.device == "cuda" else "fp32",
            },
            "telemetry": {"spans": options.level},
        }
    )


def random_batches(config: JobConfig, device: torch.device) -> list[MicroBatch]:
    """The micro-batches of every step: random tokens, one document a row."""
    model, size = config.model, config.training.micro_batch_size
    generator = torch.Generator().manual_seed(1)
    made = []
    for _ in range(config.micro_batches):
        shape = (size, model.sequence_length + 1)
        tokens = torch.randint(model.vocab_size, shape, generator=generator)
        positions = torch.arange(model.sequence_length).expand(size, -1).contiguous()
        arrays: dict[str, Any] = {
            "tokens": tokens[:, :-1].contiguous().numpy(),
            "targets": tokens[:, 1:].contiguous().numpy(),
            "loss_weight": torch.ones(size, model.sequence_length).numpy(),
            "position": positions.numpy(),
            "document_start": torch.zeros_like(positions).numpy(),
        }
        made.append(MicroBatch.from_numpy(arrays).to(device))
    return made


def block_s(trainer: Trainer, timer: StepTimer, batches: list[MicroBatch], steps: int) -> float:
    """Mean seconds of a step over a block that ends with the device idle."""
    device = batches[0].tokens.device
    begin_s = time.perf_counter()
    for _ in range(steps):
        if timer.on:
            timer.begin_step(trainer.step + 1)
        trainer.train_step(batches)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - begin_s) / steps


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Blocks in pairs; returns the figures."""
    config, device = job_of(options), torch.device(options.device)
    off_s: list[float] = []
    on_s: list[float] = []
    spans = 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "spans"
        writer = SpanRingWriter(path, rank=0, attempt=1, capacity=_CAPACITY)
        reader = SpanRingReader(path)
        timer = step_timer(writer, options.level, device)
        trainer = Trainer(config, 0, single_process_groups(), device, timer=timer)
        trainer.initialise()
        batches = random_batches(config, device)
        block_s(trainer, timer, batches, _WARM_UP_STEPS)
        reader.take(_CAPACITY)
        for pair in range(options.pairs):
            for on in (pair % 2 == 0, pair % 2 == 1):
                timer.on = on
                taken = block_s(trainer, timer, batches, options.steps_per_block)
                (on_s if on else off_s).append(taken)
                spans += len(reader)
                reader.take(_CAPACITY)
            print(f"pair {pair + 1}: {off_s[-1]:.5f} s off, {on_s[-1]:.5f} s on", file=sys.stderr)
        timer.close()
        found: dict[str, Any] = overhead(off_s, on_s)
        found["dropped"] = writer.dropped
    found |= {"device": options.device, "level": options.level, "torch": torch.__version__}
    found |= {"steps_per_block": options.steps_per_block, "most_percent": options.most_percent}
    found["spans_per_step"] = spans / (options.pairs * options.steps_per_block)
    found["step_s"] = sum(off_s) / len(off_s)
    found["holds"] = found["upper_95_percent"] <= options.most_percent
    return found


def main() -> int:
    """Measure; returns the exit status."""
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if cuda else "cpu")
    parser.add_argument("--level", choices=("phases", "micro_batches"), default="phases")
    parser.add_argument("--layers", type=int, default=24 if cuda else 4)
    parser.add_argument("--hidden", type=int, default=2048 if cuda else 256)
    parser.add_argument("--vocab", type=int, default=32000 if cuda else 1000)
    parser.add_argument("--seq", type=int, default=2048 if cuda else 128)
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--steps-per-block", type=int, default=STEPS)
    parser.add_argument("--pairs", type=int, default=PAIRS, help=f"at least {LEAST_PAIRS}")
    parser.add_argument("--most-percent", type=float, default=MOST_PERCENT)
    options = parser.parse_args()
    if options.pairs < LEAST_PAIRS:
        parser.error(f"--pairs: the bound needs at least {LEAST_PAIRS} pairs of blocks")
    if options.device == "cuda" and not cuda:
        parser.error("--device: there is no CUDA device here; give cpu")
    found = measure(options)
    print(json.dumps(found))
    return 0 if found["holds"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
