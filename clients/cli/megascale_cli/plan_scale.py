"""`megascale plan search`, `spares`, `checkpoint` and `goodput`: planning without a job file.

The formulas are :mod:`megascale_planner` and :mod:`megascale_job.sizes`; here are the
options and the tables. With ``--json`` one object is printed on stdout.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from megascale_job.presets import MODELS
from megascale_job.sizes.failures import (
    HOUR_S,
    PUBLISHED_DEVICE_HOURS,
    away_probability,
    best_interval_s,
    enough_spares,
    mtbf_s,
)
from megascale_job.visible import counted
from megascale_planner.devices import GPUS, BadCalibration, calibrated
from megascale_planner.goodput import goodput
from megascale_planner.prediction import with_measured_share
from megascale_planner.search import BLOCKS, Found, layout, search, sources
from megascale_planner.systems import SYSTEMS
from megascale_planner.workload import Refused, Workload, from_row

USER_MISTAKE_EXIT_CODE = 2
_SHOWN_REASONS = 8
_TABLE_WIDTH = 170  # whatever the terminal's is: rows stay whole
_MORE_WIDTH = 30  # of models with experts: a further column, and longer terms
_COLUMNS = (
    "tp",
    "pp",
    "vpp",
    "dp",
    "b",
    "recompute",
    "block",
    "stage_layers",
    "step s",
    "low to high",
    "MFU causal / full",
    "GiB",
    "largest terms",
)

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Plan a run before there is a job: layout, spares, checkpoints, goodput.",
)
_console = Console(highlight=False)

Gpus = Annotated[int, typer.Option(min=1, help="Devices of the run.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
DeviceHours = Annotated[
    float, typer.Option(min=1e-3, help="Hours of one device between two failures.")
]
NodeDevices = Annotated[int, typer.Option(min=1, help="Devices of one node.")]
SaveCost = Annotated[float, typer.Option(min=0, help="Seconds that training stops for a snapshot.")]


@app.command("search")
def search_layouts(
    model: Annotated[str, typer.Option(help="A model of `megascale init`: 175b, llama3-8b.")],
    gpus: Gpus,
    gpu: Annotated[str, typer.Option(help="a100-80g, h100, h800 or h200.")] = "h100",
    system: Annotated[str, typer.Option(help="Whose software: see docs/planner.md.")] = "ours",
    global_batch: Annotated[
        int, typer.Option(min=0, help="Sequences of a step; 0: one for each device.")
    ] = 0,
    precision: Annotated[str, typer.Option(help="bf16 or fp8.")] = "bf16",
    block: Annotated[str, typer.Option(help="serial, parallel or both.")] = "both",
    calibration: Annotated[
        Path | None, typer.Option(help="A file of `megascale plan calibrate`.")
    ] = None,
    ep_across_nodes: Annotated[
        bool, typer.Option("--ep-across-nodes", help="Also let groups of ep span nodes.")
    ] = False,
    top: Annotated[int, typer.Option(min=1, max=1000, help="Number of layouts to show.")] = 10,
    as_json: AsJson = False,
) -> None:
    """Rank every legal layout of a model by its predicted step time.

    Shows memory, MFU in both counts, the step by term, an interval, the source of every constant,
    and why the other candidates were rejected (all of them with --json).

    Example: [bold]megascale plan search --model 175b --gpus 1536 --gpu h100[/bold]
    """
    try:
        workload = _workload(model, gpus, gpu, system, global_batch, precision)
        workload = replace(workload, ep_across_nodes=ep_across_nodes)
        device, software = GPUS[gpu], SYSTEMS[system]
        if calibration is not None:
            device = calibrated(device, _read(calibration))
            software = with_measured_share(software, device, _read(calibration))
        found = search(workload, device, software, _blocks(block))
    except (Refused, BadCalibration) as error:
        raise _refuse(str(error)) from None
    rows = found.rows(top)
    constants = sources(device, software)
    if as_json:
        rejected = [{**layout(item.candidate), "reason": item.reason} for item in found.rejected]
        facts = {"model": model, "gpus": gpus, "gpu": gpu, "system": system}
        facts |= {"global_batch": workload.global_batch, "precision": precision}
        print(json.dumps({**facts, "ranked": rows, "rejected": rejected, "sources": constants}))
    else:
        _show(found, rows, constants)
    if not rows:
        raise typer.Exit(USER_MISTAKE_EXIT_CODE)


def _workload(
    model: str, gpus: int, gpu: str, system: str, global_batch: int, precision: str
) -> Workload:
    name = model if model in MODELS else f"gpt-{model}"
    if name not in MODELS:
        raise Refused(f"--model {model}: unknown; give one of {', '.join(MODELS)}")
    sizes = MODELS[name].model
    swiglu = sizes.get("mlp") == "swiglu"
    row = {
        "system": system,
        "gpu": gpu,
        "layers": sizes["layers"],
        "hidden": sizes["hidden_size"],
        "heads": sizes["heads"],
        "kv_heads": sizes.get("kv_heads"),
        "ffn": sizes.get("ffn_size"),
        "mlp": "swiglu" if swiglu else "gelu",
        "sequence": sizes["sequence_length"],
        "vocab": sizes["vocab_size"],
        "gpus": gpus,
        "dp": gpus,
        "global_batch": global_batch or gpus,
        "precision": precision,
    }
    if "experts" in sizes:
        row |= _experts(sizes)
    if global_batch % gpus:  # the layout of the row is not used: any that is legal will do
        row["global_batch"] = gpus
    workload, _ = from_row(row)
    return _with_batch(workload, global_batch or gpus)


def _experts(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a row for a preset with experts; loads are assumed as in a run."""
    names = {"count": "experts", "ffn_size": "expert_ffn", "shared_ffn_size": "shared_ffn"}
    known = ("top_k", "dense_layers", "groups", "groups_kept")
    row = {
        names.get(name, name): value
        for name, value in sizes["experts"].items()
        if name in names or name in known
    }
    return {**row, "head_dim": sizes.get("head_dim", 0), "qk_norm": int(sizes.get("qk_norm", 0))}


