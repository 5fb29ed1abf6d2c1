"""Messages that cannot be true change nothing but the log, and the driver lives on."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.harness.simulated_cluster import SimulatedCluster, demo_job

from megascale.v1 import types_pb2
from megascale_common.service.clock import SystemClock
from megascale_driver.core.checkpoint_progress import Progress, SealedSnapshot
from megascale_driver.core.events import JobSubmitted, NodeReport
from megascale_driver.core.policy import Policy
from megascale_driver.core.state import Cluster, Job, JobPhase
from megascale_driver.engine import Engine

ABSURD = 10**9


def running() -> SimulatedCluster:
    world = SimulatedCluster(1, nodes=3)
    world.run(2.0)
    world.feed(JobSubmitted(world.now_s, demo_job("a", steps=1000), "test"))
    world.run(20.0)
    assert world.state.jobs["a"].phase is JobPhase.RUNNING
    return world


@pytest.mark.parametrize(
    "progress",
    [
        Progress(job="a", committed_step=ABSURD, committed_by_attempt=1, manifest_uri="m"),
        Progress(job="a", committed_step=10, committed_by_attempt=ABSURD, manifest_uri="m"),
        Progress(job="a", sealed=(SealedSnapshot(0, 1, ABSURD, "d"),)),
        Progress(job="a", replicas=(SealedSnapshot(0, 1, -1, "d"),)),
    ],
)
def test_absurd_progress_is_refused_with_an_event(progress: Progress) -> None:
    world = running()
    before = world.state.jobs["a"]
    node = world.state.nodes["n0"]
    assert node.report is not None
    report = replace(node.report, progress=(progress,))
    world.feed(NodeReport(world.now_s, "n0", node.identity.incarnation, report))
    after = world.state.jobs["a"]
    assert (after.committed_step, after.current.step) == (
        before.committed_step,
        before.current.step,
    )
    assert world.audit[-1].reason == "MESSAGE_REFUSED" and world.audit[-1].subject == "nodes/n0"
    world.run(10.0)
    assert world.state.jobs["a"].current.step > before.current.step, "the job goes on"


@pytest.mark.parametrize(("attempt", "step"), [(1, ABSURD), (ABSURD, 1)])
def test_an_absurd_step_record_hides_no_later_one(attempt: int, step: int) -> None:
    """Records are taken in order: one from far ahead would drop all that follow."""
    engine = Engine(Policy(), SystemClock(), "token", "127.0.0.1:1")
    engine.state = Cluster(jobs={"a": Job("a", demo_job("a", steps=1000))})
    assert engine.step_done("a", types_pb2.StepRecord(attempt=1, step=1))
    assert not engine.step_done("a", types_pb2.StepRecord(attempt=attempt, step=step))
    assert engine.step_done("a", types_pb2.StepRecord(attempt=1, step=2))
