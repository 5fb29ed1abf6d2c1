"""What logs report, in the core: the root is named, and evicts only where it is about a machine."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.harness.desk import POLICY, Desk, exited
from tests.harness.kernel_lines import OFF_BUS, logs

from megascale.v1 import driver_pb2, link_pb2, types_pb2
from megascale_driver.analysis.logs.correlation import Observation
from megascale_driver.core.queue.explain import explanation
from megascale_driver.core.values.cluster import AttemptPhase
from megascale_driver.core.values.events import Audit, PolicyRequested
from megascale_driver.core.values.job import JobPhase
from megascale_driver.presence import reports
from megascale_driver.wire import messages as wire

ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 22.00 MiB."
TIMEOUT = (
    "[E ProcessGroupNCCL.cpp:737] [Rank 1] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=9, OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 1802212 milliseconds"
)
CLOSED = "NCCL WARN socketProgress: Connection closed by remote peer node2<42830>"


def desk_of(*nodes: str) -> Desk:
    desk = Desk(*nodes)
    desk.submit(max_restarts_without_progress=50)
    desk.run()
    return desk


def fail(desk: Desk, error: str, found: dict[str, tuple[Observation, ...]]) -> None:
    """The attempt fails by its first rank; then all its nodes report idle, with their logs."""
    job, slots = desk.job(), desk.job().slots
    desk.fail(slots[0].node, exited(slots[0].ranks[0], desk.now_s, 1, error=error))
    for slot in slots:
        seen = found.get(slot.node, ())
        of = (job.name, job.attempt)
        desk.report(slot.node, AttemptPhase.IDLE, logs_of=of, logs=seen)


def written(desk: Desk) -> list[Audit]:
    return [line for line in desk.audit if line.reason == "LOG_ROOT_FOUND"]


def test_a_fatal_fault_in_a_kernel_log_quarantines_its_node_and_no_other() -> None:
    desk = desk_of("n1", "n2", "n3")
    good, bad = (slot.node for slot in desk.job().slots)
    found = {good: logs(TIMEOUT, CLOSED, CLOSED, rank=0), bad: logs(OFF_BUS, at_s=1030.0)}
    fail(desk, f"RuntimeError: {CLOSED}", found)
    (line,) = written(desk)
    assert (line.subject, line.policy, line.mode) == (f"nodes/{bad}", "kernel-log", "ENFORCE")
    assert f"the kernel log of node {bad}" in line.message and OFF_BUS in line.message
    assert "3 other lines are set aside" in line.message
    assert (desk.disposition(bad), desk.disposition(good)) == ("QUARANTINED", "SCHEDULABLE")
    assert desk.job().evicted == (bad,)
    assert bad not in {slot.node for slot in desk.job().slots}


def test_text_of_a_worker_is_observed_until_an_operator_has_it_enforced() -> None:
    for mode, evicted in (("OBSERVE", 0), ("ENFORCE", 1)):
        desk = desk_of("n1", "n2", "n3")
        if mode == "ENFORCE":
            desk.feed(PolicyRequested(desk.now_s, "log-root", mode, "a test", "me"))
        bad = desk.job().slots[1]
        fail(desk, CLOSED, {bad.node: logs(ECC, rank=bad.ranks[0])})
        (line,) = written(desk)
        assert (line.policy, line.mode) == ("log-root", mode)
        assert len(desk.job().evicted) == evicted
        assert desk.disposition(bad.node) == "SCHEDULABLE"  # other jobs may still use it


@pytest.mark.parametrize("line", [OFF_BUS, ECC, OOM])
def test_one_root_on_two_nodes_is_software_and_evicts_nobody(line: str) -> None:
    desk = desk_of("n1", "n2", "n3")
    desk.feed(PolicyRequested(desk.now_s, "log-root", "ENFORCE", "a test", "me"))
    rank = -1 if line is OFF_BUS else 0
    fail(desk, "ValueError: a", {slot.node: logs(line, rank=rank) for slot in desk.job().slots})
    assert "no node is evicted for it" in written(desk)[0].outcome
    assert desk.reasons().count("SOFTWARE_SUSPECTED") == 1
    assert desk.job().evicted == () and desk.job().node_failures == {}
    assert {desk.disposition(name) for name in desk.state.nodes} == {"SCHEDULABLE"}


def test_one_root_on_another_node_in_the_next_attempt_is_software() -> None:
    desk = desk_of("n1", "n2", "n3", "n4")
    first, second = (slot.node for slot in desk.job().slots)
    fail(desk, "ValueError: a", {first: logs(OFF_BUS)})
    assert desk.job().evicted == (first,)
    desk.wait(5.0)
    desk.run()
    assert second in {slot.node for slot in desk.job().slots}
    fail(desk, "ValueError: a", {second: logs(OFF_BUS)})
    assert desk.job().evicted == (first,) and desk.disposition(second) == "SCHEDULABLE"
    assert "SOFTWARE_SUSPECTED" in desk.reasons()


def test_executors_of_one_machine_that_share_its_kernel_log_are_not_two_machines() -> None:
    desk = desk_of("n1", "n2", "n3")
    for slot in desk.job().slots:
        node = desk.state.nodes[slot.node]
        node = replace(node, identity=replace(node.identity, boot_id="one"))
        desk.state = replace(desk.state, nodes={**desk.state.nodes, slot.node: node})
    bad = [slot.node for slot in desk.job().slots]
    fail(desk, "ValueError: a", {name: logs(OFF_BUS) for name in bad})
    assert sorted(desk.job().evicted) == sorted(bad)


@pytest.mark.parametrize("error", [TIMEOUT, CLOSED])
def test_a_timeout_or_a_closed_connection_alone_never_evicts(error: str) -> None:
    desk = desk_of("n1", "n2", "n3")
    for _ in range(POLICY.node_failures + 2):
        first = desk.job().slots[0]
        fail(desk, error, {first.node: logs(error, rank=first.ranks[0])})
        while desk.job().phase is JobPhase.QUEUED:  # the back-off, in heartbeats
            desk.wait(4.0)
            for name in desk.state.nodes:
                if desk.state.holder_of(name) is None:
                    desk.report(name, AttemptPhase.IDLE)
        desk.run()
    assert desk.job().phase is JobPhase.RUNNING
    assert desk.job().evicted == () and desk.job().node_failures == {}


def test_the_explanation_has_the_root_in_words_and_in_fields() -> None:
    desk = desk_of("n1", "n2", "n3")
    first, second = desk.job().slots
    found = {first.node: logs(CLOSED, rank=0), second.node: logs(ECC, rank=second.ranks[0])}
    fail(desk, CLOSED, found)
    log = [line for line in desk.audit if line.log == "a"]
    told = explanation(desk.state, "a", log, desk.now_s, POLICY)
    assert "what the logs say" in told.text and ECC in told.text
    root = wire.explanation_message(told, types_pb2.Epoch()).log_root
    assert root == driver_pb2.LogRoot(
        attempt=1, node=second.node, rank=second.ranks[0], category="gpu_ecc_uncorrectable",
        action="evict_restart", line=ECC, nodes=[second.node], set_aside=1,
    )  # fmt: skip


def test_what_another_build_reports_is_taken_in_and_evicts_nobody() -> None:
    beat = link_pb2.Heartbeat(logs_job="a", logs_attempt=2)
    beat.logs.add(signature="new", category="gpu_on_fire", role="origin", action="evict_restart")
    beat.logs.add(signature="x", category="collective_timeout", action="evict_restart", role="root")
    beat.logs[0].first_at.seconds = 100
    report = reports.report(beat, types_pb2.Epoch(), clock_offset_s=5.0)
    new, timeout = report.logs
    assert report.logs_of == ("a", 2) and new.at == 105.0
    kinds = [(one.finding.kind.category, one.finding.kind.action) for one in (new, timeout)]
    assert kinds == [("unknown", "restart"), ("collective_timeout", "restart")]
