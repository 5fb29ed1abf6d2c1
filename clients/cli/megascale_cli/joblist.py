"""The command `jobs`: a table of all jobs with their progress, once or again and again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, Any, Literal

import typer
from rich.live import Live
from rich.markup import escape

from megascale_cli.exits import RETRY_FOR_S, with_client
from megascale_cli.options import Cluster, Json
from megascale_cli.output import (
    age,
    clipped,
    console,
    duration,
    on_a_terminal,
    percent,
    phase_text,
    print_items,
    print_json,
    print_table,
    table,
)
from megascale_cli.watch import WATCH_RETRY_FOR_S
from megascale_client import AsyncClient, Job
from megascale_client.progress import remaining_s

REFRESH_S = 2.0
COLUMNS = (
    *("NAME", "PHASE", "STEP", "DONE", "ETA", "ATTEMPT", "CHECKPOINT"),
    *("NODES", "AGE", "WHY"),
)
EMPTY = "no jobs yet; submit one with: megascale submit job.yaml"
NO_MATCH = "no job is in that phase"

_KEYS: dict[str, Callable[[Job], Any]] = {
    "name": lambda job: job.spec.name,
    "phase": lambda job: (job.phase, job.spec.name),
    "created": lambda job: -job.created_at.ToNanoseconds(),
    "progress": lambda job: -percent(job),
    "eta": lambda job: remaining_s(job) if remaining_s(job) is not None else float("inf"),
}


def jobs(
    phase: Annotated[
        list[str] | None,
        typer.Option(metavar="PHASE", help="Only jobs in this phase; can be repeated."),
    ] = None,
    sort: Annotated[
        Literal["name", "phase", "created", "progress", "eta"],
        typer.Option(help="created: newest first; progress: furthest first; eta: soonest first."),
    ] = "name",
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Show it again on every change, until Ctrl-C.")
    ] = False,
    cluster: Cluster = None,
    as_json: Json = False,
) -> None:
    """List all jobs, with progress and the time left.

    Example: [bold]megascale jobs --phase running --sort eta --watch[/bold]
    """

    async def read(client: AsyncClient) -> list[Job]:
        return sorted([job async for job in client.jobs(phase=phase or ())], key=_KEYS[sort])

    empty = NO_MATCH if phase else EMPTY

    async def action(client: AsyncClient) -> None:
        if watch:
            await _refresh(lambda: read(client), as_json, empty)
            return
        print_items(await read(client), COLUMNS, _row, empty=empty, as_json=as_json)

    with_client(action, cluster, as_json, retry_for_s=WATCH_RETRY_FOR_S if watch else RETRY_FOR_S)


async def _refresh(read: Callable[[], Any], as_json: bool, empty: str) -> None:
    """Show the jobs until Ctrl-C: in place on a terminal, else again after every change."""
    if on_a_terminal() and not as_json:
        with Live(console=console, screen=False, auto_refresh=False) as live:
            while True:
                listed = await read()
                live.update(table(COLUMNS, map(_row, listed)) if listed else empty, refresh=True)
                await asyncio.sleep(REFRESH_S)
    shown: dict[str, Job] = {}
    first = True
    while True:
        listed = await read()
        changed = [job for job in listed if shown.get(job.spec.name) != job]
        if as_json:
            for job in changed:
                print_json(job)
        elif changed or len(shown) != len(listed) or first:
            print_table(COLUMNS, map(_row, listed), empty=empty)
            print(flush=True)
        first, shown = False, {job.spec.name: job for job in listed}
        await asyncio.sleep(REFRESH_S)


def _row(job: Job) -> tuple[str, ...]:
    left_s = remaining_s(job)
    return (
        job.spec.name,
        phase_text(job.phase),
        f"{job.step}/{job.spec.trainer.training.steps}",
        f"{percent(job):.0f}%",
        "-" if left_s is None else duration(left_s),
        str(job.attempt),
        str(job.committed_step or "-"),
        ",".join(job.nodes) or "-",
        age(job.created_at),
        escape(clipped(job.phase_reason)),
    )
