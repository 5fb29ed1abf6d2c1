"""Sends decisions as OpenTelemetry spans beside the loop: no decision ever waits for one.

The loop only appends to a bounded queue; a thread makes spans of what lies there and sends them in
batches. A full queue drops the newest and counts it; what the receiver does not take within the
exporter's own deadline is given up and counted.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Final

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.status import Status, StatusCode

from megascale.v1 import types_pb2
from megascale_common.service import logs
from megascale_driver.core.values.cluster import Cluster
from megascale_driver.core.values.events import Audit
from megascale_driver.tracing.recording import Recorded, decision, ended

MAX_QUEUED: Final = 8192  # a switch with its nodes and jobs at once
BATCH: Final = 512
GATHER_S: Final = 0.5  # for which spans gather before they are sent
CLOSE_S: Final = 3.0  # for what is queued when the driver ends
_Line = tuple[int, int, Audit, float]  # what recording.decision takes
_SCOPE = InstrumentationScope("megascale_driver")
_log = logs.get(__name__)


class DecisionSpans:
    """Observes the engine. Use: :meth:`start`, and :meth:`close` when the driver ends.

    Args:
        exporter: where spans go; it is called in a thread of its own.
        epoch: of the term in which this driver leads; None while it does not.
    """

    def __init__(
        self,
        exporter: SpanExporter,
        resource: Mapping[str, str],
        epoch: Callable[[], types_pb2.Epoch | None],
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self._exporter, self._resource = exporter, Resource(dict(resource))
        self._epoch, self._now_s = epoch, now_s
        self._queue: deque[Recorded | _Line] = deque()
        self._more, self._ends = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="otlp", daemon=True)
        self._counts: Counter[str] = Counter()
        self._lost = False  # whether the last batch was not taken

    def start(self) -> None:
        """Begin to send."""
        self._thread.start()

    def outcomes(self) -> Counter[str]:
        """How many spans were sent, failed (not taken by the receiver) and dropped."""
        return Counter(self._counts)

    def step(self, job: str, record: types_pb2.StepRecord) -> None:
        """Steps are no decisions."""

    def committed(self, old: Cluster, new: Cluster, audit: tuple[Audit, ...]) -> None:
        """Queue the spans of a decision."""
        epoch = self._epoch()
        if epoch is None or not epoch.cluster_generation:
            return
        now_s, generation = self._now_s(), epoch.cluster_generation
        for line in audit:
            self._put((generation, epoch.create_revision, line, now_s))
        for span in ended(generation, old, new, now_s):
            self._put(span)

    def close(self) -> None:
        """Send what is queued, for a little while, and end; blocks."""
        self._ends.set()
        self._more.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)
        self._exporter.shutdown()

    def _put(self, span: Recorded | _Line) -> None:
        if len(self._queue) >= MAX_QUEUED:
            self._counts["dropped"] += 1
            return
        self._queue.append(span)
        self._more.set()

    def _run(self) -> None:
        while not self._ends.is_set() or self._queue:
            self._more.wait()
            self._more.clear()
            self._ends.wait(GATHER_S)
            while self._queue:
                count = min(BATCH, len(self._queue))
                self._send([self._queue.popleft() for _ in range(count)])

    def _send(self, batch: list[Recorded | _Line]) -> None:
        try:
            found = (each if isinstance(each, Recorded) else decision(*each) for each in batch)
            spans = [as_span(each, self._resource) for each in found]
            taken = self._exporter.export(spans) is SpanExportResult.SUCCESS
        except Exception:  # of a foreign library; the thread must go on
            _log.exception("spans of decisions were not sent")
            taken = False
        self._counts["sent" if taken else "failed"] += len(batch)
        if not taken and not self._lost:
            _log.warning("the receiver of --otlp-endpoint takes no spans; they are given up")
        self._lost = not taken


def as_span(found: Recorded, resource: Resource) -> ReadableSpan:
    """A recorded span as OpenTelemetry has it."""
    start_ns, end_ns = round(found.start_s * 1e9), round(found.end_s * 1e9)
    parent = _context(found.trace_id, found.parent_id) if found.parent_id else None
    return ReadableSpan(
        name=found.name,
        context=_context(found.trace_id, found.span_id),
        parent=parent,
        resource=resource,
        attributes=dict(found.attributes),
        events=[Event("evidence", dict(each), start_ns) for each in found.evidence],
        links=[Link(_context(trace, span)) for trace, span in found.follows],
        kind=SpanKind.INTERNAL,
        status=Status(StatusCode.ERROR if found.failed else StatusCode.UNSET),
        start_time=start_ns,
        end_time=end_ns,
        instrumentation_scope=_SCOPE,
    )


def _context(trace_id: str, span_id: str) -> SpanContext:
    return SpanContext(
        int(trace_id, 16), int(span_id, 16), is_remote=False, trace_flags=TraceFlags(1)
    )
