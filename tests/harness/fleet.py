"""Several jobs on the driver's core: a :class:`tests.harness.desk.Desk` with helpers by job."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.harness.desk import Desk
from tests.harness.simulated_cluster import demo_job

from megascale_driver.core.values.cluster import AttemptPhase, Liveness, Progress
from megascale_driver.core.values.events import AttemptOpened, JobSubmitted, NodeReport
from megascale_driver.core.values.job import JobPhase
from megascale_job.config import CheckpointConfig
from megascale_job.restore import RestorePlan, RestoreSource


class Fleet(Desk):
    """Jobs of one rank per device on nodes of four devices."""

    def add(
        self, name: str, nodes: int = 1, *, spares: int = 0, saves: bool = True, **fields: Any
    ) -> str:
        """Submit a job of ``nodes`` nodes; returns the refusal. ``fields``: of its config."""
        config = replace(demo_job(name, dp=nodes, spares=spares), **fields)
        checkpoint = replace(config.checkpoint, uri=f"/checkpoints/{name}")
        config = replace(config, checkpoint=checkpoint if saves else CheckpointConfig())
        return self.feed(JobSubmitted(self.now_s, config, "me"))

    def nodes_of(self, name: str) -> list[str]:
        """Nodes of the job's attempt, in the order of the ranks."""
        return [slot.node for slot in self.job(name).slots]

    def all_report(self, name: str, phase: AttemptPhase, **details: Any) -> None:
        """Every living node of the attempt reports ``phase``."""
        for node in self.nodes_of(name):
            if self.state.nodes[node].liveness is Liveness.ALIVE:
                self.report(node, phase, **details)

    def open(self, name: str) -> None:
        """The committer opens the attempt, which restores the newest commit."""
        job, restore = self.job(name), RestorePlan()
        if not job.config.checkpoint.uri:
            return
        if job.committed_step:
            by = job.committed_by_attempt
            restore = RestorePlan(RestoreSource.STORAGE, job.committed_step, by, "manifest")
        self.feed(AttemptOpened(self.now_s, name, job.attempt, restore, "h:2"))

    def start(self, name: str) -> None:
        """Bring the job's attempt to RUNNING."""
        self.all_report(name, AttemptPhase.PREPARED)
        self.open(name)
        self.all_report(name, AttemptPhase.RUNNING)
        assert self.job(name).phase is JobPhase.RUNNING, self.job(name)

    def committed(self, name: str, step: int) -> tuple[Progress, ...]:
        """The part of a heartbeat that shows this commit of the attempt."""
        return (Progress(name, committed_step=step, committed_by_attempt=self.job(name).attempt),)

    def idle(self, name: str) -> None:
        """Every living node of the stopping attempt reports that it is idle."""
        for node in self.nodes_of(name):
            if self.state.nodes[node].liveness is Liveness.ALIVE:
                self.report(node, AttemptPhase.IDLE)

    def repeat(self, node: str) -> None:
        """The node's newest heartbeat once more."""
        held = self.state.nodes[node]
        assert held.report is not None
        self.feed(NodeReport(self.now_s, node, held.identity.incarnation, held.report))

    def lose(self, job: str, node: str) -> None:
        """The node dies; the attempt of the job stops on all others."""
        self.die(node)
        self.idle(job)
        self.wait(0.25)

    def die(self, node: str) -> None:
        """The node is silent until it is dead; all others beat meanwhile."""
        while self.liveness(node) != "DEAD":
            self.beat(but=node)

    def beat(self, seconds: float = 5.0, but: str = "") -> None:
        """Time passes, with a heartbeat of every living node but one."""
        self.wait(seconds)
        for name, node in self.state.nodes.items():
            if name != but and node.liveness is Liveness.ALIVE and node.report is not None:
                self.repeat(name)
