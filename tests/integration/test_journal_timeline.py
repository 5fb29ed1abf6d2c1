"""Lists of several logs: every line once, in the order of time, with bounded work for each page."""

from __future__ import annotations

import itertools
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from tests.harness import etcd as etcd_harness
from tests.harness.driver import DriverProcess
from tests.harness.journal import WatchedEtcd, elected, leader
from tests.harness.simulated_cluster import demo_job
from tests.harness.waiting import CALL_TIMEOUT_S

from megascale.v1 import driver_pb2
from megascale_client import AsyncClient
from megascale_common.etcd.operations import Put
from megascale_common.etcd.server import EtcdServer
from megascale_common.service.clock import VirtualClock
from megascale_common.service.errors import ExpiredError
from megascale_driver.core.values.cluster import Cluster
from megascale_driver.core.values.events import Audit
from megascale_driver.core.values.job import Job
from megascale_driver.journal import timeline, trimmer
from megascale_driver.journal.older_lines import OlderLines
from megascale_driver.journal.reader import ACTIVE_JOB_LINES, CLUSTER_LINES
from megascale_driver.journal.records import BLOCK_LINES, records
from megascale_driver.journal.store import LEADER_KEY
from megascale_driver.journal.timeline import Log, Timeline
from megascale_driver.journal.trimmer import Retention, Trimmer

etcd_server, etcd_prefix = etcd_harness.etcd_server, etcd_harness.etcd_prefix
BEGUN_S = 1_700_000_000.0
SUBJECTS = ("nodes/n1", "nodes/n2", "jobs/a")
TXN_ROWS = 100


@pytest_asyncio.fixture
async def etcd(etcd_server: EtcdServer, etcd_prefix: str) -> AsyncIterator[WatchedEtcd]:
    async with WatchedEtcd([etcd_server.endpoint], prefix=etcd_prefix) as client:
        yield client


async def put(etcd: WatchedEtcd, decisions: list[list[Audit]]) -> None:
    """Store the lines of decisions as a leader does, some at a time."""
    rows = [Put(key, value) for lines in decisions for key, value, _ in records(lines)]
    for first in range(0, len(rows), TXN_ROWS):
        await etcd.txn(success=rows[first : first + TXN_ROWS])


def history(seed: int, logs: list[str], decisions: int) -> list[list[Audit]]:
    """Decisions of two drivers in turn, whose clocks differ by 5 s; now and then a mass event."""
    choose, now_s, skew_s = random.Random(seed), BEGUN_S, 0.0
    newest = dict.fromkeys(logs, 0)
    found = []
    for _ in range(decisions):
        now_s += choose.choice([0.0, 0.25, 3.0])
        if choose.random() < 0.02:
            skew_s = 5.0 - skew_s
        log = choose.choice(logs)
        lines = []
        for _ in range(choose.choice([1, 1, 1, 2, 90])):
            newest[log] += 1
            lines.append(line(log, newest[log], now_s + skew_s, choose.choice(SUBJECTS)))
        found.append(lines)
    return found


def line(log: str, seq: int, at_s: float, subject: str) -> Audit:
    return Audit(log, seq, at_s, "driver", subject, "NODE_SUSPECT", f"line {seq} of {log!r}")


def logs_of(decisions: list[list[Audit]]) -> list[Log]:
    lasts: dict[str, int] = {}
    begun: dict[str, float] = {}
    for lines in decisions:
        begun.setdefault(lines[0].log, lines[0].at_s if lines[0].log else 0.0)
        lasts[lines[-1].log] = lines[-1].seq
    return [Log(name, begun[name], last) for name, last in lasts.items()]


async def listed(
    readers: list[Timeline], logs: list[Log], token: str, count: int, subject: str = ""
) -> list[tuple[str, int, float]]:
    """All pages, each by the next reader in turn."""
    found = []
    for number in range(2_000):
        reader = readers[number % len(readers)]
        about = SUBJECTS if not subject else (subject,)
        page = await reader.page(logs, token, lambda line: line.subject in about, count)  # noqa: B023
        assert len(page.lines) <= count
        found += [(item.log, item.seq, item.at_s) for item in page.lines]
        token = page.token
        if not token:
            return found
    raise AssertionError("the list does not end")


