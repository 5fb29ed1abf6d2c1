"""A lane: one piece of work after the other, whoever stops waiting for it."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from tests.harness.waiting import CALL_TIMEOUT_S

from megascale_checkpoint import concurrency
from megascale_checkpoint.commit import commit_log
from megascale_checkpoint.commit.commit_log import LogWriters
from megascale_checkpoint.concurrency import Lane
from megascale_common.service.errors import UnavailableError


async def test_what_has_begun_is_finished_and_what_waits_may_be_given_up() -> None:
    lane, begun, go_on, order = Lane("lane"), threading.Event(), threading.Event(), []

    def first() -> None:
        begun.set()
        go_on.wait()
        order.append("first")

    waiting = asyncio.create_task(lane.run(first, 0.05))
    await asyncio.sleep(0)
    # The loop stands still meanwhile, so the time is not up before the work has begun.
    assert begun.wait(CALL_TIMEOUT_S)
    with pytest.raises(UnavailableError, match="lane: the storage has not answered for 0 s"):
        await waiting
    with pytest.raises(UnavailableError):
        await lane.run(lambda: order.append("given up"), 0.05)
    last = asyncio.create_task(lane.run(lambda: order.append("last")))
    await asyncio.sleep(0.05)
    assert order == []
    go_on.set()
    await last
    assert order == ["first", "last"] and lane.waiting == 0


async def test_an_error_of_the_work_is_the_callers() -> None:
    def late() -> None:
        raise TimeoutError("the mount's own")

    with pytest.raises(TimeoutError, match="the mount's own"):
        await Lane("lane").run(late, 5.0)


async def test_a_lane_takes_only_so_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(concurrency, "MOST_WAITING", 2)
    lane, go_on = Lane("lane"), threading.Event()
    waiting = [asyncio.create_task(lane.run(go_on.wait)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(UnavailableError, match="2 calls wait") as caught:
        await lane.run(go_on.wait)
    assert caught.value.reason == "STORAGE_UNAVAILABLE"
    go_on.set()
    await asyncio.gather(*waiting)


async def test_an_idle_lane_has_no_thread_and_works_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(concurrency, "IDLE_S", 0.02)
    lane = Lane("lane of this test")
    first = await lane.run(threading.current_thread)
    await asyncio.to_thread(first.join)
    second = await lane.run(threading.current_thread)
    assert second is not first
    await asyncio.to_thread(second.join)


async def test_idle_writers_are_dropped_and_busy_ones_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit_log, "KEPT_WRITERS", 2)
    writers, go_on = LogWriters(), threading.Event()
    busy = writers.of(f"{tmp_path}/busy")
    call = asyncio.create_task(busy.call(lambda log: go_on.wait()))
    await asyncio.sleep(0)
    idle = writers.of(f"{tmp_path}/idle")
    for name in "abc":
        writers.of(f"{tmp_path}/{name}")
    assert writers.of(f"{tmp_path}/busy") is busy
    assert writers.of(f"{tmp_path}/idle") is not idle
    go_on.set()
    await call
