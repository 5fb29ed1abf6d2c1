"""Messages that are ready in the same turn of the loop are handled a few at a time, in order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from tests.harness.waiting import CALL_TIMEOUT_S

from megascale.v1 import link_pb2
from megascale_common.service.clock import VirtualClock
from megascale_driver.core.values.cluster import Device, Identity
from megascale_driver.core.values.events import Tick
from megascale_driver.core.values.policy import Policy
from megascale_driver.nodes.open_links import Link
from megascale_driver.service.link_service import LinkService
from megascale_driver.shell.engine import Engine
from megascale_driver.shell.loop import AT_ONCE, LoopTurns
from megascale_driver.shell.ticks import LOOP_BLOCKED_S

COUNT = 5 * AT_ONCE + 7


async def test_places_are_taken_in_order_so_many_in_a_turn() -> None:
    turns, through = LoopTurns(), list[int]()

    async def message(number: int) -> None:
        if not turns.take():
            await turns.wait()
        through.append(number)

    tasks = [asyncio.create_task(message(number)) for number in range(COUNT)]
    tasks[AT_ONCE + 3].cancel()
    most, before = 0, 0
    async with asyncio.timeout(CALL_TIMEOUT_S):
        while len(through) < COUNT - 1:
            await asyncio.sleep(0)
            most, before = max(most, len(through) - before), len(through)
    # Two turns of places may end up in one of this task's: it is in neither's order.
    assert most <= 2 * AT_ONCE
    assert through == [number for number in range(COUNT) if number != AT_ONCE + 3]
    assert turns.waited_s() == 0.0
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert turns.take(), "there is room again"


async def test_who_comes_later_overtakes_nobody_that_waits() -> None:
    turns = LoopTurns()
    assert all(turns.take() for _ in range(AT_ONCE)) and not turns.take()
    first = asyncio.ensure_future(turns.wait())
    await asyncio.sleep(0)
    assert not turns.take() and turns.waited_s() >= 0.0
    await first
    assert turns.take()


async def test_a_fleet_that_answers_at_once_leaves_turns_to_the_rest_of_the_driver() -> None:
    """Heartbeats of hundreds of nodes are there in the same turn."""
    clock = VirtualClock()
    engine = Engine(Policy(), clock, "token", "here")
    heard: list[str] = []

    async def one_beat() -> AsyncIterator[bytes]:
        beat = link_pb2.Heartbeat(seq=1)
        yield link_pb2.ConnectRequest(heartbeat=beat).SerializeToString()

    engine.heartbeats.heard = lambda link, beat, now_s: heard.append(link.node)  # type: ignore[method-assign]
    service = LinkService(engine, cast(Any, None), "test")
    names = [f"n{number}" for number in range(COUNT)]
    readers = [
        asyncio.create_task(
            service._read(one_beat(), Link(name, Identity("i", devices=(Device(0, "cpu"),)), 0.0))
        )
        for name in names
    ]
    most, before = 0, 0
    async with asyncio.timeout(CALL_TIMEOUT_S):
        while len(heard) < COUNT:
            await asyncio.sleep(0)
            most, before = max(most, len(heard) - before), len(heard)
    await asyncio.gather(*readers)
    assert most <= 2 * AT_ONCE and heard == names


@pytest.mark.parametrize("waits_s", [0.0, 2 * LOOP_BLOCKED_S])
async def test_messages_that_wait_for_their_turn_are_no_silence(waits_s: float) -> None:
    """A tick has its turn before them: it must not take their nodes for silent."""
    engine = Engine(Policy(), VirtualClock(), "token", "here")
    engine.heartbeats.turns.waited_s = lambda: waits_s  # type: ignore[method-assign]
    ticks = asyncio.Queue[Tick]()
    engine.post = ticks.put_nowait  # type: ignore[method-assign,assignment]
    task = asyncio.create_task(engine.ticks.run())
    async with asyncio.timeout(CALL_TIMEOUT_S):
        assert (await ticks.get()).loop_blocked == (waits_s > 0.0)
    task.cancel()