def _with_batch(workload: Workload, global_batch: int) -> Workload:
    values = {**asdict(workload), "global_batch": global_batch}
    return Workload(**values)


def _blocks(block: str) -> tuple[str, ...]:
    if block == "both":
        return BLOCKS
    if block not in BLOCKS:
        raise Refused(f"--block {block}: give serial, parallel or both")
    return (block,)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadCalibration(f"--calibration {path}: {error}") from None


def _show(found: Found, rows: list[dict[str, Any]], constants: list[dict[str, Any]]) -> None:
    sizes = ["tp", "pp", "vpp", "dp", "micro_batch"]
    columns = list(_COLUMNS)
    if rows and "ep" in rows[0]:
        sizes.insert(4, "ep")
        columns.insert(4, "ep")
    table = Table(box=None)
    for title in columns:
        table.add_column(title, no_wrap=True)
    for row in rows:
        terms = sorted(row["terms"].items(), key=lambda item: -item[1])[:4]
        shares = ", ".join(f"{name} {100 * s / row['step_time_s']:.0f} %" for name, s in terms)
        table.add_row(
            *(str(row[name]) for name in sizes),
            row["recompute"],
            row["block"],
            _runs(row["stage_layers"]),
            f"{row['step_time_s']:.3f}",
            f"{row['low']:.3f} to {row['high']:.3f}",
            f"{100 * row['mfu_causal']:.1f} / {100 * row['mfu_full']:.1f} %",
            f"{row['memory_gib']:.1f}",
            shares,
        )
    width = _TABLE_WIDTH + _MORE_WIDTH * (len(columns) > len(_COLUMNS))
    Console(highlight=False, width=width).print(table, crop=False)
    _console.print(f"{len(found.ranked)} layouts can run, {len(found.rejected)} cannot:")
    for reason, count in found.reasons()[:_SHOWN_REASONS]:
        example = next(item for item in found.rejected if item.reason.startswith(f"{reason}:"))
        _console.print(f"  {count:6d}  {example.reason}", markup=False)
    _console.print("Constants:")
    for constant in constants:
        value = f"{constant['of']}.{constant['constant']} = {constant['value']:g}"
        _console.print(f"  {value}: {constant['source']}", markup=False, soft_wrap=True)


