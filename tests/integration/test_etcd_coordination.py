"""Leases, watches and elections on a real etcd that is killed, restarted, cut off, compacted."""

import asyncio
import contextlib
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.harness.etcd import (
    CuttableProxy,
    etcd,
    etcd_prefix,
    etcd_server,
    revision_of,
    take,
)
from tests.harness.waiting import CALL_TIMEOUT_S

from megascale_common.etcd import rpc_pb2
from megascale_common.etcd.client import EtcdClient, Position, Watch
from megascale_common.etcd.connection import Member
from megascale_common.etcd.election import campaign
from megascale_common.etcd.errors import InvalidEtcdRequest
from megascale_common.etcd.lease import Lease
from megascale_common.etcd.operations import Put
from megascale_common.etcd.server import EtcdServer

__all__ = ["etcd", "etcd_prefix", "etcd_server"]  # fixtures

# Far above what any test here takes: only a lease whose loss is the point is short.
LEASE_TTL_S = 60

# Leases


async def test_a_lease_revoked_by_another_is_lost(etcd: EtcdClient) -> None:
    async with await Lease.grant(etcd, 9) as lease:
        request = rpc_pb2.LeaseRevokeRequest(ID=lease.lease_id)

        async def revoke(member: Member, timeout_s: float) -> rpc_pb2.LeaseRevokeResponse:
            return await member.lease.LeaseRevoke(request, timeout=timeout_s)

        await etcd.members.write("revoke", CALL_TIMEOUT_S, revoke)
        await asyncio.wait_for(lease.lost.wait(), CALL_TIMEOUT_S)
        assert "revoked" in lease.lost_reason


async def test_a_blocked_event_loop_does_not_prolong_a_lease(etcd: EtcdClient) -> None:
    async with await Lease.grant(etcd, 1) as lease:
        time.sleep(1.0)  # noqa: ASYNC251 - the pause is the point
        assert lease.remaining_s() == 0.0


# Watches


async def test_a_watch_over_a_killed_server_has_no_gap_and_no_duplicate(
    etcd: EtcdClient, etcd_server: EtcdServer
) -> None:
    start = await revision_of(etcd) + 1
    expected: list[tuple[int, str]] = []

    async def write(first: int) -> None:
        for index in range(first, first + 5):
            keys = [f"w/{index}/{part}" for part in "abc"]
            result = await etcd.txn(success=[Put(key, b"x") for key in keys])
            expected.extend((result.revision, key) for key in keys)

    async with Watch(etcd, "w/", start) as watch:
        await write(0)
        seen = await take(watch, 8)  # in the middle of a revision
        etcd_server.kill()
        await etcd_server.start()
        await write(5)
        seen += await take(watch, 22)
        etcd_server.kill()
        await etcd_server.start()
        await write(10)
        seen += await take(watch, 15)
    assert [(event.kv.mod_revision, event.kv.key) for event in seen] == expected


async def test_a_large_history_arrives_in_fragments(etcd: EtcdClient) -> None:
    start = await revision_of(etcd) + 1
    for index in range(8):
        await etcd.txn(success=[Put(f"f/{index}/{part}", bytes(400_000)) for part in "ab"])
    async with Watch(etcd, "f/", start, queue_events=2) as watch:
        await asyncio.sleep(0.2)  # a slow consumer
        seen = await take(watch, 16)
        assert [event.kv.key for event in seen] == [
            f"f/{i}/{part}" for i in range(8) for part in "ab"
        ]
    await etcd.delete_prefix("f/")


async def test_a_cut_while_catching_up_leaves_no_gap(
    etcd: EtcdClient, etcd_server: EtcdServer, etcd_prefix: str
) -> None:
    """etcd sends a long history in batches of 1000 revisions, each with the newest revision."""
    start = await revision_of(etcd) + 1
    revisions: list[int] = []
    for first in range(0, 1100, 50):  # as many at once as a busy machine answers in time
        keys = [f"h/{index}" for index in range(first, first + 50)]
        revisions += await asyncio.gather(*(etcd.put(key, bytes(200)) for key in keys))
    async with CuttableProxy(etcd_server.endpoint) as proxy:
        async with EtcdClient([proxy.endpoint], prefix=etcd_prefix) as client:
            async with Watch(client, "h/", start, queue_events=1) as watch:
                seen = await take(watch, 1)
                proxy.swallow_replies = True  # the first batch is here, the second is lost
                seen += await take(watch, 999)
                proxy.reset()
                seen += await take(watch, 100)
    assert [event.kv.mod_revision for event in seen] == sorted(revisions)


async def test_closing_ends_the_iteration(etcd: EtcdClient) -> None:
    async with Watch(etcd, "", await revision_of(etcd) + 1) as watch:
        waiting = asyncio.create_task(anext(watch))
        await asyncio.sleep(0.05)
    with pytest.raises(StopAsyncIteration):
        await asyncio.wait_for(waiting, CALL_TIMEOUT_S)
    with pytest.raises(InvalidEtcdRequest, match="start_revision"):
        Watch(etcd, "", 0)


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(0, 12), st.booleans()), max_size=5),
)
def test_positions_survive_a_cut_anywhere(sizes: list[int], cuts: list[tuple[int, bool]]) -> None:
    """Streams end after any number of events, within or between the parts of a revision."""
    history = [(revision, part) for revision, size in enumerate(sizes, 10) for part in range(size)]
    position, delivered = Position(10), []
    for length, whole in [*cuts, (len(history), True)]:
        start = position.restart()
        stream = [item for item in history if item[0] >= start][:length]
        delivered += [item for item in stream if position.take(item[0])]
        at_end_of_revision = stream and (stream[-1][0], stream[-1][1] + 1) not in history
        if whole and at_end_of_revision:
            position.complete(stream[-1][0])
    assert delivered == history


# Elections


async def test_candidates_lead_one_after_another(etcd_server: EtcdServer, etcd_prefix: str) -> None:
    leading: list[str] = []
    tokens: list[int] = []

    async def candidate(name: str) -> None:
        async with EtcdClient([etcd_server.endpoint], prefix=etcd_prefix) as client:
            async with await campaign(
                client, "leader", name.encode(), ttl_s=LEASE_TTL_S
            ) as leadership:
                leading.append(name)
                tokens.append(leadership.create_revision)
                assert len(leading) == 1, "two leaders at once"
                stored = await client.get("leader")
                assert stored is not None and stored.value == name.encode()
                await asyncio.sleep(0.1)
                leading.remove(name)

    await asyncio.wait_for(asyncio.gather(*(candidate(name) for name in "abc")), CALL_TIMEOUT_S)
    assert len(tokens) == 3 and tokens == sorted(set(tokens))


async def test_a_campaign_given_up_leaves_no_candidate(etcd: EtcdClient) -> None:
    async with await campaign(etcd, "leader", b"a", ttl_s=LEASE_TTL_S):
        waiting = asyncio.create_task(campaign(etcd, "leader", b"b", ttl_s=LEASE_TTL_S))
        await asyncio.sleep(0.2)
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting
    assert await etcd.get("leader") is None
