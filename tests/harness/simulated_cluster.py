"""A simulated cluster with a virtual clock: nodes that crash, stall, lie and return, real core.

All choices come from one seeded generator, so a seed replays a history exactly. At each failover
the driver's state passes through its codec, as it does through etcd.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field

from tests.harness.presence import Presence

from megascale_common.service.clock import VirtualClock
from megascale_driver.analysis.group_search import Answer
from megascale_driver.analysis.logs.correlation import Observation
from megascale_driver.analysis.progress import OperationCount, RankStatus
from megascale_driver.core import machine
from megascale_driver.core.values.cluster import (
    AttemptPhase,
    Breaker,
    Check,
    Cluster,
    Desired,
    DesiredPhase,
    Device,
    Identity,
    Node,
    Progress,
    Report,
    SealedSnapshot,
    WorkerReport,
)
from megascale_driver.core.values.events import (
    AttemptOpened,
    Audit,
    CheckGroup,
    Effect,
    Event,
    GroupChecked,
    LeaderStarted,
    NodeHello,
    NodeReport,
    OpenAttempt,
    OpenFailed,
    Outcome,
    Probe,
    ProbeResult,
    StreamReset,
    Tick,
)
from megascale_driver.core.values.job import Job
from megascale_driver.core.values.policy import Policy
from megascale_driver.journal import codec
from megascale_job import loading
from megascale_job.config import JobConfig
from megascale_job.restore import RestorePlan, RestoreSource

TICK_S = 0.25
STEP_S = 0.5
SNAPSHOT_STEPS = 5
COMMIT_DELAY_STEPS = 2


@dataclass
class SimulatedNode:
    """The true state of a node, whatever the driver's state of it is."""

    name: str
    switch: str
    devices: int = 4
    boots: int = 1
    up: bool = True
    connected: bool = False
    paused_until_s: float = 0.0
    partitioned_until_s: float = 0.0
    down_until_s: float = 0.0
    desired: Desired = field(default_factory=Desired)
    desired_version: int = 0
    phase: AttemptPhase = AttemptPhase.IDLE
    job: str = ""
    attempt: int = 0
    workers: tuple[WorkerReport, ...] = ()
    checks: tuple[Check, ...] = ()
    phase_at_s: float = 0.0
    next_beat_s: float = 0.0
    sealed: dict[int, tuple[int, int]] = field(default_factory=dict)
    lies: bool = False
    step: int = 0
    written_at_s: float = 0.0
    # Up to this attempt, of any job, its workers are alive but do not advance.
    stalled_until_attempt: int = 0
    # Checks of groups that it is in fail.
    fails_with_others: bool = False
    kind: str = "cpu"  # of its devices
    # What its kernel has logged, reported with the logs of its newest attempt.
    kernel_log: tuple[Observation, ...] = ()
    logs_of: tuple[str, int] = ("", 0)

    def workers_run(self) -> bool:
        """Whether worker processes exist."""
        return self.phase in (AttemptPhase.STARTING, AttemptPhase.RUNNING)

    @property
    def incarnation(self) -> str:
        return f"{self.name}-boot-{self.boots}"

    @property
    def stalled(self) -> bool:
        return self.attempt <= self.stalled_until_attempt

    def statuses(self, ranks: tuple[int, ...], now_s: float) -> tuple[RankStatus, ...]:
        """Status pages of the ranks; all wait in an operation that stalled nodes never enter."""
        entered = self.step if self.stalled else self.step + 1
        world = OperationCount("world", entered, self.step)
        phase = "STEP" if self.step else "WARMUP"
        return tuple(
            RankStatus(rank, self.step, phase, now_s - self.written_at_s, (world,))
            for rank in ranks
        )

    def identity(self) -> Identity:
        devices = tuple(Device(i, self.kind) for i in range(self.devices))
        endpoint = f"{self.name}:1"
        return Identity(self.incarnation, devices=devices, topology={"switch": self.switch},
                        executor_endpoint=endpoint, checkpoint_endpoint=endpoint)  # fmt: skip


