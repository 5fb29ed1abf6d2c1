"""The link against a real gRPC peer: an error in a message ends neither link nor agent."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from tests.harness.agent_process import TOKEN
from tests.harness.recording_driver import RecordingDriver

from megascale.v1 import link_pb2
from megascale_executor.agent.config import addresses_from
from megascale_executor.agent.link.driver_link import DriverLink, NodeSide
from megascale_executor.agent.reports.span_reports import SpanReports
from megascale_executor.agent.reports.step_reports import StepReports


async def test_a_hello_or_heartbeat_that_cannot_be_built_is_built_again(tmp_path: Path) -> None:
    driver = RecordingDriver("test", TOKEN, interval_s=0.1)
    address_file = tmp_path / "driver.address"
    hellos, beats = iter([ValueError("no hello yet")]), iter([UnicodeError("no beat yet")] * 2)
    obeyed: list[int] = []

    def hello() -> link_pb2.ExecutorHello:
        for error in hellos:
            raise error
        return link_pb2.ExecutorHello(node="n0", incarnation="one")

    def heartbeat() -> link_pb2.Heartbeat:
        for error in beats:
            raise error
        return link_pb2.Heartbeat()

    def obey(desired: link_pb2.DesiredState) -> None:
        obeyed.append(desired.version)
        if len(obeyed) == 1:
            raise RuntimeError("a defect")

    side = NodeSide(hello, heartbeat, see_epoch=lambda epoch: None, desired=obey)
    link = DriverLink(
        "test",
        TOKEN,
        lambda: addresses_from((), address_file),
        side,
        StepReports(),
        SpanReports("n0"),
    )
    driver.want(link_pb2.DESIRED_PHASE_IDLE)
    await driver.start(address_file)
    running = asyncio.create_task(link.run())
    try:
        await driver.until(lambda: len(driver.beats) >= 2 and len(obeyed) == 2)
        assert {hello.node for hello in driver.hellos} == {"n0"} and link.connected
        assert driver.beats[0].seq == 1, "the driver sees no gap"
        assert driver.connections >= 2, "dialled again after the order that failed"
        assert not running.done()
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        assert running.cancelled(), "whoever owns the link can still end it"
    finally:
        running.cancel()
        await driver.stop()
