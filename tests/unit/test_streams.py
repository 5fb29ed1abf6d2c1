"""Streams that can be ended from outside: nothing of what they waited for is left behind."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.harness.waiting import CALL_TIMEOUT_S

from megascale_driver.nodes import streams
from megascale_driver.nodes.streams import TermNotes, until_set


async def _refused(begin: asyncio.Event) -> AsyncIterator[int]:
    yield 1
    await begin.wait()
    raise ValueError("no such token")


async def test_an_error_reaches_who_listens() -> None:
    begin = asyncio.Event()
    begin.set()
    stream = until_set(asyncio.Event(), _refused(begin))
    assert await anext(stream) == 1
    with pytest.raises(ValueError, match="no such token"):
        await anext(stream)


async def test_an_error_that_comes_when_nobody_listens_any_more_is_no_defect() -> None:
    """Random requests found it: a watch that was refused while its client went away."""
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    begin = asyncio.Event()
    stream = until_set(asyncio.Event(), _refused(begin))
    assert await anext(stream) == 1
    listening = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0.01)  # it waits for the next answer
    begin.set()
    listening.cancel()  # in the same turn
    with pytest.raises(asyncio.CancelledError):
        await listening
    del stream, listening
    gc.collect()
    await asyncio.sleep(0)
    assert reported == []


async def test_the_event_ends_a_wait_that_lasts() -> None:
    event = asyncio.Event()
    stream = until_set(event, _refused(asyncio.Event()))
    assert await anext(stream) == 1
    asyncio.get_running_loop().call_soon(event.set)
    assert [answer async for answer in stream] == []


async def soon(stream: AsyncIterator[str]) -> str:
    """The next answer, which is there or due."""
    async with asyncio.timeout(CALL_TIMEOUT_S):
        return await anext(stream)


async def test_a_stream_says_once_that_the_term_is_lost_and_once_that_it_is_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between answers and while none comes; a term that is back at once is not worth a word."""
    monkeypatch.setattr(streams, "LOOK_S", 0.01)
    now_s, note, ended = 0.0, "", asyncio.Event()
    answers: asyncio.Queue[str] = asyncio.Queue()

    async def coming() -> AsyncIterator[str]:
        while True:
            yield await answers.get()

    notes = TermNotes(lambda: note, clock=lambda: now_s)
    stream = until_set(ended, coming(), notes.news)
    answers.put_nowait("first")
    assert await soon(stream) == "first"
    note, now_s = "no term: campaigns", 1.0
    answers.put_nowait("second")
    assert await soon(stream) == "second"
    note, now_s = "", 2.0
    answers.put_nowait("third")
    assert await soon(stream) == "third"
    note, now_s = "no term: etcd is down", 3.0
    answers.put_nowait("fourth")
    assert await soon(stream) == "fourth"
    now_s += streams.NOTE_AFTER_S
    assert await soon(stream) == "no term: etcd is down"
    note = "no term: etcd is down, older"
    answers.put_nowait("fifth")
    assert await soon(stream) == "fifth"
    note = ""
    assert await soon(stream) == streams.LEADS_AGAIN
    ended.set()
    assert [answer async for answer in stream] == []
