"""Decisions as OpenTelemetry spans: what a real receiver gets, and what nothing waits for."""

from __future__ import annotations

import argparse
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
from tests.harness.waiting import until

from megascale.v1 import types_pb2
from megascale_common.service.errors import OptionError
from megascale_driver.core.values.attempt import Attempt, NodeSlot
from megascale_driver.core.values.cluster import Cluster
from megascale_driver.core.values.events import Audit, Evidence
from megascale_driver.core.values.job import AttemptRecord, Job, JobPhase
from megascale_driver.tracing import ids, opening
from megascale_driver.wire import messages as wire

pytest.importorskip("opentelemetry.sdk", reason="needs the extra otel")
import itertools

from opentelemetry.proto.trace.v1.trace_pb2 import Status
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from tests.harness.otlp import Receiver, attributes

from megascale_driver.tracing import exporter as exporting
from megascale_driver.tracing.exporter import BATCH, DecisionSpans

EPOCH = types_pb2.Epoch(cluster_generation=1_700_000_000, create_revision=42)
GENERATION = EPOCH.cluster_generation


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.close()


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cluster", default="east")
    opening.add_options(parser)
    return parser.parse_args(words)


def opened(url: str) -> DecisionSpans:
    found = opening.opened(parsed("--otlp-endpoint", url), lambda: EPOCH)
    assert found is not None
    return found


def line(reason: str, seq: int = 1, *, job: str = "demo", attempt: int = 2) -> Audit:
    subject = f"jobs/{job}" if job else "nodes/n7"
    evidence = (Evidence("probe", "driver", "connection refused"),)
    return Audit(
        job, seq, 1.5e9, "driver", subject, reason, "node n3 is dead", "silence", "ENFORCE",
        attempt, evidence, "spare n4 takes over",
    )  # fmt: skip


def job(phase: JobPhase, number: int = 2, timer_s: float = 1.5e9) -> Job:
    records = tuple(AttemptRecord(n, (), 1.5e9 - 1000 + n) for n in range(1, number + 1))
    current = Attempt(number, slots=(NodeSlot("n3", (0,), (0,)),))
    return Job(
        "demo", config=cast(Any, None), phase=phase, current=current, attempts=records,
        timer_s=timer_s, reason="it is so",
    )  # fmt: skip


def test_a_decision_arrives_with_all_that_the_log_has_under_the_id_that_events_carry(
    receiver: Receiver,
) -> None:
    traces = opened(receiver.url)
    traces.start()
    lines = (line("NODE_DEAD"), line("JOB_FAILED", 2), line("LEADER_ELECTED", 3, job=""))
    traces.committed(Cluster(), Cluster(), lines)
    until(lambda: len(receiver.spans) == 3, "the spans", traces.outcomes)
    traces.close()
    assert traces.outcomes() == {"sent": 3}
    dead, failed, elected = receiver.spans
    assert attributes(dead) == {
        "actor": "driver", "subject": "jobs/demo", "reason": "NODE_DEAD",
        "message": "node n3 is dead", "job": "demo", "attempt": 2, "rule": "silence",
        "mode": "ENFORCE", "outcome": "spare n4 takes over", "seq": 1,
        "epoch": "1700000000.42",
    }  # fmt: skip
    for span, each in zip(receiver.spans, lines, strict=True):
        assert span.trace_id.hex() == wire.event_message(each, EPOCH).trace_id
        assert span.start_time_unix_nano == 1.5e9 * 1e9 < span.end_time_unix_nano
    assert dead.name == "NODE_DEAD" and dead.trace_id == failed.trace_id != elected.trace_id
    assert len({span.span_id for span in receiver.spans}) == 3
    parent = ids.attempt_span_id(GENERATION, "demo", 2)
    assert dead.parent_span_id.hex() == parent and not elected.parent_span_id
    assert attributes(dead.events[0])["digest"] == "connection refused"
    assert dead.status.code == Status.STATUS_CODE_UNSET
    assert failed.status.code == Status.STATUS_CODE_ERROR
    resource = receiver.resources[0]
    assert resource["service.name"] == "megascale-driver"
    assert resource["service.namespace"] == "east"


