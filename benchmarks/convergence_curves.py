"""Loss curves beside each other, by tokens: ends, differences from one of them, noise."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.compare_losses import compare
from benchmarks.loss_plot import Curve, Curves


def read_curve(path: Path) -> Curve | None:
    """The curve of a file of JSON lines with ``tokens`` and ``loss``; None of an empty one."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    if not lines:
        return None
    return Curve(
        np.array([line["tokens"] for line in lines], np.float64),
        np.array([line["loss"] for line in lines], np.float64),
    )


def rows_of(
    curves: Curves, against: str, noise: str, *, evaluated: bool = False
) -> list[dict[str, Any]]:
    """Each run beside the run ``against``, seed by seed.

    Two runs are compared up to the tokens that both have read. ``last_tenth`` is the mean loss over
    the last tenth of these; a difference below 0 means that the run learnt more. ``within_noise``
    says that the mean difference is at most the largest distance, of any seed, between ``against``
    and the run ``noise``; None where one of these is missing. Of ``evaluated`` runs, which do not
    learn, the mean (``loss`` for ``last_tenth``) is over all batches, and so is the standard error
    of the difference.
    """
    of = _evaluated if evaluated else _row
    found = {name: of(name, curves[name], curves.get(against, {})) for name in curves}
    apart = found[noise]["differences"] if noise in found else []
    bound = max(map(abs, apart), default=None)
    for row in found.values():
        missing = bound is None or row["difference"] is None
        row["within_noise"] = None if missing else row["difference"] <= bound
    return list(found.values())


def _row(name: str, found: Mapping[int, Curve], reference: Mapping[int, Curve]) -> dict[str, Any]:
    lengths = {
        seed: min(curve.length, reference[seed].length) if seed in reference else curve.length
        for seed, curve in found.items()
    }
    ends = {seed: curve.end(lengths[seed]) for seed, curve in found.items()}
    pairs = [seed for seed in found if seed in reference]
    apart = [ends[seed] - reference[seed].end(lengths[seed]) for seed in pairs]
    steps = [
        compare(list(reference[seed].losses), list(found[seed].losses), 0.0)
        for seed in pairs
        if np.array_equal(reference[seed].tokens, found[seed].tokens)
    ]
    first = next(iter(found.values()))
    return {
        "run": name,
        "seeds": list(found),
        "steps": len(first.losses),
        "tokens": min(lengths.values()),
        "first": float(first.losses[0]),
        "last_tenth": statistics.mean(ends.values()),
        "last_tenth_by_seed": list(ends.values()),
        "difference": statistics.mean(apart) if apart else None,
        "differences": apart,
        "standard_error": _standard_error(apart),
        "mean_step_difference": max((x["mean_difference"] for x in steps), default=None),
        "max_step_difference": max((x["max_difference"] for x in steps), default=None),
    }


def _evaluated(
    name: str, found: Mapping[int, Curve], reference: Mapping[int, Curve]
) -> dict[str, Any]:
    pairs = [seed for seed in found if seed in reference]
    apart = {}
    for seed in pairs:
        both = min(len(found[seed].losses), len(reference[seed].losses))
        apart[seed] = found[seed].losses[:both] - reference[seed].losses[:both]
    batches = [float(each) for seed in pairs for each in apart[seed]]
    first = next(iter(found.values()))
    return {
        "run": name,
        "seeds": list(found),
        "steps": len(first.losses),
        "tokens": first.length,
        "loss": statistics.mean(float(curve.losses.mean()) for curve in found.values()),
        "loss_by_seed": [float(curve.losses.mean()) for curve in found.values()],
        "difference": statistics.mean(batches) if batches else None,
        "differences": [float(apart[seed].mean()) for seed in pairs],
        "standard_error": _standard_error(batches),
    }


def _standard_error(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


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
            ", ".join(f"{end:.4f}" for end in row.get("loss_by_seed") or row["last_tenth_by_seed"]),
            "" if not apart else f"{row['difference']:+.5f}",
            ", ".join(f"{difference:+.5f}" for difference in apart),
            "" if error is None else f"{error:.5f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
