"""Commands about the speed of a job: heat, why, timeline, topology, profile."""

from __future__ import annotations

import gzip
import json
import math
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from megascale.v1 import driver_pb2
from megascale_cli.exits import FAILED, OK, USAGE, with_client
from megascale_cli.options import MAX_NUMBER, MAX_RANK, Cluster, JobName, Json, Reason
from megascale_cli.output import console, print_json, print_table, short, size_text
from megascale_cli.watch import WATCH_RETRY_FOR_S
from megascale_client import AsyncClient, Job, JobPhase, Profile, TraceState
from megascale_job.visible import counted

VIEWER = "https://ui.perfetto.dev"
# The viewer's own rules let it read from this address of the user's machine alone.
VIEWER_PORT = 9001
FETCHED_WITHIN_S = 60.0
HEAD = '{"otherData":'  # how a trace begins, up to sentences and clocks
MAX_HEAD_CHARACTERS = 1 << 20  # before the events; clocks of 12,288 nodes take less


def why(
    name: JobName,
    steps: Annotated[
        int, typer.Option(min=1, max=2000, help="How many of the newest steps to compare.")
    ] = 200,
    split: Annotated[
        int,
        typer.Option(
            min=0, max=MAX_NUMBER, help="First step of the slower window; 0: where it got slower."
        ),
    ] = 0,
    cluster: Cluster = None,
    as_json: Json = False,
) -> None:
    """Explain in one sentence with numbers why the steps of a job take longer than before.

    It names data, garbage collection, a slow host, the network, clock or power, checkpoints, or the
    routing of experts, if one of them explains enough of the growth.

    Example: [bold]megascale why demo --steps 500[/bold]
    """

    async def action(client: AsyncClient) -> None:
        answer = await client.mfu_decline(name, steps=steps, split_step=split)
        if as_json:
            print_json(answer)
            return
        console.print(f"[bold]{answer.cause.replace('_', ' ')}[/bold]: {answer.sentence}")
        if answer.shares:
            parts = sorted(answer.shares.items(), key=lambda part: -part[1])
            shown = ", ".join(f"{cause.replace('_', ' ')} {share:.0%}" for cause, share in parts)
            windows = f"steps {answer.first_step} to {answer.split_step - 1}"
            console.print(f"{windows} against {answer.split_step} to {answer.last_step}: {shown}")

    with_client(action, cluster, as_json)


