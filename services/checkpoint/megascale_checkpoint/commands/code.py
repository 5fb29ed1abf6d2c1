"""``megascale code``: puts a job's own code on storage, from which every node fetches it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from megascale_checkpoint import artifacts
from megascale_common.service.errors import RequestError
from megascale_job.visible import visible

app = typer.Typer(
    name="code",
    help="Put a job's own code on storage, from which every node fetches it.",
    no_args_is_help=True,
)


@app.callback()
def code() -> None:
    """Put a job's own code on storage, from which every node fetches it."""


@app.command("push")
def push(
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="A folder with packages, or a wheel.")
    ],
    to: Annotated[str, typer.Option(help="Folder on storage: a path, s3://..., hdfs://...")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write a folder or a wheel to storage, and print the lines for the job file.

    The artifact's name is its SHA-256, so it never changes, and the same code is written once.

    Example: megascale code push build/code --to s3://bucket/code
    """
    if "://" not in to:
        to = str(Path(to).absolute())
    try:
        uri, found = artifacts.push(source, to)
    except OSError as error:
        raise RequestError(f"{source} cannot be written to {to}: {error}") from error
    if as_json:
        typer.echo(json.dumps({"uri": uri, "sha256": found}))
    else:
        typer.echo(visible(f"code:\n  uri: {uri}\n  sha256: {found}"))
