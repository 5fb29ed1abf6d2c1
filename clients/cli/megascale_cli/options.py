"""Options and arguments that several commands share, with shell completion of names.

Names of jobs and nodes are read from the cluster if it answers within a second.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any

import typer

from megascale_client import AsyncClient, MegascaleError

HELP_OPTIONS = ["-h", "--help"]
JSON_OPTION = "--json"

# Groups of commands in `megascale --help`.
FIRST_STEPS = "First steps"
JOBS = "Jobs"
NODES = "Nodes and cluster"

# A user waits at the TAB key.
TIMEOUT_S = 1.0

_Listing = Callable[[AsyncClient], Coroutine[Any, Any, list[str]]]


def job_names(context: typer.Context, incomplete: str) -> list[str]:
    """Names of jobs that start with ``incomplete``."""

    async def listed(client: AsyncClient) -> list[str]:
        return [job.spec.name async for job in client.jobs()]

    return _complete(context, incomplete, listed)


def node_names(context: typer.Context, incomplete: str) -> list[str]:
    """Names of nodes that start with ``incomplete``."""

    async def listed(client: AsyncClient) -> list[str]:
        return [node.name async for node in client.nodes()]

    return _complete(context, incomplete, listed)


def _complete(
    context: typer.Context,
    incomplete: str,
    listed: _Listing,
) -> list[str]:
    async def ask() -> list[str]:
        async with AsyncClient.from_run_folder(
            context.params.get("cluster"), retry_for_s=0
        ) as client:
            return await asyncio.wait_for(listed(client), TIMEOUT_S)

    try:
        return [name for name in asyncio.run(ask()) if name.startswith(incomplete)]
    except (MegascaleError, TimeoutError):
        return []


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
