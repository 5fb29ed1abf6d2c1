"""Operators' requests on nodes in the core, the audit log with its tokens, the driver's metrics."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from tests.harness.simulated_cluster import SimulatedCluster, demo_job
from tests.harness.waiting import CALL_TIMEOUT_S

from megascale.v1 import types_pb2
from megascale_common.service.clock import VirtualClock
from megascale_common.service.errors import ExpiredError
from megascale_driver.core.values.cluster import Disposition
from megascale_driver.core.values.events import (
    Audit,
    CancelRequested,
    CordonRequested,
    EvictRequested,
    JobSubmitted,
    Mutation,
    RequestKey,
    UncordonRequested,
)
from megascale_driver.core.values.job import JobPhase
from megascale_driver.core.values.policy import Policy
from megascale_driver.core.values.reasons import REASONS
from megascale_driver.journal.audit_log import AuditLog, canonical, token_of
from megascale_driver.nodes.streams import until_set
from megascale_driver.shell.engine import Engine, Term
from megascale_driver.shell.metrics import DriverMetrics

CHANGES: dict[str, type[EvictRequested | CordonRequested | UncordonRequested]] = {
    "evict": EvictRequested,
    "cordon": CordonRequested,
    "uncordon": UncordonRequested,
}


def ask(world: SimulatedCluster, what: str, node: str, key: RequestKey | None = None) -> str:
    event: Mutation = CHANGES[what](world.now_s, node, f"{what} it", "ada", key)
    return world.feed(event).refusal


def running(spares: int = 1) -> SimulatedCluster:
    """Three nodes; job a runs on two of them, the third is its spare."""
    world = SimulatedCluster(1, nodes=3)
    world.run(2.0)
    world.feed(JobSubmitted(world.now_s, demo_job("a", spares=spares), "ada"))
    world.run(12.0)
    assert world.state.jobs["a"].phase is JobPhase.RUNNING
    return world


def used(world: SimulatedCluster) -> list[str]:
    return [slot.node for slot in world.state.jobs["a"].slots]


def test_a_disposition_that_a_node_has_changes_nothing_and_unknown_nodes_are_refused() -> None:
    world = running()
    before, lines = world.state.nodes["n0"], len(world.audit)
    assert (
        ask(world, "uncordon", "n0") == ""
        and world.state.nodes["n0"] is before
        and len(world.audit) == lines
    )
    ask(world, "cordon", "n0", RequestKey("r1", "d1"))
    assert [line.reason for line in world.audit[lines:]] == ["NODE_CORDONED"]
    ask(world, "uncordon", "n0")
    ask(world, "cordon", "n0", RequestKey("r1", "d1"))
    assert world.state.nodes["n0"].disposition is Disposition.SCHEDULABLE, (
        "the repeated request was carried out before"
    )
    assert ask(world, "cordon", "n1", RequestKey("r1", "d2")) == "REQUEST_ID_REUSED"
    assert ask(world, "cordon", "n9") == ask(world, "uncordon", "n9") == "NODE_NOT_FOUND"


def test_reasons_in_the_log_are_the_declared_ones() -> None:
    world = running()
    world.feed(CancelRequested(world.now_s, "a", "enough", "ada"))
    world.run(10.0)
    assert {line.reason for line in world.audit} <= set(REASONS)


def lines_of(*keys: tuple[str, int]) -> list[Audit]:
    return [Audit(log, seq, 0.0, "driver", f"jobs/{log}", "PLACED", "") for log, seq in keys]


async def taken(stream: AsyncIterator[Audit], count: int) -> list[tuple[str, int]]:
    async with asyncio.timeout(CALL_TIMEOUT_S):
        return [(line.log, line.seq) for line in [await anext(stream) for _ in range(count)]]


@given(st.lists(st.sampled_from(["", "a", "b"]), max_size=40), st.integers(0, 40))
def test_a_token_continues_at_every_driver_that_loads_the_same_log(
    logs: list[str], cut: int
) -> None:
    seqs: dict[str, int] = {}
    keys = []
    for log in logs:
        seqs[log] = seqs.get(log, 0) + 1
        keys.append((log, seqs[log]))
    lines = lines_of(*keys)
    first, second = AuditLog(), AuditLog()
    for line in lines:
        first.extend([line])
    second.load(lines)
    for index, line in enumerate(lines):
        assert (
            list(first.behind(token_of(line)))
            == list(second.behind(token_of(line)))
            == lines[index + 1 :]
        )
    assert first.behind("") == lines


def test_lines_of_one_commit_have_one_order() -> None:
    lines = lines_of(("b", 1), ("", 7), ("a", 3), ("a", 2))
    assert [(line.log, line.seq) for line in canonical(lines)] == [
        ("", 7),
        ("a", 2),
        ("a", 3),
        ("b", 1),
    ]


async def test_followers_get_new_lines_across_a_reload_and_only_those_they_want() -> None:
    log = AuditLog()
    log.load(lines_of(("a", 1), ("b", 1)))
    everything = log.follow("", lambda line: True)
    only_b = log.follow("1.a", lambda line: line.log == "b")
    log.extend(lines_of(("a", 2), ("b", 2)))
    assert await taken(everything, 2) == [("a", 2), ("b", 2)]
    assert await taken(only_b, 2) == [("b", 1), ("b", 2)]
    waiting = asyncio.create_task(taken(everything, 1))
    await asyncio.sleep(0)
    log.load(
        lines_of(("a", 1), ("b", 1), ("a", 2), ("b", 2), ("", 1))
    )  # a new term of the same process
    assert await waiting == [("", 1)]


@pytest.mark.parametrize(
    "token", ["x", "1", "a.1", "-1.a", "9.a", "1.nobody", "999999999999999999999.a"]
)
def test_foreign_tokens_are_refused(token: str) -> None:
    log = AuditLog()
    log.load(lines_of(("a", 1)))
    with pytest.raises(ValueError) as caught:
        log.behind(token)
    assert not isinstance(caught.value, ExpiredError)


def test_a_token_before_the_oldest_line_asks_for_what_is_not_held() -> None:
    """``0.a`` begins with the oldest line of ``a``, which only etcd or the export may have."""
    log = AuditLog()
    log.load(lines_of(("a", 1)))
    with pytest.raises(ExpiredError):
        log.behind("0.a")


def test_a_token_of_a_dropped_line_has_expired() -> None:
    log = AuditLog(held=10)
    log.extend(lines_of(*(("a", seq) for seq in range(1, 6000))))
    assert [line.seq for line in log] == list(range(5990, 6000))
    with pytest.raises(ExpiredError, match="newest 10"):
        log.follow("5.a", lambda line: True)
    assert [line.seq for line in log.behind("5995.a")] == [5996, 5997, 5998, 5999]


async def test_a_stream_ends_when_its_event_is_set() -> None:
    event = asyncio.Event()

    async def numbers() -> AsyncIterator[int]:
        yield 1
        yield 2
        await asyncio.Event().wait()

    async with asyncio.timeout(CALL_TIMEOUT_S):
        seen = []
        async for number in until_set(event, numbers()):
            seen.append(number)
            if number == 2:
                event.set()
    assert seen == [1, 2]


def samples(registry: CollectorRegistry, name: str) -> dict[tuple[str, ...], float]:
    """Samples of one name, by the values of their labels."""
    found = [
        sample for metric in registry.collect() for sample in metric.samples if sample.name == name
    ]
    return {tuple(sample.labels.values()): sample.value for sample in found}


def record(attempt: int, step: int, mfu: float | None = None) -> types_pb2.StepRecord:
    made = types_pb2.StepRecord(attempt=attempt, step=step, loss=2.5, tokens_per_s=1000.0)
    made.step_time.FromMilliseconds(250)
    made.data_wait.FromMilliseconds(10)
    made.memory_bytes = step << 30
    if mfu is not None:
        made.mfu_causal = made.mfu_full = mfu
    return made


def observe(
    world: SimulatedCluster, engine: Engine, metrics: DriverMetrics, seconds: float
) -> None:
    """Advance in small rounds and report each change to the metrics, as the engine does."""
    for _ in range(int(seconds / 0.25)):
        old, lines = world.state, len(world.audit)
        world.run(0.25)
        engine.state = world.state
        metrics.committed(old, world.state, world.audit[lines:])


def test_steps_recoveries_and_events_are_counted() -> None:
    world = running()
    engine = Engine(Policy(), world.clock, "token", "here")
    metrics = DriverMetrics(engine)
    engine.state = world.state
    for step in (1, 2):
        metrics.step("a", record(1, step, mfu=0.4 if step == 2 else None))
    registry = metrics.registry
    assert samples(registry, "megascale_step_duration_seconds_count") == {("a",): 2}
    assert samples(registry, "megascale_step_duration_seconds_sum") == {("a",): 0.5}
    assert samples(registry, "megascale_tokens_total") == {("a",): 500}
    assert samples(registry, "megascale_data_wait_seconds_total") == {("a",): pytest.approx(0.02)}
    assert samples(registry, "megascale_memory_bytes") == {("a",): 2 << 30}
    assert samples(registry, "megascale_mfu_ratio") == {("a", "causal"): 0.4, ("a", "full"): 0.4}
    assert samples(registry, "megascale_leader") == {(): 0}
    assert samples(registry, "megascale_jobs") == {}, (
        "a standby does not report a state that it does not have"
    )
    world.kill_worker(used(world)[0])
    observe(world, engine, metrics, 20.0)
    assert world.state.jobs["a"].attempt == 2
    metrics.step("a", record(2, 3))
    metrics.step("a", record(2, 4))
    # The event that ends the stop also places the next attempt. No time passes in QUEUED, so there
    # is no "schedule" part.
    counts = samples(registry, "megascale_recovery_duration_seconds_count")
    assert counts == {(part,): 1 for part in ("stop", "prepare", "start", "first_step", "total")}
    sums = samples(registry, "megascale_recovery_duration_seconds_sum")
    parts = sum(seconds for (part,), seconds in sums.items() if part != "total")
    assert sums[("total",)] == pytest.approx(parts, abs=0.01) and parts > 0
    assert samples(registry, "megascale_events_total")[("WORKER_EXITED", "none")] >= 1
    assert samples(registry, "megascale_incidents_total") == {("worker_exited", "restart"): 1}


def test_steps_are_examples_of_their_attempt_where_the_scraper_asks() -> None:
    world = running()
    engine = Engine(Policy(), world.clock, "token", "here")
    engine.state = world.state
    epoch = types_pb2.Epoch(cluster_generation=1_700_000_000)
    engine.term = cast(Term, SimpleNamespace(epoch=epoch))
    metrics = DriverMetrics(engine)
    metrics.step("a", record(3, 1))
    encode, kind = choose_encoder("application/openmetrics-text; version=1.0.0")
    assert kind.startswith("application/openmetrics-text")
    text = encode(metrics.registry).decode()
    (bucket,) = [line for line in text.splitlines() if " # {" in line]
    assert bucket.startswith("megascale_step_duration_seconds_bucket{")
    assert '# {attempt="3"} 0.25' in bucket
    plain, _ = choose_encoder("text/plain")
    assert " # {" not in plain(metrics.registry).decode()


def test_series_of_an_ended_job_are_dropped_after_an_hour() -> None:
    world = running()
    clock = VirtualClock()
    engine = Engine(Policy(), clock, "token", "here")
    metrics = DriverMetrics(engine)
    engine.state = world.state
    experts = record(1, 1)
    experts.balance = experts.router_z = 1.5
    experts.expert_load_max = experts.expert_load_min = 1.0
    metrics.step("a", experts)
    world.feed(CancelRequested(world.now_s, "a", "enough", "ada"))
    world.run(10.0)
    engine.state, engine.clock = world.state, world.clock
    names = ("loss", "balance", "router_z", "expert_load_ratio")
    assert samples(metrics.registry, "megascale_loss") == {("a",): 2.5}
    assert all(samples(metrics.registry, f"megascale_{name}") for name in names)
    world.run(3700.0)
    assert not any(samples(metrics.registry, f"megascale_{name}") for name in names)
