"""Shared parts of the commands on storage: the job-or-folder argument, output, errors."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from megascale_checkpoint.commit.commit_log import CommitLog, Record
from megascale_checkpoint.commit.commit_record import Checkpoint
from megascale_checkpoint.storage import SYMBOLIC_LINK, is_link_error, join, open_storage
from megascale_common.service.errors import (
    ForbiddenError,
    NotFoundError,
    RequestError,
    UnavailableError,
)
from megascale_job.names import is_dns_label
from megascale_job.visible import visible

Target = Annotated[
    str,
    typer.Argument(
        metavar="JOB_OR_FOLDER",
        help="A job's name, or its checkpoint.uri: a folder, s3://, hdfs://. A word of a-z, 0-9 "
        "and '-' is always a job; write ./NAME for a folder of such a name.",
    ),
]
Cluster = Annotated[
    Path | None,
    typer.Option(
        "--cluster",
        help="Run folder of the cluster that has the job; default $MEGASCALE_RUN_FOLDER, then "
        "./runs/current.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, one object per line.")]
Attempt = Annotated[
    int | None,
    typer.Option(min=1, help="The attempt that wrote it, if two have; default: the newest."),
]
# Finds a job's checkpoint.uri by its name and the run folder. The CLI, which has a client, passes
# it.
Find = Callable[[str, Path | None], str]


def root_of(context: typer.Context, target: str, cluster: Path | None) -> str:
    """The URI of the job or folder that ``target`` names.

    The form alone decides: a word that can be the name of a job is one, anything else is a URI or a
    folder. Existing folders or clusters play no part, because the target of a removal or repair
    must not depend on where the command is typed.

    Raises:
        RequestError: it is a job's name, and there is no client here to ask for its folder.
    """
    if "://" in target:
        return target
    if target and not is_dns_label(target):  # an empty target is not a folder either
        # Storage refuses relative paths, because each node would resolve them in its own working
        # directory; this command runs on one machine.
        return str(Path(target).expanduser().absolute())
    find: Find | None = (context.find_root().obj or {}).get("checkpoint_uri")
    if find is None:
        raise RequestError(
            f"{target!r} is not a folder: give ./{target}, an absolute path or a URI"
        )
    return find(target, cluster)


@contextmanager
def storage_errors(uri: str) -> Iterator[None]:
    """Turn errors of a storage into errors with an exit status."""
    try:
        yield
    except PermissionError as error:
        raise ForbiddenError(f"{uri} cannot be used: {error}") from error
    except OSError as error:
        if is_link_error(error):
            raise RequestError(f"{uri} cannot be used: {error}", reason=SYMBOLIC_LINK) from error
        raise UnavailableError(f"{uri} cannot be used: {error}") from error


def read_log(uri: str, *, whole: bool = False) -> CommitLog:
    """The commit log at ``uri``, read to its end; damaged records are reported on stderr.

    Raises:
        NotFoundError: there is none.
        ForbiddenError, UnavailableError: the storage refuses or does not answer.
    """
    with storage_errors(uri):
        log = CommitLog(open_storage(uri))
        try:
            log.refresh(whole=whole)
            if log.state.older:  # the snapshot of the log leaves out the oldest checkpoints
                log = CommitLog(open_storage(uri))
                log.refresh(whole=True)
        except NotADirectoryError:
            pass  # a file, and not a folder of checkpoints
    for damage in log.damaged:
        typer.echo(f"damaged record: {visible(str(damage))}", err=True)
    if not log.state.seq and not log.damaged:
        raise NotFoundError(
            f"{uri} holds no commit log: give the folder that a job's checkpoint.uri names, or the "
            "job's name; `megascale jobs` lists the jobs",
            reason="NO_COMMIT_LOG",
        )
    return log


def find(log: CommitLog, step: int, attempt: int | None) -> Record:
    """The newest checkpoint of a step.

    Raises:
        NotFoundError: there is none.
    """
    for record in log.commits():
        if record.step == step and attempt in (None, record.attempt):
            return record
    of = f" of attempt {attempt}" if attempt else ""
    known = ", ".join(str(record.step) for record in log.commits()[:8]) or "none"
    raise NotFoundError(
        f"{log.uri} has no complete checkpoint of step {step}{of}; the newest: {known}",
        reason="CHECKPOINT_NOT_FOUND",
    )


def row(uri: str, record: Record, pins: dict[Checkpoint, str]) -> dict[str, Any]:
    """A checkpoint as `megascale checkpoint list --json` shows it; sizes in bytes."""
    return {
        "job": record.values.get("job", ""),
        "step": record.step,
        "attempt": record.attempt,
        "manifest_uri": join(uri, record.values["manifest"]),
        "size_bytes": record.values.get("size_bytes", 0),
        "committed_at": record.values["time"],
        "world_size": record.values.get("world_size", 0),
        "pin": pins.get(record.checkpoint, ""),
    }


def print_json(values: dict[str, Any]) -> None:
    """One JSON object on a line of its own."""
    typer.echo(json.dumps(values))


def size_text(size_bytes: int) -> str:
    """A size with its unit."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
