"""A fleet that lost its driver dials again: when, how long it waits, and what a refusal says."""

from __future__ import annotations

import asyncio
import itertools
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from tests.harness.agent_process import TOKEN
from tests.harness.waiting import CALL_TIMEOUT_S, eventually

from megascale.v1 import link_pb2, link_pb2_grpc
from megascale_common.etcd import keeper_process
from megascale_common.node.link_limits import (
    BEGINNING_S,
    DIALS_PER_S,
    HELLO_S,
    MAX_RETRY_S,
)
from megascale_common.service import status
from megascale_common.service.channel import open_channel
from megascale_common.service.clock import VirtualClock
from megascale_common.service.errors import NotLeaderError, UnavailableError
from megascale_common.service.server import RpcServer
from megascale_driver.core.values.policy import Policy
from megascale_driver.service import link_service
from megascale_driver.service.link_service import DialPace, LinkService
from megascale_driver.shell import leadership
from megascale_driver.shell.engine import Engine
from megascale_executor.agent.link import driver_link as link
from megascale_executor.agent.link.driver_link import DriverLink, NodeSide
from megascale_executor.agent.reports.span_reports import SpanReports
from megascale_executor.agent.reports.step_reports import StepReports


def test_refused_nodes_get_moments_one_after_the_other() -> None:
    pace = DialPace()
    waits = [pace.next_s(100.0) for _ in range(1000)]
    assert waits[0] == pytest.approx(1 / DIALS_PER_S), "a small cluster waits for nothing"
    gaps = [after - before for before, after in itertools.pairwise(waits)]
    assert gaps == pytest.approx([1 / DIALS_PER_S] * 999)
    assert pace.next_s(1000.0) == pytest.approx(1 / DIALS_PER_S), "later there is room again"


def test_nobody_is_asked_to_wait_for_longer_than_the_bound() -> None:
    pace = DialPace()
    waits = [pace.next_s(100.0) for _ in range(20_000)]
    assert max(waits) == MAX_RETRY_S and waits.count(MAX_RETRY_S) > 9_000
    assert pace.next_s(105.0) == pytest.approx(MAX_RETRY_S - 5.0, abs=0.01), "it empties"


def test_the_limits_of_the_link_keep_their_order() -> None:
    policy = Policy()
    assert BEGINNING_S + link_service.HELLO_TIMEOUT_S <= HELLO_S, "refused before it gives up"
    assert DIALS_PER_S * HELLO_S >= 12_500, "a whole fleet is taken in before any node gives up"
    # Note at link_limits: a node at a driver whose loop hangs finds the next one in time.
    silent_s = link._SILENT_INTERVALS * policy.heartbeat_interval_s
    lost_s = silent_s + HELLO_S + 1.25 * MAX_RETRY_S
    next_s = keeper_process.SILENCE_LIMIT_S + leadership.LEASE_TTL_S
    assert lost_s < next_s + policy.dead_uncorroborated_after_s


def test_an_error_carries_when_to_try_again() -> None:
    refused = UnavailableError("later", reason="BUSY", retry_after_s=1.25)
    sent = status.to_status(refused)
    trailing = (("grpc-status-details-bin", sent.SerializeToString()),)
    received = grpc.aio.AioRpcError(
        grpc.StatusCode.UNAVAILABLE,
        grpc.aio.Metadata(),
        grpc.aio.Metadata(*trailing),
        details=sent.message,
    )
    found = status.read(received)
    assert (found.reason, found.retry_after_s) == ("BUSY", 1.25)
    plain = status.to_status(UnavailableError("later"))
    assert len(plain.details) == 1, "who asks for no wait says nothing about it"


