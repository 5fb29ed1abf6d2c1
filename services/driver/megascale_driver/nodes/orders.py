"""The desired states that nodes get: each node only its own slice of an attempt.

A node needs its ranks, its devices and the addresses that its own workers use. The table of all
ranks would be megabytes per second for a large job (289 MiB for 1,536 nodes). The node gets its
digest instead, which the ranks compare when they meet; the table itself is in `nodes` of the job.
Agents of link protocol 1 require the table and get it.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from megascale.v1 import job_pb2, link_pb2, types_pb2
from megascale_driver.core.values.attempt import NodeSlot
from megascale_driver.core.values.cluster import Cluster, Desired, DesiredPhase, Node
from megascale_driver.core.values.job import Job
from megascale_driver.nodes.job_network import JobNetwork
from megascale_driver.nodes.open_links import OpenLinks
from megascale_driver.wire import messages as wire
from megascale_job import loading
from megascale_job.config import JobConfig
from megascale_job.sections.code import EnvironmentConfig
from megascale_job.wire import restore
from megascale_job.wire import spec as job_spec

PROTOCOL = link_pb2.ProtocolRange(lowest=1, highest=5)
AT_ONCE = 16  # orders sent before other tasks get a turn: 2 to 4 ms
SLICES = 2  # agents of this protocol version and later take slices
SURROUNDINGS = 3  # ... know `code.uri` and `environment`
NETWORK = 4  # ... know NCCL's settings
JOB_JSON = 5  # ... read the job's canonical bytes; older agents get its message
# An older agent would ignore these fields and run the job without its code, secrets and account. It
# does know `code.path`, refuses a missing folder, and repeats its name.
OLDER_AGENT = "/this agent is of a build without code.uri and environment - update the node"
_PHASES = {
    phase: link_pb2.DesiredPhase.Value(f"DESIRED_PHASE_{phase.value}") for phase in DesiredPhase
}
DIGEST_DIGITS = 32  # digits of the SHA-256 over the nodes in the order of their ranks


@dataclass(frozen=True)
class _Common:
    """The part that is the same for all nodes of an attempt; ``table``: node of each rank."""

    job: Job
    assignment: link_pb2.AttemptAssignment
    table: list[str]

    @functools.cached_property
    def spec(self) -> job_pb2.JobSpec:
        """The job as a message, for older agents."""
        return job_spec.to_proto(self.job.config)


class Orders:
    """The desired states of nodes, from a committed state.

    The part that is the same for all nodes of an attempt is built once: an attempt starts on
    thousands of nodes, and each gets it again when it links to a new leader.
    """

    def __init__(
        self, state: Cluster, epoch: types_pb2.Epoch, network: JobNetwork | None = None
    ) -> None:
        self._state = state
        self._epoch = epoch
        self._network = network
        self._common: dict[str, _Common] = {}

    def follow(self, state: Cluster) -> None:
        """Use a newer state from now on."""
        self._state = state
        for name, common in list(self._common.items()):
            job = state.jobs.get(name)
            if job is None or _attempt(job) != _attempt(common.job):
                del self._common[name]

    def of(self, name: str, protocol: int = PROTOCOL.highest) -> link_pb2.DesiredState:
        """The desired state of a node whose link speaks ``protocol``."""
        node = self._state.nodes[name]
        message = _without_assignment(node, self._epoch)
        job = self._state.holder_of(name) if node.desired.job else None
        slot = job.slot_of(name) if job is not None else None
        if job is not None and slot is not None:
            if job.name not in self._common:
                self._common[job.name] = _common(job, self._network)
            common = self._common[job.name]
            message.assignment.CopyFrom(common.assignment)
            _fill(message.assignment, node.desired, slot)
            if protocol < SLICES:
                message.assignment.rank_nodes.extend(common.table)
            if protocol < NETWORK:
                message.assignment.ClearField("network")
            if protocol < JOB_JSON:
                _as_message(message.assignment, common, protocol)
        return message


class OrderSender:
    """Puts desired states on the links of their nodes, a few at a time.

    An attempt on ten thousand nodes orders as many at once; sent without a break they would block
    the loop, and with it every acknowledgement, for a second. Only the newest state of a node is
    sent, so a node that is ordered twice meanwhile gets one message (Note [Desired state] in
    :mod:`megascale_driver.core.values.cluster`).
    """

    def __init__(self, links: OpenLinks) -> None:
        self._links = links
        self.network: JobNetwork | None = None  # of the site, if the driver has its profile
        self._names: dict[str, None] = {}
        self._added = asyncio.Event()

    def add(self, names: Iterable[str]) -> None:
        """Send the desired states of these nodes; they are decided and committed."""
        self._names.update(dict.fromkeys(names))
        if self._names:
            self._added.set()

    def clear(self) -> None:
        """Forget unsent states: the term that decided them has ended."""
        self._names.clear()

    async def run(self, epoch: types_pb2.Epoch, state: Callable[[], Cluster]) -> None:
        """Send what is added; ``state``: returns the newest committed state."""
        orders = Orders(state(), epoch, self.network)
        while True:
            await self._added.wait()
            self._added.clear()
            while self._names:
                orders.follow(state())
                for name in list(itertools.islice(self._names, AT_ONCE)):
                    del self._names[name]
                    link = self._links.get(name)
                    # Built from the newest state, which may be newer than the order: a later
                    # version is always right.
                    if link is not None and name in state().nodes:
                        link.command(orders.of(name, link.protocol))
                await asyncio.sleep(0)


def desired_state(
    node: Node,
    job: Job | None,
    epoch: types_pb2.Epoch,
    protocol: int = PROTOCOL.highest,
    network: JobNetwork | None = None,
) -> link_pb2.DesiredState:
    """The desired state of ``node``; ``job`` is the job that holds it, if any."""
    jobs = {job.name: job} if job is not None else {}
    state = Cluster(nodes={node.name: node}, jobs=jobs)
    return Orders(state, epoch, network).of(node.name, protocol)


def _as_message(assignment: link_pb2.AttemptAssignment, common: _Common, protocol: int) -> None:
    """Give an older agent the job as a message instead of bytes."""
    assignment.ClearField("job_json")
    assignment.ClearField("job_sha256")
    assignment.spec.CopyFrom(common.spec)
    if protocol < SURROUNDINGS and _has_surroundings(common.job.config):
        assignment.spec.code.path = OLDER_AGENT


def _has_surroundings(config: JobConfig) -> bool:
    return bool(config.code.uri) or config.environment != EnvironmentConfig()


def _attempt(job: Job) -> tuple[object, ...]:
    """The inputs of :func:`_common`; usually the same objects, so cheap to compare."""
    return job.active, job.attempt, job.slots, job.spec_revision, job.config


def _rank_nodes(job: Job) -> list[str]:
    """The node of each global rank."""
    nodes = [""] * job.config.layout.world_size
    for slot in job.slots:
        for rank in slot.ranks:
            nodes[rank] = slot.node
    return nodes


def _common(job: Job, network: JobNetwork | None) -> _Common:
    table = _rank_nodes(job)
    job_json = loading.to_json(job.config).encode()
    assignment = link_pb2.AttemptAssignment(
        job=job.name,
        spec_revision=job.spec_revision,
        job_json=job_json,
        job_sha256=loading.digest_of(job_json),
        rank_table_digest=hashlib.sha256("\n".join(table).encode()).hexdigest()[:DIGEST_DIGITS],
    )
    if network is not None and (settings := network.of(job.config)) is not None:
        assignment.network.CopyFrom(settings)
    return _Common(job, assignment, table)


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
    message.checks.extend(wanted.checks)
    message.fleet_failures = wanted.failures.count
    message.fleet_device_hours = wanted.failures.device_hours
    if wanted.restore is not None:
        message.restore.CopyFrom(restore.to_proto(wanted.restore))


def _without_assignment(node: Node, epoch: types_pb2.Epoch) -> link_pb2.DesiredState:
    wanted = node.desired
    # Field by field, which is faster: an attempt on thousands of nodes makes as many messages.
    message = link_pb2.DesiredState()
    message.epoch.CopyFrom(epoch)
    message.version = node.desired_version
    message.phase = _PHASES[wanted.phase]
    message.leave = wanted.leave
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
