"""`megascale sim`: simulations of a cluster's network.

The models are :mod:`megascale_planner.network`; here are the options, tables, files and plots.
matplotlib is imported only when a plot is drawn.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table

from megascale_job.visible import counted
from megascale_planner.network.ecmp import (
    ORDERS,
    PHASES,
    BadFabric,
    BadJob,
    Fabric,
    Floats,
    conflicts,
)
from megascale_planner.network.ecmp import simulate as simulate_flows
from megascale_planner.network.incast import ARMS, Setup, simulate

Slowdowns = Mapping[tuple[str, str, int], Sequence[NDArray[np.float64]]]
USER_MISTAKE_EXIT_CODE = 2
_TABLE_WIDTH = 150
_ECMP_COLUMNS = (
    "order",
    "phase",
    "qps",
    "cross_tor",
    "mean_rate",
    "worst_rate",
    "slowest_hop_mean",
    "slowdown_p50",
    "slowdown_p99",
    "slowdown_max",
)
_LOADS = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Simulate the network of a cluster that you do not have. Every figure is simulated.",
)
_console = Console(highlight=False, width=_TABLE_WIDTH)

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Csv = Annotated[Path | None, typer.Option("--csv", help="Write every row to this file.")]
Plot = Annotated[
    Path | None, typer.Option("--plot", help="Draw into this file (.png or .svg; extra plot).")
]


@app.command("ecmp")
def ecmp(
    hosts: Annotated[int, typer.Option(min=2, help="Servers, all of them of one job.")] = 1536,
    pp: Annotated[int, typer.Option(min=1, help="Pipeline stages; tp stays on a host.")] = 8,
    order: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(ORDERS)}; can be repeated; default: all.")
    ] = None,
    phase: Annotated[
        list[str] | None, typer.Option(help="dp (rings) or pp (stages); default: both.")
    ] = None,
    qps: Annotated[
        list[int] | None, typer.Option(help="Queue pairs of a connection; default: 1 and 16.")
    ] = None,
    split: Annotated[
        bool, typer.Option(help="Ports of the ToRs split in two, as in the paper.")
    ] = True,
    rails: Annotated[int, typer.Option(min=1, help="Network cards of a host.")] = 8,
    ports: Annotated[int, typer.Option(min=1, help="Ports of a ToR, down as well as up.")] = 32,
    seeds: Annotated[int, typer.Option(min=1, max=1000, help="Seeds of the switches' hashes.")] = 3,
    csv_file: Csv = None,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Slowdown of a job by equal-cost multi-path routing, for each order of ranks over the hosts.

    Flows in a fat tree of ToR, aggregation and core switches get max-min fair rates, in shares of
    a network card's line rate. A ring is as fast as its slowest hop.

    Example: [bold]megascale sim ecmp --hosts 1536 --pp 8 --order pp-inner --plot rings.png[/bold]
    """
    wanted = [
        (each, kind, count, seed)
        for each in order or ORDERS
        for kind in phase or PHASES
        for count in qps or (1, 16)
        for seed in range(seeds)
    ]
    try:
        fabric = Fabric(hosts, rails, ports, split)
        rows = []
        slowdowns: dict[tuple[str, str, int], list[Floats]] = {}
        for each, kind, count, seed in _shown(wanted):
            result = simulate_flows(fabric, pp, each, kind, count, seed)
            rows.append(result.row())
            slowdowns.setdefault((each, kind, count), []).append(result.slowdowns())
    except (BadFabric, BadJob) as error:
        raise _refuse(str(error)) from None
    shapes = {"tors": fabric.tors, "blocks": fabric.blocks, "hosts_per_tor": fabric.hosts_per_tor}
    _write_csv(csv_file, rows)
    if plot is not None:
        _draw(lambda: plot_slowdowns(plot, slowdowns, split=split))
    means = _means(rows)
    if as_json:
        print(json.dumps({"simulated": True, "hosts": hosts, "pp": pp, **shapes, "rows": rows}))
        return
    title = f"{counted(hosts, 'host')}, {fabric.tors} ToRs, simulated; mean of {seeds} seeds"
    _print_rows(title, means, _ECMP_COLUMNS)


