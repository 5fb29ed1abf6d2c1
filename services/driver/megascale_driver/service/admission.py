"""Checks of a job when it is submitted: nodes, memory, folders, files, storage.

Note [Missing files]. A path that this driver cannot see proves nothing: the nodes may be other
hosts, or containers on this one. A job is refused for a missing file only if every alive node sees
the same files as this process (the same mounts under the same root of the same kernel) and the
system reports that the file does not exist. In all other cases, a missing permission included, the
first attempt finds out.

The driver has neither the packages of a storage nor its credentials; the checkpoint daemon of a
node has both, so a daemon does the check. Only storages on servers are checked here: checking a
folder would create it, so that waits until the first attempt opens.
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
EARLIER_TIMEOUT_S = 3.0  # for listing a job's checkpoints; the submit call waits for it
_ELSEWHERE = "give it another folder or remove this one"
Check = Callable[[Node, str], Awaitable[None]]
Listed = Callable[[Node, str, str], Awaitable[Sequence[driver_pb2.Checkpoint]]]


async def examine(
    config: JobConfig, state: Cluster, network: JobNetwork | None = None
) -> list[str]:
    """Warnings about a job whose values are valid.

    Raises:
        JobError: no known node can run it, files that it names do not exist (see
            Note [Missing files]), or its watchdog is too short for the site's network.
    """
    if network is not None:
        network.check(config)
    known = capacities(state.nodes.values())
    # In threads, because the parameter table of a large job and a slow mount take time.
    need = await asyncio.to_thread(_rank_bytes, config) if known else 0
    problems = [*fit_refusals(config, need, known), *_shared_folder(config, state)]
    if _sees_what_nodes_see(state):
        problems += await asyncio.to_thread(lambda: _of_files(config))
    if problems:
        raise JobError(problems, config)
    return fit_warnings(config, known)


def _shared_folder(config: JobConfig, state: Cluster) -> Iterator[JobProblem]:
    """A problem if another job writes, or wrote, its checkpoints to this job's folder."""
    folder = local_path(config.checkpoint.uri)
    for job in state.jobs.values():
        used = job.current.restore is not None or job.committed_step or not job.terminal
        if job.name == config.name:
            continue  # an update of the job itself
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
        return 0  # validation reports the sizes that the table refuses


async def check_storage(config: JobConfig, state: Cluster, ask: Check) -> list[str]:
    """Warnings about the storage at ``checkpoint.uri``; one that does not answer may do so later.

    Args:
        ask: makes a node check an address; raises grpc.aio.AioRpcError.

    Raises:
        JobError: the storage refuses access, or cannot be used.
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
    """A warning if the job's folder already holds checkpoints, which would be restored.

    Args:
        listed: lists a job's checkpoints through a node's daemon; raises grpc.aio.AioRpcError.
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
