"""Nodes as the driver meets them: an agent that obeys, workers that train, a checkpoint daemon.

A node speaks the link protocol with the driver's real link service. What it really is (up, paused,
with a lost GPU) is known here only; the driver has to find it out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from tests.simulation.shell.chances import Chances
from tests.simulation.shell.memory import Memory
from tests.simulation.shell.network import Link
from tests.simulation.shell.rest import BEAT_S, Rest

from megascale.v1 import link_pb2, types_pb2
from megascale_driver.nodes.orders import PROTOCOL

if TYPE_CHECKING:
    from tests.simulation.shell.training import Gang
    from tests.simulation.shell.world import World

GAP_S = 0.05
SILENT_S = 30.0  # without a message of the driver, the node dials again
IDLE, PREPARING, PREPARED, STARTING, RUNNING, FAILED, FINISHED = range(1, 8)


class SimNode:
    """One node: the true state, whatever a driver believes of it."""

    def __init__(self, world: World, name: str, switch: str, devices: int) -> None:
        self.world, self.name, self.switch, self.devices = world, name, switch, devices
        self.boots = 1
        self.protocol = (
            1 if name.endswith("7") else PROTOCOL.highest
        )  # some agents are of an old build
        self.up, self.paused, self.gpu_lost = True, False, False
        self._slowness = 1.0
        self.hangs: set[tuple[str, int]] = set()  # attempts that its workers hold up
        self.log_storm = False
        self._chances = Chances(world, name)
        # Of its heartbeats, apart: how many there are must not change anything else.
        self.traffic = Chances(world, f"{name}-traffic")
        self.rest = Rest(self)
        self.place = len(world.nodes)  # in the order of the world
        self.clock_offset_s = self.draw(-3.0, 3.0)
        self.memory = Memory()
        self.trouble_until_s = 0.0  # until then something is, or was lately, wrong with it
        self.down_at_s = 0.0  # when it went down last
        self.dials = 0
        self.link: Link | None = None
        self._held: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._reset()
        world.later(self.draw(0.0, 2.0), self._dial)

    def _reset(self) -> None:
        """The state of an agent that has just started."""
        self.phase = IDLE
        self.is_mute = False
        self.job, self.attempt = "", 0
        self.ranks: tuple[int, ...] = ()
        self.failure = ""
        self.finished_step = 0
        self.workers: list[link_pb2.WorkerStatus] = []
        self.checks: list[types_pb2.CheckResult] = []
        self.epoch = (0, 0)
        self.version = 0
        self.gang: Gang | None = None
        self.seq = 0
        self.changed_at_s = self.world.now_s
        self._heard_s = self.world.loop.time()
        self._wanted: link_pb2.DesiredState | None = None
        self._beat_number = 0

    @property
    def incarnation(self) -> str:
        """New with every start of the agent."""
        return f"{self.name}-{self.boots}"

    @property
    def endpoint(self) -> str:
        """host:port of its services."""
        return f"{self.name}.{self.boots}:1"

    @property
    def replica_target(self) -> str:
        """Where its snapshots are copied to, as it was ordered; "" for nowhere."""
        return self._wanted.assignment.replica_target if self._wanted is not None else ""

    @property
    def trains(self) -> bool:
        """Whether worker processes exist."""
        return self.phase in (STARTING, RUNNING)

    @property
    def slowness(self) -> float:
        """How many times as long its workers take for a step."""
        return self._slowness

    @slowness.setter
    def slowness(self, times: float) -> None:
        if self.gang is not None:
            self.gang.moved()
        self._slowness = times
        if self.gang is not None:
            self.gang.moved()

    def draw(self, lowest: float, highest: float) -> float:
        """A number from the node's own generator."""
        return self._chances.now.uniform(lowest, highest)

    def holds_up(self, attempt: tuple[str, int]) -> bool:
        """Whether its workers keep those of other nodes in that attempt waiting."""
        return self.paused or attempt in self.hangs

    # --- what faults do

    def crash(self) -> None:
        """All processes of the node end at once."""
        if not self.up:
            return
        self.rest.end()
        gang = self.gang
        self.up, self.down_at_s = False, self.world.now_s
        self._drop_link()
        self._held.clear()
        self.paused = False
        self.memory.clear()
        boots = self.boots
        self._reset()
        self.boots = boots
        if gang is not None:
            gang.leave(self)

    def boot(self) -> None:
        """Start the agent again, as a new incarnation."""
        if self.up:
            return
        self.boots += 1
        self.up = True
        self._reset()
        self.later(self.draw(0.5, 2.0), self._dial)

    def pause(self) -> None:
        """SIGSTOP to everything on the node: sockets stay open, nothing is sent."""
        self.rest.end()
        if self.gang is not None:
            self.gang.stands_still()
        self.paused = True
        if self.gang is not None:
            self.gang.moved()

    def resume(self) -> None:
        """Go on after :meth:`pause`."""
        if not self.paused:
            return
        if self.gang is not None:
            self.gang.settle()
        self.paused = False
        if self.gang is not None:
            self.gang.moved()
        held, self._held = self._held, []
        for work, arguments in held:
            self.later(0.0, work, *arguments)

    def mute(self, *, linked: bool) -> None:
        """Its agent answers calls, and no longer sends anything; its workers are gone.

        ``linked``: its link stays open. Only a restart of the agent helps.
        """
        self.is_mute = True
        if self.trains:
            self.kill_worker("", -9, "it is gone")
        if not linked:
            self._drop_link()

    def hang(self) -> None:
        """Its workers hold up those of the other nodes, until the attempt ends."""
        if self.gang is not None:
            self.gang.stands_still()
            self.hangs.add(self.gang.key)
            self.gang.moved()

    def kill_worker(self, kind: str = "", status: int = -9, error: str = "") -> None:
        """One worker process ends."""
        if self.up and self.trains and self.gang is not None:
            self.worker_failed(self.gang, kind, status, error)

    # --- what its gang does

    def workers_run(self, gang: Gang) -> None:
        """All workers have met and restored."""
        if self.gang is gang and self.phase == STARTING:
            self._enter(RUNNING)
            self._advance()

    def workers_finished(self, gang: Gang) -> None:
        """All workers have done their steps."""
        if self.gang is gang and self.phase == RUNNING:
            self.gang = None
            self.finished_step = gang.last
            self._enter(FINISHED)

    def worker_failed(self, gang: Gang, kind: str, status: int, error: str) -> None:
        """A worker of this node ended; the agent stops the others."""
        if self.paused:
            self._held.append((self.worker_failed, (gang, kind, status, error)))
            return
        if self.gang is not gang or not self.up:
            return
        self.gang = None
        exited = Timestamp()
        exited.FromNanoseconds(int((self.world.now_s + self.clock_offset_s) * 1e9))
        self.workers = [
            link_pb2.WorkerStatus(
                rank=self.ranks[0], state=link_pb2.WORKER_STATE_EXITED, exit_status=status,
                error=error, error_kind=kind, exited_at=exited, step=gang.step(), phase="STEP",
            )
        ]  # fmt: skip
        gang.leave(self)
        self._enter(FAILED)

    def report_step(self, gang: Gang) -> None:
        """Send the newest step record to the driver."""
        link = self.link
        if link is None or not link.greeted or self.paused or not gang.step():
            return
        record = types_pb2.StepRecord(attempt=gang.attempt, step=gang.step(), loss=2.0)
        record.step_time.FromNanoseconds(round(gang.pace_s * 1e9))
        link.report_steps(gang.job, record)

    # --- the link

    def later(self, delay_s: float, work: Callable[..., None], *arguments: Any) -> None:
        """Do something of this incarnation later; while the node is paused, it waits."""
        self.world.later(delay_s, self._unless_gone(work, arguments))

    def _unless_gone(
        self, work: Callable[..., None], arguments: tuple[Any, ...]
    ) -> Callable[[], None]:
        boots = self.boots

        def run() -> None:
            if not self.up or self.boots != boots:
                return
            if self.paused:
                self._held.append((work, arguments))
            else:
                work(*arguments)

        return run

    def _dial(self) -> None:
        """Dial the drivers in turn until one answers as leader."""
        if self.link is not None or self.is_mute:
            return
        driver = self.world.driver_to_dial(self)
        if driver is None or not self.world.network.open(self.name, driver.name):
            self.later(self.draw(0.2, 2.0), self._dial)
            return
        self.link = Link(self.world.network, self, driver)
        self._heard_s = self.world.loop.time()
        self.link.send(link_pb2.ConnectRequest(hello=self.hello()))
        self.later(5.0, self._await_hello, self.link)

    def _await_hello(self, link: Link) -> None:
        if self.link is link and not link.greeted:
            self._drop_link()
            self._dial()

    def link_closed(self, link: Link) -> None:
        """The stream has ended, or was refused."""
        if self.paused:
            self._held.append((self.link_closed, (link,)))
        elif self.link is link:
            self.rest.end()
            self.link = None
            self.later(self.draw(0.1, 1.0), self._dial)

    def _drop_link(self) -> None:
        self.rest.end()
        link, self.link = self.link, None
        if link is not None:
            link.close_from_node()

    def receive(self, link: Link, message: link_pb2.ConnectResponse) -> None:
        """A message of the driver."""
        if self.paused:
            self._held.append((self.receive, (link, message)))
            return
        if self.link is not link or not self.up:
            return
        self._heard_s = self.world.loop.time()
        kind = message.WhichOneof("message")
        if kind == "hello":
            epoch = message.hello.epoch
            if not self._see_epoch((epoch.cluster_generation, epoch.create_revision)):
                return
            link.greeted = True
            self._beat(link)
            if self.gang is not None and 0 in self.ranks:
                self.report_step(self.gang)
        elif kind == "desired_state":
            self._obey(message.desired_state)

    def acknowledged(self, link: Link) -> None:
        """The driver has taken in a heartbeat."""
        if self.link is link and self.up:
            self._heard_s = self.world.loop.time()

    def _see_epoch(self, epoch: tuple[int, int]) -> bool:
        """Refuse a lower epoch than one seen before, by ending the session."""
        if epoch < self.epoch:
            self._drop_link()
            self.later(self.draw(0.2, 2.0), self._dial)
            return False
        if epoch > self.epoch:
            self.epoch, self.version = epoch, 0
        return True

    def _obey(self, desired: link_pb2.DesiredState) -> None:
        epoch = (desired.epoch.cluster_generation, desired.epoch.create_revision)
        if not self._see_epoch(epoch) or desired.version < self.version:
            return
        self.world.invariants.ordered(self, desired)
        self.version = desired.version
        self._wanted = desired
        self._advance()
        self.changed()

    def _advance(self) -> None:
        """Take the next action towards the desired state, level-triggered."""
        wanted = self._wanted
        if wanted is None:
            return
        mine = (self.job, self.attempt) == (wanted.assignment.job, wanted.assignment.attempt)
        if wanted.phase == link_pb2.DESIRED_PHASE_IDLE:
            if self.phase != IDLE:
                self._stop()
                self.later(self.draw(0.1, 0.6), self._idle, wanted)
        elif not mine:
            if self.phase not in (IDLE, PREPARING):
                self._stop()
            self._prepare(wanted)
        elif wanted.phase == link_pb2.DESIRED_PHASE_START and self.phase == PREPARED:
            self._start(wanted)
        elif self.phase == RUNNING and self.gang is not None and 0 in self.ranks:
            self.gang.ordered(wanted.leave)

    def _stop(self) -> None:
        gang, self.gang = self.gang, None
        if gang is not None:
            self.world.invariants.stopped(self, gang)
            gang.leave(self)
            self.workers = [
                link_pb2.WorkerStatus(rank=rank, state=link_pb2.WORKER_STATE_EXITED,
                                      exit_status=-15, error_kind="STOPPED")
                for rank in self.ranks
            ]  # fmt: skip

    def _idle(self, wanted: link_pb2.DesiredState) -> None:
        if self._wanted is wanted:
            self.job, self.attempt, self.workers, self.checks = "", 0, [], []
            self.finished_step = 0
            self._enter(IDLE)

    def _prepare(self, wanted: link_pb2.DesiredState) -> None:
        assignment = wanted.assignment
        self.job, self.attempt = assignment.job, assignment.attempt
        self.ranks, self.workers, self.checks = tuple(assignment.ranks), [], []
        self.finished_step = 0
        self._enter(PREPARING)
        self.later(self.draw(0.5, 3.0), self._prepared, self.job, self.attempt)

    def _prepared(self, job: str, attempt: int) -> None:
        if (self.job, self.attempt, self.phase) != (job, attempt, PREPARING):
            return
        verdict = types_pb2.CHECK_VERDICT_FAIL if self.gpu_lost else types_pb2.CHECK_VERDICT_PASS
        detail = "the device does not answer" if self.gpu_lost else ""
        self.checks = [types_pb2.CheckResult(name="device_present", verdict=verdict, detail=detail)]
        self._enter(FAILED if self.gpu_lost else PREPARED)
        self._advance()

    def _start(self, wanted: link_pb2.DesiredState) -> None:
        assignment = wanted.assignment
        self._enter(STARTING)
        self.gang = self.world.gang_of(assignment)
        self.world.invariants.started(self, wanted)
        self.gang.join(self)

    def _enter(self, phase: int) -> None:
        self.phase = phase
        self.changed_at_s = self.world.now_s
        self.changed()

    # --- heartbeats

    def changed(self) -> None:
        """Send a heartbeat at once."""
        self.rest.end()
        link = self.link
        if link is not None and link.greeted and not link.beat_waits:
            link.beat_waits = True
            gap_s = GAP_S
            if self.world.large:  # all that change within one gap send at its end
                gap_s -= self.world.loop.time() % GAP_S
            self.later(gap_s, self._beat_of_change, link)

    def _beat_of_change(self, link: Link) -> None:
        link.beat_waits = False
        self._beat(link)

    def _beat(self, link: Link) -> None:
        if self.link is not link or not link.greeted or self.is_mute:
            return
        self._beat_number += 1
        if self.world.loop.time() - self._heard_s > SILENT_S:
            self._drop_link()
            self._dial()
            return
        message = link_pb2.ConnectRequest(heartbeat=self.heartbeat())
        if not self.world.network.loses(self):
            link.send(message)
            if self.world.network.duplicates(self):
                link.send(message)
        if not self.rest.begin(link):
            self._beat_later(BEAT_S, link)

    def _beat_later(self, delay_s: float, link: Link) -> None:
        # In the node's own place: who ends a rest must not change the order of what follows.
        work = self._unless_gone(self._next_beat, (link, self._beat_number))
        self.world.later_in_place(delay_s, 3 * self.place, work)

    def _next_beat(self, link: Link, number: int) -> None:
        if self._beat_number == number:
            self._beat(link)

    @property
    def settled(self) -> bool:
        """Whether its next heartbeats would repeat the one before."""
        phase = self.phase in (IDLE, RUNNING) and not (self.log_storm or self.paused)
        return phase and self.link is not None and not self.link.beat_waits

    def goes_on(self, link: Link, next_s: float, heard_s: float) -> None:
        """Send heartbeats again after a rest, the first in ``next_s``; all before were heard."""
        self._heard_s = heard_s
        self._beat_later(next_s, link)

    def hello(self) -> link_pb2.ExecutorHello:
        """Who the node is."""
        return link_pb2.ExecutorHello(
            protocol=link_pb2.ProtocolRange(lowest=1, highest=self.protocol),
            node=self.name,
            incarnation=self.incarnation,
            boot_id=self.incarnation,
            devices=[
                types_pb2.Device(index=i, kind=types_pb2.DEVICE_KIND_CPU)
                for i in range(self.devices)
            ],
            topology={"switch": self.switch},
            executor_endpoint=self.endpoint,
            checkpoint_endpoint=self.endpoint,
            hostname=self.name,
        )

    def heartbeat(self) -> link_pb2.Heartbeat:
        """What the node is and does now."""
        self.seq += 1
        generation, revision = self.epoch
        # Field by field: the constructors with keywords take three times as long.
        beat = link_pb2.Heartbeat()
        beat.seq = self.seq
        seen = beat.epoch_seen
        seen.cluster_generation, seen.create_revision = generation, revision
        beat.desired_version = self.version
        beat.job, beat.attempt = self.job, self.attempt
        beat.phase = self.phase  # type: ignore[assignment]
        beat.failure = self.failure
        self._statuses(beat)
        beat.checks.extend(self.checks)
        beat.store_endpoint = self.endpoint if self.job else ""
        self._checkpoints(beat)
        beat.finished_step = self.finished_step
        beat.checkpoint_daemon.replica_endpoint = self.endpoint
        if self.gang is not None and self.gang.failed_order and 0 in self.ranks:
            beat.leave_failure.id = self.gang.failed_order
            beat.leave_failure.error = "the storage is away"
        _set(beat.sent_at, self.world.now_s + self.clock_offset_s)
        if self.log_storm:
            line = "x" * 500
            beat.logs.extend(
                link_pb2.LogFingerprint(signature=f"{i} {line}", count=9, sample_line=line)
                for i in range(self.traffic.now.choice((20, 80)))
            )
        return beat

    def _statuses(self, beat: link_pb2.Heartbeat) -> None:
        gang = self.gang
        if gang is None or not self.trains:
            beat.workers.extend(self.workers)
            return
        step, stalled = gang.step(), gang.running and gang.stalled
        phase = "STEP" if gang.running and step > gang.base else "WARMUP"
        for rank in self.ranks:
            status = beat.workers.add()
            status.rank, status.state = rank, link_pb2.WORKER_STATE_RUNNING
            status.pid, status.step, status.phase = 4711, step, phase
            age_s = gang.still_s() if stalled else self.traffic.now.uniform(0.0, 0.9)
            _set(status.status_age, age_s)
            if stalled:
                behind = self.holds_up(gang.key)
                status.operations.add(group="world", entered=step + (not behind), completed=step)

    def _checkpoints(self, beat: link_pb2.Heartbeat) -> None:
        if self.gang is not None:
            self.gang.settle()
        for job in self.memory.jobs():
            message = beat.checkpoints.add()
            message.job = job
            message.committed_step, message.committed_by_attempt = self.world.storage_of(
                job
            ).committed
            self.memory.report(job, message)


def _set(stamp: Timestamp | Duration, seconds: float) -> None:
    """Seconds as nanoseconds, cut off."""
    stamp.seconds, stamp.nanos = divmod(int(seconds * 1e9), 1_000_000_000)
