"""How far FP8's sums turn and shorten gradients, at one state of a convergence study.

    python benchmarks/convergence.py --study fp8 --folder out --branch-at 500 --evaluate 32
    python benchmarks/fp8_gradients.py --study fp8 --folder out --branch-at 500 --evaluate 4

The options are the first command's, whose state it reads (state-SEED.pt) and whose text it goes on
with; --evaluate says how many batches. Nothing is trained: each run computes the gradients of the
same batches with the same values, and they are compared with those of bf16, by kind of weight. Of
gradients g and those of bf16, r: *error* is |g - r| / |r|, *direction* the cosine of their angle,
*length* <g, r> / <r, r>, below 1 where sums lose what they should add, or casts round small values
to nothing. The row "next batch" has bf16's gradients of the batch after it as g: how far gradients
lie from each other anyway. The last line of stdout is one JSON object; exit status 1 if a gradient
is not finite.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import convergence

from megascale_trainer.parallel.tensor.fp8 import FastSums
from megascale_trainer.process.bootstrap import destroy_groups
from megascale_trainer.trainer import Trainer

REFERENCE = "bf16"
# By name: the run of the study, and which products are summed fast, if the run does not say it.
RUNS: Mapping[str, tuple[str, FastSums | None]] = {
    REFERENCE: ("bf16", None),
    "bf16, other sums": ("bf16, other sums", None),
    "none fast": ("fp8, hybrid, no sums fast", None),
    "input gradients fast": ("fp8, hybrid", FastSums(False, False, True, False)),
    "weight gradients fast": ("fp8, hybrid", FastSums(False, False, False, True)),
    "input projections fast": ("fp8, hybrid, input projections fast", None),
    "all but output projections fast": ("fp8, hybrid", None),
    "the forward fast": ("fp8, hybrid, forward sums fast", None),
    "all fast": ("fp8, hybrid, all sums fast", None),
}
_KINDS = {
    **dict.fromkeys(("q", "k", "v", "up", "gate"), "input projections"),
    **dict.fromkeys(("attention_out", "ffn_out"), "output projections"),
}
Gradients = dict[str, list[torch.Tensor]]  # of one batch, by kind of weight


class _Kept:
    """Stands in for the optimizer: keeps gradients, changes nothing."""

    def __init__(self) -> None:
        self.gradients: list[torch.Tensor] = []

    def update(self, gradients: Sequence[torch.Tensor], *_: object) -> None:
        """As of :class:`megascale_trainer.optimizer.interface.Optimizer`."""
        self.gradients = [shard.clone() for shard in gradients]


def gradients(name: str, options: argparse.Namespace, seed: int) -> Iterator[Gradients]:
    """Of each batch: the gradients of a mean loss, float32, by kind of weight."""
    run, fast = RUNS[name]
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", 0)
        gc.collect()  # the run before refers to itself
        torch.cuda.empty_cache()
    trainer, batches = convergence.started(options, run, seed, device)
    if fast is not None:
        assert trainer._fp8 is not None
        trainer._fp8.arithmetic.fast = fast
        tokens = trainer.config.training.micro_batch_size * trainer.config.model.sequence_length
        trainer._fp8.choose_algorithms(trainer._table, tokens, device)
    kept = trainer._optimizer = _Kept()
    for step in range(options.branch_at, options.branch_at + options.evaluate):
        trainer.train_step(batches.step(step)).read()
        yield _by_kind(trainer, kept.gradients)
    destroy_groups()


def _by_kind(trainer: Trainer, shards: Sequence[torch.Tensor]) -> Gradients:
    table, found = trainer._table, dict[str, list[torch.Tensor]]()
    numbers = {owned: number for number, owned in enumerate(table.shard_ranges)}
    for owned, piece, start, stop in table.overlaps():
        *_, weight, part = ("", *piece.name.split("."))
        kind = _KINDS.get(weight, "others") if part == "weight" else "others"
        own = shards[numbers[owned]][start - owned.start : stop - owned.start]
        found.setdefault(kind, []).append(own)
    return found


def compared(found: Gradients, reference: Gradients) -> dict[str, dict[str, float]]:
    """``error``, ``direction`` and ``length`` of each kind."""
    rows = {}
    for kind, wanted in reference.items():
        apart = along = own = size = 0.0
        for left, right in zip(found[kind], wanted, strict=True):
            apart += float((left - right).double().square().sum())
            along += float((left.double() * right.double()).sum())
            own += float(left.double().square().sum())
            size += float(right.double().square().sum())
        error, direction = math.sqrt(apart / size), along / math.sqrt(own * size)
        rows[kind] = {"error": error, "direction": direction, "length": along / size}
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Compute, compare, print."""
    options = convergence.parser(__doc__).parse_args(arguments)
    if refusal := _refusal(options):
        print(f"fp8_gradients.py: {refusal}", file=sys.stderr)
        return 2
    rows: list[dict[str, Any]] = []
    print(
        "| seed | run | weights | error | direction | length |\n|---|---|---|---|---|---|",
        file=sys.stderr,
    )
    for seed in options.seeds:
        reference = list(gradients(REFERENCE, options, seed))
        rows += _rows(seed, "next batch", list(map(compared, reference[1:], reference[:-1])))
        for name in list(RUNS)[1:]:
            each = map(compared, gradients(name, options, seed), reference)
            rows += _rows(seed, name, list(each))
    print(json.dumps({"batches": options.evaluate, "rows": rows}), flush=True)
    return int(not all(math.isfinite(value) for row in rows for value in row["length"]))


def _refusal(options: argparse.Namespace) -> str:
    if options.study != "fp8" or options.evaluate < 2:
        return "give --study fp8, and with --evaluate the number of batches, two at least"
    states = [convergence.state_path(options, seed) for seed in options.seeds]
    missing = ", ".join(str(path) for path in states if not path.exists())
    if missing:
        return f"no {missing}: train it with convergence.py --branch-at"
    return convergence.refusal_of(options, REFERENCE)


def _rows(
    seed: int, name: str, batches: Sequence[Mapping[str, Mapping[str, float]]]
) -> Iterator[dict[str, Any]]:
    for kind in batches[0]:
        found = {of: [batch[kind][of] for batch in batches] for of in batches[0][kind]}
        shown = " | ".join(f"{sum(each) / len(each):.5f}" for each in found.values())
        print(f"| {seed} | {name} | {kind} | {shown} |", file=sys.stderr, flush=True)
        yield {"seed": seed, "run": name, "weights": kind, **found}


if __name__ == "__main__":
    raise SystemExit(main())
