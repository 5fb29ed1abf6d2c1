"""What is stored stays bounded: old lines are exported, then removed; nothing of the state goes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
from tests.harness import etcd as etcd_harness
from tests.harness import journal
from tests.harness.driver import DriverProcess
from tests.harness.journal import Crash, WatchedEtcd, elected, leader
from tests.harness.simulated_cluster import demo_job
from tests.harness.waiting import CALL_TIMEOUT_S

from megascale.v1 import driver_pb2
from megascale_common.etcd.server import EtcdServer
from megascale_common.service.clock import VirtualClock
from megascale_common.service.errors import ExpiredError, NotLeaderError
from megascale_driver.core.values.attempt import Attempt
from megascale_driver.core.values.cluster import Cluster
from megascale_driver.core.values.events import Audit
from megascale_driver.core.values.job import AttemptRecord, Job, JobPhase
from megascale_driver.journal import trimmer as trimmers
from megascale_driver.journal.older_lines import OlderLines
from megascale_driver.journal.store import LEADER_KEY, Store
from megascale_driver.journal.trimmer import Retention, Trimmer

etcd_server, etcd_prefix = etcd_harness.etcd_server, etcd_harness.etcd_prefix
CLUSTER_LINES, JOB_LINES, ATTEMPTS = 100, 300, 8


@pytest_asyncio.fixture
async def etcd(etcd_server: EtcdServer, etcd_prefix: str) -> AsyncIterator[WatchedEtcd]:
    async with WatchedEtcd([etcd_server.endpoint], prefix=etcd_prefix, timeout_s=20.0) as client:
        yield client


async def stored(etcd: WatchedEtcd, clock: VirtualClock) -> Cluster:
    """A cluster with a history: lines alone and in blocks, attempts, a second between lines."""
    store, state, _ = await leader(etcd)
    for number in range(1, ATTEMPTS + 1):
        job = state.jobs.get("a", Job("a", demo_job("a")))
        seq = job.log_seq
        # Every second decision is a mass event, whose lines become a block.
        more = 10 if number % 2 else 65
        if number == ATTEMPTS:
            more = JOB_LINES - seq
        lines = []
        for offset in range(1, more + 1):
            clock.advance(1.0)
            lines.append(line("a", seq + offset, clock.now_s()))
        lines += [line("", state.log_seq + 1, clock.now_s())]
        job = replace(
            job, log_seq=seq + more, current=Attempt(number=number),
            attempts=(*job.attempts, AttemptRecord(number, (), 1.0)),
        )  # fmt: skip
        later = replace(state, jobs={"a": job}, log_seq=state.log_seq + 1)
        await store.commit(state, later, tuple(lines), deadline_s=journal.DEADLINE_S)
        state = later
    return state


def line(log: str, seq: int, at_s: float) -> Audit:
    return Audit(log, seq, at_s, "driver", "jobs/a", "WORKER_EXITED", f"line {seq}")


def exported(folder: Path) -> list[tuple[str, int]]:
    """(log, seq) of the exported lines, in their order."""
    found = [json.loads(text) for path in sorted(folder.glob("*.jsonl"))
             for text in path.read_text().splitlines()]  # fmt: skip
    return [(item["log"], item["seq"]) for item in found]


async def trimmer(etcd: WatchedEtcd, retention: Retention, clock: VirtualClock) -> Trimmer:
    return Trimmer(etcd, await elected(etcd), retention, clock)


async def test_lines_beyond_the_count_are_exported_then_removed(
    etcd: WatchedEtcd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trimmers, "PAGE_RECORDS", 7)
    clock = VirtualClock()
    state = await stored(etcd, clock)
    folder = tmp_path / "audit"
    trim = await trimmer(etcd, Retention(lines=40, attempts=3, export_to=folder), clock)
    await trim.trim(state)
    _, found, audit = await leader(etcd)
    kept = [item.seq for item in audit if item.log == "a"]
    assert kept == list(range(kept[0], JOB_LINES + 1)) and 40 <= len(kept) <= 40 + 65
    gone = [seq for log, seq in exported(folder) if log == "a"]
    assert gone + kept == list(range(1, JOB_LINES + 1)), "each line is here or there"
    assert [record.number for record in found.jobs["a"].attempts] == [6, 7, 8]
    assert found.jobs["a"].log_seq == JOB_LINES and found.log_seq == ATTEMPTS
    reads = etcd.read_keys
    await trim.trim(state)
    assert etcd.read_keys == reads, "nothing to trim costs nothing"


async def test_lines_beyond_the_age_go_and_the_newest_stays(
    etcd: WatchedEtcd, tmp_path: Path
) -> None:
    clock = VirtualClock()
    state = await stored(etcd, clock)
    trim = await trimmer(etcd, Retention(age_s=1000.0, export_to=tmp_path), clock)
    await trim.trim(state)
    assert not exported(tmp_path)
    clock.advance(2000.0)
    await trim.trim(state)
    _, found, audit = await leader(etcd)
    assert found.log_seq == ATTEMPTS, "the next line is numbered behind the last"
    assert [item.seq for item in audit if not item.log] == [ATTEMPTS]
    assert max(item.seq for item in audit if item.log) == JOB_LINES


async def test_an_ended_job_keeps_less(etcd: WatchedEtcd) -> None:
    clock = VirtualClock()
    state = await stored(etcd, clock)
    state = replace(state, jobs={"a": replace(state.jobs["a"], phase=JobPhase.FAILED)})
    trim = await trimmer(etcd, Retention(ended_lines=10, ended_attempts=1), clock)
    await trim.trim(state)
    _, found, audit = await leader(etcd)
    assert len([item for item in audit if item.log]) <= 10 + 200
    assert [record.number for record in found.jobs["a"].attempts] == [ATTEMPTS]


async def test_nothing_is_removed_that_is_not_on_disk(etcd: WatchedEtcd, tmp_path: Path) -> None:
    clock = VirtualClock()
    state = await stored(etcd, clock)
    blocked = tmp_path / "audit"
    blocked.write_text("a file stands where the folder should be")
    trim = await trimmer(etcd, Retention(lines=40, export_to=blocked), clock)
    with pytest.raises(OSError, match="audit"):
        await trim.trim(state)
    _, _, audit = await leader(etcd)
    assert [item.seq for item in audit if item.log == "a"][-1] == JOB_LINES
    assert len([item for item in audit if item.log == "a"]) == JOB_LINES


async def test_a_crash_between_export_and_removal_repeats_lines_and_loses_none(
    etcd: WatchedEtcd, tmp_path: Path
) -> None:
    clock = VirtualClock()
    state = await stored(etcd, clock)
    retention = Retention(lines=40, export_to=tmp_path)
    trim = await trimmer(etcd, retention, clock)
    etcd.txns, etcd.crash_at = 0, 1
    with pytest.raises(Crash):
        await trim.trim(state)
    etcd.crash_at = 0
    await (await trimmer(etcd, retention, clock)).trim(state)
    _, _, audit = await leader(etcd)
    kept = {item.seq for item in audit if item.log == "a"}
    gone = {seq for log, seq in exported(tmp_path) if log == "a"}
    assert gone | kept == set(range(1, JOB_LINES + 1)) and not gone & kept


async def test_a_former_leader_trims_nothing(etcd: WatchedEtcd) -> None:
    clock = VirtualClock()
    state = await stored(etcd, clock)
    trim = await trimmer(etcd, Retention(lines=40), clock)
    await Store(etcd, await elected(etcd)).load()
    before = (await etcd.get_prefix("")).items
    with pytest.raises(NotLeaderError):
        await trim.trim(state)
    assert (await etcd.get_prefix("")).items == before


async def pages(older: OlderLines, log: str, count: int) -> list[int]:
    """The numbers of all lines of a log, read in pages."""
    found: list[int] = []
    while page := await older.behind(log, found[-1] if found else 0, count):
        assert all(item.log == log for item in page) and len(page) <= count
        found += [item.seq for item in page]
    return found


async def test_older_pages_come_from_etcd_and_the_export(etcd: WatchedEtcd, tmp_path: Path) -> None:
    clock = VirtualClock()
    state = await stored(etcd, clock)
    everything = list(range(1, JOB_LINES + 1))
    assert await pages(OlderLines(etcd, None), "a", 17) == everything, "all of it is in etcd"
    assert await pages(OlderLines(etcd, None), "", 3) == list(range(1, ATTEMPTS + 1))
    retention = Retention(lines=200, export_to=tmp_path)
    trim = await trimmer(etcd, retention, clock)
    # The leader ends once between export and removal, so lines are exported twice.
    etcd.txns, etcd.crash_at = 0, 1
    with pytest.raises(Crash):
        await trim.trim(state)
    etcd.crash_at = 0
    clock.advance(86_400.0)
    await (await trimmer(etcd, retention, clock)).trim(state)
    state = replace(state, jobs={"a": replace(state.jobs["a"], log_seq=JOB_LINES)})
    await (await trimmer(etcd, Retention(lines=40, export_to=tmp_path), clock)).trim(state)
    assert len(list(tmp_path.glob("*.jsonl"))) == 2
    gone = [seq for log, seq in exported(tmp_path) if log == "a"]
    assert len(gone) > len(set(gone)) > 100
    for count in (7, 64, 1000):
        assert await pages(OlderLines(etcd, tmp_path), "a", count) == everything
    # Without the export: from the oldest that is left on; a gap is never passed over in silence.
    left = await pages(OlderLines(etcd, None), "a", 50)
    assert left == list(range(max(gone) + 1, JOB_LINES + 1))
    with pytest.raises(ExpiredError, match=rf"lines 6 to {max(gone)} of job a's log.*exports none"):
        await OlderLines(etcd, None).behind("a", 5, 10)
    with pytest.raises(ExpiredError, match=r"not among the files.*elsewhere.*shared folder"):
        await OlderLines(etcd, tmp_path / "elsewhere").behind("a", 5, 10)


async def test_a_driver_serves_older_pages(etcd_server: EtcdServer, tmp_path: Path) -> None:
    folder = tmp_path / "audit"
    driver = DriverProcess(
        tmp_path, etcd_server.endpoint, None, "driver", "--audit-export", str(folder)
    )
    try:
        async with WatchedEtcd([etcd_server.endpoint], prefix=f"{driver.prefix}/") as client:
            state = await stored(client, VirtualClock())
            trim = await trimmer(client, Retention(lines=40, export_to=folder), VirtualClock())
            await trim.trim(state)
            await client.delete(LEADER_KEY)
        await driver.start()

        async def listed(subject: str, token: str) -> list[int]:
            found: list[int] = []
            while True:
                request = driver_pb2.ListEventsRequest(
                    subject=subject, page_size=60, page_token=token
                )
                page = await driver.stub.ListEvents(request, timeout=CALL_TIMEOUT_S)
                found += [event.seq for event in page.events]
                if not (token := page.next_page_token):
                    return found

        held = await listed("jobs/a", "")
        # This driver may add lines meanwhile: the job waits for nodes.
        whole = [seq for seq in await listed("jobs/a", "0.a") if seq <= held[-1]]
        assert whole[-len(held) :] == held and whole == list(range(1, held[-1] + 1))
        assert (await listed("cluster", "0."))[:ATTEMPTS] == list(range(1, ATTEMPTS + 1))
        for subject in ("", "nodes/n1", "jobs/b"):
            with pytest.raises(grpc.aio.AioRpcError, match="with t0 for all lines") as refused:
                await listed(subject, "5.a")
            assert refused.value.code() is grpc.StatusCode.OUT_OF_RANGE
    finally:
        await driver.close()
