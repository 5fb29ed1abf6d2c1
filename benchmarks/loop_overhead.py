"""What a job's loop costs beside the bare step: loader, step records, status page and tracker.

    python benchmarks/loop_overhead.py                          # 1B on one GPU
    python benchmarks/loop_overhead.py --preset tiny --device cpu --steps 12 --trackers none

One trainer takes blocks of steps in turn, bare and in the product's loop (A B A B), so that drifts
of the device affect both alike. The overhead is the mean of the blocks' pairs; a bound stands above
it with 95 % confidence (one-sided, Student's t). The last line of stdout is one JSON object; exit
status: 0, 1 if the bound is above ``--most-percent`` or a measurement failed, 2 for a command line
that cannot run here.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# A script finds only the modules in its own folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import command, options, report
from benchmarks.options import Entry

ROUNDS, STEPS, BATCH = 24, 15, 8
MOST_PERCENT = 0.5
_CONFIDENCE = 0.95
_DEFAULTS = ["--preset", "1b", "--global-batch", str(BATCH), "--rounds", str(ROUNDS)]
_DEFAULTS += ["--steps", str(STEPS), "--kernels", "auto"]
_DEFAULTS += ["--trackers", "tensorboard" if find_spec("tensorboard") else "none"]
_DESCRIBED = (
    *("device", "torch", "ranks", "preset", "layers", "sequence_length", "global_batch_size"),
    *("precision", "kernels", "trackers"),
)


def overhead(bare_s: Sequence[float], product_s: Sequence[float]) -> dict[str, float]:
    """By what share product steps are longer than the bare ones of the same pair, in percent.

    Raises:
        ValueError: fewer than two pairs, which have no spread.
    """
    shares = [100 * (own / bare - 1) for bare, own in zip(bare_s, product_s, strict=True)]
    if len(shares) < 2:
        raise ValueError("an upper bound needs at least two pairs of blocks (--rounds)")
    mean, spread = statistics.fmean(shares), statistics.stdev(shares)
    return {
        "overhead_percent": mean,
        "upper_95_percent": mean + student_t(len(shares) - 1) * spread / math.sqrt(len(shares)),
        "median_percent": statistics.median(shares),
        "least_percent": min(shares),
        "largest_percent": max(shares),
        "pairs": len(shares),
    }


def student_t(freedom: int) -> float:
    """The 95 % quantile of Student's t, to 0.2 % from 5 degrees of freedom on.

    Expansion in 1 / freedom around the normal quantile (Abramowitz and Stegun 26.7.5).
    """
    z = statistics.NormalDist().inv_cdf(_CONFIDENCE)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def _own_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--most-percent", type=float, default=MOST_PERCENT, help="exit 1 if the bound is above"
    )


def _entries(machine: argparse.Namespace, rest: Sequence[str]) -> list[Entry]:
    words = [*_DEFAULTS, *rest, "--loop", "product", "--against", "loop=bare"]
    return [options.entry_of(words)]


def _conclude(most_percent: float, lines: list[dict[str, Any]]) -> tuple[dict[str, Any], bool]:
    [line] = lines
    if "variants" not in line:
        return line, False
    bare, product = line["variants"]
    found: dict[str, Any] = overhead(bare["mean_step_times_s"], product["mean_step_times_s"])
    holds = found["upper_95_percent"] <= most_percent
    found |= {"most_percent": most_percent, "holds": holds}
    for name, row in (("bare", bare), ("product", product)):
        found[f"{name}_step_s"] = statistics.fmean(row["mean_step_times_s"])
        found[f"{name}_blocks_s"] = row["mean_step_times_s"]
        found[f"{name}_sensors"] = row["sensors"]
    return found | {name: line[name] for name in _DESCRIBED}, holds


def main(arguments: Sequence[str]) -> int:
    """Measure; returns the exit status."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    _own_options(parser)
    most_percent = parser.parse_known_args(arguments)[0].most_percent
    return command.main(
        arguments,
        __doc__ or "",
        _own_options,
        _entries,
        report.text,
        lambda lines: _conclude(most_percent, lines),
    )


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
