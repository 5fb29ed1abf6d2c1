"""`megascale heat`: what each rank takes for each operation, and who is slow by that."""

from __future__ import annotations

import math
from typing import Annotated

import typer

from megascale.v1 import driver_pb2
from megascale_cli.exits import with_client
from megascale_cli.options import Cluster, JobName, Json
from megascale_cli.output import console, print_json, print_table
from megascale_client import AsyncClient

MOST_COLUMNS = 16  # of ranks; beyond that a row has its extremes only
_WARM, _HOT = 1.02, 1.05


def heat(
    name: JobName,
    operation: Annotated[
        list[str] | None,
        typer.Option(help="Only this operation (forward, backward, ...); may be repeated."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, max=500, help="How many of the newest steps.")] = 50,
    cluster: Cluster = None,
    as_json: Json = False,
) -> None:
    """Show what each rank takes for each operation of a step, and the nodes that are slow.

    Times are medians over the steps; a number in brackets is how many times as long as the ranks
    that do the same work take.

    Example: [bold]megascale heat demo --operation forward[/bold]
    """

    async def action(client: AsyncClient) -> None:
        answer = await client.heat_map(name, operation or (), steps=steps)
        if as_json:
            print_json(answer)
            return
        if answer.rows:
            span = f"steps {answer.first_step} to {answer.last_step} of attempt {answer.attempt}"
            console.print(f"job [bold]{name}[/bold], {span}; milliseconds a step", soft_wrap=True)
        empty = "no spans yet: they come with the first steps (trainer.telemetry.spans)"
        headings, rows = _table(answer)
        print_table(headings, rows, empty=empty)
        for slow in answer.slow_nodes:
            console.print(f"[red]{slow.sentence}[/red]", soft_wrap=True)
        if answer.rows and not answer.slow_nodes:
            one = len(set(answer.rank_nodes)) == 1
            alone = "all ranks are on one node, so there is no other to compare it with"
            none = "no node is slow for long enough to be named"
            console.print(alone if one else none, soft_wrap=True)

    with_client(action, cluster, as_json)


def _table(
    answer: driver_pb2.GetHeatMapResponse,
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    ranks = len(answer.rank_nodes)
    if ranks <= MOST_COLUMNS:
        headings = tuple(f"RANK {rank} {node}" for rank, node in enumerate(answer.rank_nodes))
        return ("OPERATION", *headings), [
            (row.operation, *(_cell(row, rank) for rank in range(ranks))) for row in answer.rows
        ]
    rows = []
    for row in answer.rows:
        known = [(value, rank) for rank, value in enumerate(row.median_ms) if not math.isnan(value)]
        if known:
            middle = sorted(known)[len(known) // 2][0]
            low, high = min(known), max(known)
            places = [f"{v:.2f} (rank {r}, {answer.rank_nodes[r]})" for v, r in (low, high)]
            rows.append((row.operation, f"{middle:.2f}", *places))
    return ("OPERATION", "MEDIAN", "LEAST", "MOST"), rows


def _cell(row: driver_pb2.HeatMapRow, rank: int) -> str:
    value, ratio = row.median_ms[rank], row.ratio[rank]
    if math.isnan(value):
        return "-"
    if math.isnan(ratio) or ratio < _WARM:
        return f"{value:.2f}"
    colour = "red" if ratio >= _HOT else "yellow"
    return f"[{colour}]{value:.2f} ({ratio:.2f})[/{colour}]"
