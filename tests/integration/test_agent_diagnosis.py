"""A real agent checks itself on demand, gives way to attempts, and shows its metrics."""

from __future__ import annotations

import asyncio
import os
import sys
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from tests.harness import scripted_template
from tests.harness.agent_process import TOKEN, AgentProcess, start_agent
from tests.harness.installed_package import install
from tests.harness.recording_driver import RecordingDriver, whole_on_one_node
from tests.harness.waiting import CALL_TIMEOUT_S, eventually

from megascale.v1 import executor_pb2, executor_pb2_grpc, link_pb2, types_pb2
from megascale_common.service.channel import open_channel
from megascale_job import loading

IDLE, PREPARE = link_pb2.DESIRED_PHASE_IDLE, link_pb2.DESIRED_PHASE_PREPARE
SCRIPT = Path(scripted_template.__file__)
OPTIONS = ("--metrics-bind", "127.0.0.1:0", "--fast-counters-ms", "10")
REFUSES = """
from megascale_executor.diagnostics.diagnostic import Diagnostic
from megascale_executor.diagnostics.finding import Finding

class Refuses(Diagnostic):
    name = "refuses"

    async def run(self, node):
        job, rank = node.attempt.job.name, node.attempt.ranks[0]
        return [Finding(self.name, job, "FAIL", f"rank {rank} is unwelcome")]
"""


@pytest_asyncio.fixture
async def driver(tmp_path: Path) -> AsyncIterator[RecordingDriver]:
    """A driver whose address stands in driver.address."""
    made = RecordingDriver("test", TOKEN)
    await made.start(tmp_path / "driver.address")
    yield made
    await made.stop()


@pytest_asyncio.fixture(params=["PASS"])
async def agent(
    driver: RecordingDriver, tmp_path: Path, request: pytest.FixtureRequest
) -> AsyncIterator[AgentProcess]:
    """An idle agent of two CPU slots, whose probes answer with the verdict given."""
    template = f"{sys.executable} {SCRIPT} --verdict {request.param}"
    started = start_agent(tmp_path, template=template, options=OPTIONS)
    await driver.until_joined()
    yield started
    await asyncio.to_thread(started.end)


async def diagnose(agent: AgentProcess, *checks: str) -> list[types_pb2.CheckResult]:
    address = (agent.node_folder / "executor.address").read_text().strip()
    async with open_channel(address, TOKEN) as channel:
        stub = executor_pb2_grpc.ExecutorServiceStub(channel)
        request = executor_pb2.RunNodeDiagnosticsRequest(checks=checks)
        return list((await stub.RunNodeDiagnostics(request, timeout=CALL_TIMEOUT_S)).checks)


async def refused(agent: AgentProcess, *checks: str) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await diagnose(agent, *checks)
    return caught.value.code(), caught.value.details() or ""


def assignment(tmp_path: Path) -> link_pb2.AttemptAssignment:
    values: dict[str, Any] = {
        "name": "demo",
        "model": {
            "layers": 2,
            "hidden_size": 32,
            "heads": 2,
            "vocab_size": 257,
            "sequence_length": 16,
        },
        "training": {"steps": 5, "global_batch_size": 4, "precision": "fp32"},
        "parallelism": {"dp": 2},
        "data": {"sources": [{"prefix": str(tmp_path / "corpus")}]},
    }
    return whole_on_one_node(loading.from_accepted(values), attempt=3)


async def test_an_idle_node_checks_itself_and_a_held_one_refuses(
    driver: RecordingDriver, agent: AgentProcess, tmp_path: Path
) -> None:
    found = await diagnose(agent)
    assert {(check.name, check.target) for check in found} >= {
        ("device_present", "cpu:0"), ("device_present", "cpu:1"), ("checkpoint_daemon", "node"),
        ("compute", "cpu:0"), ("compute", "cpu:1"), ("disk_room", str(agent.node_folder)),
    }  # fmt: skip
    others = [check for check in found if check.verdict != types_pb2.CHECK_VERDICT_PASS]
    assert {(check.name, check.verdict) for check in others} == {
        ("gpu_health", types_pb2.CHECK_VERDICT_SKIPPED),
        ("path_mtu", types_pb2.CHECK_VERDICT_SKIPPED),  # no peer to send to
    }
    assert {check.name for check in await diagnose(agent, "disk_room")} == {"disk_room"}
    code, message = await refused(agent, "disk_room", "gpu_burn")
    assert (
        code == grpc.StatusCode.INVALID_ARGUMENT
        and "no check gpu_burn, this node has device_present" in message
    )
    driver.want(PREPARE, assignment(tmp_path))
    await driver.until_phase(link_pb2.ATTEMPT_PHASE_PREPARED)
    code, message = await refused(agent)
    assert code == grpc.StatusCode.FAILED_PRECONDITION and "attempt 3 of job demo" in message


@pytest.mark.parametrize("agent", ["FAIL"], indirect=True)
async def test_a_faulty_device_is_found(agent: AgentProcess) -> None:
    verdicts = {check.name: check.verdict for check in await diagnose(agent)}
    assert verdicts["compute"] == types_pb2.CHECK_VERDICT_FAIL
    assert verdicts["disk_room"] == types_pb2.CHECK_VERDICT_PASS


