"""Loss curves on real text: what a change of the algorithm or of the numbers does to learning.

    python benchmarks/convergence.py --study algorithm --folder out --seeds 1,2,3 --at-once 4
    python benchmarks/convergence.py --study lamb --folder out --seeds 1,2,3 --at-once 7 \\
        --steps 16000 --layers 4 --hidden 256 --head-size 64 --sequence 128 --batch 8 --limit-s 400
    python benchmarks/convergence.py --study fp8 --folder out          # bf16, FP8 in both formats
    python benchmarks/convergence.py --study algorithm --folder out --read --plot out.png
    python benchmarks/convergence.py --study fp8 --folder out --steps 3200 --branch-at 1600
    python benchmarks/convergence.py --study fp8 --folder out --branch-at 1600 --evaluate 32
    python benchmarks/convergence.py --study fp8 --folder out --quick  # a dry run on a CPU

The trainer itself, on one rank for each run. Runs of a seed begin with the same values and read the
same samples in the same order. The first run of a study is what the others are compared with (or
that of --against); a run beside it changes nothing but the rounding or the order of sums, and shows
how far runs part by that alone. Runs with a larger batch read the same tokens in fewer steps. The
text is Python source, byte by byte, and no byte is read twice unless the corpus is too small
("epochs" above 1). With --limit-s runs end where they are, and pairs are compared up to the tokens
that both have read. With --branch-at the first run trains alone until that step, and all runs go on
from its state: what parts runs early, by steps gained or lost on the way to a sudden fall of the
loss, is out of the difference then, and so is what a change does early. With --evaluate as well
they do not train but read that many of the next batches with the values of that state: what is left
is what a forward computes otherwise, batch by batch. The last line of stdout is one JSON object;
exit status 1 if a run failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._C._distributed_c10d import HashStore

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.batches import Batches
from benchmarks.convergence_curves import read_curve, rows_of, table
from benchmarks.convergence_studies import QUICK, STUDIES, VOCABULARY, Sizes, job_of
from benchmarks.loss_plot import Curve, cannot_draw, draw

from megascale_job.config import JobConfig
from megascale_trainer.data.indexed import IndexedWriter, token_dtype
from megascale_trainer.process.bootstrap import Rendezvous, create_groups, destroy_groups
from megascale_trainer.trainer import Trainer, set_determinism

END_OF_FILE = 256
_QUICK_TOKENS = 1 << 16


def main(arguments: Sequence[str]) -> int:
    """Train what was chosen, each run in a process of its own, and compare the curves."""
    begin = time.time()
    options = parser(__doc__).parse_args(arguments)
    study = STUDIES[options.study]
    against = options.against or next(iter(study.runs))
    refusal = refusal_of(options, against)
    if refusal:
        print(f"convergence.py: {refusal}", file=sys.stderr)
        return 2
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.only:
        train(options.only, options)
        return 0
    failed, tokens = 0, None
    if not options.read:
        limit = _QUICK_TOKENS if options.quick else options.corpus_tokens
        tokens = write_corpus(options.folder, options.text, limit)
        if not options.corpus_only:
            failed = _train_all(options, arguments, begin, against)
    curves = _curves(options)
    rows = rows_of(curves, against, study.noise, evaluated=options.evaluate > 0)
    print(table(rows), file=sys.stderr)
    if options.plot is not None and curves:
        draw(curves, against, options.plot)
    found = {"study": options.study, "against": against, "corpus_tokens": tokens, "failed": failed}
    if tokens and rows:
        found["epochs"] = max(row["tokens"] for row in rows) / tokens
    print(json.dumps({**found, "seconds": time.time() - begin, "rows": rows}), flush=True)
    return int(failed > 0)


def refusal_of(options: argparse.Namespace, against: str) -> str:
    """What is wrong with the options, with a remedy; empty if nothing is."""
    runs = STUDIES[options.study].runs
    if against not in runs:
        return f"--against {against!r}: give one of {', '.join(runs)}"
    last = _last(options, options.steps)
    if options.evaluate and not 0 < options.branch_at <= last - options.evaluate:
        return f"--evaluate {options.evaluate}: give --branch-at, that many before step {last}"
    if options.branch_at and not 0 < options.branch_at < last:
        return f"--branch-at {options.branch_at}: give a step from 1 to {last - 1}"
    if options.branch_at and any(runs[name].batch != 1 for name in _chosen(options)):
        return "--branch-at: a run of another batch counts other steps; leave it out with --runs"
    return cannot_draw() if options.plot else ""


def _last(options: argparse.Namespace, steps: int) -> int:
    return min(steps, options.stop_after or steps)


def _chosen(options: argparse.Namespace) -> list[str]:
    names = STUDIES[options.study].runs
    return [name for name in names if any(part in name for part in options.runs.split(","))]


def _train_all(
    options: argparse.Namespace, arguments: Sequence[str], begin: float, against: str
) -> int:
    """How many runs failed; those of most steps run first, and trunks before them."""
    runs = STUDIES[options.study].runs
    chosen = [(name, seed) for seed in options.seeds for name in _chosen(options)]
    chosen.sort(key=lambda run: runs[run[0]].batch)
    for run in chosen:
        _path(options, *run).unlink(missing_ok=True)
    deadline = begin + options.limit_s if options.limit_s else None
    failed = 0
    if options.branch_at:
        trunks = [(against, seed) for seed in options.seeds]
        failed = _in_slots(options, [*arguments, "--trunk"], trunks, deadline)
    return failed or _in_slots(options, arguments, chosen, deadline)


def _in_slots(
    options: argparse.Namespace,
    arguments: Sequence[str],
    chosen: list[tuple[str, int]],
    deadline: float | None,
) -> int:
    """How many of ``chosen`` failed; ``--at-once`` of them run on each device."""
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
    """Train as ``name`` says from the first of the seeds, and write the losses step by step.

    With ``--trunk`` until ``--branch-at``, and its state is kept, from which the runs go on.
    """
    (seed,) = options.seeds
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("CONVERGENCE_DEVICE", "0")))
        torch.cuda.set_device(device)
    trainer, batches = started(options, name, seed, device)
    last = options.branch_at if options.trunk else _last(options, trainer.config.training.steps)
    path = _path(options, "trunk" if options.trunk else name, seed)
    begin, first = time.monotonic(), trainer.step
    if options.evaluate and not options.trunk:
        reached = _evaluations(trainer, batches, path, options.evaluate)
    else:
        reached = _steps(trainer, batches, path, last)
    taken = time.monotonic() - begin
    if options.trunk:
        slot = torch.empty(
            trainer.state.shard_layout().slot_bytes, dtype=torch.uint8, device=device
        )
        trainer.state.state_copy_to(slot)
        torch.save(slot, state_path(options, seed))
    text = f"{reached} steps, {taken:.0f} s, {1e3 * taken / (reached - first):.2f} ms a step"
    print(f"{path.stem}: {text}", file=sys.stderr, flush=True)
    destroy_groups()


def started(
    options: argparse.Namespace, name: str, seed: int, device: torch.device
) -> tuple[Trainer, Batches]:
    """The trainer of a run, with initial values or (``--branch-at``) at the trunk's state.

    Its groups are the process's until ``destroy_groups``.
    """
    config = job(options, name, seed)
    set_determinism(config, device)
    groups = create_groups(config.layout, 0, Rendezvous(HashStore(), device, 60.0))
    trainer, batches = Trainer(config, 0, groups, device), Batches(config, 0, device)
    if options.branch_at and not options.trunk:
        trainer.state.load_from(torch.load(state_path(options, seed), map_location=device))
        trainer.finish_load(options.branch_at)
    else:
        trainer.initialise()
    return trainer, batches


def state_path(options: argparse.Namespace, seed: int) -> Path:
    """Where the trunk of a seed leaves its state."""
    return Path(options.folder) / f"state-{seed}.pt"


def _steps(trainer: Trainer, batches: Batches, path: Path, last: int) -> int:
    """Train until step ``last`` or the deadline; returns the step that was reached."""
    deadline = float(os.environ.get("CONVERGENCE_DEADLINE", "inf"))
    config = trainer.config
    tokens = config.training.global_batch_size * config.model.sequence_length
    previous = None
    with path.open("w") as file:
        while trainer.step < last:
            result = trainer.train_step(batches.step(trainer.step))
            if previous is not None:
                _write(file, trainer.step - 1, tokens, previous)
            previous = result
            if time.time() > deadline:
                break
        _write(file, trainer.step, tokens, previous)
    return trainer.step


def _evaluations(trainer: Trainer, batches: Batches, path: Path, number: int) -> int:
    """Write the losses of the next ``number`` batches, none of which is trained on."""
    size = trainer.config.training.global_batch_size * trainer.config.model.sequence_length
    last = trainer.step + number
    with path.open("w") as file:
        for step in range(trainer.step, last):
            loss = trainer.evaluate([batches.step(step)])
            line = {"step": step, "tokens": (step - trainer.step + 1) * size, "loss": loss}
            file.write(json.dumps(line) + "\n")
    return last


def _write(file: Any, step: int, tokens: int, result: Any) -> None:
    record = result.read()
    line = {"step": step, "tokens": step * tokens, "loss": record.loss}
    line |= {"norm": record.gradient_norm, "skipped": record.skipped}
    file.write(json.dumps(line) + "\n")


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


def _curves(options: argparse.Namespace) -> dict[str, dict[int, Curve]]:
    """What is there of the study's runs."""
    found: dict[str, dict[int, Curve]] = {}
    for name in STUDIES[options.study].runs:
        for seed in sorted(options.seeds):
            path = _path(options, name, seed)
            curve = read_curve(path) if path.exists() else None
            if curve is not None:
                found.setdefault(name, {})[seed] = curve
    return found


