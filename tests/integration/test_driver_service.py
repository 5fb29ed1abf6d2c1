"""The driver as a process, with a real etcd, over real gRPC, with agents on real links."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from tests.harness.driver import DriverProcess, here, running_driver, small_job
from tests.harness.etcd import etcd, etcd_prefix, etcd_server, make_server
from tests.harness.fake_executor import FakeExecutor
from tests.harness.ha_cluster import Trio
from tests.harness.waiting import CALL_TIMEOUT_S, eventually

from megascale.v1 import driver_pb2, job_pb2, link_pb2, types_pb2
from megascale_client import AsyncClient
from megascale_common.etcd.client import EtcdClient
from megascale_common.etcd.election import campaign
from megascale_common.etcd.errors import ResourceExhausted
from megascale_common.etcd.server import EtcdServer, find_etcd
from megascale_common.node.process import child_environment
from megascale_common.service import status
from megascale_common.service.errors import NotLeaderError, ServiceError
from megascale_driver.core.values.cluster import Cluster, Node
from megascale_driver.core.values.events import Audit
from megascale_driver.journal.store import LEADER_KEY, Store

__all__ = ["etcd", "etcd_prefix", "etcd_server"]

RUNNING, SUCCEEDED = types_pb2.JOB_PHASE_RUNNING, types_pb2.JOB_PHASE_SUCCEEDED
START = link_pb2.DESIRED_PHASE_START
# What the next slower verdict takes (megascale_driver.core.values.policy).
SUSPECT_S, UNCORROBORATED_S = 8.0, 60.0


@pytest_asyncio.fixture
async def driver(etcd_server: EtcdServer, tmp_path: Path) -> AsyncIterator[DriverProcess]:
    async with running_driver(tmp_path, etcd_server.endpoint) as process:
        yield process


@contextlib.asynccontextmanager
async def executors(
    driver: DriverProcess, count: int, steps: int = 0, old: Collection[str] = ()
) -> AsyncIterator[list[FakeExecutor]]:
    async with contextlib.AsyncExitStack() as stack:
        nodes = [
            await stack.enter_async_context(
                FakeExecutor(
                    name,
                    driver.token,
                    driver.address,
                    steps=steps,
                    protocol=1 if name in old else 2,
                )
            )
            for name in (f"n{i}" for i in range(1, count + 1))
        ]
        await driver.until_nodes(count)
        for node in nodes:
            await node.until_usable()
        yield nodes


@contextlib.asynccontextmanager
async def joined(driver: DriverProcess, name: str) -> AsyncIterator[FakeExecutor]:
    """One executor whose heartbeats the driver acknowledges."""
    async with FakeExecutor(name, driver.token, driver.address) as node:
        await node.until_usable()
        yield node


def usable_file(driver: DriverProcess, node: str) -> Path:
    """What an executor in a process of its own makes once the driver may use it."""
    return driver.address_file.with_name(f"{node}.usable")


@contextlib.contextmanager
def executor_process(
    driver: DriverProcess, name: str, *arguments: str
) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "tests.harness.fake_executor", "--node", name]
    command += ["--driver-file", str(driver.address_file), "--token-file", str(driver.token_file)]
    command += ["--usable-file", str(usable_file(driver, name)), *arguments]
    process = subprocess.Popen(command, env=child_environment(), cwd=here())
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def refusal(call: Awaitable[object]) -> ServiceError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return status.read(caught.value)


def runs(attempt: int) -> Callable[[driver_pb2.Job], bool]:
    return lambda job: job.phase == RUNNING and job.attempt == attempt


async def test_a_job_runs_and_succeeds_and_watchers_see_every_step(driver: DriverProcess) -> None:
    async with executors(driver, 3, steps=10, old=("n1",)) as nodes:
        await driver.submit(small_job("demo", recovery__spare_nodes=1))
        seen: list[int] = []
        reasons: list[str] = []
        token = ""
        async for update in driver.stub.WatchJob(driver_pb2.WatchJobRequest(name="demo")):
            if update.WhichOneof("update") == "step":
                seen.append(update.step.step)
                token = update.resume_token if update.step.step == 7 else token
            elif update.WhichOneof("update") == "event":
                reasons.append(update.event.reason)
        again = driver.stub.WatchJob(driver_pb2.WatchJobRequest(name="demo", resume_token=token))
        resumed = [u.step.step async for u in again if u.WhichOneof("update") == "step"]
        job = await driver.job("demo")
        assert job.phase == SUCCEEDED
        assert seen == list(range(1, 11)) and resumed == [8, 9, 10]
        assert reasons == [
            "SUBMITTED",
            "PLACED",
            "ATTEMPT_PREPARING",
            "ATTEMPT_STARTED",
            "JOB_SUCCEEDED",
        ]
        assert (job.attempt, job.step, list(job.nodes)) == (1, 10, ["n1", "n2"])
        started = next(d for d in nodes[1].history if d.phase == START)
        assert list(started.assignment.ranks) == [4, 5, 6, 7]
        first = next(d for d in nodes[0].history if d.phase == START)
        assert started.assignment.rank_table_digest == first.assignment.rank_table_digest != ""
        # Only n1 is of the last build (link protocol 1), and expects the whole table.
        assert list(first.assignment.rank_nodes) == ["n1"] * 4 + ["n2"] * 4
        assert not started.assignment.rank_nodes
        assert started.assignment.store_endpoint
        versions = [(d.epoch.create_revision, d.version) for d in nodes[1].history]
        assert versions == sorted(versions)
        assert nodes[0].acks[-1].seq and nodes[0].acks[-1].received_at.seconds


async def test_a_restarted_driver_adopts_the_running_job(driver: DriverProcess) -> None:
    async with executors(driver, 2, steps=100_000) as nodes:
        await driver.submit(small_job("demo"), request_id="one")
        await driver.until_job("demo", lambda job: job.phase == RUNNING and job.step > 3)
        before = await driver.job("demo")
        epoch = nodes[0].desired.epoch.create_revision
        await driver.kill()
        await driver.start()
        await eventually(
            lambda: nodes[0].desired.epoch.create_revision > epoch, "orders of the new term"
        )
        await driver.until_job(
            "demo", lambda job: job.phase == RUNNING and job.step > before.step + 3
        )
        job = await driver.job("demo")
        assert (job.attempt, job.restarts, list(job.nodes)) == (1, 0, ["n1", "n2"])
        assert [d.phase for d in nodes[0].history if d.epoch.create_revision > epoch] == [START]
        assert (await driver.submit(small_job("demo"), request_id="one")).spec.name == "demo"
        reasons = [event.reason for event in await driver.events("jobs/demo")]
        assert reasons == ["SUBMITTED", "PLACED", "ATTEMPT_PREPARING", "ATTEMPT_STARTED"]


async def test_a_standby_names_the_leader_and_takes_over_when_it_resigns(
    driver: DriverProcess, etcd_server: EtcdServer, tmp_path: Path
) -> None:
    standby = DriverProcess(tmp_path, etcd_server.endpoint, driver.prefix, "standby")
    try:
        await standby.start(leads=False)
        first = driver.address()

        async def knows_the_leader() -> bool:
            refused = await refusal(standby.stub.ListJobs(driver_pb2.ListJobsRequest()))
            if refused.reason == "UNKNOWN":
                return False  # a call that gRPC itself breaks off, as on a busy machine
            assert (refused.code, refused.reason) == ("UNAVAILABLE", "NOT_LEADER")
            return refused.metadata == {"leader": first}

        await eventually(knows_the_leader, "the leader's address in the standby's answer")
        async with FakeExecutor(
            "n1", driver.token, lambda: standby.address() if gone else first
        ) as node:
            gone = False
            await eventually(
                lambda: node.acks and node.history, "an acknowledgement, and orders of the first"
            )
            gone = True
            assert await driver.stop() == 0
            await eventually(standby.leads, "the standby leads")
            await eventually(
                lambda: node.desired.epoch.create_revision > 0 and len(node.history) > 1,
                "its orders",
            )
    finally:
        await standby.close()


async def test_training_and_watchers_continue_while_etcd_is_away(
    driver: DriverProcess, etcd_server: EtcdServer
) -> None:
    async def without_a_term() -> bool:
        try:
            info = await driver.stub.GetClusterInfo(driver_pb2.GetClusterInfoRequest())
        except grpc.aio.AioRpcError:
            return False  # for a moment it shows no state: another driver might lead already
        return not info.leader

    async with executors(driver, 2, steps=100_000) as nodes:
        await driver.submit(small_job("demo", trainer__training__steps=100_000))
        await driver.until_job("demo", lambda job: job.phase == RUNNING and job.step > 0)
        epoch = nodes[0].desired.epoch.create_revision
        etcd_server.kill()
        try:
            await eventually(without_a_term, "the end of the leader's lease")
            step = (await driver.job("demo")).step
            refused = await refusal(
                driver.stub.SubmitJob(
                    driver_pb2.SubmitJobRequest(spec=small_job("other")), timeout=CALL_TIMEOUT_S
                )
            )
            expected = ("UNAVAILABLE", "NOT_LEADER")
            assert (refused.code, refused.reason) == expected, driver.log()[-3000:]
            assert "etcd has not answered for" in refused.message
            await driver.until_job("demo", lambda job: job.step > step + 5)
        finally:
            await etcd_server.start()
        await eventually(
            lambda: nodes[0].desired.epoch.create_revision > epoch, "orders of the new term"
        )
        job = await driver.job("demo")
        assert (job.phase, job.attempt, job.restarts) == (RUNNING, 1, 0)
        assert (await driver.submit(small_job("other"))).phase == types_pb2.JOB_PHASE_QUEUED


async def test_a_stale_leader_cannot_write(etcd: EtcdClient) -> None:
    first = await campaign(etcd, LEADER_KEY, b"{}", ttl_s=60)
    stale = Store(etcd, first)
    await stale.load()
    node = Cluster(nodes={"n1": Node("n1")})
    line = Audit("", 1, 0.0, "driver", "driver", "LEADER_ELECTED", "first")
    await stale.commit(Cluster(), node, (line,), deadline_s=CALL_TIMEOUT_S)
    await etcd.delete(LEADER_KEY)
    second = await campaign(etcd, LEADER_KEY, b"{}", ttl_s=60)
    fresh = Store(etcd, second)
    loaded = await fresh.load()
    assert list(loaded.cluster.nodes) == ["n1"] and [item.message for item in loaded.audit] == [
        "first"
    ]
    before = await etcd.get_prefix("")
    more = Cluster(nodes={**node.nodes, "n2": Node("n2")})
    with pytest.raises(NotLeaderError):
        await stale.commit(node, more, (), deadline_s=CALL_TIMEOUT_S)
    after = await etcd.get_prefix("")
    assert after.items == before.items, "nothing of the former leader's write was applied"
    await fresh.commit(loaded.cluster, more, (), deadline_s=CALL_TIMEOUT_S)
    await second.resign()
    await first.resign()


async def test_eviction_needs_a_reason_can_be_tried_and_moves_the_job(
    driver: DriverProcess,
) -> None:
    async with executors(driver, 3):
        await driver.until_nodes(3)
        await driver.submit(small_job("demo", recovery__spare_nodes=1))
        await driver.until_job("demo", runs(1))
        request = driver_pb2.EvictNodeRequest(name="n1")
        assert (await refusal(driver.stub.EvictNode(request))).fields[0][0] == "reason"
        request.reason, request.validate_only = "its fan is loud", True
        answer = await driver.stub.EvictNode(request)
        assert "spare n3 takes its place" in answer.consequence
        assert answer.node.disposition == types_pb2.NODE_DISPOSITION_SCHEDULABLE
        request.validate_only = False
        answer = await driver.stub.EvictNode(request)
        assert answer.node.disposition == types_pb2.NODE_DISPOSITION_QUARANTINED
        await driver.until_job("demo", runs(2))
        assert list((await driver.job("demo")).nodes) == ["n3", "n2"]
        cancelled = await driver.stub.CancelJob(
            driver_pb2.CancelJobRequest(name="demo", reason="enough")
        )
        assert cancelled.job.phase in (types_pb2.JOB_PHASE_STOPPING, types_pb2.JOB_PHASE_CANCELLED)
        await driver.until_job("demo", lambda job: job.phase == types_pb2.JOB_PHASE_CANCELLED)
        ended = await driver.stub.GetTopology(driver_pb2.GetTopologyRequest(job="demo"))
        assert ended.rank_count and not ended.ranks, "no rank of an ended job is anywhere"
        await driver.submit(small_job("late", trainer__parallelism__dp=4))
        explained = await driver.stub.ExplainJob(driver_pb2.ExplainJobRequest(name="late"))
        assert explained.explanation.startswith(
            "job late is waiting: it needs 4 nodes with 4 cpu devices, 2 schedulable nodes"
        )
        assert "n1 is quarantined (its fan is loud)" in explained.explanation
        assert explained.events[0].reason == "SUBMITTED"
        info = await driver.stub.GetClusterInfo(driver_pb2.GetClusterInfoRequest())
        assert (info.nodes_wanted, info.nodes_missing) == (4, 2)


async def test_lists_are_paged_and_logs_and_checkpoints_come_from_the_nodes(
    driver: DriverProcess,
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        second, first_node = [
            await stack.enter_async_context(joined(driver, name)) for name in ("n2", "n1")
        ]  # they do not join in the order of their ranks
        await driver.submit(small_job("demo", checkpoint__uri="/ckpt"))
        await driver.until_job("demo", runs(1))
        first = await driver.stub.ListNodes(driver_pb2.ListNodesRequest(page_size=1))
        rest = await driver.stub.ListNodes(
            driver_pb2.ListNodesRequest(page_token=first.next_page_token)
        )
        assert [n.name for n in (*first.nodes, *rest.nodes)] == [
            "n1",
            "n2",
        ] and not rest.next_page_token
        assert list(first.nodes[0].ranks) == [0, 1, 2, 3]
        page = await driver.stub.ListEvents(
            driver_pb2.ListEventsRequest(subject="jobs/demo", page_size=2)
        )
        follow = driver_pb2.ListEventsRequest(subject="jobs/demo", page_token=page.next_page_token)
        events = [*page.events, *(await driver.stub.ListEvents(follow)).events]
        assert [e.seq for e in events] == list(range(1, len(events) + 1))
        tail = driver.stub.TailLogs(driver_pb2.TailLogsRequest(job="demo", rank=5, lines=2))
        assert [r.line async for r in tail] == [f"demo attempt 1 rank 5 line {i}" for i in range(2)]
        first_node.checkpoints.commits = [
            driver_pb2.Checkpoint(job="demo", step=s) for s in (20, 10)
        ]
        second.checkpoints.commits = []
        found = await driver.stub.ListCheckpoints(
            driver_pb2.ListCheckpointsRequest(job="demo", page_size=1)
        )
        assert [c.step for c in found.checkpoints] == [20] and found.next_page_token
        info = await driver.stub.GetClusterInfo(driver_pb2.GetClusterInfoRequest())
        assert (info.nodes_alive, info.jobs_running, info.leader) == (2, 1, driver.address())
        assert (info.nodes_wanted, info.nodes_missing) == (2, 0)
        missing = await refusal(driver.stub.GetJob(driver_pb2.GetJobRequest(name="nobody")))
        assert (missing.code, missing.reason) == ("NOT_FOUND", "JOB_NOT_FOUND")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            _ = [
                r
                async for r in driver.stub.TailLogs(driver_pb2.TailLogsRequest(job="demo", rank=8))
            ]
        assert status.read(caught.value).fields[0][0] == "rank"


def bad_specs() -> list[tuple[str, job_pb2.JobSpec]]:
    tp_spec = small_job("x", trainer__parallelism__tp=3)
    without_model = small_job("x")
    without_model.trainer.ClearField("model")
    without_sources = small_job("x")
    without_sources.trainer.data.ClearField("sources")
    uneven = small_job("x")
    uneven.trainer.parallelism.stage_layers.extend([3, 3])
    return [
        ("name", small_job("Not_A_Label")),
        ("spec", small_job("x", owner="x" * 70_000)),
        ("trainer.model.layers", job_pb2.JobSpec(name="x")),
        ("trainer.model.heads", without_model),
        ("trainer.model.layers", small_job("x", trainer__model__layers=0)),
        ("trainer.model.hidden_size", small_job("x", trainer__model__hidden_size=66)),
        ("trainer.parallelism.tp", tp_spec),
        ("trainer.parallelism.cp", small_job("x", trainer__parallelism__cp=3)),
        ("trainer.parallelism.stage_layers", uneven),
        (
            "trainer.training.global_batch_size",
            small_job("x", trainer__training__global_batch_size=7),
        ),
        ("trainer.training.precision", small_job("x", trainer__training__precision=77)),
        ("trainer.data.sources", without_sources),
        ("trainer.optimizer.learning_rate", small_job("x", trainer__optimizer__learning_rate=-1.0)),
        ("checkpoint.uri", small_job("x", checkpoint__interval_steps=5)),
        ("recovery.spare_nodes", small_job("x", recovery__spare_nodes=-1)),
    ]


async def test_bad_specs_and_requests_are_refused_by_field(driver: DriverProcess) -> None:
    for field, spec in bad_specs():
        refused = await refusal(driver.stub.SubmitJob(driver_pb2.SubmitJobRequest(spec=spec)))
        assert refused.code == "INVALID_ARGUMENT", field
        assert field in [name for name, _ in refused.fields] or field in refused.fields[0][0], (
            refused.fields
        )
        for _, description in refused.fields:
            problem, _, remedy = description.partition("; ")
            assert problem and remedy, description
    validated = await driver.stub.SubmitJob(
        driver_pb2.SubmitJobRequest(spec=small_job("x"), validate_only=True)
    )
    assert validated.job.spec.trainer.training.micro_batch_size == 1
    assert not (await driver.stub.ListJobs(driver_pb2.ListJobsRequest())).jobs
    one = await driver.submit(small_job("demo"), request_id="r1")
    two = await driver.submit(small_job("demo"), request_id="r1")
    assert one.created_at == two.created_at
    other = driver_pb2.SubmitJobRequest(spec=small_job("else"), request_id="r1")
    assert (await refusal(driver.stub.SubmitJob(other))).reason == "REQUEST_ID_REUSED"
    again = driver_pb2.SubmitJobRequest(spec=small_job("demo"))
    assert (await refusal(driver.stub.SubmitJob(again))).code == "ALREADY_EXISTS"
    async with FakeExecutor("Bad_Name", driver.token, driver.address) as node:
        await asyncio.sleep(0.3)
        assert not node.acks
    assert not (await driver.stub.ListNodes(driver_pb2.ListNodesRequest())).nodes


async def test_a_second_agent_of_a_name_waits_until_the_first_is_gone(
    driver: DriverProcess,
) -> None:
    async def serves(incarnation: str) -> bool:
        (node,) = (await driver.stub.ListNodes(driver_pb2.ListNodesRequest())).nodes
        return bool(node.incarnation == incarnation)

    async with contextlib.AsyncExitStack() as stack:
        async with FakeExecutor("n1", driver.token, driver.address) as first:
            await eventually(lambda: first.acks and first.history, "orders of the first")
            second = await stack.enter_async_context(
                FakeExecutor("n1", driver.token, driver.address)
            )
            await asyncio.sleep(0.5)
            assert await serves(first.incarnation) and not second.acks
            # A heartbeat that is too large is dropped, and the link stays open.
            orders, acks = len(first.history), len(first.acks)
            first.report(
                progress=[link_pb2.CheckpointProgress(job="x", persist_error="e" * 70_000)]
            )
            await eventually(lambda: len(first.acks) > acks, "another acknowledgement")
            await asyncio.sleep(0.3)
            assert len(first.history) == orders == 1 and not second.acks
        await eventually(lambda: serves(second.incarnation), "the second agent serves")


@pytest.mark.slow
async def test_a_stopped_executor_is_suspected_and_probed(driver: DriverProcess) -> None:
    with executor_process(driver, "a0") as process:
        await driver.until_nodes(1)
        process.send_signal(signal.SIGSTOP)
        stopped_s = time.time()

        async def dead() -> bool:
            return "NODE_DEAD" in [event.reason for event in await driver.events("nodes/a0")]

        await eventually(dead, "NODE_DEAD")
        events = {event.reason: event for event in await driver.events("nodes/a0")}
        assert (
            events["NODE_SUSPECT"].time.ToNanoseconds() < events["NODE_DEAD"].time.ToNanoseconds()
        )
        assert events["NODE_DEAD"].time.ToNanoseconds() / 1e9 - stopped_s < UNCORROBORATED_S
        assert [item.kind for item in events["NODE_DEAD"].evidence] == ["silence", "corroboration"]
        process.send_signal(signal.SIGCONT)
        await driver.until_nodes(1)


async def test_a_full_etcd_is_named_in_every_answer(tmp_path: Path) -> None:
    """The alarm NOSPACE: reads go on, no term begins, and people read etcd's own words."""
    limits = ("--quota-backend-bytes", str(16 << 20))
    server = EtcdServer(tmp_path / "etcd", unsafe_no_fsync=True, extra_arguments=limits)
    async with server, running_driver(tmp_path, server.endpoint) as driver:
        async with joined(driver, "n1"):
            await driver.submit(small_job("demo"))
            await fill(server)
            words = "etcd refuses writes: mvcc: database space exceeded"
            # A write ends the term; from then on each answer says why there is none.
            request = driver_pb2.CordonNodeRequest(
                name="n1", reason="tried", request_id=str(uuid.uuid4())
            )

            async def refused() -> bool:
                request.request_id = str(uuid.uuid4())
                error = await refusal(driver.stub.CordonNode(request, timeout=CALL_TIMEOUT_S))
                return words in str(error)

            await eventually(refused, "the refusal with etcd's words", story=driver.log)
            client = AsyncClient(driver.address(), driver.token)
            async with client:
                assert [node.name async for node in client.nodes()] == ["n1"]
                [note] = client.notes
                assert note.startswith(f"this driver does not lead: {words}; what it shows is")
                explained = await client.explain("demo")
            assert explained.explanation.startswith(f"this driver does not lead: {words}")
            assert "no rank has" not in explained.explanation
            await etcdctl(server, "alarm", "list")
            await make_room(server)
            await eventually(driver.leads, "the driver leads again", story=driver.log)
            client = AsyncClient(driver.address(), driver.token)
            async with client:
                assert [node.name async for node in client.nodes()] == ["n1"]
                assert client.notes == []


