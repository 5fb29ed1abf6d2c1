"""``megascale checkpoint list``, ``verify`` and ``repair``: checkpoints on storage, no cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from megascale_checkpoint import commit_repair
from megascale_checkpoint.commit_log import CommitLog, Record
from megascale_checkpoint.storage import join, open_storage
from megascale_checkpoint.verify import verify_commit
from megascale_common.service.errors import RequestError, ServiceError

app = typer.Typer(
    name="checkpoint",
    help="List, verify and repair checkpoints on storage.",
    no_args_is_help=True,
)


def _absolute(uri: str) -> str:
    # Storage refuses relative paths, because each node would resolve them in its own working
    # directory; this command runs on one machine.
    return uri if "://" in uri else str(Path(uri).expanduser().absolute())


Uri = Annotated[
    str,
    typer.Argument(
        help="Folder of the job's checkpoints: its spec's checkpoint.uri.", callback=_absolute
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table")]


@app.command("list")
def list_checkpoints(uri: Uri, as_json: AsJson = False) -> None:
    """List the complete checkpoints below URI, newest first.

    Example: megascale checkpoint list /data/checkpoints/example
    """
    rows = [_row(uri, record) for record in _commits(uri)]
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
        return
    table = Table("step", "attempt", "ranks", "size", "committed", "manifest")
    for row in rows:
        size = f"{row['size_bytes'] / 2**20:.1f} MiB"
        table.add_row(
            str(row["step"]),
            str(row["attempt"]),
            str(row["world_size"]),
            size,
            row["time"],
            row["manifest_uri"],
        )
    Console().print(table)


@app.command("verify")
def verify(uri: Uri, as_json: AsJson = False) -> None:
    """Check every byte of every complete checkpoint below URI.

    The exit status is 1 when a checkpoint is damaged.

    Example: megascale checkpoint verify /data/checkpoints/example
    """
    records = _commits(uri)
    results = []
    for record in records:
        problems = verify_commit(record, join(uri, record.values["manifest"]))
        results.append({**_row(uri, record), "problems": problems})
        if not as_json:
            state = "damaged" if problems else "whole"
            typer.echo(f"step {record.step} of attempt {record.attempt}: {state}")
            for problem in problems:
                typer.echo(f"  {problem}")
    if as_json:
        typer.echo(json.dumps(results, indent=1))
    if any(result["problems"] for result in results):
        raise typer.Exit(1)


@app.command("repair")
def repair(
    uri: Uri, yes: Annotated[bool, typer.Option("--yes", help="Do it; else only show it")] = False
) -> None:
    """Repair the commit log below URI where a record is damaged or missing.

    Such a record may have been the one that fences an earlier attempt, so nothing is appended
    behind it. A record of which one bit has flipped is restored; any other is replaced, and its
    checkpoint, if it was one, is lost. The damaged bytes are kept in the folder damaged/. Without
    --yes it only shows what it would do, and the exit status is 1 when there is something to do.

    Example: megascale checkpoint repair /data/checkpoints/example
    """
    try:
        repairs = commit_repair.plan(open_storage(uri))
        for planned in repairs:
            typer.echo(f"record {planned.seq}: {planned.problem}: {_remedy(planned)}")
        if yes:
            commit_repair.carry_out(open_storage(uri), repairs)
    except (ServiceError, OSError) as error:
        raise RequestError(f"{uri} cannot be repaired: {error}") from error
    if not repairs:
        typer.echo("the commit log is whole: nothing to repair")
    elif yes:
        typer.echo(f"{len(repairs)} records repaired")
    else:
        typer.echo("nothing was changed: repeat with --yes to do it")
        raise typer.Exit(1)


def _remedy(planned: commit_repair.Repair) -> str:
    if planned.restored:
        return "it is restored as it was"
    closed = ", and the attempts so far may append no more" if planned.fence else ""
    kept = f"; its bytes are kept as {planned.kept}" if planned.kept else ""
    return f"a REPAIR record takes its place{closed}{kept}"


def _commits(uri: str) -> list[Record]:
    try:
        log = CommitLog(open_storage(uri))
        log.refresh()
    except (ServiceError, OSError) as error:
        raise RequestError(f"{uri} cannot be read: {error}") from error
    for damage in log.damaged:
        typer.echo(f"damaged record: {damage}", err=True)
    if not log.records and not log.damaged:
        raise RequestError(
            f"{uri} holds no commit log: give the folder that the job's checkpoint.uri names"
        )
    return log.commits()


def _row(uri: str, record: Record) -> dict[str, Any]:
    return {
        "step": record.step,
        "attempt": record.attempt,
        "world_size": record.values["world_size"],
        "size_bytes": record.values["size_bytes"],
        "time": record.values["time"],
        "manifest_uri": join(uri, record.values["manifest"]),
    }
