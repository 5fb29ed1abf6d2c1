"""A term of the engine: what leaves it and when, at its begin, while it commits, at its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.harness.fake_etcd import Connection, FakeEtcd, FakeEtcdClient
from tests.harness.simulated_cluster import demo_job
from tests.harness.waiting import CALL_TIMEOUT_S, eventually

from megascale.v1 import link_pb2
from megascale_common.service.clock import SystemClock, VirtualClock
from megascale_common.service.errors import NotLeaderError
from megascale_driver.core.values.cluster import Cluster, Device, Identity
from megascale_driver.core.values.events import JobSubmitted
from megascale_driver.core.values.policy import Policy
from megascale_driver.journal.pieces import Change
from megascale_driver.journal.rows import Batch
from megascale_driver.journal.store import Loaded
from megascale_driver.nodes.open_links import Link
from megascale_driver.presence.inbox import StepLanes
from megascale_driver.service.link_service import LinkService
from megascale_driver.shell.engine import Engine
from megascale_driver.shell.leadership import Leader
from megascale_driver.shell.loop import freezing_with_term


class Held:
    """A store whose writes are not confirmed."""

    def __init__(self) -> None:
        self.deadlines: list[float] = []

    def between(self, *_: object) -> Batch:
        return Batch([Change("x", b"{}")])

    async def write(self, batch: Batch, deadline_s: float) -> None:
        self.deadlines.append(deadline_s)
        await asyncio.Event().wait()


def leadership(remaining_s: float) -> Any:
    lease = SimpleNamespace(
        lost=asyncio.Event(), lost_reason="nobody renewed it", remaining_s=lambda: remaining_s
    )
    return SimpleNamespace(lease=lease, create_revision=7)


async def test_what_is_being_committed_when_the_lease_ends_is_let_out_to_nobody() -> None:
    engine, store, leads = Engine(Policy(), SystemClock(), "token", "here"), Held(), leadership(3.5)
    sent: list[link_pb2.ConnectResponse] = []

    async def send(message: link_pb2.ConnectResponse) -> None:
        sent.append(message)

    link = Link("n1", Identity("i", devices=(Device(0, "cpu"),)), engine.clock.now_s(), send)
    engine.links.add(link)
    await link.greet(link_pb2.ConnectResponse())
    sent.clear()
    term = asyncio.create_task(engine.lead(leads, cast(Any, store), Loaded(Cluster(), (), 1)))
    await eventually(lambda: bool(store.deadlines), "a commit that waits for etcd")
    asked = asyncio.create_task(engine.call(JobSubmitted(0.0, demo_job("a"), "me")))
    assert store.deadlines == [3.5], "no longer than the lease"
    leads.lease.lost.set()
    async with asyncio.timeout(CALL_TIMEOUT_S):
        with pytest.raises(NotLeaderError, match="lease was lost during a commit"):
            await term
        with pytest.raises(NotLeaderError, match="ended before the commit"):
            await asked
    assert engine.term is None and not engine.state.nodes and not engine.state.jobs
    assert not sent and not list(engine.audit), "neither orders nor lines of the log"
    await engine.close()


async def test_the_state_is_frozen_once_it_is_read_and_before_the_driver_serves() -> None:
    happened: list[object] = []

    async def notify(leads: bool) -> None:
        happened.append(leads)

    engine = Engine(Policy(), SystemClock(), "token", "here:1")

    def freeze() -> None:
        happened.append("frozen")
        assert engine.links.all() == [] and client_read[0], "the state was read before"

    client_read = [False]
    async with FakeEtcdClient([Connection(FakeEtcd())], prefix="megascale/") as etcd:
        adopt = engine.adopt

        async def adopted(*arguments: Any) -> None:
            client_read[0] = True
            await adopt(*arguments)

        engine.adopt = adopted  # type: ignore[method-assign]
        leader = Leader(etcd, engine, freezing_with_term(notify, freeze))
        running = asyncio.create_task(leader.run())
        await eventually(lambda: engine.term is not None, "a term")
        assert happened == ["frozen", True]
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert happened == ["frozen", True, False], "the end of a term freezes nothing"
    await engine.close()


async def test_a_heartbeat_is_acknowledged_before_anything_is_decided_about_it() -> None:
    clock = VirtualClock()
    engine = Engine(Policy(), clock, "token", "here")
    happened: list[str] = []

    async def send(message: link_pb2.ConnectResponse) -> None:
        happened.append(f"acknowledged {message.heartbeat_ack.seq}")

    def heard(link: Link, beat: Any, now_s: float) -> None:
        happened.append(f"heard {beat.seq}")

    async def beats() -> AsyncIterator[bytes]:
        for seq in (1, 2):
            beat = link_pb2.Heartbeat(seq=seq)
            yield link_pb2.ConnectRequest(heartbeat=beat).SerializeToString()

    engine.heartbeats.heard = heard  # type: ignore[method-assign,assignment]
    link = Link("n1", Identity("i"), clock.now_s(), send)
    await link.greet(link_pb2.ConnectResponse())
    happened.clear()
    await LinkService(engine, cast(Any, None), "test")._read(beats(), link)
    assert happened == ["acknowledged 1", "heard 1", "acknowledged 2", "heard 2"]


def test_step_records_of_a_job_take_one_place_however_many_there_are() -> None:
    lanes = StepLanes()
    for step in range(1, 10_001):
        lanes.add("a", 1, step, held_s=0.5)
    lanes.add("b", 2, 7)
    assert len(lanes._lanes) == 2
    found = lanes.take()
    assert (found["a"].step, found["a"].held_s, found["b"].step) == (10_000, 5_000.0, 7)
    assert not lanes and lanes.take() == {}
