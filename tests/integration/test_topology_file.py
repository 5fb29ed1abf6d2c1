"""A driver with the topology of its cluster: where it places a job, and which spare it takes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from tests.harness.driver import DriverProcess, small_job
from tests.harness.etcd import etcd, etcd_server
from tests.harness.fake_executor import FakeExecutor
from tests.harness.waiting import CALL_TIMEOUT_S

from megascale.v1 import driver_pb2, types_pb2
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
    options = (tmp_path, etcd_server.endpoint, None, "driver", "--topology", str(file))
    driver = DriverProcess(*options)
    try:
        await driver.start()
        async with contextlib.AsyncExitStack() as stack:
            nodes = [
                FakeExecutor(f"n{i}", driver.token, driver.address, devices=2) for i in range(10)
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