def _path(options: argparse.Namespace, name: str, seed: int) -> Path:
    folder: Path = options.folder
    return folder / f"{name.replace(', ', '-').replace(' ', '-')}-{seed}.jsonl"


def parser(description: str) -> argparse.ArgumentParser:
    """The options, also those of fp8_gradients.py."""
    found = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = found.add_argument
    add("--study", choices=STUDIES, required=True)
    add("--folder", type=Path, required=True, help="for the corpus and the curves")
    add("--text", type=Path, default=Path(sysconfig.get_path("stdlib")), help="Python files")
    add("--corpus-tokens", type=int, default=1 << 25, help="at most so many are taken from --text")
    add("--corpus-only", action="store_true", help="write FOLDER/corpus and train nothing")
    add("--steps", type=int, default=600, help="of the study's batch")
    add("--stop-after", type=int, default=0, help="end runs after so many of their --steps")
    add("--branch-at", type=int, default=0, help="all runs go on from the first run's state there")
    add(
        "--evaluate", type=int, default=0, help="with --branch-at: batches to read, not to train on"
    )
    add("--limit-s", type=float, default=0.0, help="end all runs so many seconds after the start")
    add("--layers", type=int, default=12)
    add("--hidden", type=int, default=1024)
    add("--head-size", type=int, default=128)
    add("--sequence", type=int, default=1024, help="tokens of a sequence")
    add("--batch", type=int, default=16, help="sequences a step")
    add("--learning-rate", type=float, help="of runs whose name has none (default: the study's)")
    add("--seeds", type=_seeds, default=[1234], help="of initial values and samples: 1,2,3")
    add("--at-once", type=int, default=1, help="runs beside each other on a device")
    add("--runs", default="", help="those runs whose names contain one of these, by commas")
    add("--read", action="store_true", help="train nothing: compare the curves that are there")
    add("--against", default="", help="the run that others are compared with (default: the first)")
    add("--plot", type=Path, help="curves with bands as a picture, and as CSV (extra plot)")
    add("--only", help=argparse.SUPPRESS)
    add("--trunk", action="store_true", help=argparse.SUPPRESS)
    add("--quick", action="store_true", help="a tiny model: a dry run")
    return found


def _seeds(text: str) -> list[int]:
    return [int(seed) for seed in text.split(",")]


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
