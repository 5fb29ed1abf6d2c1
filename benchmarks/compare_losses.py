"""Compares loss curves that `throughput.py --losses` wrote, step by step.

    python benchmarks/compare_losses.py plain.jsonl overlapped.jsonl other.jsonl --tolerance 0.02
    python benchmarks/compare_losses.py plain.jsonl overlapped.jsonl --noise sums.jsonl --plot x.png
    python benchmarks/compare_losses.py plain-{seed}.jsonl other-{seed}.jsonl --seeds 1,2,3

Prints one JSON object with the comparison of each further file with the first; with --noise, the
losses of the first file's run in another order of sums, that comparison as well, and how many times
as far apart the others are. With --seeds each file is one for every seed, compared seed by seed,
and a picture has their means and bands. Exit status: 0, 1 if one is out of tolerance or of another
length, 2 if a file cannot be read.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

# A script finds only the modules in its own folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.loss_plot import Curve, draw


def read_losses(path: Path) -> list[float]:
    """The losses of a file of JSON lines with ``step`` and ``loss``, in the order of the steps.

    Raises:
        OSError, ValueError: the file cannot be read, or is not such a file.
    """
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    try:
        return [line["loss"] for line in sorted(lines, key=lambda line: line["step"])]
    except (KeyError, TypeError) as problem:
        raise ValueError(f"{path}: lines have a step and a loss, {problem} is missing") from problem


def compare(reference: Sequence[float], other: Sequence[float], tolerance: float) -> dict[str, Any]:
    """Largest and mean absolute difference, and the first step above ``tolerance`` (from 1).

    ``end_difference`` is that of the means over the last tenth of the steps, other less reference.
    A NaN on one side alone is an infinite difference; curves of unequal length are compared up to
    the end of the shorter one.
    """
    differences = [_difference(a, b) for a, b in zip(reference, other, strict=False)]
    above = [step for step, difference in enumerate(differences, start=1) if difference > tolerance]
    last = slice(len(differences) - max(1, len(differences) // 10), len(differences))
    ends = [math.fsum(losses[last]) / max(1, len(losses[last])) for losses in (other, reference)]
    return {
        "steps": len(differences),
        "same_length": len(reference) == len(other),
        "bitwise_equal": len(reference) == len(other) and not any(differences),
        "max_difference": max(differences, default=0.0),
        "mean_difference": math.fsum(differences) / len(differences) if differences else 0.0,
        "end_difference": ends[0] - ends[1],
        "first_step_above_tolerance": above[0] if above else None,
        "tolerance": tolerance,
    }


def main(arguments: Sequence[str]) -> int:
    """Compare every further file with the first; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("reference", type=Path)
    parser.add_argument("others", type=Path, nargs="+")
    parser.add_argument("--tolerance", type=float, default=0.0, help="absolute; 0: every bit")
    parser.add_argument("--noise", type=Path, help="the reference in another order of sums")
    parser.add_argument(
        "--seeds", type=lambda text: text.split(","), default=[""], help="for {seed} in file names"
    )
    parser.add_argument("--plot", type=Path, help="curves as a picture, and as CSV (extra plot)")
    options = parser.parse_args(arguments)
    paths = [options.reference, *([options.noise] if options.noise else []), *options.others]
    try:
        losses = {
            seed: {path: read_losses(_of_seed(path, seed)) for path in paths}
            for seed in options.seeds
        }
    except (OSError, ValueError) as problem:
        print(f"compare_losses.py: {problem}", file=sys.stderr)
        return 2
    result: dict[str, Any] = {"comparisons": []}
    for seed, runs in losses.items():
        reference = runs[options.reference]
        compared = {path: compare(reference, runs[path], options.tolerance) for path in paths}
        found = [{"file": str(_of_seed(path, seed)), **compared[path]} for path in options.others]
        if options.noise:
            noise = {"file": str(_of_seed(options.noise, seed)), **compared[options.noise]}
            result.setdefault("noise", []).append(noise)
            for one in found:
                apart = noise["mean_difference"]
                one["times_noise"] = one["mean_difference"] / apart if apart else None
        result["comparisons"] += found
    if options.plot:
        _draw(losses, options.plot)
    print(json.dumps(result))
    same = [
        one["same_length"] and one["first_step_above_tolerance"] is None
        for one in result["comparisons"]
    ]
    return 0 if all(same) else 1


def _of_seed(path: Path, seed: str) -> Path:
    return Path(str(path).replace("{seed}", seed))


def _draw(losses: Mapping[str, Mapping[Path, Sequence[float]]], path: Path) -> None:
    curves: dict[str, dict[int, Curve]] = {}
    for number, runs in enumerate(losses.values()):
        for file, values in runs.items():
            name = file.stem.replace("-{seed}", "")
            curve = Curve(np.arange(1.0, len(values) + 1), np.array(values))
            curves.setdefault(name, {})[number] = curve
    draw(curves, next(iter(curves)), path, "steps", 1.0)


def _difference(one: float, other: float) -> float:
    if math.isnan(one) or math.isnan(other):
        return 0.0 if math.isnan(one) and math.isnan(other) else math.inf
    return abs(one - other)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
