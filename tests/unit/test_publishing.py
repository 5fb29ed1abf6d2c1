"""What a large decision lets out, and what a new leader takes over, leaves turns to other tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, cast

import pytest
from tests.harness.fake_etcd import Connection, FakeEtcd, FakeEtcdClient
from tests.harness.journal import all_failed, nodes, placed
from tests.harness.presence import arrived
from tests.harness.simulated_cluster import demo_job
from tests.harness.waiting import CALL_TIMEOUT_S

from megascale.v1 import link_pb2, types_pb2
from megascale_common.etcd.election import campaign
from megascale_common.service.clock import SystemClock, VirtualClock
from megascale_driver.core.values.cluster import Cluster, Device, Identity
from megascale_driver.core.values.events import Audit, LeaderStarted, NodeHello, NodeReport
from megascale_driver.core.values.job import Job, JobPhase
from megascale_driver.core.values.policy import Policy
from megascale_driver.journal import pieces
from megascale_driver.journal.fenced import MAX_CHANGES
from megascale_driver.journal.store import LEADER_KEY, Loaded, Store
from megascale_driver.nodes.open_links import Link
from megascale_driver.shell import decisions
from megascale_driver.shell.decisions import JOBS_AT_ONCE, LINES_AT_ONCE, Publisher
from megascale_driver.shell.engine import Engine, Term
from megascale_driver.shell.heartbeats import LINKS_AT_ONCE

EPOCH = types_pb2.Epoch(create_revision=1)
LINES = 5 * LINES_AT_ONCE + 3


def line(log: str, seq: int) -> Audit:
    return Audit(log, seq, 1e9, "driver", f"nodes/n{seq}", "NODE_DEAD", "x")


async def most_in_a_turn(work: Awaitable[Any], count: Callable[[], int]) -> int:
    """By how much ``count`` grows at most between two turns of another task, until all is done."""
    task = asyncio.ensure_future(work)
    most, before = 0, count()
    async with asyncio.timeout(CALL_TIMEOUT_S):
        while not task.done():
            await asyncio.sleep(0)
            most, before = max(most, count() - before), count()
    await task
    return most


class Watching:
    """An observer that counts changes of phase."""

    def __init__(self) -> None:
        self.lines: list[Audit] = []
        self.moves: list[tuple[str, str]] = []

    def step(self, job: str, record: types_pb2.StepRecord) -> None:
        """None in these tests."""

    def committed(self, old: Cluster, new: Cluster, audit: tuple[Audit, ...]) -> None:
        self.lines += audit
        self.moves += [
            (old.jobs[name].phase, job.phase)
            for name, job in new.jobs.items()
            if old.jobs[name].phase is not job.phase
        ]


async def test_the_lines_of_a_mass_event_go_out_a_few_at_a_time_in_order() -> None:
    publisher, watching = Publisher(SystemClock()), Watching()
    publisher.observers.append(watching)
    job = replace(Job("a", demo_job("a")), phase=JobPhase.RUNNING)
    old = Cluster(jobs={"a": job})
    new = Cluster(jobs={"a": replace(job, phase=JobPhase.STOPPING)})
    audit = tuple(line("a", seq) for seq in range(1, LINES + 1))
    most = await most_in_a_turn(
        publisher.committed(old, new, audit, EPOCH), lambda: len(list(publisher.audit))
    )
    assert 0 < most <= LINES_AT_ONCE
    assert tuple(publisher.audit) == tuple(watching.lines) == audit
    assert watching.moves == [(JobPhase.RUNNING, JobPhase.STOPPING)], "it has moved once"
    updates = list(publisher.feeds.of("a")._updates)
    assert [update.event.seq for update in updates[:-1]] == list(range(1, LINES + 1))
    assert updates[-1].job.phase == types_pb2.JOB_PHASE_STOPPING, "the job follows its lines"


async def test_a_new_leader_takes_over_logs_and_jobs_a_few_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    publisher = Publisher(SystemClock())
    jobs = {f"j{number}": Job(f"j{number}", demo_job("a")) for number in range(5 * JOBS_AT_ONCE)}
    known, sent = publisher.feeds.of("j3"), [0]
    known.add_step(types_pb2.StepRecord(attempt=2, step=7))
    message = decisions.wire.job_message

    def counted(*arguments: Any) -> Any:
        sent[0] += 1
        return message(*arguments)

    monkeypatch.setattr(decisions.wire, "job_message", counted)
    audit = tuple(line("j0", seq) for seq in range(1, LINES + 1))
    loaded = Loaded(Cluster(jobs=jobs), audit, 1)
    events = publisher.feeds.of("j0")._updates
    adopted = asyncio.ensure_future(publisher.adopt(loaded, EPOCH))
    most = await most_in_a_turn(adopted, lambda: max(len(events), sent[0] * 4))
    assert most <= LINES_AT_ONCE == 4 * JOBS_AT_ONCE
    assert adopted.result() == [("j3", 2, 7)], "a step that no former leader has stored"
    assert tuple(publisher.audit) == audit and sent[0] == len(jobs)


async def test_links_that_stayed_are_introduced_with_what_they_said_last_a_few_at_a_time() -> None:
    """A driver that leads again has ten thousand open links, whose heartbeats it reads anew."""
    clock = VirtualClock()
    engine = Engine(Policy(), clock, "token", "here")
    count, read = 4 * LINKS_AT_ONCE, [0]
    for number in range(count):
        who = Identity(f"n{number}-1", devices=(Device(0, "cpu"),))
        link = Link(f"n{number}", who, clock.now_s())
        engine.links.add(link)
        engine.heartbeats.opened(link)
        engine.heartbeats.heard(link, arrived(link_pb2.Heartbeat(seq=1)), clock.now_s())
    report = engine.presence.report

    def counted(*arguments: Any) -> Any:
        read[0] += 1
        return report(*arguments)

    engine.presence.report = counted  # type: ignore[method-assign]
    nothing = cast(Any, None)
    engine._begin(Term(nothing, nothing, EPOCH, clock.now_s()), Loaded(Cluster(), (), 1))
    assert read[0] == LINKS_AT_ONCE
    engine.links.get("n200").close()  # type: ignore[union-attr]
    engine.links.remove(engine.links.get("n200"))  # type: ignore[arg-type]
    (task,) = engine._tasks
    assert await most_in_a_turn(task, lambda: read[0]) <= LINKS_AT_ONCE
    events = [entry.event for entry in engine.requests.clear()]
    assert isinstance(events[0], LeaderStarted)
    hello = {e.node: at for at, e in enumerate(events) if isinstance(e, NodeHello)}
    told = {e.node: at for at, e in enumerate(events) if isinstance(e, NodeReport)}
    assert len(hello) == count and told.keys() == hello.keys() - {"n200"}
    assert all(at > hello[name] for name, at in told.items()), "each after its hello"


async def test_a_large_decision_is_encoded_where_it_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine computes it beside the loop; what is written there is ready."""
    count = 5 * MAX_CHANGES

    def refuse(*_: Any) -> Any:
        raise AssertionError("all rows of the decision are gone through in one turn of the loop")

    async with FakeEtcdClient([Connection(FakeEtcd())], prefix="megascale/") as etcd:
        leadership = await campaign(etcd, LEADER_KEY, b"{}", ttl_s=60)
        store = Store(etcd, leadership)
        empty = (await store.load()).cluster
        running = Cluster(nodes=nodes(count), jobs={"a": placed("a", count)})
        await store.commit(empty, running, (), deadline_s=60.0)
        job, lines, breaker, broken = all_failed(running.jobs["a"])
        failed = Cluster(broken, {"a": job}, {}, breaker, log_seq=count)
        batch = store.between(running, failed, lines)
        assert len(batch.changes) > MAX_CHANGES and batch.pieces
        with monkeypatch.context() as patched:
            patched.setattr(pieces, "patches", refuse)
            patched.setattr(pieces, "patches_of", refuse)
            await store.write(batch, 60.0)
        found = (await Store(etcd, leadership).load()).cluster
        await leadership.resign()
    assert {name: node.disposition for name, node in found.nodes.items()} == {
        name: node.disposition for name, node in broken.items()
    }
