"""Drivers: the real engine, leadership, links and services, each in a process that can die.

Only what surrounds them is simulated: the connection to etcd, the clock, the keeper of the lease
(a process of its own, that renews while the driver shows signs of life), the streams of the nodes.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from tests.harness.fake_etcd import Connection, FakeEtcdClient
from tests.simulation.shell.loop import Process

from megascale_common.etcd.lease import KEEPALIVES_PER_TTL, Renewal
from megascale_driver.core.values.cluster import Cluster
from megascale_driver.core.values.events import Audit
from megascale_driver.nodes.open_links import Link
from megascale_driver.service.driver_service import DriverService
from megascale_driver.service.link_service import LinkService
from megascale_driver.shell.engine import Engine
from megascale_driver.shell.heartbeats import Heartbeats
from megascale_driver.shell.leadership import Leader
from megascale_driver.shell.ticks import Ticks

if TYPE_CHECKING:
    from tests.simulation.shell.world import World

CLUSTER = "sim"
PREFIX = f"/megascale/{CLUSTER}/v1/"
MAX_PAUSE_S = 5.0  # between two ticks of a driver that has nothing to decide
SILENCE_LIMIT_S = 15.0  # of the keeper, as in megascale_common.etcd.keeper_process


class DriverClock:
    """The wall clock of one host: virtual time with the host's own offset."""

    def __init__(self, world: World, offset_s: float) -> None:
        self._world, self.offset_s = world, offset_s

    def now_s(self) -> float:
        """Unix time in seconds."""
        return self._world.now_s + self.offset_s


class Keeper:
    """Renews the lease in place of the keeper process, on the driver's connection to etcd."""

    def __init__(self, world: World, driver: SimDriver) -> None:
        self._world, self._driver = world, driver
        self._process = driver.process
        self._kept: tuple[int, int] | None = None
        self._ticked_s = world.loop.time()
        self._newest: Renewal | None = None
        self._turn = 0
        self.cut = False  # from etcd, while the driver's own connection may be open

    def keep(self, lease_id: int, ttl_s: int) -> None:
        """Renew this lease from now on."""
        self._kept = lease_id, ttl_s
        self._turn += 1
        self.tick()
        self._world.later(ttl_s / KEEPALIVES_PER_TTL, self._renew, self._turn)

    def drop(self) -> None:
        """Renew no lease any more."""
        self._kept = None
        self._turn += 1

    def tick(self) -> None:
        """The driver's loop runs."""
        self._ticked_s = self._world.loop.time()

    def newest(self) -> Renewal | None:
        """The newest renewal."""
        return self._newest

    def _renew(self, turn: int) -> None:
        if self._kept is None or turn != self._turn or not self._process.alive:
            return
        lease_id, ttl_s = self._kept
        interval_s = ttl_s / KEEPALIVES_PER_TTL
        sent_s = self._world.loop.time()
        connection = self._driver.connection
        silent = sent_s - self._ticked_s > SILENCE_LIMIT_S
        if silent or self.cut or not connection.up or connection.swallow_requests:
            self._world.later(0.2, self._renew, turn)
            return
        granted_s = connection.etcd.store.renew(lease_id, sent_s)
        if not connection.swallow_replies:
            self._newest = Renewal(lease_id, sent_s, granted_s)
        if granted_s:
            self._world.later(interval_s, self._renew, turn)


class SimEngine(Engine):
    """The engine; a node whose link it closes no longer rests."""

    def __init__(self, world: World, clock: DriverClock, address: str) -> None:
        super().__init__(world.policy, clock, "token", address)
        self.heartbeats = SimHeartbeats(self, world)
        self.ticks = Ticks(self, self.steps, self.heartbeats)


class SimHeartbeats(Heartbeats):
    """The heartbeats of the engine; the end of a link ends the rest of its node."""

    def __init__(self, engine: SimEngine, world: World) -> None:
        super().__init__(engine)
        self._world = world

    def closed(self, link: Link) -> None:
        """A node's link broke."""
        self._world.nodes[link.node].rest.end()
        super().closed(link)


class SimDriver:
    """One driver's host: at most one process of it runs at a time."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.starts = 0
        self.clock_offset_s = 0.0
        self.start()

    @property
    def alive(self) -> bool:
        """Whether its process runs."""
        return self.process.alive

    @property
    def term_of(self) -> str:
        """The name of its present process."""
        return f"{self.name}#{self.starts}"

    @property
    def leads(self) -> bool:
        """Whether it is in a term."""
        return self.process.alive and self.engine.term is not None

    def start(self) -> None:
        """Start a new process, as ``python -m megascale_driver`` does."""
        world = self.world
        self.starts += 1
        self.process = Process(world.loop, self.name)
        self.process.on_death = self._died
        self.connection = Connection(world.etcd, self.term_of)
        self.connection.delay_s = world.etcd_delay_s
        self.clock = DriverClock(world, self.clock_offset_s)
        self.client = FakeEtcdClient([self.connection], prefix=PREFIX)
        self.engine = SimEngine(world, self.clock, f"{self.name}:1")
        if world.skips:
            self.engine.presence.pace.max_pause_s = MAX_PAUSE_S
        self.engine.observers.append(Witness(world, self))
        self.keeper = Keeper(world, self)
        self.leader = Leader(self.client, self.engine, keeper=self.keeper, clock=world.loop.time)
        self.service = DriverService(self.engine, self.leader, CLUSTER)
        self.link_service = LinkService(self.engine, self.leader, CLUSTER)
        self.process.spawn(self._run())

    async def _run(self) -> None:
        await self.client.__aenter__()
        try:
            await self.leader.run()
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self.world.invariants.driver_failed(self, error)

    def crash(self) -> None:
        """Kill the process now."""
        self.process.kill()

    def _died(self) -> None:
        self.world.etcd.connections.remove(self.connection)
        for watch in list(self.world.etcd.watches):
            if watch.connection is self.connection:
                self.world.etcd.watches.remove(watch)
        for link in list(self.world.network.links):
            if link.driver is self:
                self.world.later(self.world.draw(0.0, 0.01), link.break_off)
        self.world.driver_died(self)


class Witness:
    """The observer of one driver's decisions, for the invariants."""

    def __init__(self, world: World, driver: SimDriver) -> None:
        self._world, self._driver = world, driver

    def step(self, job: str, record: Any) -> None:
        """A step was reported."""

    def committed(self, old: Cluster, new: Cluster, audit: tuple[Audit, ...]) -> None:
        """A decision was committed."""
        self._world.invariants.committed(self._driver, old, new, audit)
