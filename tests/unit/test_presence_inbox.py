"""The events that wait for the core: order, what is never lost, and turns of jobs."""

from __future__ import annotations

from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st
from tests.harness.presence import arrived
from tests.harness.simulated_cluster import demo_job

from megascale.v1 import link_pb2, types_pb2
from megascale_common.service.clock import VirtualClock
from megascale_driver.core import machine
from megascale_driver.core.values.attempt import Attempt
from megascale_driver.core.values.cluster import Cluster, Device, Identity, Liveness
from megascale_driver.core.values.job import Job
from megascale_driver.core.values.policy import Policy
from megascale_driver.nodes.open_links import Link
from megascale_driver.presence.inbox import MAX_REPORTS, Inbox
from megascale_driver.shell.engine import Engine, Term
from megascale_driver.shell.requests import Requests


def test_what_is_about_one_node_keeps_its_order() -> None:
    inbox: Inbox[str] = Inbox()
    inbox.put("hello", "a")
    inbox.put_progress("sealed 1", "a", "job")
    inbox.put_report("failed", "a")
    inbox.put("reset", "a")
    inbox.put("hello again", "a")
    assert inbox.take(10) == ["hello", "sealed 1", "failed", "reset", "hello again"]


def test_progress_before_a_reset_is_not_lost() -> None:
    inbox: Inbox[str] = Inbox()
    inbox.put_progress("committed 8", "a", "job")
    inbox.put("reset", "a")
    assert inbox.take(10) == ["committed 8", "reset"]


def test_only_the_newest_progress_of_a_node_waits_and_a_report_has_all_of_it() -> None:
    inbox: Inbox[str] = Inbox()
    for number in range(5):
        inbox.put_progress(f"sealed {number}", "a", "job")
    assert (len(inbox), inbox.take(9)) == (1, ["sealed 4"])
    inbox.put_progress("sealed 5", "a", "job")
    inbox.put_report("failed, sealed 5", "a")
    assert inbox.take(9) == ["failed, sealed 5"]


def test_jobs_take_turns_and_progress_waits_for_no_end_of_the_rest() -> None:
    inbox: Inbox[str] = Inbox()
    for number in range(6):
        inbox.put_progress(f"big {number}", f"n{number}", "big")
    inbox.put_progress("small", "s", "small")
    for number in range(20):
        inbox.put(f"order {number}")
    first = inbox.take(8)
    assert first == [*(f"order {n}" for n in range(6)), "big 0", "small"]
    assert len(inbox.clear()) == 19 and len(inbox) == 0


def test_a_full_inbox_drops_the_newest_progress_and_nothing_else() -> None:
    inbox: Inbox[str] = Inbox(max_progress=2)
    assert [inbox.put_progress(f"p{n}", f"n{n}", "job") for n in range(4)] == [
        True,
        True,
        False,
        False,
    ]
    assert inbox.put_progress("p0 newer", "n0", "job"), "it takes the place of its own"
    inbox.put("hello", "n9")
    inbox.put_report("exit", "n3")
    assert inbox.dropped == 2
    assert sorted(inbox.clear()) == ["exit", "hello", "p0 newer", "p1"]


def test_a_node_that_floods_fills_only_its_own_places() -> None:
    inbox: Inbox[int] = Inbox()
    for number in range(1000):
        inbox.put_report(number, "a")
    assert inbox.take(100) == [*range(MAX_REPORTS - 1), 999]


@given(
    st.lists(st.tuples(st.sampled_from(["put", "report", "progress", "take"]), st.integers(0, 2)))
)
def test_no_order_and_no_newest_report_is_ever_lost(history: list[tuple[str, int]]) -> None:
    inbox: Inbox[tuple[str, int]] = Inbox()
    newest: dict[str, int] = {}
    seen: dict[str, int] = {}
    orders, taken = [], []

    def note(entries: list[tuple[str, int]]) -> None:
        for name, number in entries:
            if name == "order":
                taken.append(number)
            else:
                assert number > seen.get(name, -1), "an older report never follows a newer one"
                seen[name] = number

    for number, (what, which) in enumerate(history):
        name = f"n{which}"
        if what == "put":
            inbox.put(("order", number), name)
            orders.append(number)
        elif what == "take":
            note(inbox.take(2))
        else:
            newest[name] = number
            if what == "report":
                inbox.put_report((name, number), name)
            else:
                inbox.put_progress((name, number), name, f"job {which % 2}")
    note(inbox.clear())
    assert taken == orders and seen == newest


