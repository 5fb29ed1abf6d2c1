"""What is measured of a loop that stands still, and when long-lived objects are frozen."""

from __future__ import annotations

import asyncio
import gc
import time

import pytest
from tests.harness.waiting import CALL_TIMEOUT_S

from megascale_driver.shell import loop
from megascale_driver.shell.loop import WINDOW_S, LongLived, LoopWatch


async def test_a_stall_is_measured_by_its_length() -> None:
    watch = LoopWatch()
    watch.start()
    await asyncio.sleep(0.05)
    time.sleep(0.3)  # noqa: ASYNC251 - it is what the watch has to see
    async with asyncio.timeout(CALL_TIMEOUT_S):
        while watch.longest_s() < 0.25:  # noqa: ASYNC110 - the timer fires with the next turn
            await asyncio.sleep(0.01)
    watch.stop()
    assert watch.stalls >= 1


def test_the_longest_stall_is_that_of_the_last_minute() -> None:
    watch = LoopWatch()
    for at_s, lag_s in ((10.0, 0.4), (10.5, 0.2), (30.0, 0.3), (30.2, 0.005)):
        watch.late(at_s, lag_s)
    assert (watch.longest_s(), watch.stalls) == (0.4, 3)
    watch.late(10.0 + WINDOW_S, 0.001)
    assert watch.longest_s() == 0.3, "a minute after the first"
    for second in range(1000):
        watch.late(1000.0 + second, 0.001)
    assert len(watch._seconds) <= WINDOW_S, "its memory is bounded"


def test_a_fleet_that_links_is_frozen_in_few_steps_and_once() -> None:
    frozen: list[int] = []
    count = 0
    kept = LongLived(lambda: frozen.append(count))
    for count in range(1, 12_501):
        kept.linked(count)
    assert frozen[0] == loop.FREEZE_STEP and len(frozen) < 24, frozen
    before = list(frozen)
    for count in range(12_500, 0, -1):
        kept.linked(count)
    for count in range(1, 12_501):
        kept.linked(count)
    assert frozen == before, "links that come back are not frozen again"


async def test_python_runs_no_full_collection_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    thresholds = gc.get_threshold()
    full = asyncio.Event()
    monkeypatch.setattr(loop, "FULL_S", 0.01)
    monkeypatch.setattr(gc, "collect", lambda *_: full.set())
    task = asyncio.create_task(loop.collect_periodically())
    try:
        async with asyncio.timeout(CALL_TIMEOUT_S):
            await full.wait()
        assert gc.get_threshold()[2] >= 1_000_000
    finally:
        task.cancel()
        gc.set_threshold(*thresholds)