def timeline(
    name: JobName,
    steps: Annotated[int, typer.Option(min=1, max=50, help="How many steps.")] = 3,
    first_step: Annotated[
        int, typer.Option(min=0, max=MAX_NUMBER, help="First step; 0: the newest ones.")
    ] = 0,
    rank: Annotated[
        list[int] | None,
        typer.Option(
            min=0, max=MAX_NUMBER, help="Only this rank; can be repeated, up to 64 times."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Default: JOB-timeline.json.gz.")
    ] = None,
    view: Annotated[
        bool, typer.Option("--open", help=f"Open it in the browser, at {VIEWER}.")
    ] = False,
    cluster: Cluster = None,
    as_json: Json = False,
) -> None:
    """Write one trace of all ranks, or of some, on one clock, for Perfetto.

    Each process of the trace is a rank, labelled with the error of its clock. Arrows connect the
    last rank of a collective with the ranks that waited for it, and sends with receives. The first
    process is the critical path of each step: the chain of spans that makes up its length. It is
    printed as a sentence, too.

    Example: [bold]megascale timeline demo --steps 3 --open[/bold]
    """
    path = out or Path(f"{name}-timeline.json.gz")

    async def action(client: AsyncClient) -> int:
        size = 0
        try:
            with path.open("wb") as file:
                parts = client.timeline(name, steps=steps, first_step=first_step, ranks=rank or ())
                async for part in parts:
                    size += file.write(part)
        except OSError as error:
            problem = f"error: {path}: {error.strerror}; give --out a file that can be written"
            print(problem, file=sys.stderr)
            return USAGE
        finally:
            if not size:
                path.unlink(missing_ok=True)
        paths = _critical_paths(path)
        if as_json:
            print(json.dumps({"file": str(path), "bytes": size, "critical_paths": paths}))
        else:
            for sentence in paths:
                console.print(sentence, soft_wrap=True)
            console.print(f"{path} ({size_text(size)}): open it at {VIEWER}", soft_wrap=True)
        return OK

    with_client(action, cluster, as_json)
    if view:
        _show(path)


def _critical_paths(path: Path) -> list[str]:
    """The sentences at the head of a trace, before its events; none if it has no such head."""
    try:
        with gzip.open(path, "rt") as file:
            head = file.read(MAX_HEAD_CHARACTERS)
        found, _ = json.JSONDecoder().raw_decode(head.removeprefix(HEAD))
    except (ValueError, OSError, EOFError):  # from a driver that writes no sentences
        return []
    if not head.startswith(HEAD):
        return []
    return [str(text) for name, text in found.items() if name.startswith("critical path")]


def _show(path: Path) -> None:
    """Serve the file on this machine until the viewer has fetched it, and open the viewer."""
    import http.server  # for this option alone: as slow to import as a command is to run
    import webbrowser

    fetched = threading.Event()

    class Once(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            data = path.read_bytes()
            self.send_response(200)
            self.send_header("Access-Control-Allow-Origin", VIEWER)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
            fetched.set()

        def log_message(self, format: str, *arguments: object) -> None:
            """Nothing: the command says what matters."""

    try:
        server = http.server.ThreadingHTTPServer(("127.0.0.1", VIEWER_PORT), Once)
    except OSError as error:
        reason = f"port {VIEWER_PORT}, from which the viewer reads, cannot be used"
        console.print(f"{reason}: {error.strerror}; open the file at {VIEWER}", soft_wrap=True)
        return
    with server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        webbrowser.open(f"{VIEWER}/#!/?url=http://127.0.0.1:{VIEWER_PORT}/{path.name}")
        if not fetched.wait(FETCHED_WITHIN_S):
            console.print(f"the viewer has not fetched it; open the file at {VIEWER}")
        server.shutdown()


MOST_COLUMNS = 16  # of ranks; beyond that a row has its extremes only
_WARM, _HOT = 1.02, 1.05
_ROWS = "rows of experts"
MOST_HOT = 8  # ranks with hot experts that have a sentence


def heat(
    name: JobName,
    operation: Annotated[
        list[str] | None,
        typer.Option(help="Only this operation (forward, backward, ...); can be repeated."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, max=500, help="How many of the newest steps.")] = 50,
    cluster: Cluster = None,
    as_json: Json = False,
) -> None:
    """Show how long each operation of a step takes on each rank, and which nodes are slow.

    Times are medians over the steps; a number in brackets is the ratio to the ranks that do the
    same work. A model with experts has a further row: the rows of each rank's experts over the mean
    of its ep group.

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
        for hot in answer.routing.hot_ranks[:MOST_HOT]:
            console.print(f"[magenta]{hot.sentence}[/magenta]", soft_wrap=True)
        if more := len(answer.routing.hot_ranks[MOST_HOT:]):
            console.print(f"{counted(more, 'more rank')} with hot experts: --json has all")
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
        hot = {one.rank: one for one in answer.routing.hot_ranks}
        cells = [
            (row.operation, *(_cell(row, rank, rank in hot) for rank in range(ranks)))
            for row in answer.rows
        ]
        if answer.HasField("routing"):
            shares = enumerate(answer.routing.expert_share)
            cells.append((_ROWS, *(_share(share, hot.get(rank)) for rank, share in shares)))
        return ("OPERATION", *headings), cells
    values = [(row.operation, list(row.median_ms)) for row in answer.rows]
    if answer.HasField("routing"):
        values.append((_ROWS, list(answer.routing.expert_share)))
    rows = []
    for name, of_ranks in values:
        known = [(value, rank) for rank, value in enumerate(of_ranks) if not math.isnan(value)]
        if known:
            middle = sorted(known)[len(known) // 2][0]
            low, high = min(known), max(known)
            places = [f"{v:.2f} (rank {r}, {answer.rank_nodes[r]})" for v, r in (low, high)]
            rows.append((name, f"{middle:.2f}", *places))
    return ("OPERATION", "MEDIAN", "LEAST", "MOST"), rows


def _cell(row: driver_pb2.HeatMapRow, rank: int, hot: bool) -> str:
    value, ratio = row.median_ms[rank], row.ratio[rank]
    if math.isnan(value):
        return "-"
    if math.isnan(ratio) or ratio < _WARM:
        return f"{value:.2f}"
    colour = "magenta" if hot else "red" if ratio >= _HOT else "yellow"
    return f"[{colour}]{value:.2f} ({ratio:.2f})[/{colour}]"


def _share(share: float, hot: driver_pb2.HotRank | None) -> str:
    if hot is not None:
        return f"[magenta]hot experts ({hot.expert_share:.1f} times the mean rows)[/magenta]"
    return "-" if math.isnan(share) else f"{share:.2f}"


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
    """Show where each rank of a job is, its current operation, and the ranks that it waits for.

    If no rank advances, it names the ranks that hold the others up.

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
        print_table(COLUMNS, [place_row(place) for place in rows], empty="no ranks")
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
    """Why the job has no ranks."""
    ended = job.phase in (JobPhase.SUCCEEDED, JobPhase.FAILED)
    verb = "has" if ended else "was" if job.phase == JobPhase.CANCELLED else "is"
    return f"it {verb} {short(job.phase)}, so none of its ranks runs: {job.phase_reason}"


def _chosen(answer: driver_pb2.GetTopologyResponse) -> list[driver_pb2.RankPlace]:
    """All ranks if they are few, else those that hold the job up and the longest silent ones."""
    if len(answer.ranks) <= MOST_ROWS:
        return list(answer.ranks)
    found = sorted(answer.ranks, key=lambda place: (not place.holds_up, -place.silent_s))
    return found[:MOST_ROWS]


def place_row(place: driver_pb2.RankPlace) -> tuple[str, ...]:
    """The cells of a rank, by COLUMNS; rich markup."""
    waits_for = ", ".join(map(str, place.waits_for))
    if place.waits_for_more:
        waits_for += f" and {place.waits_for_more} more"
    mark = " [red]holds the others up[/red]" if place.holds_up else ""
    return (
        *(str(place.rank), place.node, str(place.tp), str(place.dp), str(place.pp)),
        *(place.phase, str(place.step), f"{place.silent_s:.1f} s" if place.phase else ""),
        *(", ".join(place.inside), waits_for + mark),
    )


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
        bool, typer.Option("--cancel", help="Cancel the profile in progress instead.")
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
