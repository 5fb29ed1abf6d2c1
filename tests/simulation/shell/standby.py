"""Rules on spares, on nodes that are gone for long, and on saves that fail."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from megascale_driver.core.values.cluster import Cluster, Disposition, Liveness, leave_id
from megascale_driver.core.values.events import Audit
from megascale_driver.core.values.job import JobPhase
from megascale_job.sizes.failures import device_hours_per_failure

if TYPE_CHECKING:
    from tests.simulation.shell.training import Gang
    from tests.simulation.shell.world import World

KNOWN_S = 15.0  # until a failed save has its consequence: a heartbeat, and one that is lost
UNDISTURBED_S = 30.0
EARLY_S = 60.0  # before its time, by the clocks of drivers


class Standby:
    """Compares decisions about spares, absent nodes and saves with what is so."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._unsaved: set[tuple[str, int, str]] = set()  # job, attempt, order

    def committed(self, old: Cluster, new: Cluster, audit: tuple[Audit, ...]) -> None:
        """The rules on decisions."""
        for line in audit:
            if line.reason == "NODE_FORGOTTEN":
                for each in line.evidence:
                    self._forgotten(old, each.source.removeprefix("nodes/"))
            elif line.reason == "LEAVE_WITHDRAWN" and "it could not save:" in line.message:
                self._withdrawn(old, line)

    # --- nodes that are gone

    def _forgotten(self, old: Cluster, name: str) -> None:
        """I8: who is forgotten has been gone for long, and nobody needs or has cordoned it."""
        world, node = self._world, self._world.nodes[name]
        gone_s = world.now_s - node.down_at_s
        rules = world.invariants
        if node.up or gone_s < world.policy.forget_dead_s - EARLY_S:
            state = "runs" if node.up else f"has been gone for {gone_s:.0f} s"
            rules.breaks("I8", f"{name} is forgotten, and {state}")
        if old.nodes[name].disposition is not Disposition.SCHEDULABLE:
            rules.breaks("I8", f"{name} is forgotten, which is {old.nodes[name].disposition}")
        for job in old.jobs.values():
            if not job.terminal and (job.slot_of(name) is not None or name in job.spares):
                rules.breaks("I8", f"{name} is forgotten, and {job.name} needs it")

    def must_be_forgotten(self, name: str) -> None:
        """I9: a node that is gone for so long is known no more."""
        leader = self._world.leader()
        if leader is not None and name in leader.engine.state.nodes:
            self._world.invariants.breaks("I9", f"{name} is gone for long, and not forgotten")

    # --- spares

    def check_spares(self, state: Cluster) -> None:
        """I4: a job that runs has all the spares that it is to have, as far as nodes are idle."""
        named = {name for job in state.jobs.values() for name in job.spares}
        held = {slot.node for job in state.jobs.values() if job.active for slot in job.slots}
        waits = any(job.phase is JobPhase.QUEUED for job in state.jobs.values())
        for job in state.jobs.values():
            if job.phase is not JobPhase.RUNNING or waits or job.current.leaving is not None:
                continue
            idle = [
                name
                for name, node in state.nodes.items()
                if name not in named | held and name not in job.evicted
                and node.disposition is Disposition.SCHEDULABLE
                and node.liveness is Liveness.ALIVE
            ]  # fmt: skip
            wanted = spares_of(job)
            if len(job.spares) < min(wanted, len(job.spares) + len(idle)):
                what = f"{len(job.spares)} spares of {wanted}, and {idle} are idle"
                self._world.invariants.breaks("I4", f"{job.name} has {what}")

    # --- saves

    def save_failed(self, gang: Gang, order: str) -> None:
        """The workers of an attempt could not save to leave, and train on."""
        self._unsaved.add((*gang.key, order))
        self._world.later(KNOWN_S, self._must_be_known, gang, order)

    def _must_be_known(self, gang: Gang, order: str) -> None:
        """A save that fails is found out at once, not after the longest time that it may take."""
        world, leader, first = self._world, self._world.leader(), gang.first
        hidden = first is None or first.link is None or not first.link.greeted or first.paused
        if leader is None or hidden or gang.broken or gang.finished or not gang.running:
            return
        if world.network.cut_lately(UNDISTURBED_S) or world.network.loss:
            return
        job = leader.engine.state.jobs.get(gang.job)
        if world.invariants.bounds.undisturbed_s() < UNDISTURBED_S or job is None:
            return
        if (job.attempt, job.phase, leave_id(job)) == (gang.attempt, JobPhase.RUNNING, order):
            what = f"attempt {gang.key} could not save {KNOWN_S:g} s ago, and is still to leave"
            world.invariants.breaks("bound", what)

    def _withdrawn(self, old: Cluster, line: Audit) -> None:
        """I11: an order to leave is withdrawn for a failed save only if its own save failed."""
        job = old.jobs.get(line.log)
        if job is None:
            return
        # An order that is withdrawn with the decision that gives it has not failed either.
        order = leave_id(job)
        if (line.log, line.attempt, order) not in self._unsaved:
            what = f"{line.log} stays, and nothing has failed: {line.message}"
            self._world.invariants.breaks("I11", what)


def spares_of(job: Any) -> int:
    """How many spares a job is to have: by its number, or by the binomial rule, computed anew."""
    recovery, checkpoint = job.config.recovery, job.config.checkpoint
    if recovery.spares != "auto":
        return int(recovery.spare_nodes)
    count = job.current.failure_count
    hours = device_hours_per_failure(
        checkpoint.device_mtbf_hours, count.count, count.device_hours
    )  # of one device
    devices, nodes = max(len(slot.devices) for slot in job.slots), len(job.slots)
    away = 1.0 - math.exp(-recovery.repair_hours * devices / hours)
    enough = 0.0
    for spares in range(nodes + 1):
        enough += math.comb(nodes, spares) * away**spares * (1.0 - away) ** (nodes - spares)
        if enough >= recovery.spare_probability:
            return spares
    return nodes
