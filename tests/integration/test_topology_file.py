"""A driver with its site's files: where it places a job, which spare it takes, NCCL's settings."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from tests.harness.driver import DriverProcess, small_job
from tests.harness.etcd import etcd, etcd_server
from tests.harness.fake_executor import FakeExecutor
from tests.harness.waiting import CALL_TIMEOUT_S, eventually
from typer.testing import CliRunner

from megascale.v1 import driver_pb2, types_pb2
from megascale_cli.app import build_app
from megascale_common.etcd.server import EtcdServer

__all__ = ["etcd", "etcd_server"]

# As `scontrol show topology` prints it; names that follow each other are on different switches.
TOPOLOGY = """\
SwitchName=tor0 Level=0 LinkSpeed=1 Nodes=n[0,2,4,6,8]
SwitchName=tor1 Level=0 LinkSpeed=1 Nodes=n[1,3,5,7,9]
"""


async def test_a_topology_from_a_file_decides_where_ranks_and_spares_run(
    etcd_server: EtcdServer, tmp_path: Path
) -> None:
    file = tmp_path / "topology.txt"
    file.write_text(TOPOLOGY)
    network = tmp_path / "network.json"
    network.write_text('{"nccl": "2.27", "nics": ["mlx5_0"], "traffic_class": 106}')
    options = ("--topology", str(file), "--network-profile", str(network))
    driver = DriverProcess(tmp_path, etcd_server.endpoint, None, "driver", *options)
    try:
        await driver.start()
        async with contextlib.AsyncExitStack() as stack:
            nodes = [
                FakeExecutor(
                    f"n{i}", driver.token, driver.address, devices=2, protocol=3 if i == 7 else 4
                )
                for i in range(10)
            ]
            doomed = await stack.enter_async_context(contextlib.AsyncExitStack())
            for node in nodes[:8]:
                await (doomed if node is nodes[5] else stack).enter_async_context(node)
                await node.until_usable()
            # Four stages of two replicas; a step sends far more hidden states than gradients.
            sizes = {"tp": 2, "pp": 4, "dp": 2}
            layout = {f"trainer__parallelism__{axis}": size for axis, size in sizes.items()}
            await driver.submit(
                small_job(
                    "demo",
                    **layout,
                    trainer__training__global_batch_size=1024,
                    recovery__spare_nodes=2,
                )
            )
            await driver.until_job("demo", running(1))
            await settings_arrive(driver, nodes[:8], tmp_path)
            job = await driver.job("demo")
            before = await placed(driver, job)
            assert job.placement.order == "pipeline-inner" and before.cross_switch_share < 0.2
            for replica in range(2):  # nodes in the order of ranks: two of each stage
                assert len({switch(job.nodes[2 * stage + replica]) for stage in range(4)}) == 1

            for node in nodes[8:]:
                await stack.enter_async_context(node)
            await driver.until_job("demo", lambda job: set(job.spare_nodes) == {"n8", "n9"})
            await doomed.aclose()
            await driver.until_job("demo", running(2))
            again = await driver.job("demo")
            place = list(job.nodes).index("n5")
            assert again.nodes[place] == "n9", "n8 is first by name, and on the other switch"
            assert (await placed(driver, again)).cross_switch_edges == before.cross_switch_edges
            assert "fewest edges between switches" in again.placement.reason
    finally:
        await driver.close()


async def settings_arrive(driver: DriverProcess, nodes: list[FakeExecutor], folder: Path) -> None:
    """NCCL's settings come with the attempt, and what a node found is shown; jobs have to fit."""
    for node in nodes:
        sent = {each.name: each for each in node.desired.assignment.network.settings}
        if node.protocol < 4:
            assert not sent
            continue
        assert sent["NCCL_IB_TC"].value == "106" and sent["NCCL_IB_TC"].reason
    finding = {"name": "network_profile", "target": "environment", "detail": "NCCL_IB_TC is 3"}
    degraded = types_pb2.CHECK_VERDICT_DEGRADED
    nodes[0].report(checks=[types_pb2.CheckResult(verdict=degraded, **finding)])
    command = ["net", "verify", "n0", "--cluster", str(folder), "--json"]

    async def shown() -> bool:
        found = await asyncio.to_thread(CliRunner().invoke, build_app(), command)
        answer = json.loads(found.stdout)
        assert found.exit_code == (0 if answer["holds"] else 1)
        wanted = {"target": "environment", "verdict": "DEGRADED", "detail": "NCCL_IB_TC is 3"}
        return bool(answer["findings"] == [wanted])

    await eventually(shown, "the finding is shown")
    missing = await asyncio.to_thread(
        CliRunner().invoke, build_app(), ["net", "verify", "n99", "--cluster", str(folder)]
    )
    assert missing.exit_code == 4 and "there is no node n99" in missing.output
    short = small_job("short", recovery__collective_timeout_s=14.0)
    with pytest.raises(grpc.aio.AioRpcError, match=r"recovery\.collective_timeout") as refused:
        await driver.submit(short)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def running(attempt: int) -> Callable[[driver_pb2.Job], bool]:
    phase = types_pb2.JOB_PHASE_RUNNING
    return lambda job: job.attempt == attempt and job.phase == phase


def switch(node: str) -> int:
    return int(node[1:]) % 2


async def placed(driver: DriverProcess, job: driver_pb2.Job) -> driver_pb2.PlacementScore:
    """The score, which the explanation has as well."""
    request = driver_pb2.ExplainJobRequest(name=job.spec.name)
    found = await driver.stub.ExplainJob(request, timeout=CALL_TIMEOUT_S)
    score = job.placement.score
    assert found.placement == job.placement and score.cost_byte_tiers > 0
    assert f"{100 * score.cross_switch_share:.0f} % of" in found.text
    assert f"({score.cross_switch_edges} edges)" in found.text
    return score
