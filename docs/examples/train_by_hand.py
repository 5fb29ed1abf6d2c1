"""`make train`: train a small model on text by torchrun, kill it half-way, continue, compare.

Two processes on a CPU train a byte-level model on this repository's own pages. Half-way torchrun
gets SIGKILL, and the same command is started again. A second, undisturbed run of the same job shows
whether anything but time was lost. The last line is JSON; the exit status is 1 if losses differ.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
RUN = REPOSITORY / "runs" / "train"
STEPS, SAVE_EVERY, KILL_AT = 60, 10, 36
RANKS = 2
JOB: dict[str, Any] = {
    "trainer": {
        "model": {
            "layers": 4,
            "hidden_size": 128,
            "heads": 4,
            "vocab_size": 257,
            "sequence_length": 128,
        },
        "parallelism": {"dp": RANKS},
        "training": {"steps": STEPS, "global_batch_size": 16, "precision": "fp32"},
        "optimizer": {"learning_rate": 4e-3},
        "schedule": {"warmup_steps": 5},
        "data": {"sources": [{"prefix": "corpus"}]},
    }
}


def main() -> int:
    """Train, kill, continue, compare; 0 if every loss is equal."""
    shutil.rmtree(RUN, ignore_errors=True)
    RUN.mkdir(parents=True)
    texts = [str(path) for path in (REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md"))]
    command = [sys.executable, "-m", "megascale_cli", "data", "tokenize", *texts]
    subprocess.run([*command, "--output", str(RUN / "corpus")], check=True, capture_output=True)

    losses: dict[int, float] = {}
    rates: list[float] = []
    show(f"$ {' '.join(torchrun('text'))}")
    for record in steps_of("text", kill_at=KILL_AT):
        losses[record["step"]] = record["loss"]
    show(f">>> SIGKILL to torchrun after step {max(losses)}; the same command again")
    killed = dict(losses)
    for record in steps_of("text"):
        losses[record["step"]] = record["loss"]
        rates.append(record["tokens_per_s"])
    show("the same job without the kill, for comparison")
    twin = {record["step"]: record["loss"] for record in steps_of("twin")}
    equal = losses == twin and killed.items() <= twin.items() and len(twin) == STEPS
    result = {
        "steps": len(losses),
        "first_loss": losses.get(1),
        "last_loss": losses.get(STEPS),
        "tokens_per_s": round(statistics.median(rates)) if rates else None,
        "resumed_equal": equal,
    }
    print(json.dumps(result), flush=True)
    return 0 if equal else 1


def torchrun(name: str) -> list[str]:
    """The command of a job, after its file was written."""
    checkpoint = {"uri": f"checkpoints-{name}", "interval_steps": SAVE_EVERY}
    job = RUN / f"{name}.json"
    job.write_text(json.dumps({"name": name, "checkpoint": checkpoint, **JOB}, indent=2))
    shown = [os.path.relpath(path) for path in (job, RUN)]
    trainer = ["-m", "megascale_trainer", shown[0], "--run-folder", shown[1], "--device", "cpu"]
    return ["torchrun", "--standalone", "--nproc-per-node", str(RANKS), *trainer]


def steps_of(name: str, kill_at: int = 0) -> Iterator[dict[str, Any]]:
    """The step records of a run, which is killed after step ``kill_at`` (0: never)."""
    _, *options = torchrun(name)
    command = [sys.executable, "-m", "torch.distributed.run", *options, "--json"]
    with (RUN / f"{name}.err").open("ab") as errors:
        run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert run.stdout is not None
        for line in run.stdout:
            event = json.loads(line)
            if event["event"] == "attempt":
                show(f"attempt {event['attempt']} starts from step {event['restored_step']}")
            if event["event"] != "step":
                continue
            if event["step"] % SAVE_EVERY == 0 or event["step"] == 1:
                show(f"step {event['step']}  loss {event['loss']:.4f}")
            yield event
            if kill_at and event["step"] == kill_at:
                run.kill()
                break
        # The pipe ends with the last process that has it: none is left then.
        run.stdout.read()
        status = run.wait()
    if status and not kill_at:
        show((RUN / f"{name}.err").read_text()[-2000:])


def show(text: str) -> None:
    """A line for people."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
