"""How many nodes the jobs ask for, and how many are missing: what a platform is to provide.

It follows from jobs and nodes as they are recorded, so every leader asks for the same number. What
no number of nodes would help is left out: jobs above the quota of their tenant, and those whose
tensor-parallel group is larger than any known node.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megascale_driver.core.queue import quotas
from megascale_driver.core.queue.scheduling import spares_wanted
from megascale_driver.core.values.attempt import LeaveKind
from megascale_driver.core.values.policy import Policy
from megascale_driver.core.values.state import Cluster, Disposition, Job, JobPhase, Liveness, Node
from megascale_job.sizes.spare_count import wanted_spares


@dataclass(frozen=True, slots=True)
class Demand:
    """Nodes that should be there, those that are kept from work included, and those missing."""

    wanted: int
    missing: int
    why: str = ""  # who asks for the missing ones


def demand(state: Cluster, policy: Policy) -> Demand:
    """Return what the jobs ask for now; evicted nodes count on neither side."""
    there = [node for node in state.nodes.values() if _there(node)]
    kept_out = sum(node.disposition is not Disposition.SCHEDULABLE for node in there)
    left = {name for job in state.jobs.values() if not job.terminal for name in job.evicted}
    left_by_jobs = sum(n.name in left and n.disposition is Disposition.SCHEDULABLE for n in there)
    devices = max((len(node.identity.devices) for node in state.nodes.values()), default=0)
    asked = sum(_nodes_of(job, devices) for job in _counted(state, policy))
    wanted = asked + kept_out + left_by_jobs if asked else 0
    missing = max(0, wanted - len(there))
    if not missing:
        return Demand(wanted, 0)
    why = f"jobs and their spares ask for {asked}"
    if kept_out + left_by_jobs:
        unused = kept_out + left_by_jobs
        why += f", and {unused} of those alive serve none, kept from work or left by a job"
    return Demand(wanted, missing, why)


def _there(node: Node) -> bool:
    return node.liveness is Liveness.ALIVE and node.disposition is not Disposition.QUARANTINED


def _counted(state: Cluster, policy: Policy) -> Iterator[Job]:
    """The jobs that have nodes and keep them, and of those that wait the ones that may start."""
    limits, held = quotas.in_force(state.tenants, policy), quotas.devices_held(state.jobs.values())
    waiting = [job for job in state.jobs.values() if job.phase is JobPhase.QUEUED]
    for job in sorted(waiting, key=lambda job: (-job.config.priority, job.created_at_s)):
        tenant, size = job.config.tenant, job.config.layout.world_size
        devices = held.get(tenant, 0) + size
        if tenant not in limits or devices <= limits[tenant]:
            held[tenant] = devices
            yield job
    yield from (job for job in state.jobs.values() if job.active and not _frees_its_nodes(job))


def _frees_its_nodes(job: Job) -> bool:
    order = job.current.leaving
    if order is not None and order.kind is LeaveKind.SUSPEND:
        return True
    return job.phase is JobPhase.STOPPING and job.after_stop is not JobPhase.QUEUED


def _nodes_of(job: Job, devices: int) -> int:
    """Nodes and spares of a job, where the largest known node has so many devices.

    Before any node is known, a first one is asked for: it shows how many devices nodes have.
    """
    if job.active:
        return len(job.slots) + spares_wanted(job)
    if not devices:
        return 1
    usable = devices // job.config.layout.tp * job.config.layout.tp
    if not usable:
        return 0
    nodes = -(-job.config.layout.world_size // usable)
    return nodes + wanted_spares(job.config, nodes, devices)
