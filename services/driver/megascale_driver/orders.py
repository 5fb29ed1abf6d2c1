"""The desired states that go to nodes: of an attempt each node gets its own slice.

A node needs its ranks, its devices and the addresses that its own workers use. The table of all
ranks would be megabytes per second for a large job (289 MiB for 1,536 nodes); the node gets its
digest, which the ranks compare when they meet, and whoever wants the table reads `nodes` of the
job. Agents of link protocol 1 insist on the table and get it.
"""

from __future__ import annotations

import hashlib

from megascale.v1 import link_pb2, types_pb2
from megascale_common.job.wire import restore
from megascale_common.job.wire import spec as job_spec
from megascale_driver import wire
from megascale_driver.core.attempt import NodeSlot
from megascale_driver.core.state import Cluster, Desired, Job, Node

PROTOCOL = link_pb2.ProtocolRange(lowest=1, highest=2)
SLICES = 2  # from this version of the link protocol on
DIGEST_DIGITS = 32  # of the SHA-256 over the nodes in the order of their ranks


class Orders:
    """The desired states of nodes, in a state that was committed.

    What is the same for all nodes of an attempt is built once: an attempt starts on thousands.
    """

    def __init__(self, state: Cluster, epoch: types_pb2.Epoch) -> None:
        self._nodes, self._epoch = state.nodes, epoch
        self._held = {
            slot.node: (job, slot)
            for job in state.jobs.values()
            if job.active
            for slot in job.slots
        }
        self._common: dict[str, link_pb2.AttemptAssignment] = {}

    def of(self, name: str, protocol: int = PROTOCOL.highest) -> link_pb2.DesiredState:
        """The desired state of a node whose link speaks ``protocol``."""
        node = self._nodes[name]
        message = _without_assignment(node, self._epoch)
        held = self._held.get(name)
        if node.desired.job and held is not None:
            job, slot = held
            if job.name not in self._common:
                self._common[job.name] = _common(job)
            message.assignment.CopyFrom(self._common[job.name])
            _fill(message.assignment, node.desired, slot)
            if protocol < SLICES:
                message.assignment.rank_nodes.extend(_rank_nodes(job))
        return message


def desired_state(
    node: Node, job: Job | None, epoch: types_pb2.Epoch, protocol: int = PROTOCOL.highest
) -> link_pb2.DesiredState:
    """The desired state of ``node``; ``job`` is the job that holds it, if any."""
    jobs = {job.name: job} if job is not None else {}
    return Orders(Cluster(nodes={node.name: node}, jobs=jobs), epoch).of(node.name, protocol)


def _rank_nodes(job: Job) -> list[str]:
    """The node of each global rank."""
    nodes = [""] * job.config.layout.world_size
    for slot in job.slots:
        for rank in slot.ranks:
            nodes[rank] = slot.node
    return nodes


def _common(job: Job) -> link_pb2.AttemptAssignment:
    """What all nodes of the job's attempt get alike."""
    table = "\n".join(_rank_nodes(job))
    return link_pb2.AttemptAssignment(
        job=job.name,
        spec_revision=job.spec_revision,
        spec=job_spec.to_proto(job.config),
        rank_table_digest=hashlib.sha256(table.encode()).hexdigest()[:DIGEST_DIGITS],
    )


def _fill(message: link_pb2.AttemptAssignment, wanted: Desired, slot: NodeSlot) -> None:
    """Add the node's own part."""
    message.attempt = wanted.attempt
    message.ranks.extend(slot.ranks)
    message.devices.extend(slot.devices)
    message.store_endpoint = wanted.store_endpoint
    message.committer_endpoint = wanted.committer_endpoint
    message.replica_target = wanted.replicas.target
    for source in wanted.replicas.sources:
        message.replica_sources.add(rank=source.rank, endpoint=source.endpoint)
    message.fleet_failures = wanted.failures.count
    message.fleet_device_hours = wanted.failures.device_hours
    if wanted.restore is not None:
        message.restore.CopyFrom(restore.to_proto(wanted.restore))


def _without_assignment(node: Node, epoch: types_pb2.Epoch) -> link_pb2.DesiredState:
    wanted = node.desired
    message = link_pb2.DesiredState(
        epoch=epoch,
        version=node.desired_version,
        phase=link_pb2.DesiredPhase.Value(f"DESIRED_PHASE_{wanted.phase}"),
        leave=wanted.leave,
    )
    if wanted.profile is not None:
        message.profile.CopyFrom(
            link_pb2.ProfileCommand(
                id=wanted.profile.id,
                first_step=wanted.profile.first_step,
                last_step=wanted.profile.last_step,
                ranks=wanted.profile.ranks,
                not_after=wire.timestamp(wanted.profile.not_after_s),
            )
        )
    return message
