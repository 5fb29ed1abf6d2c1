"""Loss curves as a picture and as CSV: means over seeds with their bands, and differences."""

from __future__ import annotations

import csv
import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

POINTS = 60  # of a curve in a picture
_END = 0.1  # share of the tokens whose mean loss is a curve's end
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Curve:
    """``losses[i]`` is the loss of the step that ends after ``tokens[i]`` tokens; float64 [steps].

    A curve without any step is none.
    """

    tokens: Floats
    losses: Floats

    @property
    def length(self) -> float:
        """Tokens until its last step's end."""
        return float(self.tokens[-1])

    @property
    def step(self) -> float:
        """Tokens of its first step, or of the next one where it has two."""
        return float(self.tokens[0] if len(self.tokens) == 1 else self.tokens[1] - self.tokens[0])

    @property
    def begin(self) -> float:
        """Tokens before its first step; above 0 of a run that goes on from another's state."""
        return float(self.tokens[0]) - self.step

    def end(self, length: float) -> float:
        """Mean loss over the last tenth of the first ``length`` tokens, of one step at least."""
        steps = self.losses[self.tokens <= length]
        last = steps[self.tokens[: len(steps)] > (1 - _END) * length]
        return float((last if len(last) else steps[-1:]).mean())

    def binned(self, edges: Floats) -> Floats:
        """Mean loss of the steps that end within each of the intervals, float64 [len(edges) - 1].

        NaN in intervals without a step, and in those that the curve does not reach the end of.
        """
        places = np.searchsorted(edges, self.tokens, side="left") - 1
        inside = places < len(edges) - 1
        count = np.bincount(places[inside], minlength=len(edges) - 1)
        total = np.bincount(places[inside], self.losses[inside], minlength=len(edges) - 1)
        whole = (edges[1:] <= self.length * (1 + 1e-9)) & (count > 0)
        return np.where(whole, total / np.maximum(count, 1), math.nan)


Curves = Mapping[str, Mapping[int, Curve]]  # by run and seed


def cannot_draw() -> str:
    """Why no picture can be drawn here, with a remedy; empty if one can."""
    if importlib.util.find_spec("matplotlib") is not None:
        return ""
    return "--plot needs matplotlib (extra plot): omit it here, and draw elsewhere with --read"


def draw(
    curves: Curves,
    against: str,
    path: Path,
    label: str = "tokens (millions)",
    unit: float = 1e6,
) -> None:
    """Means over the seeds with their bands as a picture, and beside it as CSV.

    Above the losses, below the differences from the run ``against``, over tokens in units of
    ``unit`` (or over steps, where the curves count these). Needs the extra plot.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    every = [curve for found in curves.values() for curve in found.values()]
    begin, length = min(curve.begin for curve in every), max(curve.length for curve in every)
    points = min(POINTS, *(int((length - begin) / curve.step) for curve in every))
    edges = np.linspace(begin, length, points + 1)
    middles = (edges[1:] + edges[:-1]) / 2
    figure, (upper, lower) = pyplot.subplots(
        2, 1, figsize=(9, 8), dpi=120, sharex=True, height_ratios=(3, 2)
    )
    with path.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("run", "tokens", *_columns("loss"), *_columns("difference")))
        for name, found in curves.items():
            losses = _bands([curve.binned(edges) for curve in found.values()])
            apart = _bands(_differences(found, curves.get(against, {}), edges))
            _line(upper, middles / unit, losses, name)
            _line(lower, middles / unit, apart, name)
            for middle, *values in zip(middles, *losses, *apart, strict=True):
                if not math.isnan(values[0]):
                    cells = ("" if math.isnan(value) else f"{value:.5f}" for value in values)
                    writer.writerow((name, f"{middle:.0f}", *cells))
    _finish(upper, lower)
    lower.set(xlabel=label, ylabel=f"difference from {against}")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def _columns(of: str) -> tuple[str, str, str]:
    return f"mean_{of}", f"lowest_{of}", f"highest_{of}"


def _bands(values: Sequence[Floats]) -> tuple[Floats, Floats, Floats]:
    """Mean, lowest and highest over the seeds, NaN where a seed has none."""
    stacked = np.stack(values)
    return stacked.mean(0), stacked.min(0), stacked.max(0)


def _differences(
    found: Mapping[int, Curve], reference: Mapping[int, Curve], edges: Floats
) -> list[Floats]:
    pairs = [seed for seed in found if seed in reference]
    none = [np.full(len(edges) - 1, math.nan)]
    return [found[seed].binned(edges) - reference[seed].binned(edges) for seed in pairs] or none


def _line(axes: Any, middles: Floats, band: tuple[Floats, Floats, Floats], name: str) -> None:
    mean, low, high = band
    (line,) = axes.plot(middles, mean, label=name, linewidth=1.4)
    axes.fill_between(middles, low, high, alpha=0.2, color=line.get_color())


def _finish(upper: Any, lower: Any) -> None:
    """Limits leave out the first tenth, whose losses are far above the rest."""
    for axes in (upper, lower):
        shown = [line.get_ydata()[len(line.get_ydata()) // 10 :] for line in axes.get_lines()]
        values = np.concatenate(shown)
        values = values[np.isfinite(values)]
        if len(values):
            margin = 0.05 * (values.max() - values.min()) or 1e-3
            axes.set_ylim(values.min() - margin, values.max() + margin)
        axes.grid(alpha=0.25)
    upper.set_ylabel("training loss (nats a token)")
    upper.legend(frameon=False, fontsize="small")
