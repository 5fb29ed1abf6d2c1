"""Replicas in the driver's core: who gets which order, what a restart uses, what is reported."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.harness.desk import POLICY, Desk
from tests.harness.simulated_cluster import demo_job

from megascale.v1 import link_pb2, types_pb2
from megascale_driver.core.queue.explain import explanation
from megascale_driver.core.values.attempt import ReplicaSource
from megascale_driver.core.values.cluster import (
    AttemptPhase,
    CheckpointFailure,
    Progress,
    SealedSnapshot,
)
from megascale_driver.core.values.events import AttemptOpened, JobSubmitted, OpenAttempt
from megascale_driver.core.values.job import Job, JobPhase
from megascale_driver.journal import codec
from megascale_driver.nodes import orders
from megascale_driver.presence import reports
from megascale_driver.wire import messages as wire
from megascale_job.restore import RestorePlan, RestoreSource

PREPARED, RUNNING = AttemptPhase.PREPARED, AttemptPhase.RUNNING
RANKS = {"n1": range(4), "n2": range(4, 8)}
NO_RESTORE = RestorePlan()


def held(ranks: range, *steps: tuple[int, int]) -> tuple[SealedSnapshot, ...]:
    """Snapshots of (step, attempt)."""
    return tuple(
        SealedSnapshot(rank, attempt, step, "d") for rank in ranks for step, attempt in steps
    )


def begin(*nodes: str, replicas: int = 1) -> Desk:
    """Job a of eight ranks on n1 and n2, or however many of ``nodes`` it needs, not opened yet."""
    desk = Desk(*nodes)
    config = demo_job("a", spares=0)
    config = replace(config, checkpoint=replace(config.checkpoint, replicas=replicas))
    desk.feed(JobSubmitted(desk.now_s, config, "me"))
    prepare(desk)
    return desk


def prepare(desk: Desk) -> None:
    for slot in desk.job().slots:
        desk.report(slot.node, PREPARED, replica_endpoint=f"{slot.node}:3")


def opened(desk: Desk, plan: RestorePlan) -> None:
    desk.feed(AttemptOpened(desk.now_s, "a", desk.job().attempt, plan, "n1:2"))


def running(desk: Desk) -> None:
    opened(desk, NO_RESTORE)
    show(desk, "n1")
    show(desk, "n2")
    assert desk.job().phase is JobPhase.RUNNING


def show(
    desk: Desk,
    node: str,
    sealed: tuple[SealedSnapshot, ...] = (),
    replicas: tuple[SealedSnapshot, ...] = (),
    failure: CheckpointFailure | None = None,
    phase: AttemptPhase = RUNNING,
) -> None:
    progress = Progress("a", sealed, replicas=replicas, replica_failure=failure)
    desk.report(node, phase, progress=(progress,), replica_endpoint=f"{node}:3")


def test_each_node_gets_the_address_of_its_peer_with_start() -> None:
    desk = begin("n1", "n2")
    assert desk.state.nodes["n1"].desired.replicas.target == ""
    opened(desk, NO_RESTORE)
    assert dict(desk.job().current.replica_orders.peers) == {"n1": "n2", "n2": "n1"}
    message = orders.desired_state(desk.state.nodes["n1"], desk.job(), types_pb2.Epoch())
    assert message.assignment.replica_target == "n2:3"
    assert list(message.assignment.replica_sources) == []


def test_a_job_without_replicas_has_no_peers() -> None:
    desk = begin("n1", "n2", replicas=0)
    opened(desk, NO_RESTORE)
    assert desk.state.nodes["n1"].desired.replicas.target == ""
    assert not desk.job().current.replica_orders.peers


def lose_n2(desk: Desk) -> OpenAttempt:
    """n2 comes back without its memory; the next attempt has asked what to restore."""
    desk.hello("n2", boot=2)
    show_n1 = desk.state.nodes["n1"].report
    assert show_n1 is not None
    desk.report("n1", AttemptPhase.IDLE, progress=show_n1.progress, replica_endpoint="n1:3")
    desk.report("n2", AttemptPhase.IDLE, replica_endpoint="n2:4")
    desk.wait(1.0)
    assert desk.job().attempt == 2, desk.job().reason
    desk.report("n1", PREPARED, progress=show_n1.progress, replica_endpoint="n1:3")
    desk.report("n2", PREPARED, replica_endpoint="n2:4")
    asked = [effect for effect in desk.effects if isinstance(effect, OpenAttempt)]
    return asked[-1]


def test_a_lost_node_is_restored_from_its_peer() -> None:
    desk = begin("n1", "n2")
    running(desk)
    # n2 had sealed step 30, too, but only step 20 had reached its peer when it was lost.
    show(desk, "n1", held(RANKS["n1"], (20, 1), (30, 1)), held(RANKS["n2"], (10, 1), (20, 1)))
    asked = lose_n2(desk)
    assert (asked.sealed_step, asked.sealed_by_attempt) == (20, 1)
    opened(desk, RestorePlan(RestoreSource.MEMORY, 20, 1))
    sources = [ReplicaSource(rank, "n1", "n1:3") for rank in RANKS["n2"]]
    assert list(desk.job().current.replica_orders.sources) == sources
    assert desk.state.nodes["n1"].desired.replicas.sources == ()
    message = orders.desired_state(desk.state.nodes["n2"], desk.job(), types_pb2.Epoch())
    found = [(item.rank, item.endpoint) for item in message.assignment.replica_sources]
    assert found == [(rank, "n1:3") for rank in RANKS["n2"]]
    line = next(line for line in reversed(desk.audit) if line.reason == "ATTEMPT_OPENED")
    assert "restores step 20 from memory (rank 4, 5, 6, 7 from node n1)" in line.message


def test_a_restore_from_storage_reads_no_replica() -> None:
    desk = begin("n1", "n2")
    running(desk)
    show(desk, "n1", held(RANKS["n1"], (20, 1)), held(RANKS["n2"], (20, 1)))
    lose_n2(desk)
    opened(desk, RestorePlan(RestoreSource.STORAGE, 40, 1, "file:///m"))
    assert desk.job().current.replica_orders.sources == ()


@pytest.mark.parametrize(
    "kept",
    [
        (),
        held(range(4, 7), (20, 1)),
        held(RANKS["n2"], (10, 1)),
        held(RANKS["n2"], (20, 9)),
    ],
    ids=["none", "not of every rank", "of another step", "of an attempt that never was"],
)
def test_a_step_that_a_rank_has_nowhere_is_not_restored_from_memory(
    kept: tuple[SealedSnapshot, ...],
) -> None:
    desk = begin("n1", "n2")
    running(desk)
    show(desk, "n1", held(RANKS["n1"], (20, 1)), kept)
    assert lose_n2(desk).sealed_step == 0


def test_the_newest_step_with_all_replicas_is_in_the_status() -> None:
    desk = begin("n1", "n2")
    running(desk)

    def status() -> tuple[int, str]:
        job = wire.job_message(desk.job(), None, desk.now_s, desk.state.nodes)
        return job.replicated_step, job.replica_problem

    assert status() == (0, "")
    show(desk, "n1", replicas=held(RANKS["n2"], (10, 1), (20, 1)))
    assert status() == (0, "")
    show(desk, "n2", replicas=held(RANKS["n1"], (10, 1)))
    assert status() == (10, "")
    show(desk, "n2", failure=CheckpointFailure(1, 20, 5, "the peer is on fire"))
    assert status() == (0, "step 20 of rank 5 on n2: the peer is on fire")


def test_an_attempt_on_one_node_says_that_it_has_no_peer() -> None:
    desk = Desk("n1")
    config = demo_job("a", spares=0)
    config = replace(
        config,
        parallelism=replace(config.parallelism, dp=1, pp=1, tp=1),
        checkpoint=replace(config.checkpoint, replicas=1),
    )
    desk.feed(JobSubmitted(desk.now_s, config, "me"))
    prepare(desk)
    opened(desk, NO_RESTORE)
    job = wire.job_message(desk.job(), None, desk.now_s, desk.state.nodes)
    assert "one node" in job.replica_problem


def test_failed_copies_have_a_line_for_each_power_of_ten() -> None:
    desk = begin("n1", "n2")
    running(desk)
    for step in range(1, 121):
        for node, rank in (("n1", 0), ("n2", 4)):
            show(desk, node, failure=CheckpointFailure(1, step, rank, "overtaken"))
    found = [line.message for line in desk.audit if line.reason == "REPLICA_FAILED"]
    assert [line.rpartition("(")[2].split()[0] for line in found] == ["1", "10", "100"]
    assert "step 1 of rank 0 on n1 has no replica on n2: overtaken" in found[0]


def test_a_copy_that_fails_is_the_cause_until_one_succeeds() -> None:
    desk = begin("n1", "n2")
    running(desk)

    def explained() -> tuple[str, str]:
        log = [line for line in desk.audit if line.log == "a"]
        found = explanation(desk.state, "a", log, desk.now_s, POLICY)
        return found.cause.reason if found.cause is not None else "", found.sentence

    assert explained()[0] == ""
    show(desk, "n1", failure=CheckpointFailure(1, 20, 0, "the peer has no room"))
    cause, sentence = explained()
    assert cause == "REPLICA_FAILED"
    assert "have no replicas: step 20 of rank 0 on n1: the peer has no room" in sentence
    show(desk, "n1", replicas=held(RANKS["n2"], (30, 1)))
    assert explained()[0] == "" and "replicas" not in explained()[1]


def test_orders_outlive_the_driver() -> None:
    desk = begin("n1", "n2")
    running(desk)
    show(desk, "n1", held(RANKS["n1"], (20, 1)), held(RANKS["n2"], (20, 1)))
    lose_n2(desk)
    opened(desk, RestorePlan(RestoreSource.MEMORY, 20, 1))
    job = desk.job()
    stored = codec.load(Job, codec.dump(job), config=job.config, attempts=job.attempts)
    assert stored.current.replica_orders == job.current.replica_orders
    assert stored.current.replica_orders.targets == {"n1": "n2:4", "n2": "n1:3"}
    assert len(stored.current.replica_orders.sources) == 4


def test_a_heartbeat_carries_what_a_node_keeps() -> None:
    beat = link_pb2.Heartbeat()
    beat.checkpoint_daemon.replica_endpoint = "n1:3"
    progress = beat.checkpoints.add(job="a", replica_failures=3)
    progress.replicas.add(rank=4, attempt=1, step=20, layout_digest="d")
    progress.replica_failure.CopyFrom(
        link_pb2.CheckpointFailure(attempt=1, step=20, rank=0, error="overtaken")
    )
    report = reports.report(beat, types_pb2.Epoch())
    assert report.replica_endpoint == "n1:3"
    assert report.progress == (
        Progress(
            "a",
            replicas=held(range(4, 5), (20, 1)),
            replica_failure=CheckpointFailure(1, 20, 0, "overtaken"),
        ),
    )