class SimulatedCluster:
    """Nodes and a driver, advanced by :meth:`run`; ``state`` and ``audit`` are the driver's."""

    def __init__(
        self, seed: int, nodes: int, switches: int = 2, policy: Policy | None = None
    ) -> None:
        self.random = random.Random(seed)
        self.clock = VirtualClock()
        self.policy = policy or Policy()
        self.nodes = {f"n{i}": SimulatedNode(f"n{i}", f"s{i % switches}") for i in range(nodes)}
        self.state = Cluster()
        self.audit: list[Audit] = []
        self.committed: dict[str, int] = {}
        self.steps: dict[str, tuple[int, int, float]] = {}
        self.opened: list[tuple[str, int, RestorePlan]] = []
        self.step_s = STEP_S
        self._pending: list[tuple[float, Event]] = []
        self.presence = Presence(self.policy)
        self.feed(LeaderStarted(self.now_s, "sim"))

    @property
    def now_s(self) -> float:
        return self.clock.now_s()

    def feed(self, event: Event) -> Outcome:
        """Give the core one event; carry out its commands and effects."""
        outcome = Outcome()
        for each in self.presence.events(event, self.state):
            self.state, outcome = machine.step(self.state, each, self.policy)
            self.audit.extend(outcome.audit)
            for name in outcome.commanded:
                self._command(name)
            for effect in outcome.effects:
                self._perform(effect)
        return outcome

    def run(self, seconds: float) -> None:
        """Let ``seconds`` pass."""
        for _ in range(round(seconds / TICK_S)):
            self.clock.advance(TICK_S)
            for node in self.nodes.values():
                self._live(node)
            due = [event for at_s, event in self._pending if at_s <= self.now_s]
            self._pending = [item for item in self._pending if item[0] > self.now_s]
            for event in due:
                self.feed(event)
            steps = tuple((job, attempt, step) for job, (attempt, step, _) in self.steps.items())
            self.feed(Tick(self.now_s, steps))

    def crash(self, name: str, down_s: float) -> None:
        """End all processes of the node at once; it boots again after ``down_s``."""
        node = self.nodes[name]
        node.up, node.down_until_s = False, self.now_s + down_s
        self._disconnect(node)
        node.phase, node.job, node.attempt, node.workers = AttemptPhase.IDLE, "", 0, ()
        node.sealed.clear()

    def pause(self, name: str, seconds: float) -> None:
        """SIGSTOP: sockets stay open, nothing is sent."""
        self.nodes[name].paused_until_s = self.now_s + seconds

    def partition(self, name: str, seconds: float) -> None:
        """Cut the node's network: its link breaks, probes time out, workers lose their peers."""
        node = self.nodes[name]
        node.partitioned_until_s = self.now_s + seconds
        self._disconnect(node)

    def kill_worker(self, name: str) -> None:
        """End a worker; its node reports the attempt as failed."""
        node = self.nodes[name]
        if node.up and node.phase in (AttemptPhase.RUNNING, AttemptPhase.STARTING):
            self._fail(node, WorkerReport(0, True, -9, exited_at_s=self.now_s))

    def failover(self) -> None:
        """End the driver; another one reads what was committed, and the nodes link to it."""
        stored = self.state
        jobs: dict[str, Job] = {}
        for name, job in stored.jobs.items():
            config = loading.from_json(loading.to_json(job.config))
            jobs[name] = codec.load(Job, codec.dump(job), config=config, attempts=job.attempts)
        self.state = Cluster(
            nodes={name: codec.load(Node, codec.dump(node)) for name, node in stored.nodes.items()},
            jobs=jobs,
            breaker=codec.load(Breaker, codec.dump(stored.breaker)),
            log_seq=stored.log_seq,
        )
        self._pending.clear()
        for node in self.nodes.values():
            node.connected = False
            node.desired_version = 0
        self.feed(LeaderStarted(self.now_s, "sim"))

    def _live(self, node: SimulatedNode) -> None:
        if not node.up and self.now_s >= node.down_until_s:
            node.up, node.boots = True, node.boots + 1
        if not node.up or self.now_s < node.paused_until_s or self.now_s < node.partitioned_until_s:
            return
        if not node.connected:
            node.connected, node.next_beat_s = True, self.now_s
            self.feed(NodeHello(self.now_s, node.name, node.identity()))
        self._obey(node)
        self._train(node)
        if self.now_s >= node.next_beat_s:
            node.next_beat_s = self.now_s + self.policy.heartbeat_interval_s
            self.feed(NodeReport(self.now_s, node.name, node.incarnation, self._report(node)))

    def _obey(self, node: SimulatedNode) -> None:
        wanted = node.desired
        mine = (node.job, node.attempt) == (wanted.job, wanted.attempt)
        if wanted.phase is DesiredPhase.IDLE and node.phase is not AttemptPhase.IDLE:
            self._enter(node, AttemptPhase.IDLE)
            node.job, node.attempt, node.workers, node.checks = "", 0, (), ()
        elif wanted.phase is DesiredPhase.PREPARE and not mine:
            node.job, node.attempt, node.workers = wanted.job, wanted.attempt, ()
            self._enter(node, AttemptPhase.PREPARING)
        elif node.phase is AttemptPhase.PREPARING and self._for(node) > self.random.uniform(
            0.2, 2.0
        ):
            self._enter(node, AttemptPhase.PREPARED)
        elif wanted.phase is DesiredPhase.START and mine and node.phase is AttemptPhase.PREPARED:
            self._enter(node, AttemptPhase.STARTING)
        elif node.phase is AttemptPhase.STARTING and self._for(node) > self.random.uniform(
            0.5, 3.0
        ):
            self._enter(node, AttemptPhase.RUNNING)

    def _train(self, node: SimulatedNode) -> None:
        """Complete steps, on rank 0's node, if all nodes run; peers of a lost node fail."""
        job = self.state.jobs.get(node.job)
        if job is None or node.phase is not AttemptPhase.RUNNING or job.attempt != node.attempt:
            return
        peers = [self.nodes[slot.node] for slot in job.slots]
        gone = [
            p
            for p in peers
            if not p.up or p.attempt != node.attempt or p.phase is AttemptPhase.FAILED
        ]
        if (
            gone
            and self._for(node) > 1.0
            and all(p.phase is not AttemptPhase.STARTING for p in peers)
        ):
            self._fail(node, WorkerReport(0, True, 1, "peer closed", "COLLECTIVE", self.now_s))
            return
        running = all(
            p.phase is AttemptPhase.RUNNING and self.now_s >= p.paused_until_s and not p.stalled
            for p in peers
        )
        if node.name != job.slots[0].node or not running:
            return
        restored = job.current.restore.step if job.current.restore is not None else 0
        attempt, step, at_s = self.steps.get(job.name, (0, 0, 0.0))
        step = step if attempt == job.attempt else restored
        if self.now_s - at_s < self.step_s:
            return
        step += 1
        self.steps[job.name] = (job.attempt, step, self.now_s)
        for peer in peers:
            peer.step, peer.written_at_s = step, self.now_s
        if step % SNAPSHOT_STEPS == 0:
            for slot in job.slots:
                self.nodes[slot.node].sealed.update(
                    {rank: (step, job.attempt) for rank in slot.ranks}
                )
        if step % SNAPSHOT_STEPS == COMMIT_DELAY_STEPS and step > SNAPSHOT_STEPS:
            self.committed[job.name] = max(
                self.committed.get(job.name, 0), step - COMMIT_DELAY_STEPS
            )
        if step >= job.config.training.steps:
            for peer in peers:
                self._enter(peer, AttemptPhase.FINISHED)

    def _report(self, node: SimulatedNode) -> Report:
        if node.lies:
            phase = self.random.choice(list(AttemptPhase))
            job = self.random.choice(["", "ghost", *self.state.jobs])
            lie = Progress("ghost", (SealedSnapshot(-3, 99, 10**9, ""),), 10**12, 10**6)
            version, attempt = self.random.randrange(-5, 10**6), self.random.randrange(10)
            return Report(
                version, job, attempt, phase, "?" * 50, store_endpoint="nowhere", progress=(lie,)
            )
        progress = tuple(
            Progress(
                name,
                tuple(
                    SealedSnapshot(rank, attempt, step, "d")
                    for rank, (step, attempt) in node.sealed.items()
                ),
                self.committed.get(name, 0),
                job.attempt,
            )
            for name, job in self.state.jobs.items()
        )
        store = "127.0.0.1:9" if node.phase is not AttemptPhase.IDLE else ""
        job = self.state.jobs.get(node.job)
        slot = (
            job.slot_of(node.name)
            if job is not None and node.phase is AttemptPhase.RUNNING
            else None
        )
        statuses = node.statuses(slot.ranks, self.now_s) if slot is not None else ()
        if node.job:
            node.logs_of = node.job, node.attempt
        return Report(
            node.desired_version, node.job, node.attempt, node.phase, "", node.workers, statuses,
            node.checks, store, progress, logs_of=node.logs_of, logs=node.kernel_log,
        )  # fmt: skip

    def _command(self, name: str) -> None:
        node = self.nodes[name]
        if node.connected:
            believed = self.state.nodes[name]
            assert (
                believed.desired_version > node.desired_version or believed.desired == node.desired
            )
            node.desired, node.desired_version = believed.desired, believed.desired_version
            node.next_beat_s = self.now_s

    def _perform(self, effect: Effect) -> None:
        if isinstance(effect, CheckGroup):
            self._check_group(effect)
            return
        node = self.nodes[effect.node]
        silent = self.now_s < max(node.paused_until_s, node.partitioned_until_s)
        if isinstance(effect, Probe):
            gone = not node.up or node.incarnation != effect.incarnation
            outcome, delay_s = (
                ("timeout", 2.0) if silent else ("refused", 0.5) if gone else ("alive", 0.01)
            )
            result = ProbeResult(self.now_s + delay_s, effect.node, effect.incarnation, outcome)
            self._pending.append((self.now_s + delay_s, result))
        elif silent or not node.up or self.random.random() < 0.1:
            failed = OpenFailed(self.now_s + 1.0, effect.job, effect.attempt, "away")
            self._pending.append((self.now_s + 1.0, failed))
        else:
            self._open(effect)

    def _check_group(self, wanted: CheckGroup) -> None:
        """Nodes that are gone or cut off are silent; a group with such a node fails."""
        nodes = [self.nodes[member.node] for member in wanted.members]
        silent = {
            node.name
            for node, member in zip(nodes, wanted.members, strict=True)
            if not node.up
            or node.incarnation != member.incarnation
            or self.now_s < max(node.paused_until_s, node.partitioned_until_s)
        }
        broken = bool(silent) or any(node.fails_with_others for node in nodes)
        answers = {node.name: Answer.FAIL if broken else Answer.PASS for node in nodes}
        answers |= dict.fromkeys(silent, Answer.SILENT)
        at_s = self.now_s + (20.0 if broken else 2.0)
        key = (wanted.job, wanted.attempt, wanted.round, wanted.group)
        self._pending.append((at_s, GroupChecked(at_s, *key, answers)))

    def _open(self, wanted: OpenAttempt) -> None:
        committed = self.committed.get(wanted.job, 0)
        restore = RestorePlan()
        if wanted.sealed_step and wanted.sealed_step >= committed:
            restore = RestorePlan(
                RestoreSource.MEMORY, wanted.sealed_step, wanted.sealed_by_attempt
            )
        elif committed:
            restore = RestorePlan(RestoreSource.STORAGE, committed, 1, "m")
        self.opened.append((wanted.job, wanted.attempt, restore))
        answer = AttemptOpened(
            self.now_s + 0.2, wanted.job, wanted.attempt, restore, wanted.endpoint
        )
        self._pending.append((self.now_s + 0.2, answer))

    def _disconnect(self, node: SimulatedNode) -> None:
        if node.connected:
            node.connected = False
            self.feed(StreamReset(self.now_s, node.name, node.incarnation))

    def _enter(self, node: SimulatedNode, phase: AttemptPhase) -> None:
        node.phase, node.phase_at_s, node.next_beat_s = phase, self.now_s, self.now_s
        if phase is AttemptPhase.RUNNING:
            node.step, node.written_at_s = 0, self.now_s

    def _fail(self, node: SimulatedNode, worker: WorkerReport) -> None:
        node.workers = (worker,)
        self._enter(node, AttemptPhase.FAILED)

    def _for(self, node: SimulatedNode) -> float:
        return self.now_s - node.phase_at_s


def digest(audit: list[Audit]) -> str:
    """A history as text, to compare two runs."""
    return json.dumps(
        [(line.log, line.seq, round(line.at_s, 3), line.reason, line.subject) for line in audit]
    )


def demo_job(
    name: str, *, steps: int = 100_000, dp: int = 2, spares: int = 1, **recovery: int
) -> JobConfig:
    """TP2 x PP2 x ``dp``, with checkpoints."""
    return loading.from_accepted(
        {
            "name": name,
            "model": {
                "layers": 4,
                "hidden_size": 64,
                "heads": 4,
                "vocab_size": 257,
                "sequence_length": 64,
            },
            "training": {"steps": steps, "global_batch_size": 8 * dp},
            "parallelism": {"tp": 2, "pp": 2, "dp": dp},
            "data": {"sources": [{"prefix": "/data/corpus"}]},
            "checkpoint": {"uri": "/checkpoints", "interval_steps": SNAPSHOT_STEPS},
            "recovery": {
                "spare_nodes": spares,
                "max_restarts": 1000,
                "max_restarts_without_progress": 50,
                **recovery,
            },
        }
    )
