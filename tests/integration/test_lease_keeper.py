"""The keeper of a lease: what keeps its owner busy costs no term, what hangs its owner does."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from tests.harness import etcd as etcd_harness
from tests.harness.processes import until_gone
from tests.harness.waiting import CALL_TIMEOUT_S, eventually, until

from megascale_common.etcd.client import EtcdClient
from megascale_common.etcd.keeper_process import KeeperProcess
from megascale_common.etcd.lease import Lease
from megascale_common.etcd.server import EtcdServer
from megascale_common.node.process import child_environment

etcd_server, etcd_prefix, etcd = (
    etcd_harness.etcd_server,
    etcd_harness.etcd_prefix,
    etcd_harness.etcd,
)
TTL_S, LONG_TTL_S = 3, 60
SILENCE_S = 2.0


class Often(KeeperProcess):
    """Renews any lease as often as one of TTL_S: a long one lives through the start of a keeper."""

    def keep(self, lease_id: int, ttl_s: int) -> None:
        super().keep(lease_id, min(ttl_s, TTL_S))


@pytest.fixture
def keeper(etcd_server: EtcdServer) -> Iterator[KeeperProcess]:
    with Often([etcd_server.endpoint], silence_limit_s=SILENCE_S) as running:
        yield running


@pytest.fixture
def patient(etcd_server: EtcdServer) -> Iterator[KeeperProcess]:
    with Often([etcd_server.endpoint]) as running:
        yield running


async def started(etcd: EtcdClient, keeper: KeeperProcess) -> None:
    """Wait until the keeper renews: a short lease may then be granted."""
    async with await Lease.grant(etcd, LONG_TTL_S, keeper=keeper) as lease:
        await renewed(lease, keeper)


async def renewed(lease: Lease, keeper: KeeperProcess) -> None:
    """Wait until the keeper has renewed the lease."""
    await eventually(
        lambda: (found := keeper.newest()) is not None and found.lease_id == lease.lease_id,
        "the first renewal",
    )


async def test_a_busy_loop_does_not_lose_the_lease(
    etcd: EtcdClient, patient: KeeperProcess
) -> None:
    await started(etcd, patient)
    async with await Lease.grant(etcd, 2 * TTL_S, keeper=patient) as lease:
        await etcd.put("owner", b"", lease_id=lease.lease_id)
        await renewed(lease, patient)
        time.sleep(2.5 * TTL_S)  # noqa: ASYNC251
        assert lease.remaining_s() > 0 and not lease.lost.is_set(), lease.lost_reason
        assert await etcd.get("owner") is not None


@pytest.mark.slow
async def test_a_loop_that_stands_for_too_long_loses_it(
    etcd: EtcdClient, keeper: KeeperProcess
) -> None:
    await started(etcd, keeper)
    async with await Lease.grant(etcd, TTL_S, keeper=keeper) as lease:
        await etcd.put("owner", b"", lease_id=lease.lease_id)
        await renewed(lease, keeper)
        time.sleep(SILENCE_S + TTL_S + 1.5)  # noqa: ASYNC251
        assert lease.remaining_s() == 0.0
        await asyncio.wait_for(lease.lost.wait(), CALL_TIMEOUT_S)
        # Whose word comes first when the loop goes on, its own clock's or the keeper's, is chance.
        assert "not renewed" in lease.lost_reason or "expired" in lease.lost_reason
        await eventually(lambda: gone(etcd), "the end of the key")


async def gone(etcd: EtcdClient) -> bool:
    """Whether the key of the lease is gone."""
    return await etcd.get("owner") is None


async def test_a_lease_revoked_by_another_is_lost(etcd: EtcdClient, patient: KeeperProcess) -> None:
    async with await Lease.grant(etcd, LONG_TTL_S, keeper=patient) as lease:
        await etcd.revoke_lease(lease.lease_id, CALL_TIMEOUT_S)
        await asyncio.wait_for(lease.lost.wait(), CALL_TIMEOUT_S)
        assert "revoked" in lease.lost_reason


async def test_a_keeper_that_ends_is_replaced(etcd: EtcdClient, patient: KeeperProcess) -> None:
    async with await Lease.grant(etcd, LONG_TTL_S, keeper=patient) as lease:
        await renewed(lease, patient)
        first, renewal = patient.pid, patient.newest()
        assert first is not None and renewal is not None
        os.kill(first, signal.SIGKILL)
        await eventually(
            lambda: (found := patient.newest()) is not None and found.sent_s > renewal.sent_s,
            "a renewal by the next keeper",
        )
        assert patient.pid not in (None, first) and not lease.lost.is_set()


OWNER = """
import sys, time
from megascale_common.etcd.keeper_process import KeeperProcess
keeper = KeeperProcess([sys.argv[1]])
keeper.keep(1, 10)
print(keeper.pid, flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_keeper_ends_with_its_owner(etcd_server: EtcdServer, number: signal.Signals) -> None:
    command = [sys.executable, "-c", OWNER, etcd_server.endpoint]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=child_environment()) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        until(lambda: os.path.exists(f"/proc/{pid}"), "the keeper")
        owner.send_signal(number)
        until_gone([pid], "the keeper")
