"""Decisions in a real etcd: small, whole or not at all, and read in proportion to the state."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio
from tests.harness import etcd as etcd_harness
from tests.harness import journal
from tests.harness.journal import Crash, WatchedEtcd, all_failed, elected, leader, placed
from tests.harness.simulated_cluster import demo_job

from megascale_common.etcd.server import EtcdServer
from megascale_driver.core.values.cluster import Cluster, Disposition, Identity, Node, Tenant
from megascale_driver.core.values.events import Audit
from megascale_driver.core.values.job import Job, JobPhase
from megascale_driver.core.values.stored_fields import differs
from megascale_driver.journal import codec, reader, records
from megascale_driver.journal.fenced import MAX_CHANGES
from megascale_driver.journal.store import Store

etcd_server, etcd_prefix = etcd_harness.etcd_server, etcd_harness.etcd_prefix

ETCD_REQUEST_BYTES = 1.5 * (1 << 20)  # etcd's --max-request-bytes
HEAD_BYTES = 8 << 10


@pytest_asyncio.fixture
async def etcd(etcd_server: EtcdServer, etcd_prefix: str) -> AsyncIterator[WatchedEtcd]:
    async with WatchedEtcd([etcd_server.endpoint], prefix=etcd_prefix, timeout_s=20.0) as client:
        yield client


def line(log: str, seq: int, message: str = "x") -> Audit:
    return Audit(log, seq, 1e9, "driver", "jobs/a", "WORKER_EXITED", message)


def assert_same(found: Cluster, wanted: Cluster) -> None:
    """All that is stored of the two states is equal."""
    assert list(found.jobs) == list(wanted.jobs)
    for name, job in wanted.jobs.items():
        assert not differs(found.jobs[name], job) and found.jobs[name].attempts == job.attempts
    assert sorted(found.nodes) == sorted(wanted.nodes)
    assert not [n for n, node in wanted.nodes.items() if differs(found.nodes[n], node)]
    assert found.breaker == wanted.breaker and found.requests == wanted.requests
    assert found.log_seq == wanted.log_seq


async def test_quotas_of_tenants_have_rows_of_their_own(etcd: WatchedEtcd) -> None:
    store, state, _ = await leader(etcd)
    both = {"red": Tenant("red", 8), "blue": Tenant("blue", 0)}
    await store.commit(state, replace(state, tenants=both), (), deadline_s=journal.DEADLINE_S)
    row = await etcd.get("tenants/red")
    assert row is not None and json.loads(row.value) == {"name": "red", "quota": 8}
    store, found, _ = await leader(etcd)
    assert found.tenants == both
    one = replace(found, tenants={"red": Tenant("red", 4)})
    await store.commit(found, one, (), deadline_s=journal.DEADLINE_S)
    assert await etcd.get("tenants/blue") is None
    _, found, _ = await leader(etcd)
    assert found.tenants == one.tenants


@pytest.mark.parametrize("count", [1536, pytest.param(12_500, marks=pytest.mark.slow)])
async def test_all_nodes_of_a_job_fail_at_once(etcd: WatchedEtcd, count: int) -> None:
    """The largest request is under half of what etcd takes, and the head a few KB."""
    store, state, _ = await leader(etcd)
    running = Cluster(nodes=journal.nodes(count), jobs={"a": placed("a", count)})
    await store.commit(state, running, (line("a", 1),), deadline_s=journal.DEADLINE_S)
    running = replace(running, jobs={"a": replace(running.jobs["a"], log_seq=1)})
    job, lines, breaker, broken = all_failed(running.jobs["a"])
    failed = Cluster(broken, {"a": job}, {}, breaker, log_seq=count)
    etcd.txns = 0
    await store.commit(running, failed, lines, deadline_s=journal.DEADLINE_S)
    assert etcd.txns < count / MAX_CHANGES + 16, "the rows of the nodes, and little else"

    head = await etcd.get("jobs/a/head")
    assert head is not None
    measured = {
        "nodes": count,
        "largest_request_bytes": etcd.largest_request_bytes,
        "head_bytes": len(head.value),
        "txns": etcd.txns,
    }
    print(f"\nall nodes failed: {json.dumps(measured)}")
    assert etcd.largest_request_bytes < ETCD_REQUEST_BYTES / 2, measured
    assert etcd.largest_request_bytes <= store.largest_request_bytes
    assert len(head.value) < HEAD_BYTES, measured
    _, found, audit = await leader(etcd)
    assert_same(found, failed)
    own = [item.seq for item in audit if item.log == ""]
    assert own[-1] == count and len(own) >= min(count, reader.CLUSTER_LINES)
    assert not (await etcd.get_prefix("intents/")).items
    # A later decision about the job costs what it changes: none of the large fields.
    etcd.largest_request_bytes = 0
    store, state, _ = await leader(etcd)
    etcd.largest_request_bytes = etcd.txns = 0
    later = replace(state, jobs={"a": replace(state.jobs["a"], phase=JobPhase.FAILED)})
    await store.commit(state, later, (), deadline_s=journal.DEADLINE_S)
    assert etcd.largest_request_bytes < 4 * HEAD_BYTES and etcd.txns <= 2


async def test_a_mass_event_is_one_record_that_names_its_nodes(etcd: WatchedEtcd) -> None:
    """The rows of the nodes follow in batches, which the next leader repeats from the first."""
    count = 400
    store, state, _ = await leader(etcd)
    running = Cluster(nodes=journal.nodes(count), jobs={"a": placed("a", count)})
    await store.commit(state, running, (), deadline_s=journal.DEADLINE_S)
    job, lines, breaker, broken = all_failed(running.jobs["a"])
    failed = Cluster(broken, {"a": job}, {}, breaker, log_seq=count)
    batches = -(-count // MAX_CHANGES)
    etcd.txns = 0
    await store.commit(running, failed, lines, deadline_s=journal.DEADLINE_S)
    all_txns = etcd.txns

    await etcd.delete_prefix("")
    store, state, _ = await leader(etcd)
    await store.commit(state, running, (), deadline_s=journal.DEADLINE_S)
    # Before the last batch, the end of the piece, and the end of the intent.
    etcd.txns, etcd.crash_at = 0, all_txns - 2
    with pytest.raises(Crash):
        await store.commit(running, failed, lines, deadline_s=journal.DEADLINE_S)
    etcd.crash_at = 0
    left = [item for item in (await etcd.get_prefix("intents/")).items if item.key.count("/") > 1]
    assert len(left) == 1 and len(left[0].value) < 32 * count
    named = json.loads(left[0].value)["patches"]["shapes"][0]["columns"][0]
    assert named.split(",") == journal.names(count)
    etcd.txns = 0
    _, found, _ = await leader(etcd)
    assert_same(found, failed)
    assert etcd.txns == batches + 2 + 1, "all batches, the piece, the intent; and the leader key"
    parts = (await etcd.get_prefix("jobs/a/parts/")).items
    (faults,) = [item.value.decode() for item in parts if b"NODE_DEAD" in item.value]
    assert ",".join(journal.names(count)) in faults


def states(size: int) -> tuple[Cluster, Cluster, tuple[Audit, ...]]:
    """A state, the next, and the lines of the decision between them, of three sizes."""
    # Half of the nodes are there before: a few fields of their rows change.
    before = {f"n{i}": Node(f"n{i}", Identity(f"n{i}-1")) for i in range(0, size, 2)}
    old = Cluster(before, {"a": Job("a", demo_job("a"))})
    job = replace(old.jobs["a"], phase=JobPhase.STOPPING, log_seq=size)
    nodes = {
        f"n{i}": Node(
            f"n{i}", Identity(f"n{i}-1"), Disposition.CORDONED, f"n{i} is looked at", "manual"
        )
        for i in range(size)
    }
    lines = tuple(line("a", seq) for seq in range(1, size + 1))
    return old, Cluster(nodes, {"a": job}), lines


@pytest.mark.parametrize("reply_lost", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("size", [3, 40, 150])
async def test_a_crash_anywhere_leaves_a_whole_decision_or_none(
    etcd: WatchedEtcd, size: int, reply_lost: bool
) -> None:
    old, new, lines = states(size)
    seen = set()
    for crash_at in range(1, 40):
        await etcd.delete_prefix("")
        store, empty, _ = await leader(etcd)
        await store.commit(empty, old, (), deadline_s=journal.DEADLINE_S)
        etcd.txns, etcd.crash_at, etcd.reply_lost = 0, crash_at, reply_lost
        try:
            await store.commit(old, new, lines, deadline_s=journal.DEADLINE_S)
            ended = True
        except Crash:
            ended = False
        etcd.crash_at = 0
        store, found, audit = await leader(etcd)
        seen.add(len(audit))
        assert audit in ((), lines), f"{len(audit)} of {size} lines after transaction {crash_at}"
        assert_same(found, new if audit else old)
        assert audit or not ended
        assert not (await etcd.get_prefix("intents/")).items
        # The next decision is numbered behind what is there, and is written.
        seq = found.jobs["a"].log_seq + 1
        later = replace(found, jobs={"a": replace(found.jobs["a"], log_seq=seq)})
        await store.commit(found, later, (line("a", seq),), deadline_s=journal.DEADLINE_S)
        if ended:
            break
    # A small decision is one transaction, so a lost reply always comes behind it.
    assert ended and seen == ({size} if reply_lost and size == 3 else {0, size})


async def test_an_intent_is_recovered_by_a_leader_that_crashes_as_well(etcd: WatchedEtcd) -> None:
    old, new, lines = states(150)
    store, empty, _ = await leader(etcd)
    await store.commit(empty, old, (), deadline_s=journal.DEADLINE_S)
    etcd.txns, etcd.crash_at, etcd.reply_lost = 0, 5, True
    with pytest.raises(Crash):
        await store.commit(old, new, lines, deadline_s=journal.DEADLINE_S)
    assert [i for i in (await etcd.get_prefix("intents/")).items if i.key.count("/") == 1]
    for _ in range(3):
        leadership = await elected(etcd)
        etcd.txns, etcd.crash_at = 0, 1
        with pytest.raises(Crash):
            await Store(etcd, leadership).load()
    etcd.crash_at = 0
    _, found, audit = await leader(etcd)
    assert audit == lines
    assert_same(found, new)


async def test_a_former_leader_carries_nothing_out(etcd: WatchedEtcd) -> None:
    old, new, lines = states(150)
    store, empty, _ = await leader(etcd)
    await store.commit(empty, old, (), deadline_s=journal.DEADLINE_S)
    await elected(etcd)
    before = (await etcd.get_prefix("")).items
    with pytest.raises(Exception, match="refused"):
        await store.commit(old, new, lines, deadline_s=journal.DEADLINE_S)
    assert (await etcd.get_prefix("")).items == before


async def test_a_new_leader_reads_the_state_and_not_the_history(etcd: WatchedEtcd) -> None:
    """Of 20,000 lines only the newest are read: as many as of two million."""
    store, state, _ = await leader(etcd)
    for first in range(1, 10_001, 2_000):
        last = first + 1_999
        job = replace(Job("a", demo_job("a")), log_seq=last)
        lines = [line(log, seq) for log in ("", "a") for seq in range(first, last + 1)]
        # As builds before blocks wrote them, and as those did that trimmed the front.
        later = replace(state, jobs={"a": job}, log_seq=last)
        await put_lines(etcd, lines)
        await store.commit(state, later, (), deadline_s=journal.DEADLINE_S)
        state = later
    read = etcd.read_keys
    _, found, audit = await leader(etcd)
    read = etcd.read_keys - read
    assert (found.log_seq, found.jobs["a"].log_seq) == (10_000, 10_000)
    own = [item.seq for item in audit if not item.log]
    assert own == list(range(10_000 - len(own) + 1, 10_001)) and len(own) >= 1000
    assert [item.seq for item in audit if item.log][-1] == 10_000
    newest = reader.CLUSTER_LINES + reader.ACTIVE_JOB_LINES
    assert newest < 6_000, "of a history of any length"
    assert read < newest + 5 * records.BLOCK_LINES, f"{read} keys were read"


async def put_lines(etcd: WatchedEtcd, lines: list[Audit]) -> None:
    """Store lines as earlier decisions did, a hundred in a transaction."""
    from megascale_common.etcd.operations import Put

    for begin in range(0, len(lines), 100):
        puts = [
            Put(records.key(item.log, item.seq), codec.dump(item))
            for item in lines[begin : begin + 100]
        ]
        await etcd.txn(success=puts)


@pytest.mark.parametrize(("first", "last"), [(0, 0), (1, 1), (1, 2), (1, 7), (90, 130), (5, 5)])
async def test_the_end_of_a_log_is_found_wherever_it_begins(
    etcd: WatchedEtcd, first: int, last: int
) -> None:
    if last:
        await put_lines(etcd, [line("", seq) for seq in range(first, last + 1)])
    await etcd.put("log0", b"{}")
    assert await records.last_number(etcd, "") == last


async def test_a_deleted_job_leaves_nothing_and_its_name_is_free(etcd: WatchedEtcd) -> None:
    store, empty, _ = await leader(etcd)
    job = replace(placed("a", 40), log_seq=1)
    state = Cluster(jobs={"a": job})
    await store.commit(empty, state, (line("a", 1),), deadline_s=journal.DEADLINE_S)
    gone = Cluster(log_seq=1)
    # A line of the job's own log in the same decision goes with it.
    lines = (line("", 1, "deleted"), line("a", 2))
    await store.commit(state, gone, lines, deadline_s=journal.DEADLINE_S)
    left = [item.key for item in (await etcd.get_prefix("")).items]
    assert not [key for key in left if key.startswith(("jobs/", "index/"))], left
    await store.commit(gone, replace(state, log_seq=1), (), deadline_s=journal.DEADLINE_S)
    _, found, audit = await leader(etcd)
    assert list(found.jobs) == ["a"] and [item.message for item in audit] == ["deleted"]
