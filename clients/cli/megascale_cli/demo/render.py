"""The demo's timeline, and the loss curve as text and as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from megascale_cli.demo.claims import Kill
from megascale_cli.demo.recording import Recording, seconds
from megascale_cli.output import clipped
from megascale_job.visible import counted

CURVE_WIDTH = 72
CURVE_HEIGHT = 12


def timeline(run: Recording, kill: Kill | None) -> list[str]:
    """Events, the kill, and each attempt's first and last step, with seconds since the first."""
    rows = [(seconds(event.time), event.reason, clipped(event.message)) for event in run.events]
    if kill is not None:
        processes = counted(kill.processes, "process")
        rows.append((kill.at, ">>> SIGKILL", f"node {kill.node} with its {processes}"))
    for attempt in range(1, run.attempts + 1):
        steps = run.steps(attempt)
        for step in dict.fromkeys(steps[:1] + steps[-1:]):
            record = run.records[attempt, step]
            text = f"loss {record.loss:.4f}, attempt {attempt}"
            rows.append((seconds(record.completed_at), f"step {step}", text))
    rows.sort(key=lambda row: row[0])
    start = rows[0][0] if rows else 0.0
    return [f"{moment - start:8.3f} s  {what:<22} {text}" for moment, what, text in rows]


def curve(
    losses: Mapping[int, float], killed_at_step: int | None, resumed_from_step: int
) -> list[str]:
    """The loss curve as text; ``x``: last step before the kill, ``o``: first step resumed."""
    if not losses:
        return ["no losses"]
    first, last = min(losses), max(losses)
    low, high = min(losses.values()), max(losses.values())
    signs, legend = dict.fromkeys(losses, "·"), ""
    if killed_at_step is not None:
        resumed_step = resumed_from_step + 1
        signs |= {killed_at_step: "x", resumed_step: "o"}
        legend = f"   x killed after step {killed_at_step}, o resumed with step {resumed_step}"
    grid = [[" "] * CURVE_WIDTH for _ in range(CURVE_HEIGHT)]
    # The marks last: a step beside them may share their place.
    for step in sorted(losses, key=lambda step: signs[step] != "·"):
        column = round((step - first) / max(1, last - first) * (CURVE_WIDTH - 1))
        row = round((high - losses[step]) / max(1e-12, high - low) * (CURVE_HEIGHT - 1))
        grid[row][column] = signs[step]
    labels = {0: f"{high:.3f}", CURVE_HEIGHT - 1: f"{low:.3f}"}
    lines = [f"{labels.get(at, ''):>8} |{''.join(row).rstrip()}" for at, row in enumerate(grid)]
    return [*lines, f"{'':>8} +{'-' * CURVE_WIDTH}", f"{'step':>8}  {first} to {last}{legend}"]


def write_png(path: Path, run: Recording, twin: Recording, killed_at_step: int | None) -> str:
    """Write the loss curves as a picture; returns "", or why there is none."""
    try:
        import matplotlib
    except ImportError:
        return "matplotlib is not installed: pip install 'megascale[plot]'"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4.5))
    losses = twin.losses()
    axes.plot(
        list(losses),
        list(losses.values()),
        color="#bbbbbb",
        linewidth=5,
        label="uninterrupted twin",
    )
    for attempt in range(1, run.attempts + 1):
        losses, label = run.losses(attempt), f"attempt {attempt}"
        axes.plot(list(losses), list(losses.values()), linewidth=1.5, marker=".", label=label)
    if killed_at_step is not None:
        axes.axvline(killed_at_step, color="black", linestyle=":", label="node killed")
    title = "A node is killed; the run resumes from its checkpoint"
    axes.set(xlabel="step", ylabel="loss", title=title)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return ""
