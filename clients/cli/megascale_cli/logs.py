"""The command `logs`, for one rank or all ranks, read from their nodes."""

from __future__ import annotations

import asyncio
import math
import re
import sys
from collections.abc import AsyncIterator
from typing import Annotated

import typer

from megascale_cli.exits import OK, RETRY_FOR_S, print_error, status_of, with_client
from megascale_cli.options import MAX_NUMBER, MAX_RANK, Cluster, JobName, Json
from megascale_cli.output import print_json
from megascale_cli.watch import WATCH_RETRY_FOR_S
from megascale_client import AsyncClient, Job, MegascaleError
from megascale_job.visible import counted, visible

MAX_LINES = 100_000
DEFAULT_LINES = 100
# Lines of all ranks that are read and not yet printed; a full queue holds back the nodes.
QUEUED_LINES = 1000

Follow = Annotated[bool, typer.Option("--follow", "-f", help="Continue until the attempt ends.")]
Root = Annotated[bool, typer.Option("--root", help="Only the line that caused the newest failure.")]
Lines = Annotated[
    int | None,
    typer.Option(
        "--lines",
        "-n",
        min=1,
        max=MAX_LINES,
        help=f"How many of a rank's last lines to read; default {DEFAULT_LINES}, "
        f"{MAX_LINES} with --grep.",
    ),
]
Raw = Annotated[
    bool,
    typer.Option("--raw", help="Lines as they are: a terminal obeys escape sequences in them."),
]
_Line = tuple[int, str | MegascaleError | None]


def logs(
    name: JobName,
    rank: Annotated[int, typer.Option(min=0, max=MAX_RANK, help="Global rank.")] = 0,
    every: Annotated[
        bool, typer.Option("--all", "-a", help="All ranks, each line with its rank.")
    ] = False,
    grep: Annotated[
        str,
        typer.Option("--grep", metavar="PATTERN", help="Only lines that match (Python's re)."),
    ] = "",
    attempt: Annotated[
        int,
        typer.Option(min=0, max=MAX_NUMBER, help="Number of the attempt; 0: the newest."),
    ] = 0,
    lines: Lines = None,
    follow: Follow = False,
    root: Root = False,
    raw: Raw = False,
    cluster: Cluster = None,
    as_json: Json = False,
) -> None:
    """Print the log of one rank or of all, read from their nodes.

    With --all the ranks come one after the other, with --follow as their lines arrive. A rank whose
    node does not answer is reported on stderr and makes the exit status non-zero; the others are
    printed. --root prints the line where the failure began, from the logs of all ranks and nodes.
    Control characters are printed as text (\\x1b begins a colour); --raw leaves them as they are.

    Example: [bold]megascale logs demo --all --grep "loss|error"[/bold]
    """
    if root:
        with_client(lambda client: _root(client, name, as_json), cluster, as_json)
        return
    pattern = _pattern(grep)
    count = lines or (MAX_LINES if grep else DEFAULT_LINES)

    async def action(client: AsyncClient) -> int:
        ranks = range(_world_size(await client.get(name))) if every else [rank]
        width = len(str(ranks[-1]))
        streams = [
            _lines(client, name, each, attempt=attempt, lines=count, follow=follow)
            for each in ranks
        ]
        # With --all one node that is away must not hide the other ranks' lines; the status tells.
        status, printed = OK, False
        async for source, line in _merged(streams) if follow else _in_order(streams):
            if isinstance(line, MegascaleError):
                if not every:
                    raise line
                print_error(type(line)(f"rank {source}: {line}", reason=line.reason), as_json)
                status = status or status_of(line)
            elif line is not None and pattern.search(line):
                printed = True
                text = f"[{source:>{width}}] {line}" if every else line
                if as_json:
                    print_json({"rank": source, "line": line})
                else:
                    print(text if raw else visible(text), flush=follow)
        if not printed and not as_json and status == OK:
            print(f"{_described(name, rank, every)}: no line{_matching(grep)}", file=sys.stderr)
        return status

    with_client(action, cluster, as_json, retry_for_s=WATCH_RETRY_FOR_S if follow else RETRY_FOR_S)


async def _root(client: AsyncClient, name: str, as_json: bool) -> None:
    """Print the line that caused the newest failure."""
    answer = await client.explain(name)
    if not answer.HasField("log_root"):
        if as_json:
            print_json({})
        else:
            print(f"no root cause was found in the logs of job {name}", file=sys.stderr)
        return
    found = answer.log_root
    if as_json:
        print_json(found)
        return
    where = f"rank {found.rank}" if found.rank >= 0 else "kernel log"
    print(f"attempt {found.attempt}, node {found.node}, {where}: {found.category}")
    print(f"  {visible(found.line)}")
    print(
        f"asks for: {found.action}; set aside: "
        f"{counted(found.set_aside, 'line')} from what followed"
    )
    if len(found.nodes) > 1:
        print(f"the same on nodes {', '.join(found.nodes)}")


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise typer.BadParameter(
            f"{text!r} is not a pattern: {error}", param_hint="--grep"
        ) from None


def _world_size(job: Job) -> int:
    sizes = job.spec.trainer.parallelism
    return math.prod(max(1, size) for size in (sizes.tp, sizes.cp, sizes.dp, sizes.pp))


def _described(name: str, rank: int, every: bool) -> str:
    return f"the logs of job {name}" if every else f"the log of rank {rank} of job {name}"


def _matching(grep: str) -> str:
    return f" matches {grep!r}" if grep else " yet"


async def _lines(
    client: AsyncClient, name: str, rank: int, *, attempt: int, lines: int, follow: bool
) -> AsyncIterator[_Line]:
    """The lines of one rank, then its error if there is one."""
    try:
        async for line in client.logs(name, rank, attempt=attempt, lines=lines, follow=follow):
            yield rank, line
    except MegascaleError as error:
        yield rank, error


async def _in_order(streams: list[AsyncIterator[_Line]]) -> AsyncIterator[_Line]:
    for stream in streams:
        async for line in stream:
            yield line


async def _merged(streams: list[AsyncIterator[_Line]]) -> AsyncIterator[_Line]:
    """Lines of all streams as they arrive."""
    queue: asyncio.Queue[_Line | None] = asyncio.Queue(QUEUED_LINES)

    async def pump(stream: AsyncIterator[_Line]) -> None:
        async for line in stream:
            await queue.put(line)
        await queue.put(None)

    pumps = [asyncio.create_task(pump(stream)) for stream in streams]
    try:
        open_streams = len(pumps)
        while open_streams:
            line = await queue.get()
            if line is None:
                open_streams -= 1
            else:
                yield line
    finally:
        # The caller can leave early (an error, Ctrl-C); streams to the nodes must not outlive it.
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
