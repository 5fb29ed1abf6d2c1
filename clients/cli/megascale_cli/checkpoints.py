"""Commands about a job's checkpoints: list and fetch.

The others read storage and belong to the checkpoint service; see
:mod:`megascale_cli.plugins`.
"""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from megascale.v1 import driver_pb2
from megascale_cli.exits import with_client
from megascale_cli.options import MAX_NUMBER, Cluster, JobName, Json, job_names
from megascale_cli.output import console, local_time, print_items, print_json, size_text
from megascale_cli.plugins import CHECKPOINT, absent, run_plugin
from megascale_client import AsyncClient

JobOrFolder = Annotated[
    str,
    typer.Argument(
        metavar="JOB_OR_FOLDER",
        help="A job's name, or a folder or URI of checkpoints. A word of a-z, 0-9 and '-' is "
        "always a job; write ./NAME for a folder of such a name.",
        autocompletion=job_names,
    ),
]
# As the commands of the checkpoint service decide it: what can be no job's name is a folder.
JOB_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


def list_checkpoints(
    context: typer.Context, name: JobOrFolder, cluster: Cluster = None, as_json: Json = False
) -> None:
    """List the complete checkpoints of a job or in a folder, newest first.

    Example: [bold]megascale checkpoint list example[/bold]
    """
    if name and JOB_NAME.fullmatch(name) is None:
        arguments = ["list", name, *(["--json"] if as_json else [])]
        run_plugin("checkpoint", CHECKPOINT, arguments, context.command_path.rsplit(" ", 1)[0])

    async def action(client: AsyncClient) -> None:
        print_items(
            [checkpoint async for checkpoint in client.checkpoints(name)],
            ("STEP", "ATTEMPT", "RANKS", "SIZE", "COMMITTED", "MANIFEST", "PIN"),
            _row,
            empty=f"job {name} has no complete checkpoint",
            as_json=as_json,
        )

    with_client(action, cluster, as_json, job_or_folder=name)


def fetch(
    name: JobName,
    to: Annotated[Path, typer.Option(metavar="FOLDER", help="New folder for the copy.")],
    step: Annotated[
        int | None, typer.Option(min=1, max=MAX_NUMBER, help="Its step; default: the newest.")
    ] = None,
    cluster: Cluster = None,
    as_json: Json = False,
) -> None:
    """Copy a complete checkpoint from its storage, and compare each file with the manifest.

    The storage may be a folder, s3:// or hdfs:// (megascale\\[s3], megascale\\[hdfs]).

    Example: [bold]megascale checkpoint fetch example --to ./newest[/bold]
    """

    async def action(client: AsyncClient) -> None:
        with _bar(quiet=as_json) as bar:
            task = bar.add_task(f"checkpoint of {name}", total=None)

            def progress(done_bytes: int, total_bytes: int) -> None:
                bar.update(task, completed=done_bytes, total=total_bytes)

            got = await client.fetch_checkpoint(
                name, to, step=step, progress=progress, open_source=_open_storage
            )
        if as_json:
            facts = {
                "job": got.job,
                "step": got.step,
                "attempt": got.attempt,
                "folder": str(got.folder),
            }
            print_json({**facts, "size_bytes": got.size_bytes, "verified": got.verified})
            return
        how = (
            "all checksums match"
            if got.verified == "checksums"
            else "all sizes match; for checksums: pip install xxhash"
        )
        console.print(
            f"step {got.step} of job [bold]{name}[/bold] is in {escape(str(got.folder))}: "
            f"{size_text(got.size_bytes)}, {how}",
            soft_wrap=True,
        )

    with_client(action, cluster, as_json)


def _row(checkpoint: driver_pb2.Checkpoint) -> tuple[str, ...]:
    return (
        str(checkpoint.step),
        str(checkpoint.attempt),
        str(checkpoint.world_size),
        size_text(checkpoint.size_bytes),
        local_time(checkpoint.committed_at),
        escape(checkpoint.manifest_uri),
        escape(checkpoint.pin),
    )


def checkpoint_module(name: str) -> ModuleType:
    """A module of the checkpoint service's package, which this machine may lack.

    Imported by name, as plug-ins are: the CLI itself depends on no service.

    Raises:
        InvalidRequest: not installed; the message has the package to install.
    """
    try:
        return import_module(f"megascale_checkpoint.{name}")
    except ImportError as error:
        absent("checkpoint", CHECKPOINT, error.name or str(error))


def _open_storage(uri: str) -> Any:
    """A storage that is no folder; the checkpoint service's package reads it."""
    return checkpoint_module("storage").open_storage(uri)


def _bar(*, quiet: bool) -> Progress:
    errors = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=errors,
        disable=quiet or not errors.is_terminal,  # elsewhere its end would be an empty line
        transient=True,
    )
