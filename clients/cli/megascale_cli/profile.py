"""The command `profile`: traces of some steps of a running job."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape

from megascale_cli.exits import FAILED, OK, with_client
from megascale_cli.options import MAX_NUMBER, MAX_RANK, Cluster, JobName, Json, Reason
from megascale_cli.output import console, print_json, short, size_text
from megascale_cli.watch import WATCH_RETRY_FOR_S
from megascale_client import AsyncClient, Profile, TraceState

VIEWER = "https://ui.perfetto.dev"


def profile(
    name: JobName,
    steps: Annotated[int, typer.Option(min=1, max=20, help="How many steps.")] = 2,
    ranks: Annotated[str, typer.Option(metavar="R[,R...]", help="Global ranks, at most 64.")] = "0",
    first_step: Annotated[
        int,
        typer.Option(min=0, max=MAX_NUMBER, help="First step; 0: the nearest one possible."),
    ] = 0,
    reason: Reason = "",
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Wait until the traces are written.")
    ] = True,
    cancel: Annotated[
        bool, typer.Option("--cancel", help="Give up the profile in progress instead.")
    ] = False,
    cluster: Cluster = None,
    as_json: Json = False,
) -> None:
    """Have ranks of a running job write a trace of coming steps, the same on all ranks.

    A trace is gzipped Chrome JSON, written on the rank's node. The status is 0 only if every trace
    was written.

    Example: [bold]megascale profile demo --steps 2 --ranks 0,3[/bold]
    """
    wanted = _ranks(ranks)

    async def action(client: AsyncClient) -> int:
        if cancel:
            given_up = await client.cancel_profile(name, reason=reason)
            if as_json:
                print_json(given_up)
            else:
                _print_traces(given_up)
            return OK
        asked = await client.profile(
            name, steps, first_step=first_step, ranks=wanted, reason=reason
        )
        if not as_json:
            steps_text = f"steps {asked.first_step} to {asked.last_step}"
            console.print(f"job [bold]{name}[/bold]: {steps_text} will be profiled")
        found = await client.profiled(name, asked.id) if wait else asked
        if as_json:
            print_json(found)
        else:
            _print_traces(found)
        missed = wait and any(trace.state != TraceState.WRITTEN for trace in found.traces)
        return FAILED if missed else OK

    with_client(action, cluster, as_json, retry_for_s=WATCH_RETRY_FOR_S)


def _ranks(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) <= MAX_RANK for part in parts):
        raise typer.BadParameter(f"{text!r}: give ranks as in 0,3", param_hint="--ranks")
    return [int(part) for part in parts]


def _print_traces(profile: Profile) -> None:
    for trace in profile.traces:
        who = f"rank {trace.rank} on node {trace.node}"
        if trace.state == TraceState.WRITTEN:
            console.print(
                f"{who}: {escape(trace.path)} ({size_text(trace.size_bytes)})", soft_wrap=True
            )
        elif trace.state == TraceState.PENDING:
            console.print(f"{who}: will write {escape(trace.path)}", soft_wrap=True)
        else:
            state = short(trace.state)
            console.print(
                f"{who}: [bold red]{state}[/bold red] {escape(trace.detail)}", soft_wrap=True
            )
    if any(trace.state == TraceState.WRITTEN for trace in profile.traces):
        console.print(f"open a trace at {VIEWER} (it is read in the browser; nothing is uploaded)")
