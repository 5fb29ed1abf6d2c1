"""Plots of `megascale sim`; matplotlib is imported when one is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Slowdowns = Mapping[tuple[str, str, int], Sequence[NDArray[np.float64]]]


def slowdowns(path: Path, found: Slowdowns, *, split: bool) -> None:
    """The distribution of the groups' slowdowns, a curve for each order, phase and QPs."""
    figure, axes = _axes()
    for (order, phase, qps), each in found.items():
        values = np.sort(np.concatenate(each))
        share = np.arange(1, len(values) + 1) / len(values)
        axes.step(values, share, where="post", label=f"{order}, {phase}, {qps} QPs")
    ports = "split ports" if split else "ports not split"
    axes.set(xlabel="times as long as alone", ylabel="share of the groups")
    _finish(figure, axes, path, f"Rings and pipelines, {ports}")


def conflicts(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Conflicts of flows by load, with and without split ports."""
    figure, axes = _axes()
    for split in (True, False):
        points = [(row["load"], row["conflict"]) for row in rows if row["split"] is split]
        label = "split: two cards a link" if split else "not split: one card a link"
        axes.plot(*zip(*points, strict=True), marker="o", label=label)
    axes.set(xlabel="share of the ToR's cards that send", ylabel="flows without room", ylim=(0, 1))
    _finish(figure, axes, path, "Flows that share a link beyond its capacity")


def congestion(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """The victim's rate beside the time of the incast, a line for each control."""
    figure, axes = _axes()
    for arm in dict.fromkeys(row["arm"] for row in rows):
        points = [(row["done_ms"], row["victim_gbps"]) for row in rows if row["arm"] == arm]
        axes.plot(*zip(*points, strict=True), marker="o", label=arm)
    axes.set(xlabel="the last byte arrives after ms", ylabel="victim, Gb/s", ylim=(0, 200))
    _finish(figure, axes, path, "Incast: up and left is better")


def _axes() -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(figsize=(7, 4.5), layout="constrained")


def _finish(figure: Any, axes: Any, path: Path, title: str) -> None:
    axes.set_title(f"{title} (simulated)")
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    from matplotlib import pyplot

    pyplot.close(figure)
