"""What must hold when the faults have stopped: I9, and I10 against what is stored."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tests.harness.fake_etcd import Connection, FakeEtcdClient
from tests.simulation.shell.drivers import PREFIX

from megascale_driver.core.values.cluster import Disposition, Liveness
from megascale_driver.core.values.job import JobPhase
from megascale_driver.core.values.stored_fields import differs
from megascale_driver.journal import codec, records
from megascale_driver.journal.reader import Reader
from megascale_driver.journal.rows import Rows

if TYPE_CHECKING:
    from tests.simulation.shell.drivers import SimDriver
    from tests.simulation.shell.world import World

# Longer than a decision waits for an answer of etcd that was lost.
_IN_FLIGHT_S = 30.0
_WELL = (JobPhase.RUNNING, JobPhase.SUCCEEDED, JobPhase.FAILED, JobPhase.CANCELLED)


async def check_settled(world: World) -> None:
    """Check the leader's state against the world and against etcd."""
    rules = world.invariants
    leader = world.leader()
    if leader is None:
        rules.breaks("I9", "no driver leads although all are well")
        return
    state = leader.engine.state
    # The queue of small jobs may still be draining: then one that waits is served in its turn.
    drains = any(job.active and job.name != "main" for job in state.jobs.values())
    for job in state.jobs.values():
        if job.phase not in _WELL and not (job.phase is JobPhase.QUEUED and drains):
            rules.breaks("I9", f"job {job.name} is {job.phase} at the end: {job.reason}")
        if job.phase is JobPhase.FAILED and job.name == "main":
            rules.breaks("I9", f"job {job.name} has failed: {job.reason}")
        gangs = world.gangs_of(job.name)
        running = [g for g in gangs if g.running and not (g.broken or g.finished)]
        if job.phase is JobPhase.RUNNING and [g.attempt for g in running] != [job.attempt]:
            rules.breaks("I9", f"job {job.name} is RUNNING, and {len(running)} gangs train")
    for node in world.nodes.values():
        known = state.nodes.get(node.name)
        if known is None or known.liveness is not Liveness.ALIVE or not known.connected:
            rules.breaks("I9", f"node {node.name} is well, and the driver has it as {known}")
        elif known.disposition is not Disposition.SCHEDULABLE:
            rules.breaks("I9", f"node {node.name} is {known.disposition} after it was uncordoned")
    rules.standby.check_spares(state)
    await check_stored(world)


async def check_stored(world: World) -> None:
    """I10: what a new leader would load is what the leader has.

    A decision whose commit has landed and not been answered is stored and not yet the leader's: a
    difference counts where it is still the same some seconds later.
    """
    leader = world.leader()
    if leader is None or leader.engine.term is None:
        return
    state = leader.engine.state
    differences = await _differences(world, leader)
    if not differences:
        return
    await asyncio.sleep(_IN_FLIGHT_S)
    if not leader.leads:
        return
    later = differences if leader.engine.state is state else await _differences(world, leader)
    for text in differences:
        if text in later:
            world.invariants.breaks("I10", text)


async def _differences(world: World, leader: SimDriver) -> list[str]:
    """What etcd and the leader have differently; nothing if it decided in between."""
    state = leader.engine.state
    auditor = Connection(world.etcd, "auditor")
    async with FakeEtcdClient([auditor], prefix=PREFIX) as client:
        last = await records.last_number(client, "", 0)
        loaded = await Reader(client, Rows(), {}).read(0, last)
    world.etcd.connections.remove(auditor)
    if leader.engine.state is not state or not leader.leads:
        return []
    found = []
    for item in ("breaker", "requests", "tenants"):
        live_value, stored_value = getattr(state, item), getattr(loaded.cluster, item)
        if dict_of(live_value) != dict_of(stored_value):
            found.append(f"{item}: {live_value!r}, stored {stored_value!r}")
    for kind, live, stored in (
        ("node", state.nodes, loaded.cluster.nodes),
        ("job", state.jobs, loaded.cluster.jobs),
    ):
        for name, value in live.items():
            other = stored.get(name)
            if other is None or differs(other, value):
                have = codec.dump(other) if other is not None else None
                found.append(f"{kind} {name}: {codec.dump(value)!r}, stored {have!r}")
        if extra := sorted(stored.keys() - live.keys()):
            found.append(f"{kind}s {extra} are stored, and the leader has none")
    if state.log_seq != loaded.cluster.log_seq:
        found.append(f"log_seq {state.log_seq}, stored {loaded.cluster.log_seq}")
    return found


def dict_of(value: Any) -> Any:
    """A value that can be compared, whatever kind of mapping it is."""
    return dict(value) if isinstance(value, Mapping) else value
