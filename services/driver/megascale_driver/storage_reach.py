"""Whether the nodes can use a job's storage, found out when it is submitted.

The driver neither has the packages of a storage nor its credentials: the checkpoint daemon of a
node does. Only storages on servers are asked for; a folder is checked when the first attempt opens,
because a look at it would make it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import grpc

from megascale_common.job.config import JobConfig
from megascale_common.job.problems import JobError, JobProblem
from megascale_common.service import status
from megascale_common.service.errors import ForbiddenError, RequestError
from megascale_driver.core.state import Cluster, Liveness, Node

FIELD = "checkpoint.uri"
NODES_TRIED = 2
Check = Callable[[Node, str], Awaitable[None]]


async def check(config: JobConfig, state: Cluster, ask: Check) -> list[str]:
    """Warnings about the storage at ``checkpoint.uri``; it may answer later.

    Args:
        ask: has a node check an address; raises grpc.aio.AioRpcError.

    Raises:
        JobError: the storage refuses, or cannot be used.
    """
    uri = config.checkpoint.uri
    if "://" not in uri or uri.startswith("file://"):
        return []
    alive = [
        node
        for node in state.nodes.values()
        if node.liveness is Liveness.ALIVE and node.identity.checkpoint_endpoint
    ]
    warnings: list[str] = []
    for node in alive[:NODES_TRIED]:
        try:
            await ask(node, uri)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:  # a daemon of an older build
                continue
            refusal = status.read(error)
            if isinstance(refusal, (RequestError, ForbiddenError)):
                raise JobError([_problem(node, refusal.message)], config) from error
            warnings = [
                f"{FIELD}: node {node.name} cannot use {uri} now: {error.details()}; the job "
                "waits until it can"
            ]
            continue
        return []
    return warnings


def _problem(node: Node, text: str) -> JobProblem:
    problem, _, remedy = text.removeprefix(f"{FIELD}: ").partition("; ")
    return JobProblem(
        FIELD,
        f"node {node.name}: {problem}",
        remedy or "give the nodes access to it, or another checkpoint.uri",
    )
