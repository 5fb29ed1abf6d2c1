"""The command `profile`: traces of some steps of a running job."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape

from megascale.v1 import driver_pb2, types_pb2
from megascale_cli.exits import FAILED, OK, with_client
from megascale_cli.options import Cluster, JobName, Json, Reason
from megascale_cli.output import console, print_json, short, size_text
from megascale_cli.watch import WATCH_RETRY_FOR_S
from megascale_client import AsyncClient

VIEWER = "https://ui.perfetto.dev"


def profile(
    name: JobName,
    steps: Annotated[int, typer.Option(min=1, max=20, help="How many steps.")] = 2,
    ranks: Annotated[str, typer.Option(metavar="R[,R...]", help="Global ranks, at most 64.")] = "0",
    first_step: Annotated[
        int, typer.Option(min=0, help="First step; 0: the nearest one possible.")
    ] = 0,
    reason: Reason = "",
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Wait until the traces are written.")
    ] = True,
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
        asked = await client.profile(
            name, steps=steps, first_step=first_step, ranks=wanted, reason=reason
        )
        if not as_json:
            steps_text = f"steps {asked.first_step} to {asked.last_step}"
            console.print(f"job [bold]{name}[/bold]: {steps_text} will be profiled")
        found = await client.profiled(name, asked.id) if wait else asked
        if as_json:
            print_json(found)
        else:
            _print_traces(found)
        missed = wait and any(
            trace.state != types_pb2.TRACE_STATE_WRITTEN for trace in found.traces
        )
        return FAILED if missed else OK

    with_client(action, cluster, as_json, retry_for_s=WATCH_RETRY_FOR_S)


def _ranks(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise typer.BadParameter(f"{text!r}: give ranks as in 0,3", param_hint="--ranks")
    return [int(part) for part in parts]


def _print_traces(profile: driver_pb2.Profile) -> None:
    for trace in profile.traces:
        who = f"rank {trace.rank} on node {trace.node}"
        if trace.state == types_pb2.TRACE_STATE_WRITTEN:
            console.print(
                f"{who}: {escape(trace.path)} ({size_text(trace.size_bytes)})", soft_wrap=True
            )
        elif trace.state == types_pb2.TRACE_STATE_PENDING:
            console.print(f"{who}: will write {escape(trace.path)}", soft_wrap=True)
        else:
            state = short(types_pb2.TraceState, trace.state, "TRACE_STATE_")
            console.print(
                f"{who}: [bold red]{state}[/bold red] {escape(trace.detail)}", soft_wrap=True
            )
    if any(trace.state == types_pb2.TRACE_STATE_WRITTEN for trace in profile.traces):
        console.print(f"open a trace at {VIEWER} (it is read in the browser; nothing is uploaded)")
