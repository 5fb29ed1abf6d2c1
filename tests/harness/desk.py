"""The driver's core, given events one by one by a test, with the outcomes."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from tests.harness.presence import Presence
from tests.harness.simulated_cluster import demo_job

from megascale_driver.analysis.group_search import Answer
from megascale_driver.core import machine
from megascale_driver.core.values.cluster import (
    AttemptPhase,
    Cluster,
    Device,
    Identity,
    Liveness,
    Report,
    WorkerReport,
)
from megascale_driver.core.values.events import (
    Audit,
    CheckGroup,
    Event,
    GroupChecked,
    JobSubmitted,
    LeaderStarted,
    NodeHello,
    NodeReport,
    Outcome,
    ProbeResult,
    StreamReset,
    Tick,
)
from megascale_driver.core.values.job import Job, JobPhase
from megascale_driver.core.values.policy import Policy
from megascale_job.config import CheckpointConfig

POLICY = Policy()


class Desk:
    """Gives the core events and keeps the state, the audit lines and the effects."""

    def __init__(self, *nodes: str) -> None:
        self.now_s = 1000.0
        self.state = Cluster()
        self.audit: list[Audit] = []
        self.effects: list[object] = []
        self.presence = Presence(POLICY)
        self.feed(LeaderStarted(self.now_s, "here"))
        for name in nodes:
            self.hello(name)
            self.report(name, AttemptPhase.IDLE)

    def ask(self, event: Event) -> tuple[Cluster, Outcome]:
        """The state and outcome that an event would lead to; nothing changes."""
        return machine.step(self.state, event, POLICY)

    def feed(self, event: Event) -> str:
        refusal = ""
        for each in self.presence.events(event, self.state):
            self.state, outcome = self.ask(each)
            self.audit += outcome.audit
            self.effects += outcome.effects
            refusal = refusal or outcome.refusal
        return refusal

    def hello(self, name: str, boot: int = 1) -> None:
        who = Identity(f"{name}-{boot}", devices=tuple(Device(i, "cpu") for i in range(4)),
                       executor_endpoint=f"{name}:1", checkpoint_endpoint=f"{name}:2")  # fmt: skip
        self.feed(NodeHello(self.now_s, name, who))

    def crash(self, name: str) -> None:
        """The node's agent is gone: its link breaks, and its port refuses connections."""
        incarnation = self.state.nodes[name].identity.incarnation
        self.feed(StreamReset(self.now_s, name, incarnation))
        self.feed(ProbeResult(self.now_s, name, incarnation, "refused"))

    def report(self, name: str, phase: AttemptPhase, **details: Any) -> None:
        """A heartbeat of a node that has received its newest desired state."""
        node = self.state.nodes[name]
        if phase is not AttemptPhase.IDLE and "job" not in details:
            wanted = self.state.holder_of(name)
            assert wanted is not None
            details = {
                "job": wanted.name,
                "attempt": wanted.attempt,
                "store_endpoint": "h:9",
                **details,
            }
        report = Report(desired_version=node.desired_version, phase=phase, **details)
        self.feed(NodeReport(self.now_s, name, node.identity.incarnation, report))

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.feed(Tick(self.now_s))

    def job(self, name: str = "a") -> Job:
        return self.state.jobs[name]

    def liveness(self, name: str) -> str:
        return self.state.nodes[name].liveness.value

    def disposition(self, name: str) -> str:
        return self.state.nodes[name].disposition.value

    def submit(self, **options: Any) -> None:
        config = demo_job("a", **{"spares": 0, **options})
        self.feed(JobSubmitted(self.now_s, replace(config, checkpoint=CheckpointConfig()), "me"))

    def run(self) -> None:
        """Bring the current attempt to RUNNING."""
        for phase in (AttemptPhase.PREPARED, AttemptPhase.RUNNING):
            for slot in self.job().slots:
                self.report(slot.node, phase)
        assert self.job().phase is JobPhase.RUNNING

    def fail(self, node: str, *workers: WorkerReport) -> None:
        self.report(node, AttemptPhase.FAILED, workers=workers)

    def stop(self, *, search: bool = True) -> None:
        """Every node of the attempt that is alive reports idle; ``search``: and passes checks."""
        for slot in self.job().slots:
            if self.state.nodes[slot.node].liveness is Liveness.ALIVE:
                self.report(slot.node, AttemptPhase.IDLE)
        groups = [effect for effect in self.effects if isinstance(effect, CheckGroup)]
        if search and groups and groups[-1].attempt == self.job().attempt:
            group = groups[-1]
            answers = {member.node: Answer.PASS for member in group.members}
            key = (group.job, group.attempt, group.round, group.group)
            self.feed(GroupChecked(self.now_s, *key, answers))
        if self.job().phase is JobPhase.QUEUED and 0 < self.job().not_before_s - self.now_s <= 4.0:
            self.wait(self.job().not_before_s - self.now_s)  # a short back-off

    def reasons(self) -> list[str]:
        return [line.reason for line in self.audit if line.log == "a"]


def exited(
    rank: int, at_s: float, status: int = 1, kind: str = "", error: str = ""
) -> WorkerReport:
    return WorkerReport(rank, True, status, error, kind, at_s)


def job_with(job: Job, **changes: Any) -> Job:
    """The job with some fields changed, its own or those of its newest attempt."""
    own = {item.name for item in fields(Job)}
    current = {name: value for name, value in changes.items() if name not in own}
    job = replace(job, current=replace(job.current, **current))
    return replace(job, **{name: value for name, value in changes.items() if name in own})