@pytest.mark.parametrize("seed", range(3))
async def test_every_line_is_listed_once_in_order(
    etcd: WatchedEtcd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """In memory of nobody; some have left etcd; a reader goes on at another driver."""
    monkeypatch.setattr(timeline, "PAGE_LINES", 250)
    decisions = history(seed, ["", "a", "b"], 100)
    await put(etcd, decisions)
    logs = logs_of(decisions)
    if seed:
        monkeypatch.setattr(trimmer, "PAGE_RECORDS", 20)
        jobs = {log.name: Job(log.name, demo_job(log.name), log_seq=log.last) for log in logs}
        state = Cluster(jobs={n: j for n, j in jobs.items() if n}, log_seq=jobs[""].log_seq)
        retention = Retention(lines=200 * seed, export_to=tmp_path)
        await Trimmer(etcd, await elected(etcd), retention, VirtualClock()).trim(state)
        assert list(tmp_path.glob("*.jsonl")), "something has left etcd"
    whole = {(item.log, item.seq, item.at_s) for lines in decisions for item in lines}
    some = {(i.log, i.seq, i.at_s) for d in decisions for i in d if i.subject == "nodes/n1"}
    own = Timeline(etcd, OlderLines(etcd, tmp_path))
    for count, readers in (
        (1000, [own]),
        (97, [Timeline(etcd, OlderLines(etcd, tmp_path)) for _ in range(3)]),
    ):
        found = await listed(readers, logs, "t0", count)
        assert len(found) == len(whole) and set(found) == whole
        for name in {log for log, *_ in found}:
            numbers = [seq for log, seq, _ in found if log == name]
            assert numbers == sorted(numbers), "each log in its own order"
        times = [at_s for *_, at_s in found]
        assert all(b > a - 5.5 for a, b in itertools.pairwise(times)), "in order"
    about = await listed([own], logs, "t0", 40, "nodes/n1")
    assert len(about) == len(some) and set(about) == some
    middle_s = decisions[50][0].at_s
    later = await listed([own], logs, f"t{middle_s!r}", 200)
    assert {item for item in whole if item[2] >= middle_s} <= set(later)
    assert min(at_s for *_, at_s in later) >= middle_s - 5.0


async def test_a_page_costs_little_of_a_long_history(etcd: WatchedEtcd) -> None:
    lines = 3000
    decisions = [
        [line(name, seq, BEGUN_S + seq, "nodes/n1")]
        for name in ("", "a")
        for seq in range(1, lines + 1)
    ]
    await put(etcd, decisions)
    logs = [Log(name, BEGUN_S, lines) for name in ("", "a")]
    before = etcd.read_keys
    reader = Timeline(etcd, OlderLines(etcd, None))
    page = await reader.page(logs, f"t{BEGUN_S + 1500}", lambda _: True, 100)
    assert [item.seq for item in page.lines[:4]] == [1500, 1500, 1501, 1501]
    bisection = 2 * 14
    assert etcd.read_keys - before <= 2 * (BLOCK_LINES + timeline.MOST_READ) + bisection
    # What is not wanted is bounded, too: the page ends, and says that more follows.
    before = etcd.read_keys
    rare = await reader.page(logs, "t0", lambda _: False, 100)
    assert rare.lines == () and rare.token
    assert etcd.read_keys - before < 3 * timeline.PAGE_LINES
    rest = await reader.page(logs, rare.token, lambda line: line.seq == lines, 100)
    assert [item.seq for item in rest.lines] == [lines, lines]


async def test_lines_that_left_etcd_without_an_export_are_missed_aloud(
    etcd: WatchedEtcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the begin what can be read is listed; a list in its middle says what is gone."""
    decisions = [[line("", seq, BEGUN_S + seq, "nodes/n1")] for seq in range(1, 1001)]
    await put(etcd, decisions)
    logs = [Log("", 0.0, 1000)]
    monkeypatch.setattr(timeline, "MOST_READ", 16)
    reader = Timeline(etcd, OlderLines(etcd, None))
    page = await reader.page(logs, "t0", lambda _: True, 100)
    monkeypatch.setattr(trimmer, "PAGE_RECORDS", 50)
    state = Cluster(log_seq=1000)
    await Trimmer(etcd, await elected(etcd), Retention(lines=500), VirtualClock()).trim(state)
    with pytest.raises(ExpiredError, match=r"to 500 of the cluster's log.*exports none"):
        await reader.page(logs, page.token, lambda _: True, 100)
    found = await listed([reader], logs, "t0", 1000)
    assert [seq for _, seq, _ in found] == list(range(501, 1001))


@pytest.mark.parametrize("token", ["t", "tx", "t-1", "tnan", "tinf", "t5:", "t5:x", "t5:7"])
async def test_what_is_no_token_is_refused(etcd: WatchedEtcd, token: str) -> None:
    with pytest.raises(ValueError, match="is not a token"):
        await Timeline(etcd, OlderLines(etcd, None)).page([], token, lambda _: True, 1)


async def test_a_driver_lists_more_than_it_holds(etcd_server: EtcdServer, tmp_path: Path) -> None:
    driver = DriverProcess(tmp_path, etcd_server.endpoint, None, "driver")
    own, of_job = CLUSTER_LINES + 700, ACTIVE_JOB_LINES + 300
    try:
        async with WatchedEtcd([etcd_server.endpoint], prefix=f"{driver.prefix}/") as client:
            store, state, _ = await leader(client)
            subjects = ["nodes/n1" if seq % 3 == 0 else "nodes/n2" for seq in range(own + 1)]
            lines = [line("", seq, BEGUN_S + seq, subjects[seq]) for seq in range(1, own + 1)]
            more = [
                line("a", seq, BEGUN_S + 7 * seq + 0.5, "nodes/n1") for seq in range(1, of_job + 1)
            ]
            await put(client, [[item] for item in (*lines, *more)])
            job = Job("a", demo_job("a"), created_at_s=BEGUN_S, log_seq=of_job)
            after = Cluster(jobs={"a": job}, log_seq=own)
            await store.commit(state, after, (), deadline_s=30.0)
            await client.delete(LEADER_KEY)
        await driver.start()

        async def listed(subject: str, token: str) -> list[tuple[float, str]]:
            found = []
            while True:
                request = driver_pb2.ListEventsRequest(
                    subject=subject, page_size=1000, page_token=token
                )
                page = await driver.stub.ListEvents(request, timeout=CALL_TIMEOUT_S)
                found += [
                    (event.time.ToNanoseconds() / 1e9, event.message)
                    for event in page.events
                    if event.reason == "NODE_SUSPECT"
                ]
                if not (token := page.next_page_token):
                    return found

        assert len(await listed("", "")) < own, "the driver holds fewer"
        whole = await listed("", "t0")
        assert whole == sorted((item.at_s, item.message) for item in (*lines, *more))
        about = await listed("nodes/n1", "t0")
        assert about == [
            (item.at_s, item.message)
            for item in sorted([*lines, *more], key=lambda item: item.at_s)
            if item.subject == "nodes/n1"
        ]
        assert await listed("jobs/a", "t0") == [(item.at_s, item.message) for item in more]
        since_s = BEGUN_S + own - 5
        assert await listed("nodes/n1", f"t{since_s}") == [i for i in about if i[0] >= since_s]
        async with AsyncClient(driver.address(), driver.token) as user:
            events = [event.message async for event in user.events("nodes/n1", older=True)]
        assert events == [text for _, text in about]
    finally:
        await driver.close()
