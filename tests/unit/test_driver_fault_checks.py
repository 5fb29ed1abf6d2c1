"""Checks that follow from what broke an attempt, and nodes that fail a comparison repeatedly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
from tests.harness.desk import POLICY, Desk, exited
from tests.harness.kernel_lines import gpu_falls_off, logs
from tests.harness.presence import arrived

from megascale.v1 import link_pb2, types_pb2
from megascale_common.service.clock import VirtualClock
from megascale_driver.core.faults.job_faults import CHECKS, CHECKS_EXTRA_S
from megascale_driver.core.values.cluster import (
    MAX_SLOW,
    AttemptPhase,
    Check,
    Identity,
    Node,
    SlowCheck,
)
from megascale_driver.core.values.events import (
    Audit,
    CheckCompared,
    NodeReport,
    PolicyRequested,
    UncordonRequested,
)
from megascale_driver.core.values.job import JobPhase
from megascale_driver.core.values.policy import Policy
from megascale_driver.journal import codec
from megascale_driver.nodes.node_calls import NodeCalls
from megascale_driver.nodes.open_links import Link
from megascale_driver.nodes.orders import desired_state
from megascale_driver.presence import reports
from megascale_driver.shell.engine import Engine, Term
from megascale_executor.agent.checks.diagnosis import FAULT_CHECKS_S
from megascale_executor.diagnostics.registry import load_registry

RETRY = (
    "NCCL WARN NET/IB: Got completion from peer 10.0.0.2<1> with status=12 opcode=129 len=1 "
    "vendor err 129 (Recv)"
)
LINES = {
    RETRY: "communication",
    "RuntimeError: found NaN in local grad norm": "numeric",
    "OSError: [Errno 116] Stale file handle": "storage",
    "RuntimeError: CUDA error: an illegal memory access was encountered": "device",
    "ValueError: a bug": "",
    "RuntimeError: CUDA out of memory. Tried to allocate 2 GiB": "",
}


def running(*nodes: str) -> Desk:
    desk = Desk(*nodes)
    desk.submit(max_restarts_without_progress=50)
    desk.run()
    return desk


def ended(desk: Desk, line: str) -> None:
    first = desk.job().slots[0]
    desk.fail(first.node, exited(first.ranks[0], desk.now_s, 1, error=line))
    for slot in desk.job().slots:
        seen = logs(line, rank=slot.ranks[0]) if slot is first or slot.node == first.node else ()
        desk.report(slot.node, AttemptPhase.IDLE, logs_of=("a", desk.job().attempt), logs=seen)


def test_every_check_of_the_table_is_one_of_the_agents() -> None:
    there = set(load_registry().names)
    assert {name for names in CHECKS.values() for name in names} <= there
    assert CHECKS_EXTRA_S > FAULT_CHECKS_S


@pytest.mark.parametrize(("line", "cause"), LINES.items())
def test_the_next_attempt_begins_with_the_checks_of_the_cause(line: str, cause: str) -> None:
    desk = running("n1", "n2", "n3")
    ended(desk, line)
    wanted = CHECKS[cause] if cause else ()  # type: ignore[index]
    assert desk.job().phase is JobPhase.PREPARING and desk.job().current.checks == wanted
    node = desk.state.nodes[desk.job().slots[1].node]
    order = desired_state(node, desk.job(), types_pb2.Epoch())
    assert tuple(order.assignment.checks) == wanted
    desk.run()
    node = desk.state.nodes[node.name]
    assert not desired_state(node, desk.job(), types_pb2.Epoch()).assignment.checks
    ended(desk, "ValueError: another")
    assert desk.job().current.checks == (), "only what broke the last attempt counts"


def test_a_lost_gpu_has_the_devices_of_the_others_checked() -> None:
    desk = running("n1", "n2", "n3")
    bad = desk.job().slots[0].node
    gpu_falls_off(desk, bad)
    for slot in desk.job().slots:
        desk.report(slot.node, AttemptPhase.IDLE)
    assert desk.job().current.checks == CHECKS["device"]


def test_an_attempt_with_more_checks_may_prepare_for_longer() -> None:
    desk = running("n1", "n2")
    ended(desk, RETRY)
    assert desk.job().attempt == 2

    def beat(seconds: float) -> None:
        for _ in range(int(seconds / 4)):
            desk.wait(4.0)
            for slot in desk.job().slots:
                if desk.job().phase is JobPhase.PREPARING:
                    desk.report(slot.node, AttemptPhase.PREPARING)

    beat(POLICY.prepare_timeout_s + 20.0)
    assert desk.job().phase is JobPhase.PREPARING
    beat(CHECKS_EXTRA_S)
    assert desk.job().phase is not JobPhase.PREPARING or desk.job().attempt > 2


def slow(desk: Desk, node: str, *, failed: bool = True, origin: str = "") -> None:
    detail = "cuda:3: 80% of the fleet figure"
    desk.feed(CheckCompared(desk.now_s, node, "gemm", "cuda:3", failed, detail, origin))


def repeated(desk: Desk, node: str) -> None:
    slow(desk, node)
    slow(desk, node)


def lines_of(desk: Desk) -> list[Audit]:
    return [one for one in desk.audit if one.reason == "CHECK_REPEATED"]


def test_a_node_that_fails_a_comparison_twice_is_observed_until_the_rule_is_enforced() -> None:
    desk = running("n1", "n2", "n3")
    for name in ("nobody", "n3"):
        slow(desk, name)
        assert lines_of(desk) == []
        slow(desk, name)
    (line,) = lines_of(desk)
    assert (line.subject, line.mode, line.policy) == ("nodes/n3", "OBSERVE", "repeated-check")
    assert "cuda:3: 80%" in line.message and desk.disposition("n3") == "SCHEDULABLE"
    desk.feed(PolicyRequested(desk.now_s, "repeated-check", "ENFORCE", "a test", "me"))
    slow(desk, "n3")
    assert desk.disposition("n3") == "QUARANTINED"
    (line,) = [one for one in desk.audit if one.reason == "NODE_EVICTED"]
    assert line.policy == "repeated-check" and "3 times in a row" in line.message


def test_how_often_a_target_was_slow_in_a_row_outlives_the_leader() -> None:
    desk = running("n1", "n2", "n3")
    slow(desk, "n3")
    stored = codec.dump(desk.state.nodes["n3"])
    node = codec.load(Node, stored)
    assert node.slow_checks == (SlowCheck("gemm", "cuda:3", 1, ""),)
    desk.state = replace(desk.state, nodes={**desk.state.nodes, "n3": node})
    slow(desk, "n3")
    assert len(lines_of(desk)) == 1


def test_a_good_result_or_an_uncordon_begins_the_count_anew() -> None:
    desk = running("n1", "n2", "n3")
    slow(desk, "n3")
    slow(desk, "n3", failed=False)
    slow(desk, "n3")
    assert lines_of(desk) == [] and desk.state.nodes["n3"].slow_checks[0].times == 1
    desk.feed(UncordonRequested(desk.now_s, "n3", "repaired", "me"))
    slow(desk, "n3")
    assert lines_of(desk) == []


def test_one_measurement_of_an_attempt_counts_once_under_two_leaders() -> None:
    desk = running("n1", "n2", "n3")
    for _ in range(3):
        slow(desk, "n3", origin="a/2")
    assert lines_of(desk) == []
    slow(desk, "n3", origin="a/3")
    assert len(lines_of(desk)) == 1


def test_a_node_keeps_a_bounded_number_of_slow_targets() -> None:
    desk = running("n1", "n2", "n3")
    for number in range(3 * MAX_SLOW):
        desk.feed(CheckCompared(desk.now_s, "n3", "gemm", f"cuda:{number}", True, "slow", ""))
    assert len(desk.state.nodes["n3"].slow_checks) == MAX_SLOW


def test_what_checks_after_a_fault_measured_is_compared_with_the_fleet() -> None:
    desk = running("n1", "n2", "n3")
    ended(desk, "RuntimeError: CUDA error: an illegal memory access was encountered")
    calls = NodeCalls("token", VirtualClock())
    events: list[CheckCompared] = []
    calls.compared = events.append
    for number in range(8):
        said = link_pb2.MeasuredFigure(check="memory_bandwidth", unit="GB/s", value=700 + number)
        calls.learn(f"other{number}", Identity("i"), [said])
    name = desk.job().slots[0].node
    beat = link_pb2.Heartbeat(
        checks=[
            types_pb2.CheckResult(
                name=check, target="cpu:0", verdict=types_pb2.CHECK_VERDICT_PASS,
                value=350.0, unit="GB/s",
            )
            for check in ("memory_bandwidth", "all_reduce")
        ]
    )  # fmt: skip

    def seen(job: str = "a") -> tuple[Check, ...]:
        report = reports.report(beat, types_pb2.Epoch())
        told = replace(report, job=job, attempt=desk.job().attempt, phase=AttemptPhase.PREPARED)
        event = NodeReport(desk.now_s, name, "i", told)
        return calls.compared_with_fleet(event, lambda: beat, desk.state).report.checks

    bandwidth, other = seen()
    assert bandwidth.verdict == "DEGRADED", "one result alone condemns no node"
    assert "50% of the fleet figure" in bandwidth.detail and "condemns no node" in bandwidth.detail
    assert (other.verdict, other.detail) == ("PASS", ""), "no check of the fault's cause"
    (event,) = events
    assert (event.node, event.check, event.failed) == (name, "memory_bandwidth", True)
    assert event.origin == f"a/{desk.job().attempt}"
    assert seen() == (bandwidth, other) and len(events) == 1, "repeated by each heartbeat"
    assert seen(job="gone")[0].verdict == "PASS"
    desk.feed(event)
    assert desk.state.nodes[name].slow_checks[0].times == 1


def test_the_breaker_bounds_what_comparisons_evict() -> None:
    names = [f"n{number}" for number in range(8)]
    desk = running(*names)
    desk.feed(PolicyRequested(desk.now_s, "repeated-check", "ENFORCE", "a test", "me"))
    for name in names:
        repeated(desk, name)
    gone = [name for name in names if desk.disposition(name) == "QUARANTINED"]
    assert len(gone) == POLICY.breaker_nodes
    assert [one for one in desk.audit if one.reason == "BREAKER_TRIPPED"]


def test_the_engine_has_each_report_of_such_checks_compared() -> None:
    desk = running("n1", "n2", "n3")
    ended(desk, "RuntimeError: CUDA error: an illegal memory access was encountered")
    clock = VirtualClock()
    engine = Engine(Policy(), clock, "token", "here")
    nothing = cast(Any, None)
    engine.term = Term(nothing, nothing, types_pb2.Epoch(create_revision=1), clock.now_s())
    engine.state = desk.state
    for number in range(8):
        said = link_pb2.MeasuredFigure(check="memory_bandwidth", unit="GB/s", value=700 + number)
        engine.node_calls.learn(f"other{number}", Identity("i"), [said])
    name = desk.job().slots[0].node
    link = Link(name, Identity("i"), clock.now_s())
    engine.links.add(link)
    engine.heartbeats.opened(link)
    beat = link_pb2.Heartbeat(
        seq=1, job="a", attempt=desk.job().attempt, phase=link_pb2.ATTEMPT_PHASE_PREPARED
    )
    beat.checks.add(
        name="memory_bandwidth", target="cpu:0", unit="GB/s", value=350.0,
        verdict=types_pb2.CHECK_VERDICT_PASS,
    )  # fmt: skip
    engine.heartbeats.heard(link, arrived(beat), clock.now_s())
    events = [entry.event for entry in engine.requests.clear()]
    (compared,) = [each for each in events if isinstance(each, CheckCompared)]
    assert compared.failed and compared.node == name
    (report,) = [each.report for each in events if isinstance(each, NodeReport)]
    assert [each.verdict for each in report.checks] == ["DEGRADED"]
