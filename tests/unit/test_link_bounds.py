"""How many links a driver takes, and how many of them may still owe their hello."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.harness.waiting import CALL_TIMEOUT_S

from megascale.v1 import link_pb2, types_pb2
from megascale_common.service.clock import SystemClock
from megascale_common.service.errors import NotLeaderError, UnavailableError
from megascale_driver.core.values.cluster import Identity
from megascale_driver.core.values.policy import Policy
from megascale_driver.nodes.open_links import Link
from megascale_driver.nodes.orders import PROTOCOL
from megascale_driver.service import link_service
from megascale_driver.service.link_service import LinkService
from megascale_driver.shell.engine import Engine


async def silent() -> AsyncIterator[bytes]:
    """A peer that never says who it is."""
    await asyncio.Event().wait()
    yield b""


async def node() -> AsyncIterator[bytes]:
    """An agent."""
    device = types_pb2.Device(kind=types_pb2.DEVICE_KIND_CPU)
    hello = link_pb2.ExecutorHello(
        protocol=PROTOCOL, node="n9", incarnation="i", devices=[device]
    )  # fmt: skip
    yield link_pb2.ConnectRequest(hello=hello).SerializeToString()


def leader(beginning: asyncio.Event | None = None) -> Any:
    """A leadership, which reads the state until ``beginning`` is set."""
    return SimpleNamespace(beginning=beginning, not_leading=lambda: NotLeaderError("no term"))


async def test_nodes_that_dial_while_the_state_is_read_wait_for_the_term(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine(Policy(), SystemClock(), "token", "here")
    beginning = asyncio.Event()
    service = LinkService(engine, leader(beginning), "test")
    held = [asyncio.create_task(service._hello(node())) for _ in range(3)]
    await asyncio.sleep(0)
    assert not any(task.done() for task in held) and service._greeting == 3
    engine.term = cast(Any, object())
    beginning.set()
    async with asyncio.timeout(CALL_TIMEOUT_S):
        assert [(await task).node for task in held] == ["n9"] * 3
    engine.term = None
    monkeypatch.setattr(link_service, "BEGINNING_S", 0.01)
    with pytest.raises(NotLeaderError):  # it was in vain
        await service._hello(node())
    service = LinkService(engine, leader(asyncio.Event()), "test")
    with pytest.raises(NotLeaderError):  # it takes longer than agents wait
        await service._hello(node())
    service = LinkService(engine, leader(), "test")
    with pytest.raises(NotLeaderError):
        await service._hello(node())
    assert service._greeting == 0


async def test_links_are_bounded_with_those_that_owe_their_hello(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link_service, "MAX_LINKS", 4)
    engine = Engine(Policy(), SystemClock(), "token", "here")
    leading = leader()
    engine.term = cast(Any, leading)
    service = LinkService(engine, leading, "test")
    for name in ("n1", "n2"):
        engine.links.add(Link(name, Identity("i"), 0.0))
    assert (await service._hello(node())).node == "n9"
    waiting = [asyncio.create_task(service._hello(silent())) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(UnavailableError, match="4 links are open or being opened") as refused:
        await service._hello(node())
    assert refused.value.reason == "TOO_MANY_LINKS"
    for task in waiting:
        task.cancel()
    async with asyncio.timeout(CALL_TIMEOUT_S):
        await asyncio.gather(*waiting, return_exceptions=True)
    assert (await service._hello(node())).node == "n9", "there is room again"
