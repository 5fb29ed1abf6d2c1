"""What the commands of a cluster share: its option, reports of events, checks, exit statuses."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from megascale_common.service.errors import ServiceError, UnavailableError
from megascale_driver.platform.local.node import RUN_FOLDER_VARIABLE
from megascale_job.names import is_dns_label
from megascale_job.visible import visible

Cluster = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help=f"Run folder of the cluster; default ${RUN_FOLDER_VARIABLE}, else runs/current.",
    ),
]
JsonLines = Annotated[bool, typer.Option("--json", help="One JSON object per line.")]
Report = Callable[[str, dict[str, Any]], None]
Words = Callable[[dict[str, Any]], Mapping[str, str]]

_console = Console(stderr=True, highlight=False)


def run_folder(given: Path | None) -> Path:
    """The run folder to use: ``given``, else that of the environment, else runs/current."""
    return given or Path(os.environ.get(RUN_FOLDER_VARIABLE) or "runs/current")


def require_name(name: str, option: str) -> None:
    """Refuse what is not a DNS label, as the value of ``option``."""
    if not is_dns_label(name):
        raise typer.BadParameter(
            f"{name!r} is not a valid name: use 1 to 63 of a-z, 0-9 and '-'", param_hint=option
        )


def reporter(
    as_json: bool, sentences: Mapping[str, str], words: Words = lambda fields: {}
) -> Report:
    """Prints an event: as a JSON object on stdout, or by its sentence on stderr.

    ``words``: further fields for the sentences, from those of the event.
    """

    def report(kind: str, fields: dict[str, Any]) -> None:
        if as_json:
            print(json.dumps({"event": kind, **fields}), flush=True)
            return
        plain = {
            name: escape(visible(value)) if isinstance(value, str) else value
            for name, value in fields.items()
        }
        _console.print(sentences[kind].format(**{**plain, **words(fields)}), soft_wrap=True)

    return report


def run_alone(app: typer.Typer) -> None:
    """Run a command by itself, without the CLI: an error is one sentence and a status."""
    try:
        app()
    except ServiceError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(3 if isinstance(error, UnavailableError) else 2) from None
