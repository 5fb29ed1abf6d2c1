"""Parts of the driver's shell: codec, feeds, links, errors on the wire, clocks, a dead leader."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os

import grpc
import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st
from tests.harness.desk import Desk
from tests.harness.processes import free_port
from tests.harness.simulated_cluster import SimulatedCluster, demo_job
from tests.harness.waiting import CALL_TIMEOUT_S

from megascale.v1 import driver_pb2, link_pb2, types_pb2
from megascale_common.etcd.connection import EtcdMembers
from megascale_common.etcd.errors import EtcdUnavailable
from megascale_common.service import status
from megascale_common.service.clock import SystemClock, VirtualClock
from megascale_common.service.errors import CodecError, ExpiredError
from megascale_driver.core.values.attempt import NodeSlot
from megascale_driver.core.values.cluster import Identity, Node, SealedSnapshot
from megascale_driver.core.values.events import Audit, Evidence, JobSubmitted
from megascale_driver.core.values.job import Job
from megascale_driver.core.values.policy import Policy
from megascale_driver.core.values.stored_fields import differs
from megascale_driver.journal import codec, predecessor
from megascale_driver.journal.fenced import MAX_BYTES, MAX_CHANGES
from megascale_driver.journal.pieces import Change, split
from megascale_driver.nodes.open_links import Link, OpenLinks
from megascale_driver.shell.feeds import (
    ENDED_UPDATES,
    KEPT_ENDED,
    PACE_STEPS,
    RING_UPDATES,
    JobFeeds,
)
from megascale_driver.wire import messages as wire
from megascale_job.restore import RestorePlan, RestoreSource


def test_every_stored_value_is_read_back_equal() -> None:
    world = SimulatedCluster(1, nodes=3)
    world.run(2.0)
    world.feed(JobSubmitted(world.now_s, demo_job("a"), "test"))
    world.run(10.0)
    world.kill_worker("n0")
    world.run(2.0)
    job = world.state.jobs["a"]
    again = codec.load(Job, codec.dump(job, txn="x"), config=job.config, attempts=job.attempts)
    assert (
        not differs(job, again)
        and again.slots == job.slots
        and again.current.restore == job.current.restore
    )
    node = world.state.nodes["n1"]
    stored = codec.load(Node, codec.dump(node))
    assert stored.identity == node.identity
    assert stored.report is None, "reports are not stored"
    for line in world.audit:
        assert codec.load(Audit, codec.dump(line)) == line


evidence = st.lists(st.builds(Evidence, st.text(), st.text(), st.text())).map(tuple)
audit_lines = st.builds(
    Audit,
    st.text(),
    st.integers(0),
    st.floats(0, 1e10),
    *[st.text()] * 6,
    st.integers(0),
    evidence,
    st.text(),
)


@given(audit_lines)
def test_any_audit_line_is_read_back_equal(line: Audit) -> None:
    assert codec.load(Audit, codec.dump(line)) == line


def test_a_damaged_value_is_refused_by_field() -> None:
    good = json.loads(codec.dump(NodeSlot("n1", (0, 1), (0, 1))))
    assert codec.load(NodeSlot, json.dumps({**good, "from_a_later_build": 1}).encode()) == NodeSlot(
        "n1", (0, 1), (0, 1)
    )
    for change, named in (
        ({"ranks": [0, "x"]}, r"NodeSlot\.ranks\[1\]"),
        ({"ranks": 3}, r"NodeSlot\.ranks"),
    ):
        with pytest.raises(CodecError, match=named):
            codec.load(NodeSlot, json.dumps({**good, **change}).encode())
    with pytest.raises(CodecError, match="JSON"):
        codec.load(SealedSnapshot, b"{")


def record(attempt: int, step: int) -> types_pb2.StepRecord:
    return types_pb2.StepRecord(attempt=attempt, step=step)


def test_the_pace_of_a_job_is_the_median_of_its_newest_steps() -> None:
    feeds = JobFeeds()
    assert feeds.typical_step_of("a") is None
    times_s = [9.0] * PACE_STEPS + [2.0] * (PACE_STEPS - 1) + [30.0]
    for step, time_s in enumerate(times_s, start=1):
        record = types_pb2.StepRecord(step=step, attempt=1)
        record.step_time.FromNanoseconds(round(time_s * 1e9))
        assert feeds.of("a").add_step(record) and not feeds.of("a").add_step(record)
    assert feeds.typical_step_of("a") == 2.0
    desk = Desk("n1", "n2")
    desk.submit()
    shown = wire.job_message(desk.job(), feeds.record_of("a"), typical_step_s=2.0)
    assert shown.typical_step_time.ToNanoseconds() == 2_000_000_000
    assert not wire.job_message(desk.job(), None).HasField("typical_step_time")


@pytest.mark.parametrize(("dp", "nodes"), [(1, "1 node"), (2, "2 nodes")])
def test_reasons_count_in_the_singular_too(dp: int, nodes: str) -> None:
    desk = Desk("n1", "n2")
    desk.submit(dp=dp)
    said = [desk.job().reason]
    desk.run()
    said.append(desk.job().reason)
    assert said == [f"attempt 1: preparing {nodes}", f"attempt 1 runs on {nodes}"]


async def collect(feeds: JobFeeds, token: str) -> list[driver_pb2.WatchJobResponse]:
    return [update async for update in feeds.of("a").follow(token)]


async def test_watchers_resume_behind_their_token_without_gap_or_repetition() -> None:
    feeds = JobFeeds()
    feed = feeds.of("a")
    assert [feed.add_step(record(1, s)) for s in (1, 2, 2, 1, 3)] == [
        True,
        True,
        False,
        False,
        True,
    ]
    assert feed.add_step(record(2, 1)), "the steps of a new attempt start again"
    first = asyncio.create_task(collect(feeds, ""))
    await asyncio.sleep(0)
    feed.add_event(types_pb2.Event(seq=1, reason="X"))
    feed.add_event(types_pb2.Event(seq=1, reason="X"))
    feed.add_job(driver_pb2.Job(), ended=True)
    updates = await first
    assert [(u.step.attempt, u.step.step) for u in updates[:4]] == [(1, 1), (1, 2), (1, 3), (2, 1)]
    assert [u.WhichOneof("update") for u in updates[4:]] == ["event", "job"]
    for position, update in enumerate(updates):
        assert await collect(feeds, update.resume_token) == updates[position + 1 :]
    other_process = "0123456789ab-3"
    assert await collect(feeds, other_process) == updates
    with pytest.raises(ValueError, match="WatchJob returned"):
        await collect(feeds, "nonsense")


def test_a_feed_keeps_the_newest_record_that_was_evaluated() -> None:
    feeds = JobFeeds()
    assert feeds.evaluation_of("a") is None
    for step in range(1, 31):
        loss = 4.0 if step % 25 == 0 else None
        feeds.of("a").add_step(types_pb2.StepRecord(attempt=1, step=step, evaluation_loss=loss))
    found = feeds.evaluation_of("a")
    assert found is not None and (found.step, found.evaluation_loss) == (25, 4.0)


async def test_feeds_of_ended_jobs_are_kept_whole_for_late_watchers_then_their_tail_only() -> None:
    feeds = JobFeeds()
    for number in range(KEPT_ENDED + 1):
        name = f"j{number}"
        for step in range(ENDED_UPDATES + 10):
            feeds.of(name).add_step(record(1, step + 1))
        feeds.of(name).add_job(driver_pb2.Job(), ended=True)
        feeds.release(name)
    whole = [update async for update in feeds.of("j1").follow("")]
    tail = [update async for update in feeds.of("j0").follow("")]
    assert (len(whole), len(tail)) == (ENDED_UPDATES + 11, ENDED_UPDATES)
    assert tail[-1].HasField("job") and tail[-2].step.step == ENDED_UPDATES + 10


def test_a_second_agent_of_a_live_node_is_detected_by_its_incarnation() -> None:
    links = OpenLinks()
    links.add(Link("n1", Identity("one"), received_at_s=100.0))
    assert links.rival("n1", "two", 95.0) and not links.rival("n2", "two", 95.0)
    assert not links.rival("n1", "one", 95.0), "the same agent dials again"
    assert not links.rival("n1", "two", 101.0), "the other one is silent"
    links.all()[0].close()
    assert not links.rival("n1", "two", 95.0)


@pytest.mark.parametrize("number", ["\u00b2", "9" * 5000, "-1", ""])
async def test_numbers_of_tokens_are_plain_and_short(number: str) -> None:
    feeds = JobFeeds()
    feeds.of("a").add_step(record(1, 1))
    ring = (await anext(feeds.of("a").follow(""))).resume_token.partition("-")[0]
    with pytest.raises(ValueError, match="WatchJob returned"):
        await anext(feeds.of("a").follow(f"{ring}-{number}"))


@given(
    st.lists(st.integers(0, MAX_BYTES + 10), max_size=6).flatmap(st.permutations),
    st.integers(0, 250),
)
def test_a_commit_is_cut_into_transactions_that_etcd_takes(
    sizes_bytes: list[int], small: int
) -> None:
    changes = [Change(f"k{i}", bytes(size)) for i, size in enumerate(sizes_bytes)]
    changes += [Change(f"s{i}") for i in range(small)]
    parts = list(split(changes, MAX_CHANGES, MAX_BYTES))
    assert [change for part in parts for change in part] == changes
    for part in parts:
        assert 0 < len(part) <= MAX_CHANGES
        assert len(part) == 1 or sum(len(change.value or b"") for change in part) <= MAX_BYTES


def test_the_texts_of_a_hello_are_cut() -> None:
    long = "x" * 100_000
    hello = link_pb2.ExecutorHello(
        node="n1", incarnation="i", boot_id=long, hostname=long, build=long, executor_endpoint=long,
        checkpoint_endpoint=long, topology={f"{i}{long}": long for i in range(100)},
        devices=[types_pb2.Device(kind=types_pb2.DEVICE_KIND_CPU, uuid=long, model=long)],
    )  # fmt: skip
    assert len(codec.dump(Node("n1", wire.identity(hello)))) < 64 << 10


async def test_a_token_that_is_no_longer_in_the_ring_is_refused() -> None:
    feeds = JobFeeds()
    feed = feeds.of("a")
    feed.add_step(record(1, 1))
    token = (await anext(feed.follow(""))).resume_token
    for step in range(2, RING_UPDATES + 3):
        feed.add_step(record(1, step))
    with pytest.raises(ExpiredError, match="1 update behind the resume token is"):
        await anext(feed.follow(token))


def test_an_error_carries_its_reason_metadata_and_fields() -> None:
    error = status.of_code(
        "INVALID_ARGUMENT",
        "BAD",
        "no",
        metadata={"leader": "h:1"},
        fields=[("a.b", "is wrong")],
    )
    trailing = grpc.aio.Metadata(
        ("grpc-status-details-bin", status.to_status(error).SerializeToString())
    )
    received = grpc.aio.AioRpcError(
        grpc.StatusCode.INVALID_ARGUMENT, grpc.aio.Metadata(), trailing, "no"
    )
    again = status.read(received)
    assert (again.code, again.reason, again.message) == (error.code, "BAD", "no")
    assert (again.metadata, again.fields) == ({"leader": "h:1"}, (("a.b", "is wrong"),))
    bare = grpc.aio.AioRpcError(
        grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "gone"
    )
    assert status.read(bare).reason == "UNKNOWN"


def test_clocks_never_run_backwards() -> None:
    system, virtual = SystemClock(), VirtualClock(10.0)
    assert system.now_s() <= system.now_s()
    virtual.advance(2.5)
    assert virtual.now_s() == 12.5
    with pytest.raises(ValueError, match="negative"):
        virtual.advance(-1.0)


def test_timeouts_scale_with_the_interval_and_keep_their_order() -> None:
    policy = Policy.for_interval(10.0)
    assert (policy.suspect_after_s, policy.dead_after_s) == (16.0, 28.0)
    with pytest.raises(ValueError, match="suspect"):
        dataclasses.replace(policy, suspect_after_s=5.0)


def test_the_value_of_the_leader_key_shows_whether_its_process_is_gone() -> None:
    mine = predecessor.self_description("127.0.0.1:1")
    assert predecessor.is_gone(json.dumps(mine).encode()) is False
    assert predecessor.is_gone(json.dumps({**mine, "started": "1"}).encode()) is True, (
        "the process id belongs to another process now"
    )
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    assert predecessor.is_gone(json.dumps({**mine, "pid": child}).encode()) is True
    foreign: object
    for foreign in (
        {**mine, "boot_id": "another host"},
        {**mine, "pid_namespace": "pid:[1]"},
        {},
        [],
        "x",
    ):
        assert predecessor.is_gone(json.dumps(foreign).encode()) is False, "no evidence, no verdict"
    assert predecessor.is_gone(b"not json") is False


def test_waits_for_an_absent_etcd_end_in_time_every_time() -> None:
    """A wait that never ended would keep the lease from reporting that the leadership is over."""

    async def give_up() -> None:
        members = EtcdMembers([f"127.0.0.1:{free_port('127.0.0.1')}"], None)
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                for number in range(400):
                    with contextlib.suppress(EtcdUnavailable):
                        await members.member(0.00002 * (number % 100))
        finally:
            await members.close()

    # The services' event loop, whose timers of less than a millisecond fire together.
    uvloop.run(give_up())


def test_a_restore_plan_that_an_earlier_version_stored_is_read() -> None:
    stored = b'{"source":"STORAGE","step":40,"written_by_attempt":2,"manifest_uri":"file:///m"}'
    plan = codec.load(RestorePlan, stored)
    assert plan == RestorePlan(RestoreSource.STORAGE, 40, 2, "file:///m")
    assert codec.load(RestorePlan, codec.dump(plan)) == plan
    with pytest.raises(CodecError, match="TAPE"):
        codec.load(RestorePlan, stored.replace(b"STORAGE", b"TAPE"))
