"""Options and arguments that several commands share, so they are the same everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megascale_cli.completion import job_names, node_names

HELP_OPTIONS = ["-h", "--help"]
JSON_OPTION = "--json"

# Groups of commands in `megascale --help`.
FIRST_STEPS = "First steps"
JOBS = "Jobs"
NODES = "Nodes and cluster"

Cluster = Annotated[
    Path | None,
    typer.Option(
        "--cluster",
        help="Run folder of the cluster; default $MEGASCALE_RUN_FOLDER, then ./runs/current.",
    ),
]
Json = Annotated[
    bool,
    typer.Option(JSON_OPTION, help="Print JSON, one object per line; docs/api.md has the fields."),
]
JobName = Annotated[
    str, typer.Argument(metavar="NAME", help="Name of the job.", autocompletion=job_names)
]
Reason = Annotated[str, typer.Option(help="The reason, for the audit log.")]
NodeName = Annotated[
    str, typer.Argument(metavar="NODE", help="Name of the node.", autocompletion=node_names)
]
Check = Annotated[bool, typer.Option("--check", help="Print what would happen; change nothing.")]
MAX_RANK, MAX_NUMBER = 2**31 - 1, 2**63 - 1  # what the fields of requests hold