@pytest.mark.parametrize("agent", ["HANG"], indirect=True)
async def test_a_diagnosis_gives_way_to_an_attempt(
    driver: RecordingDriver, agent: AgentProcess, tmp_path: Path
) -> None:
    asking = asyncio.create_task(refused(agent, "compute"))
    log = agent.node_folder / "self-check.log"  # of the probe that hangs
    await eventually(log.exists, "the check runs", story=agent.log)
    assert not asking.done()
    driver.want(PREPARE, assignment(tmp_path))
    code, message = await asking
    assert code == grpc.StatusCode.ABORTED and "given work" in message
    driver.want(IDLE)
    await driver.until_phase(link_pb2.ATTEMPT_PHASE_IDLE)


async def test_a_check_of_an_installed_package_can_refuse_an_attempt(
    driver: RecordingDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = tmp_path / "site-packages"
    packages.mkdir()
    install(packages, "acme-checks", REFUSES, {"refuses": "Refuses"})
    install(packages, "broken-checks", "import no_such_module", {"broken": "Broken"})
    paths = [str(packages), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    agent = start_agent(tmp_path)
    try:
        await driver.until_joined()
        driver.want(PREPARE, assignment(tmp_path))
        failed = await driver.until_phase(link_pb2.ATTEMPT_PHASE_FAILED)
        assert failed.failure == "self-check refuses of demo: rank 0 is unwelcome"
        verdicts = {check.name: check.verdict for check in failed.checks}
        assert verdicts["broken"] == types_pb2.CHECK_VERDICT_SKIPPED
        assert verdicts["compute"] == types_pb2.CHECK_VERDICT_PASS
        assert "package broken-checks: broken_checks:Broken cannot be loaded" in agent.log()
    finally:
        await asyncio.to_thread(agent.end)


async def test_agent_and_daemon_show_metrics(agent: AgentProcess) -> None:
    def page(name: str) -> str:
        address = (agent.node_folder / name).read_text().strip()
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=CALL_TIMEOUT_S) as reply:
            return str(reply.read().decode())

    await diagnose(agent, "checkpoint_daemon")  # it serves from here on

    async def while_linked() -> str:
        found = await asyncio.to_thread(page, "metrics.address")
        # Threads read the counters, and a peak takes two samples.
        read = 'counter="process_cpu_seconds_total"' in found and "peak_bytes_per_second{" in found
        return found if read and "megascale_link_connected 1.0" in found else ""

    of_agent = await eventually(while_linked, "the agent's page while it is linked, with counters")
    for line in (
        "megascale_step_records_pending 0.0",
        'megascale_attempt_phase{phase="idle"} 1.0', 'service="executor"',
        'megascale_host_counter{counter="process_cpu_seconds_total",target="agent"}',
        'megascale_counter_sources_skipped', 'megascale_port_peak_bytes_per_second{counter="',
    ):  # fmt: skip
        assert line in of_agent, line
    of_daemon = await asyncio.to_thread(page, "checkpoint.metrics.address")
    assert (
        "megascale_checkpoint_staging_used_bytes 0.0" in of_daemon
        and 'service="checkpoint"' in of_daemon
    )


async def check_group(agent: AgentProcess, **request: Any) -> list[executor_pb2.CheckGroupResponse]:
    address = (agent.node_folder / "executor.address").read_text().strip()
    async with open_channel(address, TOKEN) as channel:
        stub = executor_pb2_grpc.ExecutorServiceStub(channel)
        call = stub.CheckGroup(executor_pb2.CheckGroupRequest(**request), timeout=CALL_TIMEOUT_S)
        return [part async for part in call]


async def test_a_node_has_a_part_in_the_check_of_a_group(
    driver: RecordingDriver, agent: AgentProcess, tmp_path: Path
) -> None:
    where, last = await check_group(agent, world_size=2)
    assert where.store_endpoint.startswith("127.0.0.1:") and not where.checks
    assert [(check.name, check.target, check.verdict) for check in last.checks] == [
        ("group_all_reduce", "cpu:0", types_pb2.CHECK_VERDICT_PASS),
        ("group_all_reduce", "cpu:1", types_pb2.CHECK_VERDICT_PASS),
    ]
    (last,) = await check_group(
        agent, first_rank=2, world_size=3, devices=[1], store_endpoint=where.store_endpoint
    )
    assert [check.target for check in last.checks] == ["cpu:1"]
    for problem, code, request in (
        ("[7] are not devices", grpc.StatusCode.INVALID_ARGUMENT, {"devices": [7]}),
        ("ranks 0 to 1 do not fit into 1", grpc.StatusCode.INVALID_ARGUMENT, {"world_size": 1}),
        ("'' is not an address", grpc.StatusCode.INVALID_ARGUMENT, {"first_rank": 1}),
        ("was restarted", grpc.StatusCode.FAILED_PRECONDITION, {"incarnation": "older"}),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await check_group(agent, **{"world_size": 3, **request})
        assert caught.value.code() == code and problem in str(caught.value.details())
    driver.want(PREPARE, assignment(tmp_path))
    await driver.until_phase(link_pb2.ATTEMPT_PHASE_PREPARED)
    with pytest.raises(grpc.aio.AioRpcError, match="attempt 3 of job demo"):
        await check_group(agent, world_size=2)
