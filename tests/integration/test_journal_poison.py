"""Rows of etcd that cannot be read: they cost their own job or node, and no term."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from tests.harness import etcd as etcd_harness
from tests.harness import journal
from tests.harness.driver import DriverProcess, small_job
from tests.harness.fake_executor import FakeExecutor
from tests.harness.journal import WatchedEtcd, leader, placed
from tests.harness.simulated_cluster import demo_job
from tests.harness.waiting import CALL_TIMEOUT_S, eventually

from megascale.v1 import driver_pb2, types_pb2
from megascale_common.etcd.client import EtcdClient
from megascale_common.etcd.server import EtcdServer
from megascale_common.service import status
from megascale_common.service.errors import NotLeaderError
from megascale_driver.core.values.cluster import Cluster, Disposition
from megascale_driver.core.values.events import Audit
from megascale_driver.core.values.job import Job
from megascale_driver.journal import codec
from megascale_driver.journal.fenced import MARKER
from megascale_driver.journal.store import META

etcd_server, etcd_prefix = etcd_harness.etcd_server, etcd_harness.etcd_prefix


@pytest_asyncio.fixture
async def etcd(etcd_server: EtcdServer, etcd_prefix: str) -> AsyncIterator[WatchedEtcd]:
    async with WatchedEtcd([etcd_server.endpoint], prefix=etcd_prefix) as client:
        yield client


async def stored(etcd: EtcdClient, *jobs: Job) -> Cluster:
    """Have a former leader store jobs."""
    store, state, _ = await leader(etcd)
    state = replace(state, jobs={job.name: job for job in jobs}, nodes=journal.nodes(2))
    await store.commit(Cluster(), state, (), deadline_s=journal.DEADLINE_S)
    return state


async def change(etcd: EtcdClient, key: str, **fields: Any) -> None:
    """Change fields of a stored row; one that is None is removed."""
    found = await etcd.get(key)
    assert found is not None
    values = {**json.loads(found.value), **fields}
    values = {name: value for name, value in values.items() if value is not None}
    await etcd.put(key, json.dumps(values).encode())


HEADS: dict[str, dict[str, Any]] = {
    "Job.phase": {"phase": "FLYING"},
    "Job.slots": {"slots": 7},
    "Job.slots[0].ranks[0]": {
        "slots": [{"node": "n1", "ranks": ["0"], "devices": [0], "incarnation": ""}]
    },
    "Job.faults[0].kind": {
        "faults": [{"kind": "GREMLINS", "node": "n1", "at_s": 1.0, "message": "x"}]
    },
    "best_step: 1000000000": {"best_step": 10**9},
    "step: 1000000000": {"step": 10**9},
    "committed_step": {"committed_step": -1},
    "attempt: 1000000000": {"attempt": 10**9},
    "log_seq": {"log_seq": 10**18},
    "revision 7": {"spec_revision": 7},
    "the head is that of": {"name": "b"},
    "a part|is missing": {"parts": {"slots": ["jobs/a/attempts/000001/placement/ab"]}},
}


@pytest.mark.parametrize("problem", HEADS)
async def test_a_head_that_cannot_be_true_costs_its_job_alone(
    etcd: WatchedEtcd, problem: str
) -> None:
    good = Job("good", demo_job("good"))
    await stored(etcd, Job("a", demo_job("a")), good)
    await change(etcd, "jobs/a/head", **HEADS[problem])
    before = await etcd.get("jobs/a/head")
    store, found, _ = await leader(etcd)
    assert list(found.jobs) == ["good"] and list(found.unreadable) == ["jobs/a"]
    assert problem.rsplit("|", maxsplit=1)[-1] in found.unreadable["jobs/a"]
    later = replace(found, jobs={"good": replace(found.jobs["good"], reason="later")})
    await store.commit(found, later, (), deadline_s=journal.DEADLINE_S)
    assert await etcd.get("jobs/a/head") == before, "it stays for whoever looks at it"


@pytest.mark.parametrize("value", [b"{", b"[]", b"\xff\xfe", b"null", b"[" * 100_000])
async def test_bytes_that_are_no_row_cost_what_they_stand_for(
    etcd: WatchedEtcd, value: bytes
) -> None:
    await stored(etcd, Job("a", demo_job("a")), Job("good", demo_job("good")))
    for key in ("jobs/a/head", "nodes/n00001", "requests/r1", "breaker"):
        await etcd.put(key, value)
    await etcd.put("jobs/ghost/specs/1", b"{}")
    await etcd.put("jobs/NOT A NAME/head", b"{}")
    await etcd.delete(MARKER)  # as a refused write does: the next leader looks for such jobs
    store, found, _ = await leader(etcd)
    assert list(found.jobs) == ["good"] and sorted(found.nodes) == ["n00000", "n00001"]
    assert sorted(found.unreadable) == [
        "breaker", "jobs/NOT A NAME", "jobs/a", "jobs/ghost", "nodes/n00001", "requests/r1",
    ]  # fmt: skip
    # Whether it was cordoned is not known: it gets no work until an operator says so.
    assert found.nodes["n00001"].disposition is Disposition.QUARANTINED
    assert found.nodes["n00000"].disposition is Disposition.SCHEDULABLE
    fresh = {**found.nodes, "n00001": journal.node("n00001")}
    await store.commit(found, replace(found, nodes=fresh), (), deadline_s=journal.DEADLINE_S)
    _, found, _ = await leader(etcd)
    assert "nodes/n00001" not in found.unreadable


async def test_a_damaged_or_missing_part_costs_its_job_alone(etcd: WatchedEtcd) -> None:
    await stored(etcd, placed("a", 40), placed("b", 40), placed("good", 40))
    for name in ("a", "b"):
        parts = (await etcd.get_prefix(f"jobs/{name}/attempts/000001/placement/")).items
        assert parts
        if name == "a":
            await etcd.delete(parts[0].key)
        else:
            await etcd.put(parts[0].key, parts[0].value.replace(b"n00001", b"n00002"))
    _, found, _ = await leader(etcd)
    assert list(found.jobs) == ["good"] and len(found.jobs["good"].slots) == 40
    assert "missing" in found.unreadable["jobs/a"] and "damaged" in found.unreadable["jobs/b"]


async def test_fields_of_a_later_build_are_kept(etcd: WatchedEtcd) -> None:
    """A build that is replaced by this one and comes back finds what it has stored."""
    state = await stored(etcd, Job("a", demo_job("a")))
    await change(etcd, "jobs/a/head", gravity={"x": 1})
    await change(etcd, "nodes/n00000", colour="blue")
    store, found, _ = await leader(etcd)
    assert not found.unreadable and list(found.jobs) == list(state.jobs)
    job = replace(found.jobs["a"], reason="later")
    node = replace(found.nodes["n00000"], disposition=Disposition.CORDONED)
    later = replace(found, jobs={"a": job}, nodes={**found.nodes, "n00000": node})
    await store.commit(found, later, (), deadline_s=journal.DEADLINE_S)
    for key, name, kept in (
        ("jobs/a/head", "gravity", {"x": 1}), ("nodes/n00000", "colour", "blue"),
    ):  # fmt: skip
        row = await etcd.get(key)
        assert row is not None and json.loads(row.value)[name] == kept


async def test_a_later_schema_is_refused_and_small_states_keep_the_first(
    etcd: WatchedEtcd,
) -> None:
    await stored(etcd, Job("a", demo_job("a")))
    assert json.loads((await row(etcd, META)).value)["schema_version"] == codec.BASIC_VERSION
    await stored(etcd, Job("a", demo_job("a")), placed("b", 200))
    assert json.loads((await row(etcd, META)).value)["schema_version"] == codec.PARTS_VERSION
    await change(etcd, META, schema_version=codec.SCHEMA_VERSION + 1)
    with pytest.raises(Exception, match="start the newer build"):
        await leader(etcd)


async def test_a_job_that_somebody_else_wrote_costs_one_term(etcd: WatchedEtcd) -> None:
    await stored(etcd, Job("good", demo_job("good")))
    await etcd.put("jobs/ghost/specs/1", b"{}")
    store, found, _ = await leader(etcd)
    jobs = {**found.jobs, "ghost": Job("ghost", demo_job("ghost"))}
    with pytest.raises(NotLeaderError):
        await store.commit(found, replace(found, jobs=jobs), (), deadline_s=journal.DEADLINE_S)
    _, found, _ = await leader(etcd)
    assert list(found.unreadable) == ["jobs/ghost"] and list(found.jobs) == ["good"]


async def test_jobs_of_a_build_without_the_index_are_found(etcd: WatchedEtcd) -> None:
    """An earlier build leads in between: it knows neither the index nor the marker."""
    await stored(etcd, Job("a", demo_job("a")))
    head, spec = await row(etcd, "jobs/a/head"), await row(etcd, "jobs/a/specs/1")
    earlier = Audit("", 1, 1e9, "driver", "driver", "LEADER_ELECTED", "an earlier build leads")
    await etcd.put("log/" + "1".zfill(20), codec.dump(earlier, txn="0" * 32))
    await etcd.put("jobs/b/specs/1", spec.value.replace(b'"a"', b'"b"'))
    await etcd.put("jobs/b/head", head.value.replace(b'"name":"a"', b'"name":"b"'))
    for _ in range(2):
        _, found, audit = await leader(etcd)
        assert sorted(found.jobs) == ["a", "b"] and found.log_seq == 1 and len(audit) == 1


async def row(etcd: EtcdClient, key: str) -> Any:
    """A row that is there."""
    found = await etcd.get(key)
    assert found is not None
    return found


async def test_a_driver_lives_on_with_an_unreadable_job(
    etcd_server: EtcdServer, tmp_path: Path
) -> None:
    driver = DriverProcess(tmp_path, etcd_server.endpoint)
    try:
        await driver.start()
        for name in ("a", "good"):
            await driver.submit(small_job(name))
        await driver.kill()
        async with EtcdClient([etcd_server.endpoint], prefix=f"{driver.prefix}/") as etcd:
            await change(etcd, "jobs/a/head", phase="FLYING")
            await etcd.delete("jobs/good/specs/1")
            await etcd.put("jobs/good/specs/1", b"{}")
        await driver.start()
        listed = await driver.stub.ListJobs(driver_pb2.ListJobsRequest(), timeout=CALL_TIMEOUT_S)
        assert not listed.jobs

        async def reported() -> list[types_pb2.Event]:
            return [e for e in await driver.events("") if e.reason == "ROW_UNREADABLE"]

        # It leads before the lines with which its term begins are stored.
        events = await eventually(reported, "the lines about the rows", story=driver.log)
        assert [event.subject for event in events] == ["jobs/a", "jobs/good"]
        assert "Job.phase" in events[0].message and "name is held" in events[0].outcome
        with pytest.raises(Exception, match="cannot be read"):
            await driver.submit(small_job("a"))
        assert (await driver.submit(small_job("c"))).phase == types_pb2.JOB_PHASE_QUEUED
    finally:
        await driver.close()


async def until_known(driver: DriverProcess, *jobs: str) -> None:
    """Wait until the driver knows which job each node runs: it acknowledges a heartbeat before."""

    async def known() -> bool:
        request = driver_pb2.ListNodesRequest()
        listed = (await driver.stub.ListNodes(request, timeout=CALL_TIMEOUT_S)).nodes
        return tuple(node.job for node in listed) == jobs

    await eventually(known, f"the nodes run {jobs}", story=driver.log)


async def test_workers_of_a_job_that_cannot_be_read_go_on(
    etcd_server: EtcdServer, tmp_path: Path
) -> None:
    """Their nodes get no order and no other work, until the job is deleted."""
    driver = DriverProcess(tmp_path, etcd_server.endpoint)
    try:
        await driver.start()
        async with contextlib.AsyncExitStack() as stack:
            nodes = [
                await stack.enter_async_context(FakeExecutor(name, driver.token, driver.address))
                for name in ("n1", "n2")
            ]
            await driver.until_nodes(2)
            await driver.submit(small_job("a"))
            await driver.until_job("a", lambda job: job.phase == types_pb2.JOB_PHASE_RUNNING)
            await driver.kill()
            async with EtcdClient([etcd_server.endpoint], prefix=f"{driver.prefix}/") as etcd:
                await change(etcd, "jobs/a/head", phase="FLYING")
                before = (await etcd.get_prefix("jobs/a/")).items
            acked = [len(node.acks) for node in nodes]
            ordered = [len(node.history) for node in nodes]
            await driver.start()
            await driver.submit(small_job("b"))
            await eventually(
                lambda: all(len(n.acks) > k + 2 for n, k in zip(nodes, acked, strict=True)),
                "heartbeats of both nodes", lambda: [len(node.acks) for node in nodes],
                story=driver.log,
            )  # fmt: skip
            assert [node.job for node in nodes] == ["a", "a"]
            assert [len(node.history) for node in nodes] == ordered, "no order at all"
            assert (await driver.job("b")).phase == types_pb2.JOB_PHASE_QUEUED
            await until_known(driver, "a", "a")
            for call in (
                driver.stub.GetJob(driver_pb2.GetJobRequest(name="a")),
                driver.stub.CancelJob(driver_pb2.CancelJobRequest(name="a", reason="r")),
                driver.stub.RestartJob(driver_pb2.RestartJobRequest(name="a", reason="r")),
                driver.stub.SuspendJob(driver_pb2.SuspendJobRequest(name="a", reason="r")),
                driver.stub.ExplainJob(driver_pb2.ExplainJobRequest(name="a")),
            ):
                with pytest.raises(grpc.aio.AioRpcError, match="megascale delete a") as refused:
                    await call
                assert status.read(refused.value).reason == "JOB_UNREADABLE"
            async with EtcdClient([etcd_server.endpoint], prefix=f"{driver.prefix}/") as etcd:
                assert (await etcd.get_prefix("jobs/a/")).items == before, (
                    "its rows stay as they are"
                )
                # An operator decides: about one of its nodes, then about the job.
                evict = driver_pb2.EvictNodeRequest(name="n2", reason="r")
                assert "of job a" in (await driver.stub.EvictNode(evict)).consequence
                await eventually(lambda: not nodes[1].job, "n2 stops")
                await until_known(driver, "a", "")
                assert (nodes[0].job, len(nodes[0].history)) == ("a", ordered[0])
                await driver.stub.UncordonNode(
                    driver_pb2.UncordonNodeRequest(name="n2", reason="r")
                )
                request = driver_pb2.DeleteJobRequest(name="a", reason="it is lost")
                reply = await driver.stub.DeleteJob(request)
                assert "workers on n1 stop" in reply.consequence
                assert not (await etcd.get_prefix("jobs/a/")).items
                assert await etcd.get("index/a") is None
            await driver.until_job("b", lambda job: job.phase == types_pb2.JOB_PHASE_RUNNING)
            assert [node.job for node in nodes] == ["b", "b"]
    finally:
        await driver.close()