@pytest.mark.slow
async def test_a_lost_quorum_is_named_in_every_answer(tmp_path: Path) -> None:
    """Two of three members are killed; the short form is in test_etcd_client."""
    trio = Trio(tmp_path)
    try:
        await trio.start()
        async with (
            running_driver(tmp_path, ",".join(trio.endpoints)) as driver,
            joined(driver, "n1"),
        ):
            await driver.submit(small_job("demo"))
            for name in ("m1", "m2"):
                trio.members[name].kill()
            await until_every_answer_says(driver, "etcd has no leader")
            await asyncio.gather(*(trio.members[name].start() for name in ("m1", "m2")))
            await until_no_answer_says_more(driver)
    finally:
        trio.close()


@pytest.mark.slow
async def test_an_etcd_that_stands_still_is_named_in_every_answer(tmp_path: Path) -> None:
    """SIGSTOP of the only member: connections stay, nothing answers."""
    server = make_server(tmp_path / "etcd")
    async with server, running_driver(tmp_path, server.endpoint) as driver, joined(driver, "n1"):
        await driver.submit(small_job("demo"))
        assert server.pid is not None
        os.kill(server.pid, signal.SIGSTOP)
        try:
            await until_every_answer_says(driver, r"etcd has not answered for \d\d+ s")
        finally:
            os.kill(server.pid, signal.SIGCONT)
        await until_no_answer_says_more(driver)


