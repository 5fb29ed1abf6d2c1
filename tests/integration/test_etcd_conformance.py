"""One suite for the real etcd and for the one in memory on which the simulation runs.

What the driver rests on: revisions and compares, transactions whole or not at all, limits, leases,
watches with compaction and restart, elections with a fence, lost replies settled exactly once.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Protocol

import pytest
import pytest_asyncio
from tests.harness.etcd import CuttableProxy, etcd_prefix, etcd_server, revision_of, take
from tests.harness.fake_etcd import Connection, FakeEtcd, FakeEtcdClient, FakeWatchCall
from tests.harness.waiting import CALL_TIMEOUT_S, eventually

from megascale_common.etcd import rpc_pb2
from megascale_common.etcd.client import EtcdClient, Watch
from megascale_common.etcd.election import Leadership, campaign
from megascale_common.etcd.errors import (
    Compacted,
    EtcdError,
    EtcdUnavailable,
    InvalidEtcdRequest,
    LeaseNotFound,
    UnknownOutcome,
)
from megascale_common.etcd.lease import Lease
from megascale_common.etcd.operations import (
    CreateRevisionEquals,
    Delete,
    Get,
    ModRevisionEquals,
    Put,
)
from megascale_common.etcd.server import EtcdServer
from megascale_common.etcd.settled import Applied, Rejected, txn_settled

__all__ = ["etcd_prefix", "etcd_server"]  # fixtures


class Cut(Protocol):
    """The connection of one client, which can be cut in either direction."""

    swallow_requests: bool
    swallow_replies: bool

    def reset(self) -> None: ...


class Subject(Protocol):
    """The etcd that a test runs on: ``etcd`` is a client; ``cut_off`` one that can be cut off."""

    etcd: EtcdClient
    cut_off: EtcdClient
    cut: Cut

    async def restart(self) -> None: ...


class Fake:
    def __init__(self, etcd: EtcdClient, cut_off: EtcdClient, cut: Cut, server: FakeEtcd) -> None:
        self.etcd, self.cut_off, self.cut, self._server = etcd, cut_off, cut, server

    async def restart(self) -> None:
        self._server.stop()
        self._server.start()


class Real:
    def __init__(self, etcd: EtcdClient, cut_off: EtcdClient, cut: Cut, server: EtcdServer) -> None:
        self.etcd, self.cut_off, self.cut, self._server = etcd, cut_off, cut, server

    async def restart(self) -> None:
        self._server.kill()
        await self._server.start()


@pytest_asyncio.fixture(params=["real", "fake"])
async def subject(
    request: pytest.FixtureRequest, etcd_server: EtcdServer, etcd_prefix: str
) -> AsyncIterator[Subject]:
    """The same tests against both."""
    if request.param == "fake":
        server = FakeEtcd(progress_s=0.2)
        cut = Connection(server, "cut off")
        async with FakeEtcdClient([Connection(server)], prefix=etcd_prefix) as etcd:
            async with FakeEtcdClient([cut], prefix=etcd_prefix) as other:
                yield Fake(etcd, other, cut, server)
        return
    async with CuttableProxy(etcd_server.endpoint) as proxy:
        async with EtcdClient([etcd_server.endpoint], prefix=etcd_prefix) as etcd:
            async with EtcdClient([proxy.endpoint], prefix=etcd_prefix) as other:
                await other.get("connected")
                yield Real(etcd, other, proxy, etcd_server)


# --- keys and revisions


async def test_revisions_count_changes_of_the_store(subject: Subject) -> None:
    etcd = subject.etcd
    first = await etcd.put("a", b"1")
    second = await etcd.put("a", b"2")
    assert second == first + 1
    stored = await etcd.get("a")
    assert stored is not None
    assert (stored.create_revision, stored.mod_revision, stored.version) == (first, second, 2)
    assert await etcd.delete("a") == 1 and await etcd.delete("a") == 0
    assert await revision_of(etcd) == second + 1, "a delete of nothing is no revision"
    assert await etcd.put("a", b"3") == second + 2
    again = await etcd.get("a")
    assert again is not None and (again.create_revision, again.version) == (second + 2, 1)


async def test_prefixes_hold_exactly_their_keys_in_order(subject: Subject) -> None:
    for key in ("jobs/2", "jobs/1", "jobs0", "job"):
        await subject.etcd.put(key, key.encode())
    assert [kv.key for kv in (await subject.etcd.get_prefix("jobs/")).items] == ["jobs/1", "jobs/2"]
    assert await subject.etcd.delete_prefix("jobs/") == 2
    assert [kv.key for kv in (await subject.etcd.get_prefix("")).items] == ["job", "jobs0"]


async def test_pages_show_one_revision(subject: Subject) -> None:
    etcd = subject.etcd
    for index in range(20):
        await etcd.put(f"n/{index:02}", b"old")
    listing, changed = await asyncio.gather(
        etcd.get_prefix("n/", page_keys=1), etcd.put("n/19", b"new")
    )
    assert [kv.key for kv in listing.items] == [f"n/{index:02}" for index in range(20)]
    assert listing.items[-1].value == (b"new" if changed <= listing.revision else b"old")
    await etcd.delete("n/00")
    assert len((await etcd.get_prefix("n/", page_keys=7)).items) == 19


# --- transactions


async def test_a_transaction_takes_one_branch_at_one_revision(subject: Subject) -> None:
    etcd = subject.etcd
    created = await etcd.txn(
        compare=[CreateRevisionEquals("k", 0)], success=[Put("k", b"1"), Put("l", b"1")]
    )
    assert created.succeeded
    both = (await etcd.get_prefix("")).items
    assert {kv.mod_revision for kv in both} == {created.revision}
    refused = await etcd.txn(
        compare=[ModRevisionEquals("k", 0)],
        success=[Put("k", b"2")],
        failure=[Get("k"), Get("absent")],
    )
    assert not refused.succeeded and refused.revision == created.revision
    assert {key: kv.value for key, kv in refused.found.items()} == {"k": b"1"}
    changed = await etcd.txn(
        compare=[ModRevisionEquals("k", created.revision)],
        success=[Delete("k", prefix=True), Put("new", b"")],
    )
    assert changed.succeeded and changed.revision == created.revision + 1
    assert [kv.key for kv in (await etcd.get_prefix("")).items] == ["l", "new"]


async def test_all_compares_must_hold(subject: Subject) -> None:
    etcd = subject.etcd
    one, two = await etcd.put("1", b""), await etcd.put("2", b"")
    for compare in (
        [ModRevisionEquals("1", one), ModRevisionEquals("2", one)],
        [ModRevisionEquals("1", two), ModRevisionEquals("2", two)],
        [CreateRevisionEquals("1", one), ModRevisionEquals("3", 1)],
    ):
        assert not (await etcd.txn(compare=compare, success=[Put("x", b"")])).succeeded
    assert await etcd.get("x") is None


async def test_limits_and_bad_requests_are_refused_whole(subject: Subject) -> None:
    etcd = subject.etcd
    most = await etcd.txn(success=[Put(f"m/{index:03}", b"") for index in range(128)])
    assert most.succeeded and len((await etcd.get_prefix("m/")).items) == 128
    before = await revision_of(etcd)
    for success in (
        [Put("k", b"1"), Put("k", b"2")],
        [Put("k/1", b"1"), Delete("k/", prefix=True)],
        [Put("big", bytes((3 << 19) + 1))],
        [Put("half", bytes(3 << 18)), Put("other", bytes(3 << 18))],
    ):
        with pytest.raises((InvalidEtcdRequest, EtcdError)) as caught:
            await etcd.txn(success=success)
        assert not isinstance(caught.value, UnknownOutcome), caught.value
    with pytest.raises(LeaseNotFound):
        await etcd.txn(success=[Put("free", b""), Put("leased", b"", 4711)])
    assert await revision_of(etcd) == before


# --- replies that are lost


@pytest.mark.parametrize("lost", ["reply", "request", "reply and server"])
async def test_an_unknown_outcome_is_settled_exactly_once(subject: Subject, lost: str) -> None:
    txn_id = uuid.uuid4().hex
    before = await subject.etcd.put("head", b"old")
    subject.cut.swallow_replies = lost != "request"
    subject.cut.swallow_requests = lost == "request"
    settling = asyncio.create_task(
        txn_settled(
            subject.cut_off,
            compare=[ModRevisionEquals("head", before), ModRevisionEquals("log/1", 0)],
            success=[Put("head", b"new"), Put("log/1", txn_id.encode())],
            marker_key="log/1",
            txn_id=txn_id,
        )
    )
    if lost == "request":
        await asyncio.sleep(0.3)
        assert await subject.etcd.get("log/1") is None
    else:
        await eventually(lambda: subject.etcd.get("log/1"), "the write")
    assert not settling.done()
    if lost == "reply and server":
        await subject.restart()
    subject.cut.reset()
    outcome = await asyncio.wait_for(settling, CALL_TIMEOUT_S)
    head, log = await subject.etcd.get("head"), await subject.etcd.get("log/1")
    assert head is not None and log is not None and outcome == Applied(log.mod_revision)
    assert (head.version, head.value, log.version) == (2, b"new", 1)


async def test_a_write_without_a_reply_is_unknown_and_a_read_unavailable(subject: Subject) -> None:
    subject.cut.swallow_replies, subject.cut_off.timeout_s = True, 1.0
    with pytest.raises(UnknownOutcome):
        await subject.cut_off.put("k", b"")
    with pytest.raises(EtcdUnavailable):
        await subject.cut_off.get("k")
    assert await subject.etcd.get("k") is not None


# --- leases


async def test_a_key_goes_with_its_lease(subject: Subject) -> None:
    etcd = subject.etcd
    lease = await Lease.grant(etcd, 60)
    await etcd.put("owner", b"", lease_id=lease.lease_id)
    await etcd.put("other", b"", lease_id=lease.lease_id)
    await etcd.put("other", b"")  # leaves the lease
    before = await revision_of(etcd)
    await lease.close()
    assert lease.lost.is_set() and lease.remaining_s() == 0.0
    assert await etcd.get("owner") is None and await etcd.get("other") is not None
    assert await revision_of(etcd) == before + 1
    with pytest.raises(LeaseNotFound):
        await etcd.put("owner", b"", lease_id=lease.lease_id)


async def test_an_owner_cut_off_loses_its_lease_before_its_key_is_deleted(
    subject: Subject,
) -> None:
    lease = await Lease.grant(subject.cut_off, 2)
    created = await subject.cut_off.put("owner", b"", lease_id=lease.lease_id)
    async with Watch(subject.etcd, "owner", created + 1, prefix=False) as watch:
        subject.cut.swallow_requests = True
        [event] = await take(watch, 1)
        # By the clock: after a pause of this process both news come at once.
        assert lease.remaining_s() == 0.0
        assert event.deleted and event.kv.key == "owner"
        await asyncio.wait_for(lease.lost.wait(), CALL_TIMEOUT_S)
        assert "not renewed" in lease.lost_reason
    subject.cut.reset()
    await lease.close()


async def test_a_kept_lease_outlives_its_ttl_and_a_restart(subject: Subject) -> None:
    ttl_s, begun_s = 5, time.monotonic()
    lease = await Lease.grant(subject.etcd, ttl_s)
    await subject.etcd.put("owner", b"", lease_id=lease.lease_id)
    await subject.restart()  # at once: most of the lease's time is left for a slow machine
    await asyncio.sleep(begun_s + ttl_s + 0.5 - time.monotonic())
    assert not lease.lost.is_set() and await subject.etcd.get("owner") is not None
    await lease.close()


# --- watches


async def test_a_watch_delivers_each_change_once_and_in_order_over_a_restart(
    subject: Subject,
) -> None:
    etcd, expected = subject.etcd, list[tuple[int, str, bool]]()
    start = await revision_of(etcd) + 1

    async def write(name: str) -> None:
        result = await etcd.txn(success=[Put(f"w/{name}/{part}", b"x") for part in "ab"])
        expected.extend((result.revision, f"w/{name}/{part}", False) for part in "ab")
        await etcd.put("elsewhere", b"")
        await etcd.delete(f"w/{name}/a")
        expected.append((result.revision + 2, f"w/{name}/a", True))

    async with Watch(etcd, "w/", start) as watch:
        await write("1")
        seen = await take(watch, 2)
        await subject.restart()
        await write("2")
        seen += await take(watch, 4)
    assert [(e.kv.mod_revision, e.kv.key, e.deleted) for e in seen] == expected


async def test_compaction_under_a_watch_is_an_error(subject: Subject) -> None:
    etcd = subject.etcd
    start = await revision_of(etcd) + 1
    for value in (b"1", b"2", b"3"):
        last = await etcd.put("c", value)
    await etcd.compact(last)
    async with Watch(etcd, "c", start) as watch:
        with pytest.raises(Compacted) as caught:
            await take(watch, 1)
        assert caught.value.compact_revision == last
    with pytest.raises(Compacted):
        await etcd.compact(start)
    stored = await etcd.get("c")
    assert stored is not None and (stored.value, stored.version) == (b"3", 3)
    async with Watch(etcd, "c", last) as watch:
        assert [event.kv.value for event in await take(watch, 1)] == [b"3"]


async def test_progress_moves_a_quiet_watch_past_compaction(subject: Subject) -> None:
    etcd = subject.etcd
    async with Watch(etcd, "quiet/", await revision_of(etcd) + 1) as watch:
        last = [await etcd.put("busy", b"") for _ in range(5)][-1]
        moved: Callable[[], bool] = lambda: watch.position.revision > last  # noqa: E731
        await eventually(moved, "progress of the watch")
        await etcd.compact(last)
        await subject.restart()
        revision = await etcd.put("quiet/k", b"")
        [event] = await take(watch, 1)
        assert event.kv.mod_revision == revision


# --- elections


async def test_a_paused_former_leader_cannot_write(subject: Subject) -> None:
    former = await campaign(subject.cut_off, "leader", b"a", ttl_s=3)
    assert isinstance(await _write_fenced(former, "before"), Applied)
    subject.cut.swallow_requests = True
    async with await asyncio.wait_for(
        campaign(subject.etcd, "leader", b"b", ttl_s=60), CALL_TIMEOUT_S
    ) as present:
        assert former.lease.lost.is_set()
        assert present.create_revision > former.create_revision
        subject.cut.reset()
        assert isinstance(await _write_fenced(former, "after"), Rejected)
        assert isinstance(await _write_fenced(present, "present"), Applied)
        assert await subject.etcd.get("log/after") is None
        await former.resign()
        assert await subject.etcd.get("leader") is not None, "resigning ends only one's own term"


async def test_a_progress_notification_does_not_overtake_an_event_of_the_fake() -> None:
    """Both may be due in one turn of a busy loop; etcd sends them in the order of their revisions.

    A client takes what lies behind a notification as delivered: an event that came after it would
    be lost, and whoever waits for it would wait without end.
    """
    etcd = FakeEtcd(progress_s=3600.0)
    call = FakeWatchCall(Connection(etcd))
    call._create(rpc_pb2.WatchCreateRequest(key=b"leader", progress_notify=True))
    etcd.store.put(rpc_pb2.PutRequest(key=b"leader", value=b"a"))
    call._progress()
    created, event, progress = [await call.read() for _ in range(3)]
    assert created.created and [each.kv.key for each in event.events] == [b"leader"]
    assert not progress.events and progress.header.revision == etcd.store.revision


async def test_a_candidate_waits_and_follows_at_once(subject: Subject) -> None:
    first = await campaign(subject.etcd, "leader", b"a", ttl_s=60)
    waiting = asyncio.create_task(campaign(subject.cut_off, "leader", b"b", ttl_s=60))
    await asyncio.sleep(0.3)
    assert not waiting.done()
    await subject.restart()  # the candidate's watch goes on behind it
    await asyncio.sleep(0.3)
    assert not waiting.done()
    await first.resign()
    second = await asyncio.wait_for(waiting, CALL_TIMEOUT_S)
    assert second.create_revision > first.create_revision
    await second.resign()


async def _write_fenced(leadership: Leadership, name: str) -> Applied | Rejected:
    txn_id = uuid.uuid4().hex
    key = f"log/{name}"
    return await txn_settled(
        leadership.client,
        compare=[leadership.guard(), ModRevisionEquals(key, 0)],
        success=[Put(key, txn_id.encode())],
        marker_key=key,
        txn_id=txn_id,
    )
