"""Spans from the rings to the driver: batches, what is dropped, and that beats go on."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
import zlib
from pathlib import Path

import pytest
from tests.harness.agent_process import TOKEN
from tests.harness.recording_driver import RecordingDriver

from megascale.v1 import link_pb2
from megascale_common.node.spans.ops import BACKWARD, FORWARD, MAX_NAME_CHARS, MAX_OPS, Op
from megascale_common.node.spans.record import SPAN, Span, from_columns
from megascale_common.node.spans.ring import CAPACITY, SpanRingWriter
from megascale_driver.service.link_service import MAX_BATCH_BYTES, MAX_BATCH_SPANS
from megascale_executor.agent.attempt import AttemptKey
from megascale_executor.agent.config import addresses_from
from megascale_executor.agent.link.driver_link import DriverLink, NodeSide
from megascale_executor.agent.reports.span_reports import BATCH_SPANS, SpanReports, unix_offset
from megascale_executor.agent.reports.step_reports import StepReports

KEY = AttemptKey("job", 3)


def write(ring: SpanRingWriter, count: int, op: Op = FORWARD) -> None:
    """Spans with values that do not compress."""
    number = ring.op(op)
    for _ in range(count):
        ring.add(Span(random.getrandbits(62), random.getrandbits(62), 7, number, 3))


async def test_all_spans_of_all_ranks_arrive_with_their_operations(tmp_path: Path) -> None:
    rings = [SpanRingWriter(tmp_path / f"{rank}", rank=rank, attempt=3) for rank in (4, 5)]
    spans = SpanReports("n1")
    spans.watch(KEY, {4: tmp_path / "4", 5: tmp_path / "5", 6: tmp_path / "absent"})
    for ring in rings:
        ring.op(BACKWARD)
    write(rings[0], 1500)
    write(rings[1], 3)
    await spans.end()
    batches = list(spans._waiting)
    assert [(batch.rank, batch.count) for batch in batches] == [(4, 1024), (4, 476), (5, 3)]
    for batch in batches:
        assert (batch.node, batch.job, batch.attempt) == ("n1", "job", 3)
        records = from_columns(zlib.decompress(batch.columns))
        names = {batch.operations[Span(*one).op].name for one in SPAN.iter_unpack(records)}
        assert names == {"forward"}
    write(rings[0], 1)
    await spans.read()
    assert len(spans) == 3, "an attempt that has ended is read no more"


async def test_a_batch_is_never_larger_than_the_driver_takes(tmp_path: Path) -> None:
    ring = SpanRingWriter(tmp_path / "0", rank=0, attempt=3)
    for number in range(MAX_OPS - 1):
        ring.op(Op(f"{number:0{MAX_NAME_CHARS}}", "collective", "g" * MAX_NAME_CHARS))
    write(ring, CAPACITY + 9)
    spans = SpanReports("n" * 63)
    spans.watch(AttemptKey("j" * 63, 3), {0: tmp_path / "0"})
    await spans.read()
    assert len(spans) == CAPACITY / BATCH_SPANS and BATCH_SPANS == MAX_BATCH_SPANS
    assert max(batch.ByteSize() for batch in spans._waiting) <= MAX_BATCH_BYTES
    assert spans.dropped == {"ring": 9, "queue": 0}


async def test_a_full_queue_drops_the_newest_and_counts(tmp_path: Path) -> None:
    ring = SpanRingWriter(tmp_path / "0", rank=0, attempt=3)
    spans = SpanReports("n1", limit=2)
    spans.watch(KEY, {0: tmp_path / "0"})
    for count in (1, 2, 3):
        write(ring, count)
        await spans.read()
    assert [batch.count for batch in spans._waiting] == [1, 2]
    assert spans.dropped == {"ring": 0, "queue": 3}


async def test_a_ring_that_cannot_be_right_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "0").write_bytes(b"x" * 100_000)
    ring = SpanRingWriter(tmp_path / "1", rank=1, attempt=2)  # of an earlier attempt
    write(ring, 5)
    spans = SpanReports("n1")
    spans.watch(KEY, {0: tmp_path / "0", 1: tmp_path / "1"})
    await spans.read()
    await spans.end()
    assert len(spans) == 0


def test_the_offset_leads_to_unix_time() -> None:
    offset_ns, error_ns = unix_offset()
    assert 0 <= error_ns < 1e8
    # This process may stand still between any two readings.
    before_ns, now_ns, after_ns = time.time_ns(), time.monotonic_ns() + offset_ns, time.time_ns()
    assert before_ns - 1e8 < now_ns < after_ns + 1e8


@pytest.fixture
async def driver(tmp_path: Path) -> RecordingDriver:
    """A driver that asks for ten beats a second and reads no spans."""
    driver = RecordingDriver("test", TOKEN, interval_s=0.1)
    driver.reads_spans.clear()
    await driver.start(tmp_path / "driver.address")
    return driver


async def test_a_driver_that_reads_spans_slowly_gets_its_beats_in_time(
    tmp_path: Path, driver: RecordingDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    # At ten beats a second a process that stands still for 0.6 s would dial again.
    monkeypatch.setattr("megascale_executor.agent.link.driver_link._SILENT_INTERVALS", 600)
    ring = SpanRingWriter(tmp_path / "0", rank=0, attempt=3)
    spans = SpanReports("n0")
    spans.watch(KEY, {0: tmp_path / "0"})
    side = NodeSide(
        hello=lambda: link_pb2.ExecutorHello(node="n0", incarnation="one"),
        heartbeat=link_pb2.Heartbeat,
        see_epoch=lambda epoch: None,
        desired=lambda desired: None,
    )
    addresses = tmp_path / "driver.address"
    link = DriverLink(
        "test", TOKEN, lambda: addresses_from((), addresses), side, StepReports(), spans
    )
    running = asyncio.create_task(link.run())
    try:
        await driver.until(lambda: len(driver.beats) >= 2)
        while not spans.dropped["queue"]:  # transport and queue are full
            write(ring, CAPACITY)
            await spans.read()
            await asyncio.sleep(0)
        first = len(driver.beats)
        await driver.until(lambda: len(driver.beats) >= first + 20)
        gaps = [b - a for a, b in itertools.pairwise(driver.beat_times[first:])]
        assert sorted(gaps)[len(gaps) // 2] < 1.0, "beats have kept their interval, and not 5 s"
        assert driver.connections == 1 and not driver.spans
        driver.reads_spans.set()
        await driver.until(lambda: len(spans) == 0 and bool(driver.spans))
        assert sum(batch.count for batch in driver.spans) <= spans.sent
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        await driver.stop()
