"""Whether the nodes can use a job's storage, and what it holds, found out at submit.

The driver neither has the packages of a storage nor its credentials: the checkpoint daemon of a
node does. Only storages on servers are asked whether they can be used; a folder is checked when the
first attempt opens, because that check would make it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import grpc

from megascale.v1 import driver_pb2
from megascale_common.service import status
from megascale_common.service.errors import ForbiddenError, RequestError
from megascale_driver.core.values.state import Cluster, Liveness, Node
from megascale_job.config import JobConfig
from megascale_job.problems import JobError, JobProblem

FIELD = "checkpoint.uri"
NODES_TRIED = 2
EARLIER_TIMEOUT_S = 3.0  # for the list of what a folder holds; a submit waits for it
_ELSEWHERE = "give it another folder or remove this one"
Check = Callable[[Node, str], Awaitable[None]]
Listed = Callable[[Node, str, str], Awaitable[Sequence[driver_pb2.Checkpoint]]]


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
    alive = _alive(state)
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


async def earlier(config: JobConfig, state: Cluster, listed: Listed) -> list[str]:
    """A warning about checkpoints that the job's folder holds already: they are restored.

    Args:
        listed: the checkpoints of a job by a node's daemon; raises grpc.aio.AioRpcError.
    """
    checkpoint, steps = config.checkpoint, config.training.steps
    alive = _alive(state) if checkpoint.uri else []
    for node in alive[:NODES_TRIED]:
        try:
            async with asyncio.timeout(EARLIER_TIMEOUT_S):
                found = await listed(node, config.name, checkpoint.uri)
        except (grpc.aio.AioRpcError, TimeoutError):
            continue  # the first attempt finds out
        if not found:
            return []
        step = found[0].step
        follows = f"training continues from there; to start at step 0, {_ELSEWHERE}"
        if step >= steps:
            follows = (
                f"with trainer.training.steps {steps} nothing is left to train; to start over, "
                f"{_ELSEWHERE}"
            )
        return [
            f"{FIELD}: {checkpoint.uri} holds step {step} of an earlier job of this name, which is "
            f"restored: {follows}"
        ]
    return []


def _alive(state: Cluster) -> list[Node]:
    return [
        node
        for node in state.nodes.values()
        if node.liveness is Liveness.ALIVE and node.identity.checkpoint_endpoint
    ]


def _problem(node: Node, text: str) -> JobProblem:
    problem, _, remedy = text.removeprefix(f"{FIELD}: ").partition("; ")
    return JobProblem(
        FIELD,
        f"node {node.name}: {problem}",
        remedy or "give the nodes access to it, or another checkpoint.uri",
    )
