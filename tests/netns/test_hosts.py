"""A job on hosts of its own: addresses by routes, IPv6, partitions, loss, delay, a slow cable."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.harness import host_faults
from tests.harness.hosts import host_cluster
from tests.harness.namespaces import host_network, missing

from megascale.v1 import types_pb2

PASS, FAIL = types_pb2.CHECK_VERDICT_PASS, types_pb2.CHECK_VERDICT_FAIL
_CHECK = """
import sys
from megascale_executor.diagnostics.path_mtu import check
found = check(sys.argv[1])
print(found.verdict, found.value)
"""
pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(bool(missing()), reason=missing() or "there are hosts"),
    pytest.mark.timeout(300),
]


async def test_on_ipv6_a_job_trains_at_the_addresses_of_the_routes(tmp_path: Path) -> None:
    async with host_cluster(tmp_path, family=6) as cluster:
        found = await host_faults.calm(cluster, steps=60)
        addresses = {
            (cluster.folder / "nodes" / node / name).read_text().rpartition(":")[0]
            for node in ("n1", "n2")
            for name in ("executor.address", "checkpoint.address", "checkpoint.replicas")
        }
        assert addresses == {f"[{cluster.host(node).ipv6}]" for node in ("n1", "n2")}
    assert found["right"], found


async def test_a_node_that_is_cut_off_is_replaced(tmp_path: Path) -> None:
    async with host_cluster(tmp_path) as cluster:
        found = await host_faults.node_cut_off(cluster)
    assert found["right"], found


async def test_a_driver_that_is_cut_off_costs_the_job_nothing(tmp_path: Path) -> None:
    async with host_cluster(tmp_path) as cluster:
        found = await host_faults.driver_cut_off(cluster)
    assert found["right"], found


async def test_an_etcd_that_is_cut_off_costs_the_job_nothing(tmp_path: Path) -> None:
    async with host_cluster(tmp_path) as cluster:
        found = await host_faults.etcd_cut_off(cluster)
    assert found["right"], found


async def test_loss_and_delay_evict_nobody(tmp_path: Path) -> None:
    async with host_cluster(tmp_path, delay_ms=25.0) as cluster:
        found = await host_faults.lossy(cluster, steps=60)
    assert found["right"], found


async def test_a_wrong_mtu_is_found_by_a_diagnostic(tmp_path: Path) -> None:
    async with host_cluster(tmp_path) as cluster, cluster.client() as client:
        (before,) = await client.diagnose("n1", ["path_mtu"])
        cluster.host("n1").set_mtu(9000)  # and the switch takes 1500
        (after,) = await client.diagnose("n1", ["path_mtu"])
        (beside,) = await client.diagnose("n2", ["path_mtu"])
    driver = cluster.host("driver").ipv4
    assert (before.target, before.verdict, before.value) == (driver, PASS, 1500.0)
    assert (after.verdict, after.value) == (FAIL, 1500.0)
    assert "set the MTU of eth0 to 1500" in after.detail
    assert beside.verdict == PASS


async def test_a_lost_ping_is_no_wrong_mtu(tmp_path: Path) -> None:
    with host_network(("n1", "n2")) as network:
        network["n2"].lose(0.2)
        found = network["n1"].run(sys.executable, "-c", _CHECK, network["n2"].ipv6)
    assert found.split() == ["PASS", "1500.0"]


async def test_a_slow_cable_evicts_nobody(tmp_path: Path) -> None:
    async with host_cluster(tmp_path) as cluster:
        found = await host_faults.slow(cluster, steps=60)
    assert found["right"], found