async def test_members_that_differ_are_named_in_every_answer(tmp_path: Path) -> None:
    """The alarm CORRUPT: etcd refuses all writes, also the end of a lease."""
    server = make_server(tmp_path / "etcd")
    async with server, running_driver(tmp_path, server.endpoint) as driver, joined(driver, "n1"):
        await driver.submit(small_job("demo"))
        async with streamed_notes(driver) as notes:
            await raise_corrupt(server)
            request = driver_pb2.CordonNodeRequest(name="n1", reason="tried")
            await refusal(driver.stub.CordonNode(request, timeout=CALL_TIMEOUT_S))
            words = "etcd refuses writes: corrupt cluster"
            await until_every_answer_says(driver, words)
            await eventually(lambda: all(notes), "the note in both streams", story=driver.log)
            assert "alarm:CORRUPT" in await etcdctl(server, "alarm", "list")
            await etcdctl(server, "alarm", "disarm")
            await until_no_answer_says_more(driver)
            await eventually(
                lambda: all(len(each) > 1 for each in notes), "its end in both", story=driver.log
            )
        for first, *others in notes:
            assert first.startswith(f"this driver does not lead: {words}; what it shows is")
            assert others == ["this driver leads again"]


@contextlib.asynccontextmanager
async def streamed_notes(driver: DriverProcess) -> AsyncIterator[tuple[list[str], list[str]]]:
    """What the driver says about itself in a watch of the job, and in one of the audit log."""
    found: tuple[list[str], list[str]] = ([], [])

    async def keep(updates: AsyncIterator[Any], notes: list[str]) -> None:
        async for update in updates:
            if update.note:
                notes.append(update.note)

    async with AsyncClient(driver.address(), driver.token) as client:
        tasks = [
            asyncio.create_task(keep(client.watch("demo"), found[0])),
            asyncio.create_task(keep(client.watch_events(), found[1])),
        ]
        try:
            yield found
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def until_every_answer_says(driver: DriverProcess, words: str) -> None:
    """Wait for the note that matches ``words``; `explain` and a refusal begin with it."""
    begins = re.compile(f"this driver does not lead: {words}")
    async with AsyncClient(driver.address(), driver.token) as client:

        async def noted() -> bool:
            async for _ in client.nodes():
                pass
            return bool(client.notes and begins.match(client.notes[0]))

        await eventually(noted, f"the note {words}", story=lambda: f"{client.notes} {driver.log()}")
        assert re.search(r"; what it shows is \d+ s old$", client.notes[0])
        assert begins.match((await client.explain("demo")).explanation)
    request = driver_pb2.CordonNodeRequest(name="n1", reason="tried")
    error = await refusal(driver.stub.CordonNode(request, timeout=CALL_TIMEOUT_S))
    assert (error.code, error.reason) == ("UNAVAILABLE", "NOT_LEADER")
    assert begins.match(error.message)