def test_a_hello_that_comes_while_the_core_is_busy_is_not_lost() -> None:
    """A node whose hello was dropped beats on and was declared DEAD."""
    clock = VirtualClock()
    engine = Engine(Policy(), clock, "token", "here")
    nothing = cast(Any, None)
    engine.term = Term(nothing, nothing, types_pb2.Epoch(create_revision=1), clock.now_s())
    engine.requests = Requests(max_progress=8)
    state = Cluster()

    def link(name: str) -> Link:
        found = Link(name, Identity(f"{name}-1", devices=(Device(0, "cpu"),)), clock.now_s())
        engine.links.add(found)
        engine.heartbeats.opened(found)
        return found

    def beat(to: Link, sealed: int) -> None:
        heartbeat = link_pb2.Heartbeat(
            seq=sealed, job="a", attempt=1, phase=link_pb2.ATTEMPT_PHASE_RUNNING
        )
        heartbeat.checkpoints.add(job="a").sealed.add(rank=0, attempt=1, step=sealed)
        engine.heartbeats.heard(to, arrived(heartbeat), clock.now_s())

    def decide() -> None:
        nonlocal state
        for entry in engine.requests.clear():
            state, _ = machine.step(state, entry.event, engine.policy)

    crowd = [link(f"n{number}") for number in range(20)]
    for each in crowd:
        beat(each, 1)
    decide()
    clock.advance(1.0)
    for each in crowd:  # etcd is slow: nothing is taken out
        beat(each, 2)
    assert engine.requests.dropped == 12
    late = link("late")
    beat(late, 1)
    decide()
    for second in range(90):
        clock.advance(1.0)
        for each in (*crowd, late):
            beat(each, 3 + second)
        engine.post(engine.steps.tick(clock.now_s(), blocked=False))
        decide()
    assert {node.liveness for node in state.nodes.values()} == {Liveness.ALIVE}
    # What was dropped came with a later heartbeat.
    reports = [node.report for node in state.nodes.values()]
    assert all(found is not None and found.progress[0].sealed[0].step > 2 for found in reports)


def test_the_end_of_an_attempt_brings_no_silence_of_a_loop_that_stood_still() -> None:
    """Only a tick at its time knows that it stood still; the end's report comes before it."""
    clock = VirtualClock()
    engine = Engine(Policy(), clock, "token", "here")
    nothing = cast(Any, None)
    engine.term = Term(nothing, nothing, types_pb2.Epoch(create_revision=1), clock.now_s())
    links = {}
    for name in ("a", "b"):
        links[name] = Link(name, Identity(f"{name}-1", devices=(Device(0, "cpu"),)), clock.now_s())
        engine.links.add(links[name])
        engine.heartbeats.opened(links[name])
    state = Cluster(jobs={"j": Job("j", demo_job("j", steps=9), current=Attempt(1))})
    engine.state = state
    clock.advance(6.0)  # the loop stands still; a heartbeat of b waits in its socket
    clock.advance(6.0)
    engine.step_done("j", types_pb2.StepRecord(attempt=1, step=1))
    failed = link_pb2.Heartbeat(seq=1, job="j", attempt=1, phase=link_pb2.ATTEMPT_PHASE_FAILED)
    engine.heartbeats.heard(links["a"], arrived(failed), clock.now_s())
    engine.post(engine.steps.tick(clock.now_s(), blocked=True))
    for entry in engine.requests.clear():
        state, _ = machine.step(state, entry.event, engine.policy)
    assert {node.liveness for node in state.nodes.values()} == {Liveness.ALIVE}
    assert state.jobs["j"].current.step == 1, "its steps come before its end"
