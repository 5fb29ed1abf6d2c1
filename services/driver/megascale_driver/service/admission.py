"""The examination of a job at submit: nodes, memory, folders, files, storage.

A path that this driver does not see proves nothing by itself: the nodes may be other hosts, or
containers of this one. It is certain only where every node that is alive sees the same files as
this process (the same mounts under the same root of the same kernel), and the system reports that
there is no such file. Anything else, a missing permission included, is left to the first attempt.

The driver has neither the packages of a storage nor its credentials: the checkpoint daemon of a
node does. Only storages on servers are asked whether they can be used; a folder is checked when the
first attempt opens, because that check would make it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence

import grpc

from megascale.v1 import driver_pb2
from megascale_common.node.process import file_view
from megascale_common.service import status
from megascale_common.service.errors import ForbiddenError, RequestError
from megascale_driver.core.values.cluster import Cluster, Liveness, Node, capacities
from megascale_driver.nodes.job_network import JobNetwork
from megascale_driver.placement.gang import fit_refusals, fit_warnings
from megascale_job.config import JobConfig
from megascale_job.corpus_record import data_file_problems
from megascale_job.named_files import MAX_FILES, local_path, missing_files
from megascale_job.problems import JobError, JobProblem
from megascale_job.sizes.memory import largest_rank_memory

FIELD = "checkpoint.uri"
NODES_TRIED = 2
EARLIER_TIMEOUT_S = 3.0  # for the list of what a folder holds; a submit waits for it
_ELSEWHERE = "give it another folder or remove this one"
Check = Callable[[Node, str], Awaitable[None]]
Listed = Callable[[Node, str, str], Awaitable[Sequence[driver_pb2.Checkpoint]]]


async def examine(
    config: JobConfig, state: Cluster, network: JobNetwork | None = None
) -> list[str]:
    """Warnings about a job whose values are accepted.

    Raises:
        JobError: no known node can run it, files that it names are certainly not there, or its
            watchdog is too short for the site's network.
    """
    if network is not None:
        network.check(config)
    known = capacities(state.nodes.values())
    # In threads: the parameter table of a large job, and a slow mount, take a while.
    need = await asyncio.to_thread(_rank_bytes, config) if known else 0
    problems = [*fit_refusals(config, need, known), *_shared_folder(config, state)]
    if _sees_what_nodes_see(state):
        problems += await asyncio.to_thread(lambda: _of_files(config))
    if problems:
        raise JobError(problems, config)
    return fit_warnings(config, known)


def _shared_folder(config: JobConfig, state: Cluster) -> Iterator[JobProblem]:
    """The checkpoint folder of another job, which has written there or is about to."""
    folder = local_path(config.checkpoint.uri)
    for job in state.jobs.values():
        used = job.current.restore is not None or job.committed_step or not job.terminal
        if job.name == config.name:
            continue  # an update: it is its own folder
        if folder and used and folder == local_path(job.config.checkpoint.uri):
            yield JobProblem(
                "checkpoint.uri",
                f"{folder} is the folder of job {job.name}",
                "give it a folder of its own; to start from that job, set checkpoint.load_uri",
            )
            return


def _of_files(config: JobConfig) -> list[JobProblem]:
    return [*missing_files(config), *data_file_problems(config, most_sources=MAX_FILES // 2)]


def _sees_what_nodes_see(state: Cluster) -> bool:
    views = {
        node.identity.file_view for node in state.nodes.values() if node.liveness is Liveness.ALIVE
    }
    return views == {file_view()} and views != {""}


def _rank_bytes(config: JobConfig) -> int:
    try:
        return largest_rank_memory(config).total_bytes
    except ValueError:
        return 0  # sizes that the table refuses have a problem of their own


async def check_storage(config: JobConfig, state: Cluster, ask: Check) -> list[str]:
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
                raise JobError([_storage_problem(node, refusal.message)], config) from error
            warnings = [
                f"{FIELD}: node {node.name} cannot use {uri} now: {error.details()}; the job "
                "waits until it can"
            ]
            continue
        return []
    return warnings


async def earlier_checkpoints(config: JobConfig, state: Cluster, listed: Listed) -> list[str]:
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


def _storage_problem(node: Node, text: str) -> JobProblem:
    problem, _, remedy = text.removeprefix(f"{FIELD}: ").partition("; ")
    return JobProblem(
        FIELD,
        f"node {node.name}: {problem}",
        remedy or "give the nodes access to it, or another checkpoint.uri",
    )