async def test_a_standby_says_when_to_dial_again_and_the_agent_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Over real gRPC: a thousand nodes were refused before this one."""
    # The queue of those before is not shorter after a pause of the machine: its time stands still.
    engine = Engine(Policy(), VirtualClock(), TOKEN, "here")
    standby: Any = SimpleNamespace(beginning=None, not_leading=lambda: NotLeaderError("no term"))
    service, server = LinkService(engine, standby, "test"), RpcServer(TOKEN)
    service.add_to(server.server)
    now_s = engine.clock.now_s()
    for _ in range(1000):
        service._pace.next_s(now_s)
    address = await server.start("127.0.0.1:0", [])
    asked: list[float] = []
    original = link.pause_s

    def pause_s(own_s: float, asked_s: float) -> float:
        asked.append(asked_s)
        return original(0.0, asked_s) / 1000.0

    monkeypatch.setattr(link, "pause_s", pause_s)
    side = NodeSide(
        lambda: link_pb2.ExecutorHello(node="n0"), link_pb2.Heartbeat, lambda _: None, print
    )
    dialling = DriverLink("test", TOKEN, lambda: [address], side, StepReports(), SpanReports("n0"))
    task = asyncio.create_task(dialling.run())
    try:
        # A call that gRPC itself breaks off asks for nothing: seen once on a busy machine.
        await eventually(lambda: len([s for s in asked if s > 0.0]) > 2, "refusals", lambda: asked)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await server.stop(0)
    assert 0.1 < max(asked) <= 1.1, asked


def test_an_agent_waits_about_as_long_as_it_is_asked_to_and_not_for_ever() -> None:
    assert link.pause_s(0.7, 0.0) == 0.7, "its own back-off"
    waits = [link.pause_s(0.1, 4.0) for _ in range(300)]
    assert 3.0 <= min(waits) < max(waits) <= 5.0 and len(set(waits)) > 100, "jitter"
    assert link.pause_s(0.1, 1e9) <= 1.25 * MAX_RETRY_S, "whatever a driver asks for"


class Slow(link_pb2_grpc.ExecutorLinkServiceServicer):
    """A driver that is behind: it answers nobody until a test has it answer."""

    def __init__(self) -> None:
        self.dials = 0
        self.answers = asyncio.Event()

    async def Connect(self, request_iterator: Any, context: Any) -> Any:
        self.dials += 1
        await self.answers.wait()
        yield link_pb2.ConnectResponse(
            hello=link_pb2.DriverHello(
                cluster="test", protocol=link_pb2.ProtocolRange(lowest=1, highest=3)
            )
        )
        await asyncio.Event().wait()


@pytest.mark.parametrize("patient", [True, False])
async def test_a_node_waits_for_a_driver_that_is_behind_and_gives_up_at_the_limit(
    patient: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not patient:
        monkeypatch.setattr(link, "HELLO_S", 0.02)
    slow, server = Slow(), RpcServer(TOKEN)
    link_pb2_grpc.add_ExecutorLinkServiceServicer_to_server(slow, server.server)
    address = await server.start("127.0.0.1:0", [])
    side = NodeSide(
        lambda: link_pb2.ExecutorHello(node="n0"), link_pb2.Heartbeat, lambda _: None, print
    )
    dialling = DriverLink("test", TOKEN, lambda: [address], side, StepReports(), SpanReports("n0"))
    task = asyncio.create_task(dialling.run())
    try:
        wanted = 1 if patient else 3
        await eventually(lambda: slow.dials >= wanted, "dials", lambda: slow.dials)
        if patient:
            async with open_channel(address, TOKEN) as channel:
                # Another node is served meanwhile; the first one still has its one connection.
                stub = link_pb2_grpc.ExecutorLinkServiceStub(channel)
                second = stub.Connect(iter([link_pb2.ConnectRequest()]))
                await eventually(lambda: slow.dials == 2, "the second node")
                slow.answers.set()
                async with asyncio.timeout(CALL_TIMEOUT_S):
                    assert (await second.read()).HasField("hello")
                await eventually(lambda: dialling.connected, "the first node's link")
                assert slow.dials == 2
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await server.stop(0)