async def until_no_answer_says_more(driver: DriverProcess) -> None:
    """Wait until the driver leads again; its answers carry no note."""
    await eventually(driver.leads, "the driver leads again", story=driver.log)
    async with AsyncClient(driver.address(), driver.token) as client:
        assert [node.name async for node in client.nodes()] == ["n1"]
        assert client.notes == []


async def raise_corrupt(server: EtcdServer) -> None:
    """Raise the alarm that etcd raises itself when it finds that members differ."""
    async with (
        EtcdClient([server.endpoint]) as client,
        grpc.aio.insecure_channel(server.endpoint) as channel,
    ):
        # AlarmRequest: 1 action (1: ACTIVATE), 2 memberID, 3 alarm (2: CORRUPT).
        request = b"\x08\x01\x10" + varint((await client.status()).member_id) + b"\x18\x02"
        call: Any = channel.unary_unary("/etcdserverpb.Maintenance/Alarm")
        await call(request, timeout=CALL_TIMEOUT_S)


def varint(value: int) -> bytes:
    """A number as protobuf writes it."""
    if value < 0x80:
        return bytes([value])
    return bytes([value & 0x7F | 0x80]) + varint(value >> 7)


async def fill(server: EtcdServer) -> None:
    """Put values until etcd raises its alarm."""
    async with EtcdClient([server.endpoint]) as client:
        with pytest.raises(ResourceExhausted, match="database space exceeded"):
            for number in range(1000):
                await client.put(f"junk/{number}", b"x" * 900_000)


async def make_room(server: EtcdServer) -> None:
    """The commands of the runbook: delete or compact, defragment, disarm."""
    found = await etcdctl(server, "get", "junk/", "--prefix", "--keys-only", "--write-out=json")
    revision = str(json.loads(found)["header"]["revision"])
    await etcdctl(server, "del", "junk/", "--prefix")
    await etcdctl(server, "compact", str(int(revision) + 1))
    await etcdctl(server, "defrag")
    await etcdctl(server, "alarm", "disarm")


async def etcdctl(server: EtcdServer, *arguments: str) -> str:
    """Run etcdctl, which comes with etcd."""
    program = Path(find_etcd()).with_name("etcdctl")
    process = await asyncio.create_subprocess_exec(
        program, "--endpoints", server.endpoint, *arguments,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    return output.decode()
