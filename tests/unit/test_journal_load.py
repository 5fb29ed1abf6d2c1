"""A new leader reads ten thousand nodes and a large job without stopping its event loop."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from tests.harness.fake_etcd import Connection, FakeEtcd, FakeEtcdClient
from tests.unit.test_attempts_at_scale import running

from megascale_common.etcd.election import campaign
from megascale_driver.journal import reader
from megascale_driver.journal.reader import ROWS_AT_ONCE, Reader
from megascale_driver.journal.store import LEADER_KEY, Store

NODES = 5 * ROWS_AT_ONCE


@pytest.mark.parametrize("large", [False, True])
async def test_stored_nodes_are_read_a_few_at_a_time_and_a_large_job_in_a_thread(
    monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    turns, most, since = 0, 0, 0
    threads: list[bool] = []
    node, job = Reader._node, Reader._job

    def counted(*arguments: Any) -> Any:
        nonlocal most, since
        since += 1
        most = max(most, since)
        return node(*arguments)

    def where(*arguments: Any) -> Any:
        threads.append(threading.current_thread() is threading.main_thread())
        return job(*arguments)

    async def turn() -> None:
        nonlocal turns, since
        while True:
            turns, since = turns + 1, 0
            await asyncio.sleep(0)

    async with FakeEtcdClient([Connection(FakeEtcd())], prefix="megascale/") as etcd:
        leadership = await campaign(etcd, LEADER_KEY, b"{}", ttl_s=60)
        store = Store(etcd, leadership)
        before = await store.load()
        state = running(NODES)
        await store.commit(before.cluster, state, (), deadline_s=60.0)
        monkeypatch.setattr(Reader, "_node", counted)
        monkeypatch.setattr(Reader, "_job", where)
        if large:
            monkeypatch.setattr(reader, "LARGE_JOB_BYTES", 1)
        turning = asyncio.create_task(turn())
        found = (await Store(etcd, leadership).load()).cluster
        turning.cancel()
        await leadership.resign()
    assert set(found.nodes) == set(state.nodes) and set(found.jobs) == {"a"}
    assert found.jobs["a"].slots == state.jobs["a"].slots
    assert most == ROWS_AT_ONCE and turns > NODES / ROWS_AT_ONCE
    assert threads == [not large]
