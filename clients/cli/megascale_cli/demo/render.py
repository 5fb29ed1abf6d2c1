"""The demo's output: its claims, the timeline, and the loss curve as text and as a picture."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from rich.markup import escape

from megascale_cli.demo.claims import Claim, Kill
from megascale_cli.demo.cluster import DemoFailed, Echo
from megascale_cli.demo.recording import Recording, seconds
from megascale_cli.output import clipped
from megascale_cli.visible import counted

CURVE_WIDTH = 72
CURVE_HEIGHT = 12


def require(claims: Iterable[Claim], echo: Echo) -> None:
    """Print which claims hold.

    Raises:
        DemoFailed: one does not; the message has the first of them.
    """
    failed = []
    for claim in claims:
        mark = "[green]yes[/green]" if claim.holds else "[bold red]NO[/bold red] "
        echo(f"  {mark} {escape(str(claim))}")
        if not claim.holds:
            failed.append(claim)
    if failed:
        raise DemoFailed(f"not observed: {failed[0]}")


def require_nothing_left(processes: int, echo: Echo) -> None:
    """Require that no process of a cluster had to be killed at its end; raises as `require`."""
    seen = f"{counted(processes, 'process')} had to be killed"
    require([Claim("nothing is left running", processes == 0, seen)], echo)


def timeline(run: Recording, kill: Kill | None) -> list[str]:
    """Events, the kill, and each attempt's first and last step, with seconds since the first."""
    rows: list[tuple[float, str]] = [
        (seconds(event.time), f"{event.reason:<22} {clipped(event.message)}")
        for event in run.events
    ]
    if kill is not None:
        rows.append(
            (
                kill.at,
                f"{'>>> SIGKILL':<22} node {kill.node} with its "
                f"{counted(kill.processes, 'process')}",
            )
        )
    for attempt in range(1, run.attempts + 1):
        steps = sorted(step for number, step in run.records if number == attempt)
        for step in dict.fromkeys(steps[:1] + steps[-1:]):
            record = run.records[attempt, step]
            rows.append(
                (
                    seconds(record.completed_at),
                    f"{'step ' + str(step):<22} loss {record.loss:.4f}, attempt {attempt}",
                )
            )
    rows.sort(key=lambda row: row[0])
    start = rows[0][0] if rows else 0.0
    return [f"{moment - start:8.3f} s  {text}" for moment, text in rows]


def curve(
    losses: Mapping[int, float], killed_at_step: int | None, resumed_from_step: int
) -> list[str]:
    """The loss curve as text; ``x``: last step before the kill, ``o``: first step resumed."""
    if not losses:
        return ["no losses"]
    first, last = min(losses), max(losses)
    low, high = min(losses.values()), max(losses.values())
    grid = [[" "] * CURVE_WIDTH for _ in range(CURVE_HEIGHT)]

    def place(step: int, sign: str) -> None:
        column = round((step - first) / max(1, last - first) * (CURVE_WIDTH - 1))
        row = round((high - losses[step]) / max(1e-12, high - low) * (CURVE_HEIGHT - 1))
        grid[row][column] = sign

    for step in losses:
        place(step, "·")
    marks = [] if killed_at_step is None else [(killed_at_step, "x"), (resumed_from_step + 1, "o")]
    for step, sign in marks:
        if step in losses:
            place(step, sign)
    labels = {0: f"{high:.3f}", CURVE_HEIGHT - 1: f"{low:.3f}"}
    lines = [
        f"{labels.get(index, ''):>8} |{''.join(row).rstrip()}" for index, row in enumerate(grid)
    ]
    legend = (
        ""
        if killed_at_step is None
        else f"   x killed after step {killed_at_step}, o resumed with step {resumed_from_step + 1}"
    )
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
    twin_losses = twin.losses()
    axes.plot(
        list(twin_losses),
        list(twin_losses.values()),
        color="#bbbbbb",
        linewidth=5,
        label="uninterrupted twin",
    )
    for attempt in range(1, run.attempts + 1):
        losses = run.losses(attempt)
        axes.plot(
            list(losses),
            list(losses.values()),
            linewidth=1.5,
            marker=".",
            label=f"attempt {attempt}",
        )
    if killed_at_step is not None:
        axes.axvline(killed_at_step, color="black", linestyle=":", label="node killed")
    axes.set(
        xlabel="step", ylabel="loss", title="A node is killed; the run resumes from its checkpoint"
    )
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return ""