@app.command("split")
def split_ports(
    ports: Annotated[int, typer.Option(min=1, max=512, help="Links up of a ToR.")] = 32,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Probability that flows share an uplink, with and without split ports, by the load of a ToR.

    Example: [bold]megascale sim split --ports 32[/bold]
    """
    rows = list(conflicts(ports, _LOADS))
    if plot is not None:
        _draw(lambda: plot_conflicts(plot, rows))
    if as_json:
        print(json.dumps({"ports": ports, "rows": rows}))
    else:
        _print_rows(f"a ToR with {counted(ports, 'link')} up", rows, ("split", "load", "conflict"))


@app.command("cc")
def congestion(
    arm: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(ARMS)}; can be repeated; default: all.")
    ] = None,
    senders: Annotated[
        list[int] | None, typer.Option(help="Senders to one receiver; default: 32.")
    ] = None,
    megabytes: Annotated[
        float, typer.Option(min=0.1, max=8000, help="Megabytes of all senders together.")
    ] = 128.0,
    xoff_kb: Annotated[
        list[int] | None, typer.Option(help="Queue in kB at which PFC stops a port; default: 1000.")
    ] = None,
    rtt_us: Annotated[float, typer.Option(min=0.1, help="Base round trip in microseconds.")] = 8.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the marks.")] = 0,
    csv_file: Csv = None,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Many senders to one receiver, packet by packet, under several congestion controls.

    Shows when the last byte arrives, the rate of a victim whose bytes go elsewhere, how long PFC
    stops the shared link, and the queue. All combinations of repeated options are simulated. Cards
    have 200 Gb/s, the shared link has 400.

    Example: [bold]megascale sim cc --arm dcqcn --arm swift --senders 8 --senders 64[/bold]
    """
    unknown = sorted(set(arm or ()) - set(ARMS))
    if unknown:
        raise _refuse(f"--arm {unknown[0]}: unknown; give one of {', '.join(ARMS)}")
    wanted = [
        (name, count, xoff)
        for name in arm or ARMS
        for count in senders or (32,)
        for xoff in xoff_kb or (1000,)
    ]
    rows = []
    for name, count, xoff in _shown(wanted):
        try:
            base = Setup(
                count, int(megabytes * 1e6), rtt_s=rtt_us * 1e-6, xoff_bytes=xoff * 1000, seed=seed
            )
        except ValueError as error:
            raise _refuse(str(error)) from None
        setup = ARMS[name].setup(base)
        found = simulate(setup, ARMS[name].make)
        rows.append(_congestion_row(name, setup, asdict(found)))
    _write_csv(csv_file, rows)
    if plot is not None:
        _draw(lambda: plot_congestion(plot, rows))
    sources = {name: ARMS[name].source for name, _, _ in wanted}
    if as_json:
        print(json.dumps({"simulated": True, "rows": rows, "sources": sources}))
        return
    ideal_ms = Setup(1, int(megabytes * 1e6)).ideal_s * 1e3
    title = f"{megabytes:g} MB to one receiver, {ideal_ms:.2f} ms at best; simulated"
    _print_rows(title, rows, tuple(rows[0]))
    for name, source in sources.items():
        _console.print(f"[dim]{name}: {source}[/dim]")


def _congestion_row(name: str, setup: Setup, found: dict[str, float]) -> dict[str, Any]:
    return {
        "arm": name,
        "senders": setup.senders,
        "xoff_kb": setup.xoff_bytes // 1000,
        "done_ms": round(found["done_s"] * 1e3, 3),
        "victim_gbps": round(found["victim_bps"] / 1e9, 1),
        "paused": round(found["paused"], 4),
        "queue_mean_kb": round(found["queue_mean_bytes"] / 1e3, 1),
        "queue_p99_kb": round(found["queue_p99_bytes"] / 1e3, 1),
        "fairness": round(found["fairness"], 4),
        "marked": round(found["marked"], 4),
    }


def _means(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean rows over the seeds of each point."""
    points: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        points.setdefault((row["order"], row["phase"], row["qps"]), []).append(row)
    return [
        {
            name: round(sum(row[name] for row in found) / len(found), 4)
            if isinstance(value, float)
            else value
            for name, value in found[0].items()
        }
        for found in points.values()
    ]


def _shown(wanted: Sequence[Any]) -> Iterable[Any]:
    """``wanted``, with a progress bar if stderr is a terminal."""
    console = Console(file=sys.stderr)
    return track(
        wanted, "simulating", console=console, transient=True, disable=not console.is_terminal
    )


def _print_rows(title: str, rows: Sequence[dict[str, Any]], names: Sequence[str]) -> None:
    table = Table(title=title, title_justify="left")
    for name in names:
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(str(row[name]) for name in names))
    _console.print(table)


def _write_csv(path: Path | None, rows: Sequence[dict[str, Any]]) -> None:
    if path is None:
        return
    try:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    except OSError as error:
        raise _refuse(
            f"--csv {path}: {error.strerror}; give a file in a folder that exists"
        ) from None


def _draw(draw: Callable[[], None]) -> None:
    try:
        draw()
    except ImportError:
        raise _refuse("--plot needs matplotlib: pip install 'megascale[plot]'") from None
    except (OSError, ValueError) as error:
        raise _refuse(
            f"--plot: {error}; give a .png or .svg file in a folder that exists"
        ) from None


def _refuse(problem: str) -> typer.Exit:
    print(f"error: {problem}", file=sys.stderr)
    return typer.Exit(USER_MISTAKE_EXIT_CODE)


def plot_slowdowns(path: Path, found: Slowdowns, *, split: bool) -> None:
    """The distribution of the groups' slowdowns, a curve for each order, phase and QPs."""
    figure, axes = _axes()
    for (order, phase, qps), each in found.items():
        values = np.sort(np.concatenate(each))
        share = np.arange(1, len(values) + 1) / len(values)
        axes.step(values, share, where="post", label=f"{order}, {phase}, {qps} QPs")
    ports = "split ports" if split else "ports not split"
    axes.set(xlabel="times as long as alone", ylabel="share of the groups")
    _finish(figure, axes, path, f"Rings and pipelines, {ports}")


def plot_conflicts(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Conflicts of flows by load, with and without split ports."""
    figure, axes = _axes()
    for split in (True, False):
        points = [(row["load"], row["conflict"]) for row in rows if row["split"] is split]
        label = "split: two cards a link" if split else "not split: one card a link"
        axes.plot(*zip(*points, strict=True), marker="o", label=label)
    axes.set(xlabel="share of the ToR's cards that send", ylabel="flows without room", ylim=(0, 1))
    _finish(figure, axes, path, "Flows that share a link beyond its capacity")


def plot_congestion(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """The victim's rate against the time of the incast, a line for each control."""
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