def _runs(stage_layers: list[int]) -> str:
    """``9, 8 x 2, 7``: equal numbers in a row once."""
    runs = [(count, len(list(run))) for count, run in itertools.groupby(stage_layers)]
    texts = [f"{count}{f' x {times}' if times > 1 else ''}" for count, times in runs]
    return ", ".join(texts) or "even"


@app.command()
def spares(
    gpus: Gpus,
    devices_per_node: NodeDevices = 8,
    device_hours: DeviceHours = PUBLISHED_DEVICE_HOURS,
    repair_hours: Annotated[
        float, typer.Option(min=0, help="Hours until a lost node is back.")
    ] = 7.5,
    probability: Annotated[
        float, typer.Option(min=0.5, max=0.999999, help="Probability that they are enough.")
    ] = 0.99,
    as_json: AsJson = False,
) -> None:
    """Number of spare nodes, by the binomial rule of `recovery.spares: auto`.

    Example: [bold]megascale plan spares --gpus 12288 --repair-hours 24[/bold]
    """
    nodes = -(-gpus // devices_per_node)
    away = away_probability(device_hours / devices_per_node, repair_hours)
    count = enough_spares(nodes, away, probability)
    facts = {"nodes": nodes, "away_probability": away, "mean_away": nodes * away, "spares": count}
    text = f"{counted(count, 'spare node')} for {nodes}: on average {nodes * away:.2f} are away"
    _answer({**facts, "probability": probability}, text, as_json)


@app.command()
def checkpoint(
    gpus: Gpus,
    save_cost_s: SaveCost = 1.0,
    device_hours: DeviceHours = PUBLISHED_DEVICE_HOURS,
    as_json: AsJson = False,
) -> None:
    """Interval between checkpoints: Daly's estimate, as `checkpoint.interval: auto` uses it.

    Example: [bold]megascale plan checkpoint --gpus 12288 --save-cost-s 2[/bold]
    """
    failure_s = mtbf_s(device_hours, gpus)
    interval_s = best_interval_s(save_cost_s, failure_s)
    text = f"every {interval_s:.0f} s; a failure every {failure_s / HOUR_S:.2f} h on average"
    _answer({"mtbf_s": failure_s, "interval_s": interval_s}, text, as_json)


@app.command("goodput")
def effective_time(
    gpus: Gpus,
    restart_s: Annotated[
        float, typer.Option(min=0, help="Seconds from a failure to the first step after it.")
    ] = 180.0,
    save_cost_s: SaveCost = 1.0,
    interval_s: Annotated[
        float, typer.Option(min=0, help="Seconds of work between saves; 0: Daly's estimate.")
    ] = 0.0,
    device_hours: DeviceHours = PUBLISHED_DEVICE_HOURS,
    as_json: AsJson = False,
) -> None:
    """Effective training time (ETTR) for a failure rate, a restart and an interval.

    Example: [bold]megascale plan goodput --gpus 12288 --restart-s 1500[/bold]
    """
    failure_s = mtbf_s(device_hours, gpus)
    found = goodput(failure_s, restart_s, save_cost_s, interval_s or None)
    halves = {
        "restart_halved": goodput(failure_s, restart_s / 2, save_cost_s, interval_s or None).ettr,
        "save_cost_halved": goodput(failure_s, restart_s, save_cost_s / 2, interval_s or None).ettr,
        "failures_halved": goodput(2 * failure_s, restart_s, save_cost_s, interval_s or None).ettr,
    }
    text = (
        f"ETTR {100 * found.ettr:.2f} %: restarting {100 * found.restarting:.2f} %, repeated work "
        f"{100 * found.repeated_work:.2f} %, saving {100 * found.saving:.2f} %; "
        + ", ".join(f"{name.replace('_', ' ')} {100 * v:.2f} %" for name, v in halves.items())
    )
    _answer({"mtbf_s": failure_s, **asdict(found), "ettr_if": halves}, text, as_json)


def _answer(facts: dict[str, Any], text: str, as_json: bool) -> None:
    if as_json:
        print(json.dumps(facts))
    else:
        _console.print(text, markup=False, soft_wrap=True)


def _refuse(message: str) -> typer.Exit:
    Console(stderr=True, highlight=False).print(message, markup=False, soft_wrap=True)
    return typer.Exit(USER_MISTAKE_EXIT_CODE)
