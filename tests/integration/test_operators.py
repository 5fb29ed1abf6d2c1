"""What operators use, at a real driver: cordon, diagnostics, audit, standby, metrics, stop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import sys
import urllib.error
import urllib.request
from asyncio.subprocess import DEVNULL
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.harness.driver import KEY_REMOVED, DriverProcess, running_driver, small_job
from tests.harness.etcd import etcd_server
from tests.harness.fake_executor import FakeExecutor
from tests.harness.waiting import CALL_TIMEOUT_S, eventually

from megascale.v1 import driver_pb2, types_pb2
from megascale_common.etcd.client import EtcdClient
from megascale_common.etcd.server import EtcdServer
from megascale_common.service import status
from megascale_common.service.errors import ServiceError

__all__ = ["etcd_server"]

LATE = "JOB_WAITS"  # of a job that still waits a second after it was submitted
CORDONED, SCHEDULABLE = types_pb2.NODE_DISPOSITION_CORDONED, types_pb2.NODE_DISPOSITION_SCHEDULABLE
SERVICES = ("megascale.v1.DriverService", "megascale.v1.ExecutorLinkService")
# One request per call of DriverService that a leader would answer, or refuse for its own content.
REQUESTS: dict[str, Any] = {
    "SubmitJob": driver_pb2.SubmitJobRequest(spec=small_job("x")),
    "GetJob": driver_pb2.GetJobRequest(name="x"),
    "ListJobs": driver_pb2.ListJobsRequest(),
    "WatchJob": driver_pb2.WatchJobRequest(name="x"),
    "CancelJob": driver_pb2.CancelJobRequest(name="x", reason="r"),
    "SuspendJob": driver_pb2.SuspendJobRequest(name="x", reason="r"),
    "ResumeJob": driver_pb2.ResumeJobRequest(name="x", reason="r"),
    "DeleteJob": driver_pb2.DeleteJobRequest(name="x", reason="r"),
    "RestartJob": driver_pb2.RestartJobRequest(name="x", reason="r"),
    "UpdateJob": driver_pb2.UpdateJobRequest(spec=small_job("x"), reason="r"),
    "ProfileJob": driver_pb2.ProfileJobRequest(job="x", steps=1),
    "CancelProfile": driver_pb2.CancelProfileRequest(job="x"),
    "ExplainJob": driver_pb2.ExplainJobRequest(name="x"),
    "GetHeatMap": driver_pb2.GetHeatMapRequest(job="x"),
    "GetTopology": driver_pb2.GetTopologyRequest(job="x"),
    "GetMfuDecline": driver_pb2.GetMfuDeclineRequest(job="x"),
    "GetTimeline": driver_pb2.GetTimelineRequest(job="x"),
    "ListNodes": driver_pb2.ListNodesRequest(),
    "EvictNode": driver_pb2.EvictNodeRequest(name="n1", reason="r"),
    "DrainNode": driver_pb2.DrainNodeRequest(name="n1", reason="r"),
    "CordonNode": driver_pb2.CordonNodeRequest(name="n1", reason="r"),
    "UncordonNode": driver_pb2.UncordonNodeRequest(name="n1", reason="r"),
    "ReportUnreachableNodes": driver_pb2.ReportUnreachableNodesRequest(),
    "RunDiagnostics": driver_pb2.RunDiagnosticsRequest(node="n1"),
    "ListEvents": driver_pb2.ListEventsRequest(),
    "WatchEvents": driver_pb2.WatchEventsRequest(),
    "TailLogs": driver_pb2.TailLogsRequest(job="x"),
    "ListCheckpoints": driver_pb2.ListCheckpointsRequest(job="x"),
    "SetPolicy": driver_pb2.SetPolicyRequest(
        rule="hang", mode=types_pb2.POLICY_MODE_OBSERVE, reason="r"
    ),
    "SetQuota": driver_pb2.SetQuotaRequest(tenant="t", devices=1, reason="r"),
    "ResetBreaker": driver_pb2.ResetBreakerRequest(reason="r"),
    "GetClusterInfo": driver_pb2.GetClusterInfoRequest(),
}


@pytest_asyncio.fixture
async def driver(etcd_server: EtcdServer, tmp_path: Path) -> AsyncIterator[DriverProcess]:
    async with running_driver(tmp_path, etcd_server.endpoint) as process:
        yield process


@pytest_asyncio.fixture
async def standby(
    driver: DriverProcess, etcd_server: EtcdServer, tmp_path: Path
) -> AsyncIterator[DriverProcess]:
    """A second driver on the same etcd that has read who leads."""
    process = DriverProcess(tmp_path, etcd_server.endpoint, driver.prefix, "standby")
    try:
        await process.start(leads=False)
        await eventually(lambda: _knows(process, driver.address()), "the standby knows the leader")
        yield process
    finally:
        await process.close()


async def _knows(process: DriverProcess, leader: str) -> bool:
    refused = await refusal(
        process.stub.GetClusterInfo(driver_pb2.GetClusterInfoRequest(), timeout=CALL_TIMEOUT_S)
    )
    return refused.metadata == {"leader": leader}


@contextlib.asynccontextmanager
async def executors(
    driver: DriverProcess, *names: str, steps: int = 0
) -> AsyncIterator[list[FakeExecutor]]:
    async with contextlib.AsyncExitStack() as stack:
        nodes = [
            await stack.enter_async_context(
                FakeExecutor(name, driver.token, driver.address, steps=steps)
            )
            for name in names
        ]
        await driver.until_nodes(len(names))
        for node in nodes:
            await node.until_usable()
        yield nodes


async def refusal(call: Awaitable[object]) -> ServiceError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return status.read(caught.value)


async def health(process: DriverProcess, service: str) -> str:
    stub = health_pb2_grpc.HealthStub(process.channel)
    reply = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=CALL_TIMEOUT_S)
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))


async def next_events(stream: Any, count: int) -> list[tuple[str, str, str]]:
    """(reason, subject, resume token) of the next ``count`` events but LATE."""
    found: list[tuple[str, str, str]] = []
    async with asyncio.timeout(CALL_TIMEOUT_S):
        while len(found) < count:
            update = await stream.read()
            if update.event.reason != LATE:
                found.append((update.event.reason, update.event.subject, update.resume_token))
    return found


async def end_of(stream: Any) -> grpc.StatusCode:
    """The status of a stream, which comes behind what it still holds."""
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
        while await stream.read() is not grpc.aio.EOF:
            pass
    code: grpc.StatusCode = await stream.code()
    return code


async def test_a_report_of_a_platform_is_taken_or_refused_whole(driver: DriverProcess) -> None:
    request = driver_pb2.ReportUnreachableNodesRequest()
    request.nodes.add(name="n9", condition="NotReady")  # a node that nobody knows does no harm
    answer = await driver.stub.ReportUnreachableNodes(request)
    assert answer.valid_for.ToSeconds() == 30
    for name, condition in (("n9", "again"), ("n1", "  ")):
        wrong = driver_pb2.ReportUnreachableNodesRequest()
        wrong.CopyFrom(request)
        wrong.nodes.add(name=name, condition=condition)
        refused = await refusal(driver.stub.ReportUnreachableNodes(wrong))
        assert refused.reason == "BAD_REQUEST" and refused.fields[0][0] == "nodes"


async def test_cordon_and_uncordon_are_tried_audited_and_kept_in_etcd(
    driver: DriverProcess, etcd_server: EtcdServer
) -> None:
    async with executors(driver, "n1", "n2"):
        request = driver_pb2.CordonNodeRequest(name="n1", request_id="r1")
        assert (await refusal(driver.stub.CordonNode(request))).fields[0][0] == "reason"
        request.reason, request.validate_only = "its link flaps", True
        tried = await driver.stub.CordonNode(request)
        assert (tried.node.disposition, tried.consequence) == (SCHEDULABLE, "it runs nothing")
        request.validate_only = False
        for _ in range(2):
            done = await driver.stub.CordonNode(request, metadata=(("megascale-actor", "ada"),))
            assert (done.node.disposition, done.node.disposition_reason) == (
                CORDONED,
                "its link flaps",
            )
        event = (await driver.events("nodes/n1"))[-1]
        assert (event.reason, event.actor) == ("NODE_CORDONED", "ada")
        async with EtcdClient([etcd_server.endpoint], prefix=driver.prefix + "/") as etcd:
            stored = await etcd.get("nodes/n1")
        assert stored is not None and json.loads(stored.value)["disposition"] == "CORDONED"
        await driver.submit(small_job("demo"))
        explained = await driver.stub.ExplainJob(driver_pb2.ExplainJobRequest(name="demo"))
        assert "n1 is cordoned (its link flaps)" in explained.explanation
        back = driver_pb2.UncordonNodeRequest(name="n1", reason="cable replaced")
        answer = await driver.stub.UncordonNode(back)
        assert (
            answer.node.disposition == SCHEDULABLE
            and answer.consequence == "it was cordoned: its link flaps"
        )
        await driver.until_job("demo", lambda job: job.phase == types_pb2.JOB_PHASE_RUNNING)
        assert (
            await driver.stub.UncordonNode(back)
        ).consequence == "nothing changes: the node is in that state already"
        evicted = await driver.stub.EvictNode(
            driver_pb2.EvictNodeRequest(name="n1", reason="smoke")
        )
        assert "begins at step 0, because the job writes no checkpoints" in evicted.consequence
        refused = await refusal(
            driver.stub.CordonNode(driver_pb2.CordonNodeRequest(name="n1", reason="r"))
        )
        assert (refused.code, refused.reason) == (
            "FAILED_PRECONDITION",
            "NODE_QUARANTINED",
        )
        missing = driver_pb2.CordonNodeRequest(name="n9", reason="r", validate_only=True)
        assert (await refusal(driver.stub.CordonNode(missing))).code == "NOT_FOUND"


async def test_diagnostics_run_on_idle_nodes_only(driver: DriverProcess) -> None:
    async with executors(driver, "n1", "n2", "n3") as nodes:
        await driver.submit(small_job("demo"))
        await driver.until_job("demo", lambda job: job.phase == types_pb2.JOB_PHASE_RUNNING)
        busy = await refusal(
            driver.stub.RunDiagnostics(driver_pb2.RunDiagnosticsRequest(node="n1"))
        )
        assert (busy.code, busy.reason) == ("FAILED_PRECONDITION", "NODE_BUSY")
        assert "ranks 0-3 of job demo" in busy.message and busy.metadata == {"job": "demo"}
        request = driver_pb2.RunDiagnosticsRequest(node="n3")
        found = await driver.stub.RunDiagnostics(request)
        assert [check.name for check in found.checks] == ["device_present", "compute"]
        request.checks.append("disk_room")
        assert [check.name for check in (await driver.stub.RunDiagnostics(request)).checks] == [
            "disk_room"
        ]
        nodes[2].gives_way = True
        gave_way = await refusal(driver.stub.RunDiagnostics(request))
        assert (gave_way.code, gave_way.reason) == ("ABORTED", "REFUSED_BY_NODE")
    gone = await refusal(driver.stub.RunDiagnostics(request))
    assert (gone.code, gone.reason) == ("UNAVAILABLE", "NODE_UNREACHABLE")


async def test_a_watcher_misses_nothing_when_another_driver_takes_over(
    driver: DriverProcess, standby: DriverProcess
) -> None:
    async with executors(driver, "n1"):
        watch = driver.stub.WatchEvents(driver_pb2.WatchEventsRequest())
        about_n1 = driver.stub.WatchEvents(driver_pb2.WatchEventsRequest(subject="nodes/n1"))
        await asyncio.gather(watch.initial_metadata(), about_n1.initial_metadata())
        await driver.submit(small_job("demo"))
        await driver.stub.CordonNode(driver_pb2.CordonNodeRequest(name="n1", reason="r"))
        seen = await next_events(watch, 2)
        assert [(reason, subject) for reason, subject, _ in seen] == [
            ("SUBMITTED", "jobs/demo"), ("NODE_CORDONED", "nodes/n1"),
        ]  # fmt: skip
        assert [reason for reason, _, _ in await next_events(about_n1, 1)] == ["NODE_CORDONED"]
        # While the node is there: that it is gone would be an event as well.
        assert await driver.stop() == 0
    token = seen[0][2]
    assert await end_of(watch) in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    await eventually(standby.leads, "the standby leads")
    again = standby.stub.WatchEvents(driver_pb2.WatchEventsRequest(resume_token=token))
    resumed = await next_events(again, 2)
    assert [reason for reason, _, _ in resumed] == ["NODE_CORDONED", "LEADER_ELECTED"]
    assert resumed[0][2] == seen[1][2], "the same line has the same token at every driver"
    everything = [event.reason for event in await standby.events("")]
    assert [reason for reason in everything if reason != LATE] == [
        "LEADER_ELECTED",
        "NODE_JOINED",
        "SUBMITTED",
        "NODE_CORDONED",
        "LEADER_ELECTED",
    ]
    wrong = standby.stub.WatchEvents(driver_pb2.WatchEventsRequest(resume_token="7.nobody"))
    assert (await refusal(wrong.read())).fields[0][0] == "resume_token"
    wrong = standby.stub.WatchEvents(driver_pb2.WatchEventsRequest(subject="racks/r1"))
    assert (await refusal(wrong.read())).fields[0][0] == "subject"


async def test_a_standby_answers_nothing_but_who_leads(
    driver: DriverProcess, standby: DriverProcess
) -> None:
    names = [
        method.name for method in driver_pb2.DESCRIPTOR.services_by_name["DriverService"].methods
    ]
    assert sorted(names) == sorted(REQUESTS)
    for name in names:
        call = getattr(standby.stub, name)(REQUESTS[name], timeout=CALL_TIMEOUT_S)
        refused = await refusal(call.read() if hasattr(call, "read") else call)
        assert (refused.code, refused.reason) == ("UNAVAILABLE", "NOT_LEADER"), name
        assert refused.metadata == {"leader": driver.address()}, name
    assert [await health(standby, name) for name in ("", *SERVICES)] == [
        "SERVING",
        "NOT_SERVING",
        "NOT_SERVING",
    ]
    assert [await health(driver, name) for name in ("", *SERVICES)] == ["SERVING"] * 3
    assert "megascale_leader 0.0" in scrape(standby) and "megascale_leader 1.0" in scrape(driver)


async def test_sigterm_resigns_and_a_standby_leads_at_once(
    driver: DriverProcess, standby: DriverProcess
) -> None:
    async with executors(driver, "n1"):
        watch = driver.stub.WatchEvents(driver_pb2.WatchEventsRequest())
        await watch.initial_metadata()  # an open stream does not delay the stop
        status = health_pb2_grpc.HealthStub(driver.channel).Watch(
            health_pb2.HealthCheckRequest(service=SERVICES[0])
        )
        assert (await status.read()).status == health_pb2.HealthCheckResponse.SERVING
        assert await driver.stop() == 0
        assert (await status.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        await eventually(standby.leads, "the standby leads")
    assert KEY_REMOVED not in standby.log(), "a leader that stops in order removes its key itself"
    assert await health(standby, SERVICES[0]) == "SERVING"


async def test_a_standby_does_not_wait_for_the_lease_of_a_killed_leader(
    driver: DriverProcess, standby: DriverProcess
) -> None:
    await driver.kill()
    await eventually(standby.leads, "the standby leads")
    assert KEY_REMOVED in standby.log(), "the lease alone would hold the standby back for 10 s"


async def test_a_restored_backup_with_a_higher_generation_leads_again(tmp_path: Path) -> None:
    """As in docs/operations.md."""
    server = EtcdServer(tmp_path / "etcd")
    await server.start()
    etcdctl = Path(sys.executable).with_name("etcdctl")

    async def run(*arguments: str) -> None:
        limits = (f"--{limit}-timeout={CALL_TIMEOUT_S:g}s" for limit in ("dial", "command"))
        process = await asyncio.create_subprocess_exec(
            etcdctl, *limits, *arguments, stdout=DEVNULL, stderr=DEVNULL
        )
        assert await process.wait() == 0, arguments

    driver = DriverProcess(tmp_path, server.endpoint)
    try:
        await driver.start()
        async with executors(driver, "n1"):
            await driver.stub.CordonNode(driver_pb2.CordonNodeRequest(name="n1", reason="r"))
            await run(
                "--endpoints", server.endpoint, "snapshot", "save", str(tmp_path / "backup.db")
            )
            before = (await driver.stub.GetClusterInfo(driver_pb2.GetClusterInfoRequest())).epoch
            await driver.kill()
            server.kill()
            shutil.rmtree(tmp_path / "etcd")
            await run(
                "snapshot",
                "restore",
                str(tmp_path / "backup.db"),
                "--data-dir",
                str(tmp_path / "etcd"),
            )
            await server.start()
            generation = before.cluster_generation + 1
            meta = f'{{"cluster_generation":{generation},"schema_version":1}}'
            await run("--endpoints", server.endpoint, "put", f"{driver.prefix}/meta", meta)
            await driver.start()
            after = (await driver.stub.GetClusterInfo(driver_pb2.GetClusterInfoRequest())).epoch
            assert after.cluster_generation == generation
            await driver.until_nodes(1)
            (node,) = (await driver.stub.ListNodes(driver_pb2.ListNodesRequest())).nodes
            assert node.disposition == CORDONED
    finally:
        await driver.close()
        await server.stop()


def scrape(process: DriverProcess, path: str = "/metrics") -> str:
    url = f"http://{process.metrics_file.read_text().strip()}{path}"
    with urllib.request.urlopen(url, timeout=CALL_TIMEOUT_S) as reply:
        return str(reply.read().decode())


async def test_metrics_show_jobs_nodes_and_steps(driver: DriverProcess) -> None:
    async with executors(driver, "n1", "n2", steps=5):
        await driver.submit(small_job("demo"))
        await driver.until_job("demo", lambda job: job.phase == types_pb2.JOB_PHASE_SUCCEEDED)
        page = await asyncio.to_thread(scrape, driver)
    for line in (
        'megascale_jobs{phase="succeeded"} 1.0',
        'megascale_nodes{disposition="schedulable",liveness="alive"} 2.0',
        'megascale_step_duration_seconds_count{job="demo"} 5.0',
        'megascale_step{job="demo"} 5.0',
        'megascale_loss{job="demo"} 0.2',
        'megascale_events_total{reason="JOB_SUCCEEDED",severity="info"} 1.0',
        'service="driver"',
    ):
        assert line in page, line
    assert 'megascale_heartbeat_age_seconds{node="n2"} ' in page
    with pytest.raises(urllib.error.HTTPError, match="404"):
        await asyncio.to_thread(scrape, driver, "/other")
