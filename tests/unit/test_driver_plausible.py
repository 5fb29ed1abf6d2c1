"""Messages that cannot be true change nothing but the log, and the driver lives on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
from tests.harness.presence import arrived
from tests.harness.simulated_cluster import SimulatedCluster, demo_job

from megascale.v1 import link_pb2, types_pb2
from megascale_common.service.clock import SystemClock
from megascale_driver.core import machine
from megascale_driver.core.values.cluster import Cluster, Device, Identity, Progress, SealedSnapshot
from megascale_driver.core.values.events import Audit, JobSubmitted, NodeReport
from megascale_driver.core.values.job import Job, JobPhase
from megascale_driver.core.values.policy import Policy
from megascale_driver.nodes.open_links import Link
from megascale_driver.shell.engine import Engine, Term

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


def leading(*jobs: Job) -> Engine:
    """A leader of these jobs."""
    engine = Engine(Policy(), SystemClock(), "token", "127.0.0.1:1")
    engine.state = Cluster(jobs={job.name: job for job in jobs})
    nothing = cast(Any, None)
    engine.term = Term(nothing, nothing, types_pb2.Epoch(create_revision=1), 0.0)
    return engine


def decided(engine: Engine) -> list[Audit]:
    """The lines that the events in the inbox lead to."""
    state, lines = engine.state, []
    for entry in engine.requests.clear():
        state, outcome = machine.step(state, entry.event, engine.policy)
        lines += [line for line in outcome.audit if line.reason == "MESSAGE_REFUSED"]
    return lines


def test_absurd_step_records_of_a_job_are_one_event() -> None:
    engine = leading(Job("a", demo_job("a", steps=1000)), Job("b", demo_job("b", steps=1000)))
    for job in ("a", "a", "a", "b"):
        assert not engine.step_done(job, types_pb2.StepRecord(attempt=1, step=ABSURD))
    lines = decided(engine)
    assert [line.subject for line in lines] == ["jobs/a", "jobs/b"]
    assert f"names step {ABSURD} of 1000" in lines[0].message


def test_a_heartbeat_with_an_unknown_value_is_refused_with_one_event() -> None:
    """An agent of a later build reports a phase that this driver does not know."""
    engine = leading()
    link = Link("n1", Identity("i", devices=(Device(0, "cpu"),)), engine.clock.now_s())
    engine.links.add(link)
    engine.heartbeats.opened(link)
    for seq in range(1, 5):
        beat = link_pb2.Heartbeat(seq=seq, attempt=seq)
        beat.phase = 77  # type: ignore[assignment]
        engine.heartbeats.heard(link, arrived(beat), engine.clock.now_s())
    (line,) = decided(engine)
    assert line.subject == "nodes/n1" and "77" in line.message
    assert engine.presence.lane.last_beat_s("n1") > 0, "it is there all the same"
    good = link_pb2.Heartbeat(seq=5, phase=link_pb2.ATTEMPT_PHASE_IDLE)
    engine.heartbeats.heard(link, arrived(good), engine.clock.now_s())
    (entry,) = engine.requests.clear()
    assert isinstance(entry.event, NodeReport), "the next one that can be read counts"
