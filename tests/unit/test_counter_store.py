"""Counters beside the spans: from a host's files into the store, and into the answer of `why`."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.harness import recorded_spans
from tests.harness.desk import Desk
from tests.harness.injected_spans import Change, injected

from megascale.v1 import link_pb2
from megascale_common.node.spans.ops import FORWARD
from megascale_common.node.spans.record import Span, to_columns
from megascale_common.node.spans.ring import SpanRingWriter
from megascale_driver.analysis.spans.decline import StepWindows, windows_of
from megascale_driver.analysis.spans.table import RECORD, SpanTable
from megascale_driver.telemetry import store as stores
from megascale_driver.telemetry.intake import SpanIntake
from megascale_driver.telemetry.store import MAX_COUNTERS, CounterStore, SpanStore
from megascale_driver.telemetry.views import SpanViews
from megascale_executor.agent.attempt import AttemptKey
from megascale_executor.agent.reports.span_reports import SpanReports
from megascale_executor.counters.sampler import read_all, sources

S = 1_000_000_000
RECORDED = recorded_spans.read(recorded_spans.CPU_DP4)
SPLIT = 31
Values = dict[tuple[str, str], float]


def batch(
    at_ns: int, values: Values, node: str = "n1", job: str = "demo", attempt: int = 1
) -> link_pb2.ReportSpansRequest:
    found = link_pb2.ReportSpansRequest(
        node=node, job=job, attempt=attempt, counters_at_unix_ns=at_ns
    )
    for (name, target), value in values.items():
        found.counters.add(name=name, target=target, value=value)
    return found


def spans(table: SpanTable, job: str, attempt: int) -> Iterator[link_pb2.ReportSpansRequest]:
    """The spans of a table as agents send them."""
    for rank, node in enumerate(table.nodes):
        own = table.where(table.rank == rank)
        records = np.empty(len(own), RECORD)
        for name in RECORD.names or ():
            records[name] = getattr(own, name)
        found = link_pb2.ReportSpansRequest(
            node=node, job=job, attempt=attempt, rank=rank, count=len(own),
            columns=zlib.compress(to_columns(records.tobytes())),
        )  # fmt: skip
        for op in table.ops:
            found.operations.add(name=op.name, kind=op.kind, group=op.group)
        yield found


@pytest.fixture
def store(tmp_path: Path) -> SpanStore:
    return SpanStore(tmp_path / "telemetry", 1 << 30, 1e9)


async def test_counters_of_a_host_go_with_the_spans_of_its_ranks(tmp_path: Path) -> None:
    port = tmp_path / "sys/class/infiniband/mlx5_0/ports/1/counters"
    port.mkdir(parents=True)
    (port / "port_xmit_data").write_text("25\n")
    (port / "symbol_error").write_text("3\n")
    ring = SpanRingWriter(tmp_path / "0", rank=2, attempt=3)
    reports = SpanReports("n1", counters=lambda: read_all(sources(tmp_path)), counters_s=600)
    reports.watch(AttemptKey("job", 3), {2: tmp_path / "0"})
    ring.add(Span(1, 2, 3, ring.op(FORWARD)))
    await reports.read()
    await reports.read()
    counted = [one for one in reports._waiting if one.counters]
    assert len(counted) == 1, "the second reading comes too soon"
    (found,) = counted
    assert (found.job, found.attempt, found.rank, found.count) == ("job", 3, 2, 0)
    values = {(each.name, each.target): each.value for each in found.counters}
    assert values == {("rdma_sent_bytes_total", "mlx5_0:1"): 100.0}
    assert found.counters_at_unix_ns > 1e18


async def test_a_node_without_ranks_sends_no_counters(tmp_path: Path) -> None:
    reports = SpanReports("n1", counters=lambda: read_all(sources()), counters_s=0)
    await reports.read()
    reports.watch(AttemptKey("job", 3), {0: tmp_path / "absent"})
    await reports.read()
    assert not len(reports)


def test_means_and_rises_of_two_windows_come_back(store: SpanStore) -> None:
    clock, sent = ("gpu_sm_clock_hertz", "g0"), ("rdma_sent_bytes_total", "m:1")
    for second in range(20):
        hertz, total = (2e9, 10.0 * second) if second < 10 else (1e9, 100.0 + 2 * (second - 10))
        counts = store.add([batch(second * S, {clock: hertz, sent: total})])
        assert counts["counters"] == 2
    windows = {"n1": StepWindows(0, 10 * S, 19 * S), "n9": StepWindows(0, 1, 2)}
    found = {one.name: one for one in store.counters.changes("demo", 1, windows)}
    assert (found[clock[0]].before, found[clock[0]].after) == (2e9, 1e9)
    assert (found[sent[0]].before, found[sent[0]].after) == pytest.approx((10, 2))
    assert store.counters.changes("demo", 2, windows) == []
    later = {"n1": StepWindows(0, 18 * S, 19 * S)}
    assert store.counters.changes("demo", 1, later) == [], "two samples show no mean"


def test_a_counter_that_began_again_says_nothing(store: SpanStore) -> None:
    for second, total in enumerate((5.0, 6.0, 7.0, 8.0, 0.0, 1.0)):
        store.add([batch(second * S, {("link_flaps_total", "eth0"): total})])
    windows = {"n1": StepWindows(0, 3 * S, 5 * S)}
    assert store.counters.changes("demo", 1, windows) == []


def test_what_is_not_what_it_says_is_counted_as_damaged(store: SpanStore) -> None:
    many = batch(S, {("gpu_power_watts", str(n)): 1.0 for n in range(MAX_COUNTERS + 1)})
    long = batch(S, {("x" * 1000, ""): 1.0})
    elsewhere = batch(S, {("gpu_power_watts", "g"): 1.0}, job="../up")
    assert store.add([many, long, elsewhere]) == {"damaged": MAX_COUNTERS + 3}


def test_small_files_become_one_and_old_ones_go(tmp_path: Path) -> None:
    counters = CounterStore(tmp_path)
    for second in range(stores.MERGE_FILES):
        counters.add(batch(second * S, {("gpu_power_watts", f"g{second % 3}"): float(second)}))
        counters.flush()
    (left,) = (tmp_path / "demo/attempt-000001").glob("counters-*.parquet")
    assert stores.bounds_of(left) == (0, stores.MERGE_FILES - 1)
    windows = {"n1": StepWindows(0, 32 * S, 64 * S)}
    assert len(counters.changes("demo", 1, windows)) == 3
    SpanStore(tmp_path, most_bytes=1, most_age_s=1e9).trim()
    assert not list(tmp_path.glob("*")), "the limit of the spans holds for counters as well"


def test_windows_are_times_of_each_node() -> None:
    table = RECORDED.of_steps(1, 60)
    found = windows_of(table, SPLIT)
    assert set(found) == set(table.nodes)
    for window in found.values():
        assert window.first_ns < window.split_ns < window.last_ns


@pytest.mark.parametrize(
    ("counter", "rank", "cause", "says"),
    [
        (None, 2, "slow_host", ""),
        ("clock", 2, "throttle", "the clock of g0 is 1200 MHz instead of 1980"),
        ("clock", None, "throttle", "on node n3 the clock of g0 is 1200 MHz"),
        ("steady", None, "unknown", "though no device's clock fell"),
        ("network", None, "network_wait", "rdma_ack_timeouts_total of n3 mlx5_0:1 rises by 50"),
    ],
)
async def test_counters_decide_why_the_mfu_fell(
    store: SpanStore, counter: str | None, rank: int | None, cause: str, says: str
) -> None:
    desk = Desk(*RECORDED.nodes)
    desk.submit(dp=4)
    desk.run()
    job = desk.job()
    # The recording has one rank on each node, where the desk's job has four.
    slots = tuple(
        replace(job.slots[rank], node=node, ranks=(rank,))
        for rank, node in enumerate(RECORDED.nodes)
    )
    alone = replace(job.config.parallelism, tp=1, pp=1)
    config = replace(job.config, parallelism=alone)
    job = replace(job, config=config, current=replace(job.current, slots=slots))
    change = Change(compute={rank: 5.0} if rank is not None else dict.fromkeys(range(4), 5.0))
    if counter == "network":
        change = Change(network={"reduce_scatter": 6.0})
    before, after = RECORDED.of_steps(1, SPLIT - 1), RECORDED.of_steps(SPLIT, 61)
    store.add(spans(before, job.name, job.attempt))
    store.add(spans(injected(after, change), job.name, job.attempt))
    table = RECORDED.of_steps(1, 61)
    for node, window in windows_of(table, SPLIT).items() if counter else ():
        for number in range(21):
            late = number >= 10 and node == "n3"
            at_ns = window.first_ns + (window.split_ns - window.first_ns) * number // 10
            slow = late and counter == "clock"
            timeouts = 50.0 * (at_ns - window.split_ns) / S if late and counter == "network" else 0
            values: Values = {
                ("gpu_sm_clock_hertz", "g0"): 1.2e9 if slow else 1.98e9,
                ("rdma_ack_timeouts_total", "mlx5_0:1"): timeouts,
            }
            store.add([batch(at_ns, values, node, job.name, job.attempt)])
    answer = await SpanViews(SpanIntake(store), store).decline(job, 60, SPLIT)
    assert answer.cause == cause, answer.sentence
    assert says in answer.sentence
