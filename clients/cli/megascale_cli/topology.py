"""`megascale topology`: where the ranks of a job are, and who waits for whom."""

from __future__ import annotations

from collections import Counter
from typing import Annotated

import typer

from megascale.v1 import driver_pb2
from megascale_cli.exits import with_client
from megascale_cli.options import MAX_RANK, Cluster, JobName, Json
from megascale_cli.output import console, print_json, print_table, short
from megascale_cli.visible import counted
from megascale_client import AsyncClient, Job, JobPhase

MOST_ROWS = 64  # of all ranks; beyond that those that matter
COLUMNS = ("RANK", "NODE", "TP", "DP", "PP", "PHASE", "STEP", "SILENT", "INSIDE", "WAITS FOR")


def topology(
    name: JobName,
    rank: Annotated[
        int | None,
        typer.Option(min=0, max=MAX_RANK, help="Only this rank and the members of its groups."),
    ] = None,
    cluster: Cluster = None,
    as_json: Json = False,
) -> None:
    """Show where each rank of a job is, what it is inside of, and for whom it waits.

    Of a job that stands still it names the ranks that hold the others up.

    Example: [bold]megascale topology demo --rank 3[/bold]
    """

    async def action(client: AsyncClient) -> None:
        answer = await client.topology(name, rank=rank)
        if as_json:
            print_json(answer)
            return
        axes = " x ".join(f"{axis} {answer.axes[axis]}" for axis in ("tp", "cp", "dp", "pp"))
        console.print(f"job [bold]{name}[/bold], attempt {answer.attempt}: {axes}")
        for group in answer.groups:
            ranks = ", ".join(map(str, group.ranks))
            console.print(f"{group.name}: ranks {ranks}; {group.direction}", soft_wrap=True)
        if not answer.ranks:
            console.print(without_ranks(await client.get(name)), markup=False, soft_wrap=True)
            return
        rows = _chosen(answer)
        print_table(COLUMNS, [_row(place) for place in rows], empty="no ranks")
        if len(rows) < len(answer.ranks):
            phases = Counter(place.phase or "unknown" for place in answer.ranks)
            by_phase = ", ".join(f"{count} {phase}" for phase, count in phases.most_common())
            console.print(
                f"{counted(len(answer.ranks), 'rank')}: {by_phase}; --rank R shows its groups"
            )
        if answer.standstill:
            console.print(f"[red]{answer.standstill}[/red]", soft_wrap=True)

    with_client(action, cluster, as_json)


def without_ranks(job: Job) -> str:
    """Why no rank of the job is anywhere."""
    ended = job.phase in (JobPhase.SUCCEEDED, JobPhase.FAILED)
    verb = "has" if ended else "was" if job.phase == JobPhase.CANCELLED else "is"
    return f"it {verb} {short(job.phase)}, so none of its ranks runs: {job.phase_reason}"


def _chosen(answer: driver_pb2.GetTopologyResponse) -> list[driver_pb2.RankPlace]:
    """All ranks if they are few, else those that hold the job up and the longest silent ones."""
    if len(answer.ranks) <= MOST_ROWS:
        return list(answer.ranks)
    found = sorted(answer.ranks, key=lambda place: (not place.holds_up, -place.silent_s))
    return found[:MOST_ROWS]


def _row(place: driver_pb2.RankPlace) -> tuple[str, ...]:
    waits_for = ", ".join(map(str, place.waits_for))
    if place.waits_for_more:
        waits_for += f" and {place.waits_for_more} more"
    mark = " [red]holds the others up[/red]" if place.holds_up else ""
    return (
        *(str(place.rank), place.node, str(place.tp), str(place.dp), str(place.pp)),
        *(place.phase, str(place.step), f"{place.silent_s:.1f} s" if place.phase else ""),
        *(", ".join(place.inside), waits_for + mark),
    )
