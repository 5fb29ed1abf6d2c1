"""The simulated world: drivers, etcd, nodes, storage, one clock, one generator of chances.

The clock of the world (``now_s``) is the loop's time plus what was skipped. A stretch in which
nothing changes (every attempt trains, every node beats, no fault is due) is skipped: the clock
jumps, and every node sends its next heartbeat. In large fleets nodes rest while they have nothing
to report (:mod:`tests.simulation.shell.rest`). Neither ever changes a decision
(tests/simulation/test_shell.py compares).
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import heapq
import itertools
import random
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from tests.harness.fake_etcd import FakeEtcd
from tests.simulation.shell.drivers import SimDriver
from tests.simulation.shell.invariants import Invariants
from tests.simulation.shell.loop import VirtualLoop
from tests.simulation.shell.network import Channel, Link, Network
from tests.simulation.shell.nodes import FAILED, PREPARED, PREPARING, STARTING, SimNode
from tests.simulation.shell.operators import Operators
from tests.simulation.shell.rest import FLEET
from tests.simulation.shell.services import Services
from tests.simulation.shell.settled import check_stored
from tests.simulation.shell.training import Gang, Storage

from megascale.v1 import link_pb2, types_pb2
from megascale_driver.analysis.progress import MIN_STEP_TIMES
from megascale_driver.core.values.cluster import Liveness
from megascale_driver.core.values.job import JobPhase
from megascale_driver.core.values.policy import Policy
from megascale_driver.nodes import node_calls, probes
from megascale_driver.shell import leadership
from megascale_executor.agent.run.assignment import job_of

QUIET_S = 12.0  # without any change before a stretch is skipped
GRID_S = 10.0  # a skip is a multiple of it: heartbeats and steps keep their places
LANDING_S = 6.0  # before the next event a skip ends: a heartbeat of each node, and more
NODES_PER_SWITCH = 8
CHECKED = 8  # of so many skipped stretches of a large fleet one is checked against etcd


class World:
    """One seed's world."""

    def __init__(
        self, seed: int, nodes: int, *, skip: bool = True, rest: int = FLEET, devices: int = 2
    ) -> None:
        self.seed, self.skips = seed, skip
        # A large fleet: its nodes rest, and whether they do changes no order and no delay.
        self.large = nodes >= rest
        self.rests = skip and self.large
        self.loop = VirtualLoop(seed)
        self.loop.ordered = self.large
        self.random = random.Random(f"world-{seed}")
        self.skipped_s = 0.0
        self.started_s = self.now_s
        self.policy = Policy()
        self.open_failures = 0.0
        self.active_faults = 0  # that last now
        self.excused_until_s = 0.0  # until then the newest fault may still have consequences
        self.changed_at_s = self.now_s
        self.loop.dialler = self._connect
        self.event = -1  # the newest, with which all chances began anew
        self._agenda: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = itertools.count()
        self._outside = contextvars.Context()
        self._step_s: dict[str, float] = {}
        self._ranks: dict[str, int] = {}
        self.storages: dict[str, Storage] = {}
        self.gangs: dict[tuple[str, int], Gang] = {}
        self.etcd = FakeEtcd()
        self.network = Network(self)
        self.services = Services(self)
        self.invariants = Invariants(self)
        self.etcd.before_write = self.invariants.writes
        self.etcd.after_write = self.invariants.written
        self.operators = Operators(self)
        self.nodes: dict[str, SimNode] = {}
        self.drivers: list[SimDriver] = []
        self._size, self.devices = nodes, devices
        self._stretches = 0  # that were skipped

    # --- time and chance

    @property
    def now_s(self) -> float:
        """The time of the world, in seconds."""
        return self.loop.now_s + self.skipped_s

    def draw(self, lowest: float, highest: float) -> float:
        """A number from the world's generator."""
        return self.random.uniform(lowest, highest)

    def later(self, delay_s: float, work: Callable[..., Any], *arguments: Any) -> None:
        """Do something soon, whoever dies; skips wait for it."""
        self.loop.call_outside(max(0.0, delay_s), work, *arguments)

    def later_in_place(self, delay_s: float, place: int, work: Callable[..., Any]) -> None:
        """Do something soon, in this place among all that is due at that time."""
        self.loop.call_in_place(max(0.0, delay_s), place, work)

    def at(self, at_s: float, work: Callable[..., Any], *arguments: Any) -> None:
        """Do something at a time of the world, which may be far away."""
        heapq.heappush(self._agenda, (at_s, next(self._numbers), work, arguments))

    @property
    def calm(self) -> bool:
        """Whether no fault lasts, nor ended so lately that it may have consequences."""
        return not self.active_faults and self.now_s > self.excused_until_s

    def etcd_delay_s(self) -> float:
        """How long a message between a driver and etcd takes."""
        return self.network.random.uniform(0.0005, 0.003)

    def touched(self) -> None:
        """Something has changed: no stretch is skipped for a while."""
        self.changed_at_s = self.now_s

    # --- running

    async def run(self, seconds: float) -> None:
        """Let time pass; stops at the first broken invariant."""
        end_s = self.now_s + seconds
        if not self.drivers:
            self._populate()
        while self.now_s < end_s and not self.invariants.broken:
            for context in self.loop.unhandled:
                self.invariants.breaks("unhandled", f"{context.get('exception')!r} {context}")
            while self._agenda and self._agenda[0][0] <= self.now_s:
                _, number, work, arguments = heapq.heappop(self._agenda)
                self._chances_of(number)
                work(*arguments)
            self.invariants.advance.look()
            due_s = min(end_s, self._agenda[0][0] if self._agenda else end_s)
            if self.skips and due_s - self.now_s > QUIET_S + LANDING_S and self._quiet():
                # All of etcd against all of the leader's state, as at the end of a history.
                if self._stretches % (CHECKED if self.rests else 1) == 0:
                    await check_stored(self)
                self._stretches += 1
                self._skip((due_s - LANDING_S - self.now_s) // GRID_S * GRID_S)
            await asyncio.sleep(min(max(0.0, due_s - self.now_s), 5.0))

    def _chances_of(self, number: int) -> None:
        """Begin the chances anew: what follows an event depends on nothing before it."""
        self.event = number
        self.loop.begin(number)
        for name, source in (("world", self.random), ("network", self.network.random)):
            source.seed(f"{name}-{self.seed}-{number}")
        random.seed(f"jitter-{self.seed}-{number}")

    def _populate(self) -> None:
        for number in range(self._size):
            name = f"n{number}"
            self.nodes[name] = SimNode(self, name, f"s{number // NODES_PER_SWITCH}", self.devices)
        self.drivers.extend(SimDriver(self, name) for name in ("d0", "d1"))

    def _quiet(self) -> bool:
        """Whether nothing but time would pass from now on."""
        return not self.unrest()

    def unrest(self) -> str:
        """Why the stretch that begins now cannot be skipped; empty if it can."""
        if self.active_faults or self.now_s - self.changed_at_s < QUIET_S:
            return "a fault or a change"
        leader = self.leader()
        if leader is None or leader.engine.requests or self.operators.busy:
            return "no leader, or one at work"
        state = leader.engine.state
        if self.now_s - state.leader_since_s + leader.clock_offset_s < QUIET_S:
            return "a new leader"
        waiting = (JobPhase.PREPARING, JobPhase.STARTING, JobPhase.STOPPING)
        leader_s = self.now_s + leader.clock_offset_s
        for job in state.jobs.values():
            if job.phase in waiting:
                return f"job {job.name} is {job.phase}"
            if job.phase is JobPhase.QUEUED and job.not_before_s > leader_s:
                return f"job {job.name} waits before its next attempt"
            if job.active and job.current.leaving is not None:
                return f"job {job.name} is to leave its nodes"
            # A driver has to know the steps of a job before their number no longer identifies it,
            # and to forget those that took longer: of a skipped stretch it learns one time only.
            times = job.step_times if job.phase is JobPhase.RUNNING else ()
            if job.phase is JobPhase.RUNNING and len(times) < MIN_STEP_TIMES:
                return f"job {job.name} has done few steps"
            if times and max(times) > times[-1]:
                return f"job {job.name} has done steps that took longer"
        for name, known in state.nodes.items():
            if known.liveness is Liveness.SUSPECT:
                return f"node {name} is suspected"
        moving = (PREPARING, PREPARED, STARTING, FAILED)
        for node in self.nodes.values():
            if node.up and (node.paused or node.link is None or not node.link.greeted):
                return f"node {node.name} has no link"
            if node.up and node.phase in moving:
                return f"node {node.name} is in phase {node.phase}"
        restless = [gang.key for gang in self.gangs.values() if not gang.settled]
        return f"gangs {restless}" if restless else ""

    def may_rest(self, link: Link) -> bool:
        """Whether nothing hinders a link, its driver or the network."""
        driver = link.driver
        leads = driver.leads and not driver.process.paused and driver.term_of == link.term
        return leads and self.network.quiet(link) and not self.invariants.bounds.disturbed

    def wake(self) -> None:
        """End the rest of all nodes."""
        for node in self.nodes.values():
            node.rest.end()

    def _skip(self, seconds: float) -> None:
        for gang in self.gangs.values():
            if gang.first is not None:
                gang.first.rest.end()  # its next heartbeat brings what was committed
        linked = [node.name for node in self.nodes.values() if node.link and not node.rest]
        lanes = [driver.engine.presence.lane for driver in self.drivers if driver.leads]
        for lane in lanes:
            for name in linked:
                lane.assume(name)
        self.skipped_s += seconds
        for driver, lane in zip([d for d in self.drivers if d.leads], lanes, strict=True):
            for name in linked:
                lane.doubt(driver.clock.now_s(), name, driver.clock.now_s())
        for key in [key for key, gang in self.gangs.items() if gang.gone]:
            self.invariants.figures.ended(self.gangs.pop(key))
        for gang in self.gangs.values():
            gang.settle()
        for gang in self.gangs.values():
            gang.report_now()

    def leader(self) -> SimDriver | None:
        """The driver that leads now, if one does."""
        return next((driver for driver in self.drivers if driver.leads), None)

    def driver_died(self, driver: SimDriver) -> None:
        """A supervisor starts the driver again."""
        self.touched()

        def restart() -> None:
            if not driver.alive:
                driver.start()
                self.touched()

        self.later(self.draw(1.0, 20.0), restart)

    # --- who is who

    def driver_to_dial(self, node: SimNode) -> SimDriver | None:
        """The next driver in the node's list."""
        node.dials += 1
        driver = self.drivers[node.dials % len(self.drivers)]
        return driver if driver.alive else None

    def node_at(self, address: str) -> tuple[SimNode, int]:
        """The node and incarnation that an address belongs to."""
        name, _, boots = address.partition(":")[0].partition(".")
        return self.nodes[name], int(boots)

    def jobs_on(self, node: SimNode) -> list[str]:
        """The job that the node works for, if any."""
        return [node.job] if node.job else []

    def storage_of(self, job: str) -> Storage:
        """The checkpoints of a job."""
        return self.storages.setdefault(job, Storage())

    def gangs_of(self, job: str) -> list[Gang]:
        """All attempts of a job that still exist."""
        return [gang for key, gang in self.gangs.items() if key[0] == job]

    def gang_of(self, assignment: link_pb2.AttemptAssignment) -> Gang:
        """The gang of an attempt, made by the first of its nodes that starts."""
        key = assignment.job, assignment.attempt
        if key not in self.gangs:
            restore = assignment.restore
            known = restore.source != types_pb2.RESTORE_SOURCE_NONE
            steps = job_of(assignment).training.steps
            ranks = self._ranks[assignment.job]
            state = (restore.step, restore.written_by_attempt)
            stored = not known or state in self.storage_of(assignment.job).commits
            first = restore.step if known else 0
            self.gangs[key] = Gang(self, *key, ranks, first, steps, stored=stored)
        return self.gangs[key]

    def submitted(self, job: str, step_s: float, ranks: int) -> None:
        """What the simulation has to know of a job: the time per step, the number of ranks."""
        self._step_s[job] = step_s
        self._ranks[job] = ranks

    def step_s(self, job: str) -> float:
        """How long a step of the job takes."""
        return self._step_s[job]

    async def _connect(self, make: Any, host: str, port: int, **options: Any) -> Any:
        return await self.services.connect(make, host, port, **options)


@contextlib.contextmanager
def host_of(world: World) -> Iterator[None]:
    """Have the code of the services see the world's clock, its names and its chances."""
    ids = random.Random(f"ids-{world.seed}")
    random.seed(f"jitter-{world.seed}")

    def new_id() -> uuid.UUID:
        return uuid.UUID(int=ids.getrandbits(128), version=4)

    def describe(address: str) -> dict[str, str | int]:
        return {"address": address, "pid": ids.getrandbits(30)}

    def channel(address: str, token: str) -> Channel:
        return Channel(world, address)

    with contextlib.ExitStack() as stack:
        for target, name, value in (
            (time, "time", lambda: world.now_s),
            (time, "monotonic", world.loop.time),
            (time, "clock_gettime", lambda number: world.loop.time()),
            (uuid, "uuid4", new_id),
            (leadership, "self_description", describe),
            (leadership, "is_gone", lambda value: False),
            (node_calls, "open_channel", channel),
            (probes, "open_channel", channel),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        yield
