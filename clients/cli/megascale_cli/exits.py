"""Exit statuses of the CLI; errors become a line on stderr and a status here and nowhere else."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import typer
from google.protobuf.message import Message

from megascale_cli.output import console, print_json
from megascale_client import (
    AlreadyExists,
    AsyncClient,
    InvalidRequest,
    MegascaleError,
    NotAllowed,
    NotFound,
    NotPossible,
    Unavailable,
)
from megascale_client.errors import from_service
from megascale_client.views import View
from megascale_job.visible import visible

Answer = TypeVar("Answer", bound=Message | View)

# Releases of typer differ in the module that holds it.
UsageError: Any = typer.BadParameter.__bases__[0]

OK = 0
FAILED = 1
USAGE = 2
UNAVAILABLE = 3
NOT_FOUND = 4
REFUSED = 5
INTERRUPTED = 130

HELP = (
    "Exit status: 0 done; 1 what was requested failed (a watched job too); "
    "2 wrong usage or a refused job; 3 no cluster or no driver answers; 4 not found; "
    "5 refused in this state or not allowed; 130 interrupted."
)

# First match wins, so children stand before their parents.
_STATUS: tuple[tuple[type[MegascaleError], int], ...] = (
    (InvalidRequest, USAGE),
    (Unavailable, UNAVAILABLE),
    (NotFound, NOT_FOUND),
    (AlreadyExists, REFUSED),
    (NotPossible, REFUSED),
    (NotAllowed, REFUSED),
)

# A one-shot command gives up sooner than a program would.
RETRY_FOR_S = 10.0


def status_of(error: MegascaleError) -> int:
    """The exit status for an error of the client."""
    return next((status for kind, status in _STATUS if isinstance(error, kind)), FAILED)


def fail(error: MegascaleError, as_json: bool = False) -> typer.Exit:
    """Print the error on stderr (one JSON object with --json); raise what is returned."""
    print_error(error, as_json)
    return typer.Exit(status_of(error))


def print_error(error: MegascaleError, as_json: bool) -> None:
    """Print the error on stderr: a line for people, or one JSON object."""
    text = str(error)
    if as_json:
        details: dict[str, object] = {
            "error": text,
            "kind": type(error).__name__,
            "reason": error.reason,
        }
        if isinstance(error, InvalidRequest):
            details["problems"] = [
                {
                    "field": p.field,
                    "problem": p.problem,
                    "remedy": p.remedy,
                }
                for p in error.problems
            ]
        print(json.dumps(details), file=sys.stderr)
    else:
        print(f"error: {visible(text)}", file=sys.stderr)


def report(error: Exception, as_json: bool) -> int | None:
    """Print an error of a command that another package added; None if it is a defect.

    Such a command reports an error by letting it escape. The error has a ``reason`` (a stable word)
    and may have a gRPC ``code``, which gives the exit status (without one: wrong usage).
    """
    known = from_service(error)
    return None if known is None else fail(known, as_json).exit_code


def hint_at_folder(error: MegascaleError, name: str) -> None:
    """Add what to type where a folder here has the job's name, and is meant."""
    if isinstance(error, NotFound | Unavailable) and name and Path(name).is_dir():
        error.args = (f"{error}; {name} is read as a job's name: for the folder give ./{name}",)


def print_warning(warning: str) -> None:
    """Print what the driver warns of, apart from the answer."""
    print(f"warning: {visible(warning)}", file=sys.stderr, flush=True)


def print_note(note: str) -> None:
    """Print what the driver says about itself, apart from the answer."""
    print(f"note: {visible(note)}", file=sys.stderr, flush=True)


def with_client(
    action: Callable[[AsyncClient], Awaitable[int | None]],
    cluster: Path | None,
    as_json: bool,
    job_or_folder: str = "",
    *,
    retry_for_s: float = RETRY_FOR_S,
) -> None:
    """Run ``action`` with a client of the cluster in run folder ``cluster``.

    What ``action`` returns is the exit status; None is 0. ``job_or_folder`` is the argument that
    names a job here, and could have named a folder.
    """

    async def run() -> int | None:
        async with AsyncClient.from_run_folder(cluster, retry_for_s=retry_for_s) as client:
            try:
                return await action(client)
            finally:
                for note in client.notes:
                    print_note(note)

    try:
        status = asyncio.run(run())
    except MegascaleError as error:
        hint_at_folder(error, job_or_folder)
        raise fail(error, as_json) from None
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    if status:
        raise typer.Exit(status)


def print_answer(
    call: Callable[[AsyncClient], Awaitable[Answer]],
    text: Callable[[Answer], str],
    cluster: Path | None,
    as_json: bool,
) -> None:
    """Make one call and print its answer: as JSON, or ``text`` of it, which is rich markup."""

    async def action(client: AsyncClient) -> None:
        answer = await call(client)
        if as_json:
            print_json(answer)
        else:
            console.print(text(answer), soft_wrap=True)

    with_client(action, cluster, as_json)
