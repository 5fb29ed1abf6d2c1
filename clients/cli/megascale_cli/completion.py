"""Shell completion of job and node names, read from the cluster if it answers within a second."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import typer

from megascale_client import AsyncClient, MegascaleError

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
    listed: Callable[[AsyncClient], Coroutine[Any, Any, list[str]]],
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
