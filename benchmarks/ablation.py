"""Table 3 of MegaScale on this machine: the gain of each step from a plain trainer to the full one.

    python benchmarks/ablation.py --preset 7b --tp 2 --pp 2 --vpp 2 --steps 5 \\
        --budget-s 540 --results ablation.jsonl --plot ablation.png
    python benchmarks/ablation.py --preset tiny --tp 2 --pp 2 --device cpu --rounds 2
    python benchmarks/ablation.py --read ablation.jsonl --plot ablation.png

Rows are measured in turn, so that each has a partner in time in every other. Gains are in tokens
per second, because two of the rows change the mathematics (the block) or the batch. Rows that have
no effect in the layout are left out.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# A script finds only the modules in its own folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import command, options, report
from benchmarks.loss_plot import cannot_draw
from benchmarks.options import Entry
from benchmarks.presets import PRESETS, ConfigurationRefused, Run

_PLAIN = ("--block", "serial", "--kernels", "torch", "--overlap", "none")
_OVERLAP_ROWS = {"tp": "TP", "pp": "PP", "dp": "DP"}
_LARGER_BATCH = "+ larger batch"
# MFU points that the paper's Table 3 gives a row (175B, 256 GPUs; its larger batch is three times
# as large, with LAMB).
_PAPER_POINTS = {
    "+ parallel block": "+4.6",
    "+ kernels": "+1.7",
    "+ TP overlap": "+2.2",
    "+ PP overlap": "+2.5",
    "+ DP overlap": "+1.5",
    _LARGER_BATCH: "+3.0",
}


def ladder(run: Run, ranks: int, batch_factor: int) -> list[dict[str, Any]]:
    """The rows after the baseline, each as what it changes."""
    sizes = {"tp": run.tp, "pp": run.pp, "dp": run.dp or ranks // (run.tp * run.pp)}
    rows: list[dict[str, Any]] = [
        {"row": "+ parallel block", "block": "parallel"},
        {"row": "+ kernels", "kernels": "triton"},
    ]
    hidden: list[str] = []
    for axis, label in _OVERLAP_ROWS.items():
        if sizes[axis] > 1:
            hidden.append(axis)
            rows.append({"row": f"+ {label} overlap", "overlap": ",".join(hidden)})
    if batch_factor > 1:
        batch = (run.global_batch or PRESETS[run.preset].batch) * batch_factor
        rows.append({"row": _LARGER_BATCH, "global_batch": batch})
    return rows


class _Ablation:
    """The command line's parts, and where the picture goes."""

    def __init__(self) -> None:
        self._plot: Path | None = None

    def own_options(self, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("--batch-factor", type=int, default=3, help="of the last row's batch; 1: no such row")
        add("--plot", default="", help="the rows as a picture, and beside it as CSV")

    def entries(self, machine: argparse.Namespace, rest: Sequence[str]) -> list[Entry]:
        self._plot = machine.folder / machine.plot if machine.plot else None
        if self._plot is not None and (refusal := cannot_draw()):
            raise ConfigurationRefused(refusal)
        asked = options.entry_of(rest)
        if len(asked.variants) > 1:
            raise ConfigurationRefused("an ablation has rows of its own: omit --against")
        ranks = command.ranks(machine, [asked])
        return [options.entry_of([*rest, *_PLAIN], ladder(asked.run, ranks, machine.batch_factor))]

    def conclude(self, lines: list[dict[str, Any]]) -> tuple[dict[str, Any], bool]:
        if self._plot is not None:
            _draw_measured(lines, self._plot)
        return {"results": lines}, True


def main(arguments: Sequence[str]) -> int:
    """Measure the rows, or draw those of before; returns the exit status."""
    reading = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    reading.add_argument("--read", type=Path)
    reading.add_argument("--plot", type=Path)
    found, others = reading.parse_known_args(arguments)
    if found.read is None:
        run = _Ablation()
        description = __doc__ or ""
        return command.main(
            arguments, description, run.own_options, run.entries, _text, run.conclude
        )
    if found.plot is None or others:
        print("ablation.py: --read RESULTS takes --plot PICTURE and nothing else", file=sys.stderr)
        return 2
    lines = [json.loads(line) for line in found.read.read_text().splitlines()]
    if not _draw_measured(lines, found.plot):
        print(f"ablation.py: {found.read} has no measured rows", file=sys.stderr)
        return 1
    print(json.dumps({"picture": str(found.plot)}))
    return 0


def _draw_measured(lines: Sequence[Mapping[str, Any]], path: Path) -> bool:
    """Draw the first result that has rows; whether there was one."""
    measured = [line["variants"] for line in lines if "variants" in line]
    if measured:
        draw(cells_of(measured[0]), path)
    return bool(measured)


def cells_of(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What a picture and its CSV have of each measured row; MFU in percent, None on a CPU.

    ``points`` are what the row adds to the MFU of the row before, with attention counted in full;
    ``paper_points`` what it adds in the paper. Gains in tokens per second are shares.
    """
    cells, before = [], None
    for row in rows:
        full = _percent(row["mfu_full"])
        gain = row.get("gain_over_previous") or {}
        paper = _PAPER_POINTS.get(row["label"])
        cells.append(
            {
                "row": row["label"],
                "tokens_per_s_per_device": row["tokens_per_s_per_device"],
                "mfu_causal": _percent(row["mfu_causal"]),
                "mfu_full": full,
                "points": None if full is None or before is None else full - before,
                "paper_points": None if paper is None else float(paper),
                **{f"gain_{name}": gain.get(name) for name in ("median", "min", "max")},
            }
        )
        before = full
    return cells


def draw(cells: Sequence[Mapping[str, Any]], path: Path) -> None:
    """The rows' MFU (tokens per second on a CPU), and what each adds beside the paper's points.

    Needs the extra plot. The same goes to a CSV file beside ``path``.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with path.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(cells[0]))
        writer.writeheader()
        writer.writerows(cells)
    known = cells[0]["mfu_full"] is not None
    names = [cell["row"] for cell in cells]
    figure, (speed, added) = pyplot.subplots(2, 1, figsize=(9, 7), dpi=120)
    unit = "mfu_full" if known else "tokens_per_s_per_device"
    bars = speed.bar(names, [cell[unit] for cell in cells], color="tab:blue")
    speed.bar_label(bars, fmt="%.1f", fontsize="small")
    speed.set_ylabel("MFU, attention in full (%)" if known else "tokens/s per device")
    places, width = range(len(cells) - 1), 0.38
    if known:
        ours = [cell["points"] for cell in cells[1:]]
        papers = [cell["paper_points"] or 0.0 for cell in cells[1:]]
        label = "the paper (175B, 256 GPUs)"
        right = added.bar([place + width for place in places], papers, width, label=label)
        added.bar_label(right, fmt="%+.1f", fontsize="small")
    else:  # the paper has points of MFU alone
        ours = [100 * cell["gain_median"] for cell in cells[1:]]
    left = added.bar(places, ours, width, label="here")
    added.bar_label(left, fmt="%+.1f", fontsize="small")
    added.set_xticks(list(places), names[1:])
    added.set_ylabel("MFU points added" if known else "gain in tokens/s (%)")
    added.axhline(0.0, color="black", linewidth=0.8)
    added.legend(frameon=False)
    for axes in (speed, added):
        axes.tick_params(axis="x", labelsize="small")
        axes.margins(y=0.15)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _text(line: dict[str, Any]) -> str:
    if "variants" not in line:
        return report.text(line)
    rows = line["variants"]
    paper = [_PAPER_POINTS.get(row["label"], "-") for row in rows]
    return f"{report.text(line)}\n\n{report.table(rows, {'MFU points in the paper': paper})}"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
