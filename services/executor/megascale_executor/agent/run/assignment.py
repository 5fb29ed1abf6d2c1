"""Checks the driver's assignment and makes the message for each worker from it. Pure."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from megascale.v1 import link_pb2
from megascale_common.node import framing
from megascale_common.node.addresses import split
from megascale_common.node.files import AttemptFolder
from megascale_common.node.messages import Assignment, FailureCount, ReplicaOrders
from megascale_common.service.errors import AssignmentError
from megascale_executor.agent.config import AgentConfig
from megascale_executor.diagnostics.wanted_network import WantedNetwork, WantedSetting
from megascale_job import loading
from megascale_job.config import JobConfig
from megascale_job.layout import readers_of
from megascale_job.visible import counted
from megascale_job.wire import restore
from megascale_job.wire.spec import from_accepted_proto


@dataclass(frozen=True, slots=True)
class Sockets:
    """The unix sockets at which workers reach the services of their node."""

    loader: Path
    checkpoint: Path


def job_of(assignment: link_pb2.AttemptAssignment) -> JobConfig:
    """The job of an assignment: its canonical bytes, or the message of an older driver.

    Raises:
        AssignmentError: the bytes do not have their digest.
        JobError: fields that this version cannot read.
    """
    if not assignment.job_json:
        return from_accepted_proto(assignment.spec)
    digest = loading.digest_of(assignment.job_json)
    if digest != assignment.job_sha256:
        raise AssignmentError(
            f"job_json has the SHA-256 {digest}, and job_sha256 is {assignment.job_sha256!r}"
        )
    return loading.from_json(assignment.job_json)


def job_text(assignment: link_pb2.AttemptAssignment, config: JobConfig) -> str:
    """The canonical JSON of the job of an assignment, for the processes of the node."""
    return assignment.job_json.decode() or loading.to_json(config)


def check_assignment(
    assignment: link_pb2.AttemptAssignment, config: JobConfig, node: str, devices: Collection[int]
) -> None:
    """Refuse an assignment that contradicts itself or this node.

    Raises:
        AssignmentError: its text names the contradiction.
    """
    ranks, indices = list(assignment.ranks), list(assignment.devices)
    world_size = config.layout.world_size
    if not ranks or len(ranks) != len(indices):
        raise AssignmentError(
            f"{counted(len(ranks), 'rank')} on {counted(len(indices), 'device')}: each rank "
            "needs one device"
        )
    if len(set(ranks)) != len(ranks) or len(set(indices)) != len(indices):
        raise AssignmentError(f"ranks {ranks} on devices {indices}: each may be listed once only")
    unknown = sorted(set(indices) - set(devices))
    if unknown:
        raise AssignmentError(
            f"devices {unknown} are not of node {node}, which has {sorted(devices)}"
        )
    beyond = [rank for rank in ranks if not 0 <= rank < world_size]
    if beyond:
        raise AssignmentError(f"ranks {beyond} do not exist in a world of {world_size}")
    if not assignment.rank_nodes and assignment.rank_table_digest:
        return  # since link protocol 2 the ranks compare the digest at rendezvous
    if len(assignment.rank_nodes) != world_size:
        raise AssignmentError(
            f"{len(assignment.rank_nodes)} rank_nodes for a world size of {world_size}"
        )
    here = [rank for rank, name in enumerate(assignment.rank_nodes) if name == node]
    if sorted(ranks) != here:
        raise AssignmentError(
            f"ranks {sorted(ranks)} are given to node {node}, but rank_nodes gives it {here}"
        )


def wanted_network(assignment: link_pb2.AttemptAssignment) -> WantedNetwork | None:
    """The NCCL settings that the driver wants; None if it sent none.

    Raises:
        AssignmentError: too many of them, or one is not a setting of NCCL.
    """
    if not assignment.HasField("network"):
        return None
    sent = assignment.network
    try:
        return WantedNetwork(
            nccl=sent.nccl,
            cards=tuple(sent.cards),
            settings=tuple(
                WantedSetting(each.name, each.value, each.reason, each.default_value)
                for each in sent.settings
            ),
        )
    except ValueError as error:
        raise AssignmentError(f"network of the assignment: {error}") from None


def hosts_of(endpoints: Iterable[str]) -> tuple[str, ...]:
    """The host of each endpoint that is host:port, without duplicates."""
    found = []
    for endpoint in endpoints:
        with contextlib.suppress(ValueError):
            found.append(split(endpoint)[0])
    return tuple(dict.fromkeys(found))


def worker_assignments(
    assignment: link_pb2.AttemptAssignment,
    config: JobConfig,
    agent: AgentConfig,
    folder: AttemptFolder,
    work_folder: Path,
    sockets: Sockets,
) -> list[tuple[Assignment, Path]]:
    """The message for each worker of this node, and its log file.

    Args:
        work_folder: where the job's processes keep files for other tools.

    Raises:
        AssignmentError: the store's endpoint is not host:port.
    """
    try:
        host, port = split(assignment.store_endpoint)
    except ValueError as error:
        raise AssignmentError(f"store_endpoint {error}") from None
    ranks = list(assignment.ranks)
    readers = readers_of(ranks, config.layout)
    text = job_text(assignment, config)
    sources = {source.rank: source.endpoint for source in assignment.replica_sources}
    rate = int(config.checkpoint.max_replicate_mib_per_s * (1 << 20))
    messages: list[tuple[Assignment, Path]] = []
    for local_rank, (rank, device) in enumerate(zip(ranks, assignment.devices, strict=True)):
        reader, count = readers[rank]
        message = Assignment(
            version=framing.PROTOCOL_VERSION,
            cluster=agent.cluster,
            node=agent.node,
            job=assignment.job,
            attempt=assignment.attempt,
            rank_table=assignment.rank_table_digest,
            rank=rank,
            local_rank=local_rank,
            local_ranks=len(ranks),
            device_kind=agent.device_kind,
            device_index=device,
            config=text,
            store_host=host,
            store_port=port,
            status_page=str(folder.status_page(rank)),
            spans=str(folder.spans(rank)),
            loader_socket=str(sockets.loader),
            readers=count,
            reader=reader,
            checkpoint_socket=str(sockets.checkpoint),
            committer_endpoint=assignment.committer_endpoint,
            replicas=ReplicaOrders(
                target=assignment.replica_target,
                source=sources.get(rank, ""),
                bytes_per_s=rate,
            ),
            failures=FailureCount(
                count=assignment.fleet_failures,
                device_hours=assignment.fleet_device_hours,
            ),
            restore=restore.from_proto(assignment.restore).to_mapping(),
            reports=rank == 0,
            run_folder=str(work_folder),
        )
        messages.append((message, folder.log(rank)))
    return messages
