"""Faults: what can go wrong, when, and to whom; a history is a list of them.

Each seed draws its own list. A fault is a plain value, so a history that breaks a rule can be cut
down to the faults that matter and replayed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.simulation.shell.drivers import PREFIX
from tests.simulation.shell.figures import MAIN_JOB
from tests.simulation.shell.invariants import AFTERMATH_S
from tests.simulation.shell.people import PEOPLE, SAVING_S, People

from megascale.v1 import driver_pb2
from megascale_common.etcd import rpc_pb2
from megascale_driver.core.values.cluster import Disposition
from megascale_driver.journal.store import LEADER_KEY
from megascale_driver.presence.intake import TICK_INTERVAL_S

if TYPE_CHECKING:
    from tests.simulation.shell.nodes import SimNode
    from tests.simulation.shell.world import World

DAY_S = 86_400.0
# Failures per 1,000 node-days: Llama 3 (arXiv 2407.21783, table 5: 419 unexpected interruptions in
# 54 days on 2,048 nodes), and RSC-1 of Meta (arXiv 2410.21680: 6.50; RSC-2 has 2.34).
RATES = (3.79, 6.5)
# Shares in hundred, after the same table (of 419: GPU 148, its memory 72, switches and cables 35;
# software and hosts the rest). How the rest divides into kills, crashes, power and hangs is ours.
HARDWARE = (("gpu_lost", 40), ("kill_worker", 22), ("crash", 12), ("power", 8), ("hang", 9))
SWITCH_SHARE = 9  # cables and switches, which hit all nodes behind them
STORM = (
    ("crash", 6), ("power", 2), ("pause", 5), ("kill_worker", 6), ("gpu_lost", 3), ("hang", 2),
    ("straggler", 2), ("bad_link", 3), ("flaky", 2),
    ("flap", 4), ("cut_up", 3), ("cut_down", 3), ("partition", 3), ("switch", 2),
    ("log_storm", 2), ("driver_crash", 6), ("driver_pause", 4), ("driver_clock", 3),
    ("driver_cut", 3), ("crash_on_commit", 6), ("late_write", 4), ("etcd_stop", 3),
    ("etcd_slow", 3), ("etcd_lost_reply", 4), ("etcd_cut", 3), ("etcd_compact", 3),
    ("leader_key_deleted", 3), ("lossy", 3),
    ("storage_away", 2), ("evict", 3), ("cordon", 3), ("cancel", 2), ("small_job", 5),
    ("wrong_requests", 3), ("repeated_orders", 3),
    *PEOPLE,
)  # fmt: skip
# While they last, nothing is expected of drivers within a bound of time.
DISTURBING = frozenset({
    "driver_pause", "late_write", "etcd_stop", "etcd_slow", "etcd_lost_reply", "etcd_cut",
    "etcd_compact", "leader_key_deleted", "lossy", "bounce", "astray",
})  # fmt: skip


@dataclass(frozen=True, slots=True, order=True)
class Fault:
    """``kind`` at ``at_s`` after the start, for ``for_s``; ``pick`` chooses the target."""

    at_s: float
    kind: str
    for_s: float
    pick: int

    def __str__(self) -> str:
        return f"{self.at_s:9.1f} s  {self.kind:<16} for {self.for_s:6.1f} s, pick {self.pick}"


def history(seed: int, nodes: int, days: float, rate: float, storms: float) -> list[Fault]:
    """The faults of one seed: hardware at the published ``rate``, and storms of all kinds.

    ``rate`` is per 1,000 node-days; 0: one between the published ones. ``storms`` per day are
    minutes in which everything goes wrong, far more often than in production.
    """
    chance = random.Random(f"faults-{seed}")
    rate = rate or chance.uniform(*RATES)
    faults: list[Fault] = []
    end_s = days * DAY_S
    at_s = 0.0
    while rate > 0:
        at_s += chance.expovariate(rate / 1000.0 / DAY_S * nodes)
        if at_s >= end_s:
            break
        kinds = (*HARDWARE, ("switch", SWITCH_SHARE))
        faults.append(_draw(chance, kinds, at_s))
    storm_s = 0.0
    while storms > 0:
        storm_s += chance.expovariate(storms / DAY_S)
        if storm_s >= end_s:
            break
        at_s = storm_s
        for _ in range(chance.randint(2, 7)):
            faults.append(_draw(chance, STORM, at_s))
            at_s += chance.choice((0.0, 0.3, 2.0, 10.0, 40.0)) * chance.random()
    return sorted(faults)


def _draw(chance: random.Random, kinds: tuple[tuple[str, int], ...], at_s: float) -> Fault:
    kind = chance.choices([name for name, _ in kinds], [weight for _, weight in kinds])[0]
    for_s = chance.choice((1.0, 4.0, 12.0, 18.0, 30.0, 70.0)) * chance.uniform(0.5, 1.5)
    return Fault(round(at_s, 3), kind, round(for_s, 2), chance.randrange(1 << 20))


class Weather(People):
    """Carries out the faults of a history, and in the end repairs everything."""

    def __init__(self, world: World, faults: list[Fault]) -> None:
        self._world = world
        self._small_jobs = 0
        for fault in faults:
            world.at(world.started_s + fault.at_s, self._strike, fault)

    def _strike(self, fault: Fault) -> None:
        world = self._world
        world.touched()
        world.active_faults += 1
        disturbs = fault.kind in DISTURBING
        world.invariants.bounds.begin(disturbs)
        undo = getattr(self, f"_{fault.kind}")(fault)

        def over() -> None:
            if undo is not None:
                undo()
            world.touched()
            world.active_faults -= 1
            world.invariants.bounds.end(disturbs)

        world.excused_until_s = max(world.excused_until_s, world.now_s + fault.for_s + AFTERMATH_S)
        world.later(fault.for_s, over)

    def _node(self, fault: Fault) -> SimNode:
        """A node, more often one that works than not."""
        nodes = list(self._world.nodes.values())
        busy = [node for node in nodes if node.trains]
        pool = busy if busy and fault.pick % 4 else nodes
        node = pool[fault.pick // 4 % len(pool)]
        self._trouble([node], fault)
        return node

    def _trouble(self, nodes: list[SimNode], fault: Fault) -> None:
        world = self._world
        until_s = world.now_s + fault.for_s + AFTERMATH_S
        for node in nodes:
            node.trouble_until_s = max(node.trouble_until_s, until_s)
            if node.job:
                world.invariants.excused_s[node.job] = until_s

    # --- nodes

    def _crash(self, fault: Fault) -> Callable[[], None]:
        node = self._node(fault)
        self._struck(node)
        node.crash()
        return node.boot

    def _power(self, fault: Fault) -> Callable[[], None]:
        """The host is gone without a word: nothing refuses, nothing answers."""
        node = self._node(fault)
        self._struck(node)
        heal = self._isolate([node])
        if node.gang is not None:
            node.gang.stands_still()
        node.crash()

        def back() -> None:
            heal()
            node.boot()

        return back

    def _pause(self, fault: Fault) -> Callable[[], None]:
        node = self._node(fault)
        if fault.for_s > AFTERMATH_S:
            self._struck(node)
        node.pause()
        return node.resume

    def _kill_worker(self, fault: Fault) -> None:
        node = self._node(fault)
        self._struck(node)
        node.kill_worker("OTHER" if fault.pick % 2 else "", 1 if fault.pick % 2 else -9, "it broke")

    def _gpu_lost(self, fault: Fault) -> None:
        """The device fails its checks until it is replaced, and an operator says so."""
        world, node = self._world, self._node(fault)
        self._struck(node)
        node.gpu_lost = True
        repair_s = 600.0 + fault.for_s * 40
        node.trouble_until_s = max(node.trouble_until_s, world.now_s + repair_s + AFTERMATH_S)
        node.kill_worker("OTHER", 1, "CUDA error: uncorrectable ECC error")

        def repaired() -> None:
            node.gpu_lost = False
            self._ask("UncordonNode", node.name, "device replaced")

        world.at(world.now_s + repair_s, repaired)

    def _hang(self, fault: Fault) -> None:
        node = self._node(fault)
        if node.gang is not None:
            self._struck(node)
            node.hang()
            node.trouble_until_s += 1000.0
            self._world.invariants.excused_s[node.job] = self._world.now_s + 2000.0

    def _straggler(self, fault: Fault) -> Callable[[], None]:
        node = self._node(fault)
        node.slowness = 1.1 + fault.pick % 10 / 10
        return lambda: setattr(node, "slowness", 1.0)

    def _flap(self, fault: Fault) -> None:
        node = self._node(fault)
        for number in range(2 + fault.pick % 5):
            self._world.later(number * fault.for_s / 6, self._break_link, node)

    def _break_link(self, node: SimNode) -> None:
        if node.link is not None:
            node.link.break_off()

    def _cut_up(self, fault: Fault) -> Callable[[], None]:
        return self._cut(self._node(fault).name, "*")

    def _cut_down(self, fault: Fault) -> Callable[[], None]:
        return self._cut("*", self._node(fault).name)

    def _partition(self, fault: Fault) -> Callable[[], None]:
        """No driver reaches the node; its workers train on, over another network."""
        return self._isolate([self._node(fault)])

    def _switch(self, fault: Fault) -> Callable[[], None]:
        """Every node behind a switch is cut off, from drivers and from its peers."""
        world = self._world
        switches = sorted({node.switch for node in world.nodes.values()})
        chosen = switches[fault.pick % len(switches)]
        nodes = [node for node in world.nodes.values() if node.switch == chosen]
        self._trouble(nodes, fault)
        for node in nodes:
            if node.gang is not None and node.gang.running:
                self._struck(node)
            node.hang()
        return self._isolate(nodes)

    def _bad_link(self, fault: Fault) -> Callable[[], None] | None:
        """A link between two nodes of the main job drops what it carries, or is far too slow."""
        names = self._colleagues()
        if len(names) < 2:
            return None
        one = fault.pick % len(names)
        other = (one + 1 + fault.pick // 64 % (len(names) - 1)) % len(names)
        pair, hidden = (names[one], names[other]), self._world.invariants.hidden
        hidden.begin(pair, drops=bool(fault.pick // 4096 % 3))
        return lambda: hidden.end(pair)

    def _flaky(self, fault: Fault) -> Callable[[], None] | None:
        """A node breaks what it computes with others, and passes its own checks."""
        names, hidden = self._colleagues(), self._world.invariants.hidden
        if not names:
            return None
        name = names[fault.pick % len(names)]
        hidden.begin((name,))

        def over() -> None:
            hidden.end((name,))
            self._world.at(self._world.now_s + 60.0, self._ask, "UncordonNode", name, "repaired")

        return over

    def _colleagues(self) -> list[str]:
        """The nodes of the main job's attempt that trains."""
        gangs = [gang for gang in self._world.gangs_of(MAIN_JOB) if gang.running]
        return sorted(gangs[-1].members) if gangs else []

    def _log_storm(self, fault: Fault) -> Callable[[], None]:
        node = self._node(fault)
        node.log_storm = True
        return lambda: setattr(node, "log_storm", False)

    def _isolate(self, nodes: list[SimNode]) -> Callable[[], None]:
        undo = [self._cut(*way) for node in nodes for way in ((node.name, "*"), ("*", node.name))]
        return lambda: [heal() for heal in undo] and None  # type: ignore[func-returns-value]

    def _cut(self, source: str, target: str) -> Callable[[], None]:
        network = self._world.network
        network.cut(source, target)
        return lambda: network.heal(source, target)

    def _struck(self, node: SimNode) -> None:
        if node.trains:
            self._world.invariants.figures.struck(node.name)

    # --- drivers

    def _driver_crash(self, fault: Fault) -> None:
        driver = self._world.leader() or self._world.drivers[0]
        driver.process.dies_after = fault.pick % 300

    def _driver_pause(self, fault: Fault) -> Callable[[], None]:
        world = self._world
        driver = world.leader() or world.drivers[0]
        process, engine = driver.process, driver.engine
        pace = engine.presence.pace
        ordinary_s = pace.max_pause_s
        # With all its ticks: the first one after the pause shows that the loop stood still.
        pace.max_pause_s = TICK_INTERVAL_S
        engine.retimed.set()
        ended = False

        def pause() -> None:
            if not ended:  # a fault may be as short as this
                process.pause()

        world.later(2 * TICK_INTERVAL_S, pause)

        def over() -> None:
            nonlocal ended
            ended = True
            process.resume()
            world.later(1.0, setattr, pace, "max_pause_s", ordinary_s)

        return over

    def _driver_clock(self, fault: Fault) -> None:
        """The host's clock is set; the next process on it starts with the new time."""
        driver = self._world.drivers[fault.pick % len(self._world.drivers)]
        driver.clock_offset_s = float((-600, -30, -5, 5, 30, 600)[fault.pick // 2 % 6])
        driver.crash()

    def _driver_cut(self, fault: Fault) -> Callable[[], None]:
        driver = self._world.leader() or self._world.drivers[0]
        ways = [(driver.name, "*"), ("*", driver.name)]
        undo = [self._cut(*way) for way in ways[: 1 + fault.pick % 2]]
        return lambda: [heal() for heal in undo] and None  # type: ignore[func-returns-value]

    def _crash_on_commit(self, fault: Fault) -> Callable[[], None]:
        """The leader dies around its next write: before it is applied, or before the reply."""
        etcd, world = self._world.etcd, self._world
        when = fault.pick % 3
        count = fault.pick // 3 % 3
        name = "before_write" if when == 0 else "after_write"
        rest = getattr(etcd, name)

        def strike(connection: object, *arguments: object) -> None:
            nonlocal count
            rest(connection, *arguments)
            leader = world.leader()
            if leader is None or leader.connection is not connection:
                return
            count -= 1
            if count < 0:
                setattr(etcd, name, rest)
                leader.process.dies_after = 0 if when < 2 else fault.pick % 40
                if when < 2:
                    leader.crash()

        setattr(etcd, name, strike)

        def over() -> None:
            if getattr(etcd, name) is strike:
                setattr(etcd, name, rest)

        return over

    def _late_write(self, fault: Fault) -> Callable[[], None]:
        """Writes of the leader are under way for longer than its lease, which is not renewed."""
        leader = self._world.leader() or self._world.drivers[0]
        connection = leader.connection
        keeper = leader.keeper
        keeper.cut = True
        connection.delay_s = lambda: 13.0 + fault.pick % 9

        def over() -> None:
            keeper.cut = False
            connection.delay_s = self._world.etcd_delay_s
            connection.reset()

        return over

    # --- etcd

    def _etcd_stop(self, fault: Fault) -> Callable[[], None]:
        self._world.etcd.stop()
        return self._world.etcd.start

    def _etcd_slow(self, fault: Fault) -> Callable[[], None]:
        etcd = self._world.etcd
        etcd.disk_s = (0.05, 0.3, 1.0)[fault.pick % 3]
        return lambda: setattr(etcd, "disk_s", 0.0)

    def _etcd_lost_reply(self, fault: Fault) -> Callable[[], None]:
        leader = self._world.leader() or self._world.drivers[0]
        leader.connection.swallow_replies = True
        return leader.connection.reset

    def _etcd_cut(self, fault: Fault) -> Callable[[], None]:
        leader = self._world.leader() or self._world.drivers[0]
        connection = leader.connection
        connection.swallow_requests = connection.swallow_replies = True
        return connection.reset

    def _etcd_compact(self, fault: Fault) -> None:
        store = self._world.etcd.store
        if store.revision > store.compacted:
            store.compact(store.revision)
        for connection in self._world.etcd.connections:
            connection.reset()

    def _leader_key_deleted(self, fault: Fault) -> None:
        """Somebody deletes the leader's key by hand: its lease lives on, its term is over."""
        world = self._world
        store = world.etcd.store
        store.delete(rpc_pb2.DeleteRangeRequest(key=(PREFIX + LEADER_KEY).encode()))

    # --- network, storage, people

    def _lossy(self, fault: Fault) -> Callable[[], None]:
        network = self._world.network
        network.loss, network.duplication, network.slow_s = 0.2, 0.3, 0.4

        def over() -> None:
            network.loss = network.duplication = network.slow_s = 0.0

        return over

    def _storage_away(self, fault: Fault) -> Callable[[], None]:
        world = self._world
        world.open_failures = 0.7
        return lambda: setattr(world, "open_failures", 0.0)

    def _evict(self, fault: Fault) -> None:
        node = self._node(fault)
        self._ask("EvictNode", node.name, "its fan is loud")
        world = self._world
        # An eviction waits for the job to save, and stops it after at most 420 s.
        node.trouble_until_s = max(node.trouble_until_s, world.now_s + SAVING_S)
        world.invariants.excused_s.update(
            dict.fromkeys(world.jobs_on(node), world.now_s + SAVING_S)
        )
        world.at(world.now_s + 600.0 + fault.for_s, self._ask, "UncordonNode", node.name, "fixed")

    def _cordon(self, fault: Fault) -> None:
        node = self._node(fault)
        self._ask("CordonNode", node.name, "maintenance")
        world = self._world
        world.at(world.now_s + 300.0 + fault.for_s, self._ask, "UncordonNode", node.name, "done")

    def _small_job(self, fault: Fault) -> None:
        self._small_jobs += 1
        self._world.operators.submit(
            f"small-{self._small_jobs}", 1 + fault.pick % 2, steps=40 + fault.pick % 60,
            step_s=3.0, priority=fault.pick // 2 % 3,
        )  # fmt: skip

    def _cancel(self, fault: Fault) -> None:
        name = f"small-{max(1, self._small_jobs - fault.pick % 2)}"
        self._world.invariants.excused_s[name] = self._world.now_s + AFTERMATH_S
        self._world.operators.send(
            "CancelJob", driver_pb2.CancelJobRequest(name=name, reason="a mistake")
        )

    def _wrong_requests(self, fault: Fault) -> None:
        send = self._world.operators.send
        send("EvictNode", driver_pb2.EvictNodeRequest(name="nobody", reason="typing error"))
        send("CancelJob", driver_pb2.CancelJobRequest(name="nobody", reason="typing error"))
        send("UncordonNode", driver_pb2.UncordonNodeRequest(name="n0"))
        send("SubmitJob", driver_pb2.SubmitJobRequest())

    def _repeated_orders(self, fault: Fault) -> Callable[[], None]:
        operators = self._world.operators
        operators.repeats = 1.0
        self._evict(fault)
        self._small_job(fault)
        return lambda: setattr(operators, "repeats", 0.0)

    def _ask(self, method: str, node: str, reason: str) -> None:
        request = getattr(driver_pb2, f"{method}Request")(name=node, reason=reason)
        self._world.operators.send(method, request)

    def repair(self) -> None:
        """Repair everything that is still broken: from here on every job must run again."""
        leader = self._world.leader()
        known = leader.engine.state.nodes if leader is not None else {}
        for node in self._world.nodes.values():
            node.gpu_lost = False
            node.boot()
            # Orders for nodes that nothing has ever befallen would be most of a large fleet's work.
            mine = known.get(node.name)
            well = mine is not None and mine.disposition is Disposition.SCHEDULABLE
            if node.trouble_until_s or not well:
                self._ask("UncordonNode", node.name, "the fleet is whole again")
        self._settle_orders()
