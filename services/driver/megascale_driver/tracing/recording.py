"""What becomes a span: decisions, phases and attempts, as values. Pure; needs no OpenTelemetry.

A decision lasts from the event that led to it until etcd has confirmed it. A phase and an attempt
are recorded once, when they end; the decisions about an attempt are its children.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from megascale_driver.core.values.cluster import Cluster
from megascale_driver.core.values.events import Audit
from megascale_driver.core.values.job import Job, JobPhase
from megascale_driver.core.values.overlay import changed_keys
from megascale_driver.core.values.reasons import severity_of
from megascale_driver.tracing import ids

MAX_EVIDENCE: Final = 16  # pieces that a span has
PREFIX: Final = "megascale."
_BAD_ENDS = frozenset({JobPhase.FAILED})
Value = str | int


@dataclass(frozen=True, slots=True)
class Recorded:
    """A span: times in Unix seconds, ids in hexadecimal digits, names of attributes in full."""

    name: str
    trace_id: str
    span_id: str
    start_s: float
    end_s: float
    attributes: Mapping[str, Value]
    parent_id: str = ""
    failed: bool = False
    evidence: tuple[Mapping[str, Value], ...] = ()
    # (trace, span) of what it follows from: the attempt before.
    follows: tuple[tuple[str, str], ...] = field(default=())


def decision(generation: int, revision: int, line: Audit, committed_s: float) -> Recorded:
    """A line of the audit log of the leader with this epoch."""
    about = bool(line.log and line.attempt)
    values: dict[str, Value] = {
        "actor": line.actor,
        "subject": line.subject,
        "reason": line.reason,
        "message": line.message,
        "job": line.log,
        "attempt": line.attempt,
        "rule": line.policy,
        "mode": line.mode,
        "outcome": line.outcome,
        "seq": line.seq,
        "epoch": f"{generation}.{revision}",
    }
    return Recorded(
        name=line.reason,
        trace_id=ids.trace_id(generation, line),
        span_id=ids.span_id(generation, line),
        start_s=line.at_s,
        end_s=max(line.at_s, committed_s),
        attributes=_named(values),
        parent_id=ids.attempt_span_id(generation, line.log, line.attempt) if about else "",
        failed=severity_of(line.reason) == "critical",
        evidence=tuple(
            _named({"kind": e.kind, "source": e.source, "digest": e.digest, "uri": e.uri})
            for e in line.evidence[:MAX_EVIDENCE]
        ),
    )


def ended(generation: int, old: Cluster, new: Cluster, now_s: float) -> Iterator[Recorded]:
    """The phases and attempts that ended with a decision."""
    for name in changed_keys(old.jobs, new.jobs):
        before, job = old.jobs.get(name), new.jobs.get(name)
        if before is None or not before.active or before.attempt == 0:
            continue
        over = job is None or not job.active or job.attempt != before.attempt
        if over or (job is not None and job.phase is not before.phase):
            yield _phase(generation, before, now_s)
        if over:
            yield _attempt(generation, before, job, now_s)


def _phase(generation: int, job: Job, now_s: float) -> Recorded:
    phase = job.phase.lower()
    return Recorded(
        name=f"phase {phase}",
        trace_id=ids.attempt_trace_id(generation, job.name, job.attempt),
        span_id=ids.phase_span_id(generation, job.name, job.attempt, phase, job.timer_s),
        start_s=job.timer_s or now_s,
        end_s=now_s,
        attributes=_named({"job": job.name, "attempt": job.attempt, "phase": phase}),
        parent_id=ids.attempt_span_id(generation, job.name, job.attempt),
    )


def _attempt(generation: int, before: Job, job: Job | None, now_s: float) -> Recorded:
    number = before.attempt
    opened = next((e for e in reversed(before.attempts) if e.number == number), None)
    earlier = number - 1
    values: dict[str, Value] = {
        "job": before.name,
        "attempt": number,
        "nodes": len(before.slots),
        "step": before.current.step,
        "reason": before.stop_reason or (job.reason if job is not None else "deleted"),
    }
    return Recorded(
        name=f"attempt {number} of {before.name}",
        trace_id=ids.attempt_trace_id(generation, before.name, number),
        span_id=ids.attempt_span_id(generation, before.name, number),
        start_s=min(now_s, opened.opened_at_s if opened is not None else before.timer_s),
        end_s=now_s,
        attributes=_named(values),
        failed=job is not None and job.phase in _BAD_ENDS,
        follows=(
            (
                ids.attempt_trace_id(generation, before.name, earlier),
                ids.attempt_span_id(generation, before.name, earlier),
            ),
        )
        if earlier
        else (),
    )


def _named(values: Mapping[str, Value]) -> dict[str, Value]:
    """Attributes under our prefix; empty ones are left out."""
    return {PREFIX + name: value for name, value in values.items() if value != ""}
