"""What many nodes report about an attempt costs a few steps each, and decides as a scan would."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.harness.waiting import CALL_TIMEOUT_S
from tests.unit.test_driver_orders import fleet

from megascale.v1 import link_pb2, types_pb2
from megascale_driver.core import draft, machine
from megascale_driver.core.jobs import jobs
from megascale_driver.core.queue import scheduling
from megascale_driver.core.recovery import recovery
from megascale_driver.core.values.attempt import Attempt, NodeSlot
from megascale_driver.core.values.cluster import (
    AttemptPhase,
    Cluster,
    Device,
    Disposition,
    Identity,
    Liveness,
    Progress,
    Report,
)
from megascale_driver.core.values.events import (
    CancelRequested,
    JobSubmitted,
    LeaderStarted,
    NodeHello,
    NodeReport,
    Tick,
)
from megascale_driver.core.values.job import JobPhase
from megascale_driver.core.values.overlay import Working
from megascale_driver.core.values.policy import Policy
from megascale_driver.nodes.open_links import Link, OpenLinks
from megascale_driver.nodes.orders import AT_ONCE, OrderSender
from megascale_driver.placement.queue import decide

NODES = 384
STEPS_PER_REPORT = 4  # a scan per report takes NODES / 2


@given(
    st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.booleans()), max_size=60),
    st.integers(0, 6),
)
def test_the_answer_is_that_of_a_scan_whatever_was_asked_before(
    changes: list[tuple[int, bool, bool]], count: int
) -> None:
    attempt = Attempt(1, tuple(NodeSlot(f"n{at}", (at,), (0,)) for at in range(count)))
    ready = {slot.node: False for slot in attempt.slots}
    for at, value, copied in changes:
        if at < count:
            ready[f"n{at}"] = value
        if copied:  # another state of the same attempt, which shares what it remembers
            attempt = replace(attempt, step=attempt.step + 1)
        assert attempt.all_slots(lambda slot: ready[slot.node]) == all(ready.values())


@pytest.fixture(name="looked_at")
def looked_at_(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many slots were looked at, so far."""
    count = [0]
    original_phase, original_stopped = jobs._report_phase, jobs._stopped

    def phase(*arguments: object) -> object:
        count[0] += 1
        return original_phase(*arguments)  # type: ignore[arg-type]

    def stopped(*arguments: object) -> bool:
        count[0] += 1
        return original_stopped(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(jobs, "_report_phase", phase)
    monkeypatch.setattr(jobs, "_stopped", stopped)
    yield count


def reported(state: Cluster, phase: AttemptPhase, now_s: float) -> Cluster:
    """The state after all nodes have reported this phase, in an order that is not the slots'."""
    for name in sorted(state.nodes, key=lambda name: name[::-1]):
        report = Report(2, "a", 3, phase)
        if phase is AttemptPhase.IDLE:
            report = Report(state.nodes[name].desired_version)
        state, _ = machine.step(state, NodeReport(now_s, name, "i", report), Policy())
    return state


def test_an_attempt_that_starts_runs_and_stops_on_many_nodes_is_linear(
    looked_at: list[int],
) -> None:
    state = fleet(NODES)
    job = replace(state.jobs["a"], phase=JobPhase.STARTING, timer_s=1000.0)
    nodes = {
        name: replace(node, liveness=Liveness.ALIVE, connected=True)
        for name, node in state.nodes.items()
    }
    state = Cluster(nodes=nodes, jobs={"a": job})
    for phase in (AttemptPhase.PREPARED, AttemptPhase.RUNNING):
        state = reported(state, phase, 1001.0)
    assert state.jobs["a"].phase is JobPhase.RUNNING
    stopping = replace(state.jobs["a"], phase=JobPhase.STOPPING, timer_s=1002.0)
    state = reported(replace(state, jobs={"a": stopping}), AttemptPhase.IDLE, 1003.0)
    assert state.jobs["a"].phase is not JobPhase.STOPPING
    assert looked_at[0] < 3 * NODES * STEPS_PER_REPORT, looked_at


def linked(names: list[str], state: Cluster, now_s: float, policy: Policy) -> Cluster:
    """The state after these nodes have linked and reported that they are idle, one by one."""
    for name in names:
        hello = NodeHello(now_s, name, Identity("i", devices=(Device(0, "cpu"),)))
        state, _ = machine.step(state, hello, policy)
        state, _ = machine.step(state, NodeReport(now_s, name, "i", Report()), policy)
    return state


def test_a_job_that_waits_is_not_decided_anew_for_every_node_that_links(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decided = [0]

    def counted(*arguments: object) -> object:
        decided[0] += 1
        return decide(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(scheduling, "decide", counted)
    policy = Policy()
    names = [f"n{at:04d}" for at in range(600)]
    state = linked(names[:300], Cluster(), 1000.0, policy)
    config = fleet(600).jobs["a"].config
    state, _ = machine.step(state, JobSubmitted(1001.0, config, "test"), policy)
    assert decided[0] == 1, "a new job is decided at once"
    state = linked(names[300:], state, 1001.01, policy)
    assert decided[0] <= 2, "300 nodes linked within one pause"
    state, _ = machine.step(state, Tick(1002.0), policy)
    assert decided[0] <= 3 and state.jobs["a"].phase is JobPhase.QUEUED
    before = decided[0]
    state, _ = machine.step(state, CancelRequested(1002.01, "a", "why", "test"), policy)
    state, _ = machine.step(state, JobSubmitted(1002.02, replace(config, name="b"), "t"), policy)
    assert decided[0] == before + 1, "within the pause a new job is still decided at once"


def test_a_fleet_that_is_still_linking_to_a_new_leader_is_given_time() -> None:
    policy = Policy()
    state = fleet(600)
    state, _ = machine.step(state, LeaderStarted(1000.0, "here"), policy)
    assert state.grace_until_s == 1000.0 + policy.leader_grace_s
    names = list(state.nodes)
    for second in range(100):
        hello = NodeHello(1000.0 + second, names[second], Identity("i"))
        state, _ = machine.step(state, hello, policy)
    assert state.grace_until_s == 1000.0 + policy.leader_grace_max_s, "not for ever"
    again = fleet(600)
    again, _ = machine.step(again, LeaderStarted(1000.0, "here"), policy)
    for second in range(1, 20):
        hello = NodeHello(1000.0 + second, names[0], Identity("i"))
        again, _ = machine.step(again, hello, policy)
    assert again.grace_until_s == 1000.0 + policy.leader_grace_s, "one node that flaps extends none"


async def test_orders_to_many_nodes_leave_turns_to_other_tasks() -> None:
    state = fleet(400)
    links = OpenLinks()
    sent: list[str] = []

    async def gone(message: object) -> None:
        sent.append("order")

    for name in state.nodes:
        link = Link(name, Identity("i"), 0.0, gone, 2)
        links.add(link)
        await link.greet(link_pb2.ConnectResponse())
    sent.clear()
    sender = OrderSender(links)
    task = asyncio.create_task(sender.run(types_pb2.Epoch(), lambda: state))
    sender.add([*state.nodes, "unknown"])
    sender.add(state.nodes)
    most, before = 0, 0
    async with asyncio.timeout(CALL_TIMEOUT_S):
        while len(sent) < len(state.nodes):
            await asyncio.sleep(0)
            most, before = max(most, len(sent) - before), len(sent)
    task.cancel()
    assert most <= 2 * AT_ONCE, "a few at a time"
    await asyncio.sleep(0)
    assert len(sent) == len(state.nodes), "each once, though ordered twice"


def running(count: int) -> Cluster:
    """A job that runs on so many nodes."""
    state = fleet(count)
    report = Report(2, "a", 3, AttemptPhase.RUNNING)
    nodes = {
        name: replace(node, liveness=Liveness.ALIVE, connected=True, report=report)
        for name, node in state.nodes.items()
    }
    job = replace(state.jobs["a"], phase=JobPhase.RUNNING, timer_s=1000.0)
    return Cluster(nodes=nodes, jobs={"a": job})


def test_a_tick_looks_only_at_nodes_that_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = [0]
    original = recovery._fault_of

    def counted(*arguments: object) -> object:
        looked[0] += 1
        return original(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(recovery, "_fault_of", counted)
    state, now_s = running(NODES), 1001.0
    names = list(state.nodes)
    for beat in range(400):  # more than a layer of nodes: their map gets new bases meanwhile
        now_s += 0.25
        name = names[beat % NODES]
        known = state.nodes[name].report
        assert known is not None
        progress = (Progress("a", committed_step=beat + 1, committed_by_attempt=3),)
        report = NodeReport(now_s, name, "i", replace(known, progress=progress))
        state, _ = machine.step(state, report, Policy())
        state, _ = machine.step(state, Tick(now_s), Policy())
    assert looked[0] < 2 * NODES + 3 * 400, "all once, then what has changed"


@given(st.lists(st.tuples(st.sampled_from("fdq."), st.integers(0, 5)), max_size=30))
def test_what_a_tick_finds_does_not_depend_on_what_was_found_sound(
    history: list[tuple[str, int]],
) -> None:
    state = running(6)
    names = list(state.nodes)
    for what, at in history:
        node = state.nodes[names[at]]
        if what == "f":
            node = replace(node, report=Report(2, "a", 3, AttemptPhase.FAILED, failure="why"))
        elif what == "d":
            node = replace(node, liveness=Liveness.DEAD)
        elif what == "q":
            node = replace(node, disposition=Disposition.QUARANTINED)
        nodes = Working(state.nodes)
        nodes[names[at]] = node
        state = replace(state, nodes=nodes.frozen())
        job = state.jobs["a"]
        # Another tuple of the same slots remembers nothing.
        unaware = replace(job, current=replace(job.current, slots=tuple(list(job.slots))))
        event = Tick(1001.0)
        expected = machine.step(replace(state, jobs={"a": unaware}), event, Policy())
        found = machine.step(state, event, Policy())
        assert found[0].jobs["a"] == expected[0].jobs["a"] and found[1] == expected[1]
        if what == ".":
            state = found[0]


def test_orders_to_all_nodes_of_a_job_go_through_the_jobs_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state, asked = running(NODES), [0]
    original = draft.Draft.holder_of
    event = CancelRequested(1001.0, "a", "enough", "me")

    def counted(self: draft.Draft, node: str) -> object:
        asked[0] += 1
        return original(self, node)

    monkeypatch.setattr(draft.Draft, "holder_of", counted)
    found = machine.step(state, event, Policy())
    assert asked[0] < draft.MANY, "not once for each node"
    assert len(found[1].commanded) == NODES
    monkeypatch.setattr(draft, "MANY", NODES)
    assert machine.step(state, event, Policy()) == found, "as if they were asked one by one"
    assert asked[0] >= NODES
