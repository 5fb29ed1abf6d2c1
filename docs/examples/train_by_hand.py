"""`make train`: train a small model on text by torchrun, kill it half-way, continue, compare.

    python docs/examples/train_by_hand.py                               # two processes on a CPU
    python docs/examples/train_by_hand.py --device cuda --ranks 2       # two GPUs, a larger model

A byte-level model learns from this repository's own pages. Half-way torchrun gets SIGKILL, and the
same command is started again. A second, undisturbed run of the same job shows whether anything but
time was lost. The last line is JSON; the exit status is 1 if losses differ.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
RUN = REPOSITORY / "runs" / "train"


@dataclass(frozen=True, slots=True)
class Size:
    """Sizes that suit a device: steps of about a tenth of a second."""

    steps: int
    save_every: int
    kill_at: int
    layers: int
    hidden: int
    sequence: int
    micro_batch: int
    batch: int
    precision: str
    learning_rate: float


SIZES = {
    "cpu": Size(60, 10, 36, 4, 128, 128, 8, 16, "fp32", 4e-3),
    "cuda": Size(200, 20, 120, 12, 768, 1024, 16, 64, "bf16", 1e-3),
}


def main() -> int:
    """Train, kill, continue, compare; 0 if every loss is equal."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=list(SIZES), default="cpu")
    parser.add_argument("--ranks", type=int, default=2, help="processes, one per GPU")
    options = parser.parse_args()
    size = SIZES[options.device]
    shutil.rmtree(RUN, ignore_errors=True)
    RUN.mkdir(parents=True)
    texts = [str(path) for path in (REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md"))]
    # What `megascale data tokenize` runs.
    command = [sys.executable, "-m", "megascale_trainer.commands.data", "tokenize", *texts]
    subprocess.run([*command, "--output", str(RUN / "corpus")], check=True, capture_output=True)

    losses: dict[int, float] = {}
    rates: list[float] = []
    show(f"$ {' '.join(torchrun('text', options))}")
    for record in steps_of("text", options, kill_at=size.kill_at):
        losses[record["step"]] = record["loss"]
    show(f">>> SIGKILL to torchrun after step {max(losses)}; the same command again")
    killed = dict(losses)
    for record in steps_of("text", options):
        losses[record["step"]] = record["loss"]
        rates.append(record["tokens_per_s"])
    show("the same job without the kill, for comparison")
    twin = {record["step"]: record["loss"] for record in steps_of("twin", options)}
    equal = losses == twin and killed.items() <= twin.items() and len(twin) == size.steps
    result = {
        "steps": len(losses),
        "first_loss": losses.get(1),
        "last_loss": losses.get(size.steps),
        "tokens_per_s": round(statistics.median(rates)) if rates else None,
        "resumed_equal": equal,
    }
    print(json.dumps(result), flush=True)
    return 0 if equal else 1


def job_of(name: str, size: Size, ranks: int) -> dict[str, Any]:
    """The job, as in a job file."""
    trainer = {
        "model": {
            "layers": size.layers,
            "hidden_size": size.hidden,
            "heads": size.hidden // 64 if size.hidden > 128 else 4,
            "vocab_size": 257,
            "sequence_length": size.sequence,
        },
        "parallelism": {"dp": ranks},
        "training": {
            "steps": size.steps,
            "micro_batch_size": size.micro_batch,
            "global_batch_size": size.batch,
            "precision": size.precision,
            "deterministic": True,
        },
        "optimizer": {"learning_rate": size.learning_rate},
        "schedule": {"warmup_steps": 5},
        "data": {"sources": [{"prefix": "corpus"}]},
    }
    checkpoint = {"uri": f"checkpoints-{name}", "interval_steps": size.save_every}
    return {"name": name, "checkpoint": checkpoint, "trainer": trainer}


def torchrun(name: str, options: argparse.Namespace) -> list[str]:
    """The command of a job, after its file was written."""
    job = RUN / f"{name}.json"
    job.write_text(json.dumps(job_of(name, SIZES[options.device], options.ranks), indent=2))
    shown = [os.path.relpath(path) for path in (job, RUN)]
    trainer = ["-m", "megascale_trainer", shown[0], "--run-folder", shown[1]]
    trainer += ["--device", options.device]
    return ["torchrun", "--standalone", "--nproc-per-node", str(options.ranks), *trainer]


def steps_of(name: str, options: argparse.Namespace, kill_at: int = 0) -> Iterator[dict[str, Any]]:
    """The step records of a run, which is killed after step ``kill_at`` (0: never)."""
    _, *words = torchrun(name, options)
    command = [sys.executable, "-m", "torch.distributed.run", *words, "--json"]
    save_every, killed = SIZES[options.device].save_every, False
    with (RUN / f"{name}.err").open("ab") as errors:
        run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert run.stdout is not None
        for line in run.stdout:
            event = json.loads(line)
            if event["event"] == "attempt":
                show(f"attempt {event['attempt']} starts from step {event['restored_step']}")
            if event["event"] != "step":
                continue
            if event["step"] % save_every == 0 or event["step"] == 1:
                show(f"step {event['step']}  loss {event['loss']:.4f}")
            yield event
            if kill_at and event["step"] == kill_at:
                run.kill()
                killed = True
                break
        # The pipe ends with the last process that has it: none is left then.
        run.stdout.read()
        status = run.wait()
    if status and not killed:
        show((RUN / f"{name}.err").read_text()[-4000:])  # torchrun says much behind it
        raise SystemExit(1)


def show(text: str) -> None:
    """A line for people."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