def test_an_attempt_and_its_phases_are_spans_and_it_follows_from_the_one_before(
    receiver: Receiver,
) -> None:
    traces = opened(receiver.url)
    traces.start()
    running, stopping = job(JobPhase.RUNNING), job(JobPhase.STOPPING, timer_s=1.5e9 + 60)
    states = [
        Cluster(jobs={"demo": each})
        for each in (running, stopping, job(JobPhase.QUEUED), job(JobPhase.PREPARING, 3))
    ]
    traces._now_s = lambda: 1.5e9 + 100
    for old, new in itertools.pairwise(states):
        traces.committed(old, new, ())
    until(lambda: len(receiver.spans) == 3, "the spans", traces.outcomes)
    traces.close()
    phase, last, attempt = receiver.spans
    assert (phase.name, last.name) == ("phase running", "phase stopping")
    assert attempt.name == "attempt 2 of demo" and attributes(attempt)["nodes"] == 1
    assert attempt.span_id == phase.parent_span_id == last.parent_span_id
    assert attempt.trace_id.hex() == ids.attempt_trace_id(GENERATION, "demo", 2)
    assert phase.start_time_unix_nano == 1.5e18
    assert attempt.start_time_unix_nano == (1.5e9 - 998) * 1e9
    (link,) = attempt.links
    assert link.span_id.hex() == ids.attempt_span_id(GENERATION, "demo", 1)
    assert link.trace_id != attempt.trace_id


def test_ids_are_the_same_at_every_driver_and_absent_without_a_generation() -> None:
    one = line("NODE_DEAD")
    later = types_pb2.Epoch(cluster_generation=GENERATION, create_revision=99)
    assert wire.event_message(one, EPOCH).trace_id == wire.event_message(one, later).trace_id
    assert len(wire.event_message(one, EPOCH).trace_id) == 32
    assert wire.event_message(one, types_pb2.Epoch()).trace_id == ""
    others = [replace(one, attempt=3), replace(one, log="other"), replace(one, attempt=0)]
    traces = {ids.trace_id(GENERATION, each) for each in (one, *others)}
    assert len(traces) == 4 and ids.trace_id(GENERATION + 1, one) not in traces


class Stuck(SpanExporter):
    """Takes one batch and does not come back from it until it may; then it refuses."""

    def __init__(self) -> None:
        self.inside, self.go_on = threading.Event(), threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.inside.set()
        self.go_on.wait(60)
        return SpanExportResult.FAILURE

    def shutdown(self) -> None:
        self.go_on.set()


def test_a_receiver_that_takes_nothing_costs_spans_and_no_decision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exporting, "GATHER_S", 0.0)
    monkeypatch.setattr(exporting, "MAX_QUEUED", 10)
    stuck = Stuck()
    traces = DecisionSpans(stuck, {}, lambda: EPOCH)
    traces.start()
    traces.committed(Cluster(), Cluster(), (line("NODE_DEAD"),))
    assert stuck.inside.wait(60)
    many = tuple(line("NODE_DEAD", seq) for seq in range(BATCH))
    traces.committed(Cluster(), Cluster(), many)  # returns although nobody takes them
    assert traces.outcomes() == {"dropped": BATCH - 10}
    stuck.go_on.set()
    until(lambda: traces.outcomes()["failed"] == 11, "the end", traces.outcomes)
    traces.close()


def test_a_standby_sends_nothing() -> None:
    traces = DecisionSpans(Stuck(), {}, lambda: None)
    traces.committed(Cluster(), Cluster(), (line("NODE_DEAD"),))
    assert not traces._queue and traces.outcomes() == {}


def test_the_option_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    assert opening.opened(parsed(), lambda: None) is None
    for url in ("127.0.0.1:4317", "ftp://x:1", "http://x", "http://x:y", "https://"):
        with pytest.raises(OptionError, match=r"give http://HOST:PORT or https://HOST:PORT"):
            opening.opened(parsed("--otlp-endpoint", url), lambda: None)
    monkeypatch.setitem(
        __import__("sys").modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None
    )
    with pytest.raises(OptionError, match=r"megascale\[otel\]"):
        opening.opened(parsed("--otlp-endpoint", "http://127.0.0.1:4317"), lambda: None)
