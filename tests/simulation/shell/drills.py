"""Drills: histories in which every kind of fault happens, and those that take several at once.

A storm draws its faults, so a rare coincidence may take hundreds of seeds. A drill is a list of all
kinds in an order that the seed chooses, with times that reach every bound of
:mod:`tests.simulation.shell.bounds`, most of them alone and some on top of each other.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from tests.simulation.shell.faults import Fault, Weather
from tests.simulation.shell.figures import MAIN_JOB

from megascale.v1 import driver_pb2

if TYPE_CHECKING:
    pass

# What is drilled, and for how long: a shorter time is healed before a verdict, a longer one is not.
DRILLS = (
    ("power", (1.5, 25.0, 75.0)), ("pause", (12.0, 30.0)), ("crash", (0.5, 30.0)),
    ("partition", (11.0, 30.0, 80.0)), ("cut_up", (10.0, 30.0)), ("cut_down", (35.0,)),
    ("switch", (30.0, 90.0)), ("rolling", (200.0,)), ("half", (40.0, 75.0)), ("hang", (5.0,)),
    ("straggler", (60.0,)),
    ("bad_link", (40.0, 90.0)), ("flaky", (60.0,)),
    ("flap", (10.0,)), ("bounce", (20.0, 20.0)), ("astray", (6.0,)),
    ("rush", (1.0, 1.0)), ("lost_call", (5.0, 5.0)),
    ("kill_worker", (1.0, 1.0)), ("gpu_lost", (1.0,)), ("log_storm", (30.0,)),
    ("driver_crash", (1.0, 1.0)), ("driver_pause", (6.0, 20.0)), ("driver_clock", (1.0,)),
    ("driver_cut", (25.0,)), ("crash_on_commit", (30.0, 30.0, 30.0)), ("late_write", (20.0,)),
    ("etcd_stop", (15.0,)), ("etcd_slow", (25.0,)), ("etcd_lost_reply", (3.0, 8.0)),
    ("etcd_cut", (4.0, 8.0)), ("etcd_compact", (1.0,)), ("leader_key_deleted", (1.0, 1.0)),
    ("lossy", (40.0,)), ("storage_away", (30.0,)), ("evict", (1.0,)), ("cordon", (1.0,)),
    ("small_job", (1.0, 1.0, 1.0, 1.0, 1.0)), ("cancel", (1.0, 1.0)), ("wrong_requests", (1.0,)),
    ("repeated_orders", (20.0,)),
)  # fmt: skip
# With these something else happens, about which drivers decide and for which attempts open.
BUSY = frozenset({
    "crash_on_commit", "late_write", "etcd_stop", "etcd_slow", "etcd_lost_reply", "etcd_cut",
    "leader_key_deleted", "driver_crash", "driver_pause", "storage_away",
})  # fmt: skip
GAPS_S = (0.0, 0.5, 4.0, 30.0, 60.0, 90.0)  # between the end of a drill and the next
ROLLING = 7  # nodes that fall silent one after another
ROLLING_S = 24.0  # for which each does


def drills(seed: int, *, each_kind_once: bool = False) -> tuple[Fault, ...]:
    """Every drill once, in an order and with gaps that the seed chooses.

    Args:
        each_kind_once: only the longest drill of each kind.
    """
    chance = random.Random(f"drills-{seed}")
    kept = {kind: (max(times_s),) if each_kind_once else times_s for kind, times_s in DRILLS}
    wanted = [(kind, for_s) for kind, times_s in kept.items() for for_s in times_s]
    chance.shuffle(wanted)
    faults: list[Fault] = []
    at_s = 60.0
    for kind, time_s in wanted:
        for_s = time_s * chance.uniform(0.9, 1.1)
        faults.append(Fault(round(at_s, 3), kind, round(for_s, 2), chance.randrange(1 << 20)))
        if kind in BUSY:  # a driver that has nothing to write is not hindered
            other = chance.choice(("kill_worker", "small_job", "crash"))
            after_s = chance.choice((0.01, 0.3, 1.0))
            faults.append(Fault(round(at_s + after_s, 3), other, 1.0, chance.randrange(1 << 20)))
        gap_s = chance.choice(GAPS_S)
        at_s += gap_s if gap_s < 5.0 else for_s + gap_s
    return tuple(sorted(faults))


class Drills(Weather):
    """Carries out drills, too: faults that are several at once."""

    def _rolling(self, fault: Fault) -> None:
        """One node of the main job after another stands still: the breaker has to act."""
        for number in range(ROLLING):
            self._world.later(number * fault.for_s / ROLLING, self._stop_one, fault, number)

    def _stop_one(self, fault: Fault, number: int) -> None:
        nodes = [n for n in self._world.nodes.values() if n.job == MAIN_JOB and not n.paused]
        if nodes:
            node = nodes[(fault.pick + number) % len(nodes)]
            self._trouble([node], fault)
            self._struck(node)
            node.pause()
            self._world.later(ROLLING_S, node.resume)

    def _half(self, fault: Fault) -> Callable[[], None]:
        """Half of the nodes of every switch stand still at once, as in a failing network."""
        nodes = list(self._world.nodes.values())[fault.pick % 2 :: 2]
        self._trouble(nodes, fault)
        for node in nodes:
            self._struck(node)
            node.pause()

        def over() -> None:
            for node in nodes:
                node.resume()

        return over

    def _bounce(self, fault: Fault) -> Callable[[], None]:
        """An agent restarts, links and loses its link, again and again, in a slow network.

        What is found out of one incarnation then arrives in the time of the next.
        """
        world, node = self._world, self._node(fault)
        self._struck(node)
        network = world.network
        network.slow_s = 1.4
        end_s = world.now_s + fault.for_s

        def again() -> None:
            if world.now_s < end_s:
                node.crash()
                node.boot()
                world.later(world.draw(1.5, 4.0), self._break_link, node)
                world.later(world.draw(3.0, 6.0), again)

        again()
        return lambda: setattr(network, "slow_s", 0.0)

    def _astray(self, fault: Fault) -> None:
        """A job begins while its nodes' heartbeats are held up, a term ends, and it is cancelled.

        The driver that leads next is the same, with the links and the newest heartbeats of before.
        """
        world, end_s = self._world, self._world.now_s + fault.for_s
        self._small_job(fault)
        name = f"small-{self._small_jobs}"

        def watch() -> None:
            leader = world.leader()
            job = leader.engine.state.jobs.get(name) if leader is not None else None
            if job is not None and job.slots:
                nodes = [world.nodes[slot.node] for slot in job.slots]
                self._trouble(nodes, fault)
                for heal in [self._cut(node.name, "*") for node in nodes]:
                    world.at(end_s, heal)
                for driver in world.drivers:
                    if driver is not leader:
                        driver.crash()
                world.later(0.2, self._leader_key_deleted, fault)
                world.later(1.0, self._cancel_job, name)
            elif world.now_s < end_s - 3.0:
                world.later(0.001, watch)

        watch()

    def _lost_call(self, fault: Fault) -> None:
        """The leader dies while it calls the committer of a new attempt: the answer is lost."""
        world, end_s = self._world, self._world.now_s + fault.for_s
        self._small_job(fault)
        name = f"small-{self._small_jobs}"

        def watch() -> None:
            leader = world.leader()
            job = leader.engine.state.jobs.get(name) if leader is not None else None
            if leader is not None and job is not None and job.current.open_asked:
                leader.crash()
            elif world.now_s < end_s:
                world.later(0.0005, watch)

        watch()

    def _rush(self, fault: Fault) -> None:
        """More jobs at once than there is room for: some wait, and start when others end."""
        for number in range(5):
            self._small_job(replace(fault, pick=fault.pick + number))

    def _cancel_job(self, name: str) -> None:
        world = self._world
        world.invariants.excused_s[name] = world.now_s + 300.0
        request = driver_pb2.CancelJobRequest(name=name, reason="a mistake")
        world.operators.send("CancelJob", request)
