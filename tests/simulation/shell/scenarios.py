"""Scenarios: histories that lead to one state which drills and storms reach seldom or never.

A scenario is a fault like any other, which watches the world and acts at the moment that matters.
:data:`SCENARIOS` has the fleet that each of them needs; ``tests/simulation/hunt.py`` runs them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from tests.simulation.shell.drills import Drills
from tests.simulation.shell.faults import DAY_S, Fault
from tests.simulation.shell.figures import MAIN_JOB

from megascale.v1 import types_pb2
from megascale_job.wire import spec as job_spec

if TYPE_CHECKING:
    from tests.simulation.shell.nodes import SimNode
    from tests.simulation.shell.run import Setup
    from tests.simulation.shell.training import Gang

LOOK_S = 0.5  # between two looks of a scenario at the world
BEGIN_S = 120.0  # when a scenario begins: the main job trains
BROUGHT_S = 7.0  # a heartbeat, and what it takes on its way
MOST_ACTIVE_S = 1000.0  # a longer scenario has stretches that can be skipped
# Nodes, nodes of the main job, its spares, and how long the scenario takes, in seconds.
SCENARIOS: dict[str, tuple[int, int, int, float]] = {
    "rejoin": (6, 4, 1, 150.0),
    "deposed": (4, 2, 1, 150.0),
    "usurped": (5, 3, 1, 100.0),
    "overtaken": (6, 4, 1, 420.0),
    "back": (5, 3, 1, 900.0),
    "link": (9, 6, 1, 420.0),
    "shaky": (8, 5, 1, 200.0),
    "trio": (5, 3, 0, 150.0),
    "pair": (9, 3, 1, 500.0),
    "pair_alone": (6, 3, 1, 300.0),
    "kept": (10, 2, 1, 420.0),
    "auto": (12, 2, 1, 300.0),
    "team": (8, 2, 1, 400.0),
    "gone": (11, 4, 1, 97_200.0),
    "refused": (5, 3, 1, 120.0),
    "unsaved": (5, 3, 1, 300.0),
    "new_code": (5, 3, 1, 300.0),
    "mute": (9, 8, 0, 400.0),
    "mute_some": (9, 4, 1, 400.0),
    "dark": (17, 16, 0, 900.0),
}

# Drills that are repeated, with other nodes each time: how often, for how long, how far apart.
REPEATED: dict[str, tuple[int, float, float]] = {
    "astray": (12, 6.0, 100.0),
    "rolling": (2, 200.0, 700.0),
}


def scenario(name: str) -> Setup:
    """The history of a scenario, or of a drill that is repeated."""
    from tests.simulation.shell.run import Setup

    if name in REPEATED:
        count, for_s, apart_s = REPEATED[name]
        chance = random.Random(f"repeated-{name}")
        times = (BEGIN_S + apart_s * number for number in range(count))
        faults = tuple(Fault(at_s, name, for_s, chance.randrange(1 << 20)) for at_s in times)
        days = (faults[-1].at_s + apart_s) / DAY_S
        return Setup(0, 12, days, spares=1, faults=faults, most_steps=3_000_000)
    nodes, main, spares, for_s = SCENARIOS[name]
    days = (BEGIN_S + for_s) / DAY_S
    faults = (Fault(BEGIN_S, name, min(for_s, MOST_ACTIVE_S), 0),)
    return Setup(0, nodes, days, spares=spares, main=main, faults=faults, most_steps=3_000_000)


class Scenarios(Drills):
    """Carries out scenarios, too."""

    def _when(self, holds: Callable[[], bool], then: Callable[[], None]) -> None:
        """Do something as soon as the world is so."""
        if holds():
            then()
        else:
            self._world.later(LOOK_S, self._when, holds, then)

    def _gang(self, job: str = MAIN_JOB) -> Gang | None:
        """The attempt of a job that trains now."""
        gangs = [g for g in self._world.gangs_of(job) if g.running and not g.broken]
        return gangs[-1] if gangs else None

    def _rejoin(self, fault: Fault) -> None:
        """One driver leads, another while a node restarts, then the first, and the node is silent.

        What the first driver remembers of its own term is an incarnation that is gone.
        """
        world = self._world
        first = world.leader() or world.drivers[0]
        other = next(driver for driver in world.drivers if driver is not first)
        node = world.nodes["n0"]
        self._trouble([node], fault)

        def restart() -> None:
            self._struck(node)
            node.crash()
            node.boot()
            self._when(lambda: node.link is not None and node.link.greeted, linked)

        def linked() -> None:
            node.pause()
            self._hand_over(first.name, fault)

        self._hand_over(other.name, fault, restart)
        world.later(fault.for_s, node.resume)

    def _mute(self, fault: Fault) -> None:
        """The agents of the whole fleet answer probes and send nothing, and no worker is left."""
        self._mute_all(list(self._world.nodes.values()), fault)

    def _mute_some(self, fault: Fault) -> None:
        """As above, of half of the nodes of the main job: others take over."""
        gang = self._gang()
        members = list(gang.members.values()) if gang is not None else []
        self._mute_all(members[::2], fault)

    def _mute_all(self, nodes: list[SimNode], fault: Fault) -> None:
        self._trouble(list(self._world.nodes.values()), fault)
        for number, node in enumerate(nodes):
            self._struck(node)
            node.mute(linked=bool(number % 2))

        def restart() -> None:
            for node in nodes:
                node.crash()
                node.boot()

        self._world.later(fault.for_s - 60.0, restart)

    def _dark(self, fault: Fault) -> None:
        """The whole fleet loses its power at once, and the breaker takes that for the network."""
        nodes = list(self._world.nodes.values())
        self._trouble(nodes, fault)
        heal = self._isolate(nodes)
        for node in nodes:
            self._struck(node)
            if node.gang is not None:
                node.gang.stands_still()
            node.crash()

        def back() -> None:
            heal()
            for node in nodes:
                node.boot()

        self._world.later(fault.for_s - 60.0, back)

    def _deposed(self, fault: Fault) -> None:
        """A leader's key is deleted while it has nothing to write, which would tell it."""
        world = self._world

        def delete() -> None:
            world.invariants.bounds.begin(True)
            self._leader_key_deleted(fault)
            world.later(1.0, world.invariants.bounds.end, True)

        self._order_job("SuspendJob", MAIN_JOB)
        world.later(60.0, delete)
        world.later(fault.for_s - 5.0, self._order_job, "ResumeJob", MAIN_JOB)

    def _usurped(self, fault: Fault) -> None:
        """A leader's key is deleted, and it decides before it can know: etcd refuses the commit."""
        bounds = self._world.invariants.bounds
        bounds.begin(True)
        self._leader_key_deleted(fault)
        self._world.operators.submit("usurped", 1, steps=40, step_s=3.0)
        self._world.later(5.0, bounds.end, True)

    def _hand_over(self, name: str, fault: Fault, then: Callable[[], None] = lambda: None) -> None:
        """Delete the leader's key until this driver leads, then do something."""
        world, bounds = self._world, self._world.invariants.bounds
        bounds.begin(True)

        def again() -> None:
            leader = world.leader()
            if leader is not None and leader.name == name:
                bounds.end(True)
                then()
                return
            if leader is not None:
                self._leader_key_deleted(fault)
            world.later(3.0, again)

        again()

    def _overtaken(self, fault: Fault) -> None:
        """Two attempts reach the same step with different states, on different nodes.

        The first loses a node before the commit and its spare repeats the steps; then the spare is
        lost before the commit, too, and the first node comes back with its old snapshot.
        """
        world = self._world
        first = self._gang()
        free = [node.name for node in world.nodes.values() if not node.job]
        for name in free[1:]:
            self._ask("CordonNode", name, "this one is not wanted")
        victim = first.first if first is not None else None
        if first is None or victim is None:
            world.invariants.breaks("simulation", "the main job does not train")
            return

        def sealed() -> bool:
            gang = self._gang()
            return gang is not None and gang.sealed > world.storage_of(MAIN_JOB).committed[0]

        def evict() -> None:
            self._trouble(list(world.nodes.values()), fault)
            self._order("EvictNode", name=victim.name, now=True)
            self._when(lambda: (gang := self._gang()) is not None and gang is not first, moved)

        def moved() -> None:
            self._uncordon(victim.name)
            self._when(sealed, lose)

        def lose() -> None:
            gang = self._gang()
            spare = (
                next((n for n in gang.members.values() if n.name in free), None) if gang else None
            )
            if spare is not None:
                spare.crash()
                world.later(200.0, spare.boot)

        self._when(sealed, evict)

    # --- orders

    def _back(self, fault: Fault) -> None:
        """Go back to a step by name, and later to one that this has given up."""
        storage = self._world.storage_of(MAIN_JOB)

        def committed(step: int) -> Callable[[], bool]:
            return lambda: storage.committed[0] >= step

        def restart(step: int, then: Callable[[], None] = lambda: None) -> None:
            def answered() -> None:
                self._excuse(MAIN_JOB)
                then()

            self._excuse(MAIN_JOB)
            self._order("RestartJob", answered, name=MAIN_JOB, from_step=step)

        def begin() -> None:
            # In memory, and not stored: what lies above the step must not come back from there.
            gang = self._gang()
            assert gang is not None
            self._when(lambda: gang.sealed >= 40 > storage.committed[0], lambda: restart(10, rest))

        def rest() -> None:
            attempt = storage.opened
            self._when(
                lambda: storage.committed[1] > attempt and storage.committed[0] >= 20,
                lambda: restart(30),
            )

        self._when(committed(30), begin)

    def _team(self, fault: Fault) -> None:
        """A tenant with a quota that is raised for jobs that wait, a new leader, a quota lifted."""
        world, tenant = self._world, {"tenant": "team"}
        submit = world.operators.submit

        def jobs() -> None:
            for number, nodes in enumerate((1, 1, 2, 1)):
                submit(f"team-{number}", nodes, steps=30, step_s=2.0, more=tenant)

        # All wait for the quota, and are decided on at once when it is raised.
        self._order("SetQuota", jobs, tenant="team", devices=1)
        world.later(20.0, lambda: self._order("SetQuota", tenant="team", devices=4))
        world.later(fault.for_s / 4, self._driver_crash, fault)

        def late() -> None:
            for number in range(3):
                submit(f"late-{number}", 1, steps=60, step_s=2.0, more=tenant)
            submit("late-large", 3, steps=60, step_s=2.0, more=tenant)  # never within the quota

        world.later(fault.for_s / 2, late)
        world.later(0.8 * fault.for_s, lambda: self._order("SetQuota", tenant="team"))

    def _new_code(self, fault: Fault) -> None:
        """A job gets new code for its next attempt, and its driver dies before that begins."""
        world = self._world
        config = world.operators.configs[MAIN_JOB]
        code = replace(config.code, path="/shared/code/v2")
        spec = job_spec.to_proto(replace(config, code=code))

        def answered() -> None:
            leader = world.leader()
            if leader is not None:
                leader.crash()
            world.later(60.0, lambda: self._order_job("RestartJob", MAIN_JOB))

        self._excuse(MAIN_JOB)
        self._order("UpdateJob", answered, spec=spec)

    def _refused(self, fault: Fault) -> None:
        """The storage is away at the first call that opens an attempt, and there at the next."""
        world = self._world
        world.open_failures = 1.0
        world.operators.submit("refused", 1, steps=40, step_s=3.0)

        def failed() -> bool:
            leader = world.leader()
            job = leader.engine.state.jobs.get("refused") if leader is not None else None
            return job is not None and job.current.open_failures > 0

        self._when(failed, lambda: setattr(world, "open_failures", 0.0))

    def _unsaved(self, fault: Fault) -> None:
        """A job cannot save to leave, and says so; the next order to leave is carried out."""
        world = self._world
        world.open_failures = 1.0

        def suspend() -> None:
            self._order_job("SuspendJob", MAIN_JOB)

        def stored() -> None:
            world.open_failures = 0.0
            suspend()
            world.later(120.0, self._order_job, "ResumeJob", MAIN_JOB)

        suspend()
        world.later(fault.for_s / 2, stored)

    # --- defects that no fault names

    def _link(self, fault: Fault) -> None:
        """A link drops, and is repaired; then another one is slow."""
        world, hidden = self._world, self._world.invariants.hidden
        names = sorted(self._colleagues())

        def slow() -> None:
            hidden.begin((names[1], names[2]), drops=False)

        hidden.begin((names[0], names[3]))
        world.later(60.0, hidden.end, (names[0], names[3]))
        world.later(240.0, slow)
        world.later(380.0, hidden.end, (names[1], names[2]))

    def _trio(self, fault: Fault) -> None:
        """A link drops between two of three nodes, and no other node helps to tell which."""
        hidden, names = self._world.invariants.hidden, sorted(self._colleagues())
        hidden.begin(names[:2])
        self._world.later(fault.for_s - 1.0, hidden.end, tuple(names[:2]))

    def _shaky(self, fault: Fault) -> None:
        """A node passes its own checks, and fails with others."""
        hidden, name = self._world.invariants.hidden, sorted(self._colleagues())[2]
        hidden.begin((name,))
        self._world.later(fault.for_s - 1.0, hidden.end, (name,))

    def _pair(self, fault: Fault) -> None:
        """Two nodes are all that a job has, and fail together: it leaves both, once it may."""
        world, hidden = self._world, self._world.invariants.hidden
        world.operators.submit("pair", 2, steps=40, step_s=3.0)

        def trains() -> bool:
            return (gang := self._gang("pair")) is not None and gang.running

        def begin() -> None:
            gang = self._gang("pair")
            assert gang is not None
            hidden.begin(gang.members)
            world.later(fault.for_s - 60.0, hidden.end, tuple(gang.members))

        mode = types_pb2.POLICY_MODE_ENFORCE
        self._when(trains, begin)
        world.later(90.0, lambda: self._order("SetPolicy", rule="over-eviction", mode=mode))

    _pair_alone = _pair  # too few nodes stand by to leave both

    # --- nodes that wait, and nodes that are gone

    def _kept(self, fault: Fault) -> None:
        """A node is lost, and its snapshot comes from its peer; then a node and its peer are.

        At last a worker is killed while all nodes have two snapshots.
        """
        world = self._world
        world.operators.submit(
            "kept", 4, steps=100_000, step_s=3.0, more={"checkpoint": {"replicas": 1}}
        )

        def copies() -> int:
            """Ranks whose newest snapshot has a replica, while it is not committed; -1: it is."""
            gang = self._gang("kept")
            if gang is None or gang.sealed <= max(gang.base, gang.committed):
                return -1
            snapshot = gang.attempt, gang.sealed
            return sum(len(n.memory.copies("kept", snapshot)) for n in gang.members.values())

        def whole() -> bool:
            gang = self._gang("kept")
            return gang is not None and copies() == gang.ranks

        def copying() -> bool:
            gang = self._gang("kept")
            return gang is not None and gang.committed > gang.base and 0 <= copies() < gang.ranks

        def kill() -> None:
            gang = self._gang("kept")
            assert gang is not None
            node = gang.members[sorted(gang.members)[0]]
            self._trouble([node], fault)
            node.kill_worker("OTHER", 1, "it broke")

        def lose(count: int, then: Callable[[], None]) -> None:
            # Its heartbeats have brought the driver what is where, and it is not committed yet.
            world.later(BROUGHT_S, crash, count, then)

        def crash(count: int, then: Callable[[], None]) -> None:
            gang = self._gang("kept")
            assert gang is not None
            node = gang.members[sorted(gang.members)[1]]
            peer = world.node_at(gang.peers[node.name])[0]
            for each in (node, peer)[:count]:
                self._trouble([each], fault)
                each.crash()
                world.later(100.0, each.boot)
            world.later(60.0, then)

        def again() -> None:
            self._when(whole, lambda: lose(2, lambda: self._when(copying, kill)))

        self._when(whole, lambda: lose(1, again))

    def _auto(self, fault: Fault) -> None:
        """A job has its spares counted by the rule."""
        # Two devices a node that fail every 100 hours, and repairs of 10: two spares for 4 nodes
        # with a probability of 0.95; by the rule for one device a node it would be one.
        self._world.operators.submit(
            "auto", 4, steps=100_000, step_s=10.0,
            more={
                "recovery": {"spares": "auto", "repair_hours": 10.0, "spare_probability": 0.95},
                "checkpoint": {"device_mtbf_hours": 100.0},
            },
        )  # fmt: skip

    def _gone(self, fault: Fault) -> None:
        """Nodes are away for longer than a day: one is forgotten, the others are still needed."""
        world = self._world
        leader = world.leader() or world.drivers[0]
        spares = {name for job in leader.engine.state.jobs.values() for name in job.spares}
        idle = [n for n in world.nodes.values() if not n.job and n.name not in spares]
        plain, cordoned, needed = idle[:3]
        self._trouble(idle, fault)
        self._ask("CordonNode", cordoned.name, "it is to be replaced")
        for node in (plain, cordoned):
            world.later(30.0, node.crash)
        # A job on all that are left loses one of them, and waits for it.
        world.later(60.0, lambda: world.operators.submit(
            "needy", len(idle) - 2, steps=100_000, step_s=10.0
        ))  # fmt: skip
        world.later(200.0, needed.crash)

        def long_gone() -> None:
            if plain.up:
                return  # everything has been repaired already
            world.invariants.standby.must_be_forgotten(plain.name)
            for node in (plain, cordoned, needed):
                node.boot()

        # Drivers decide in between, too.
        for after_s in (12_000.0, world.policy.forget_dead_s + 4000.0):
            world.at(world.now_s + after_s, world.touched)
        world.at(world.now_s + world.policy.forget_dead_s + 8000.0, long_gone)
