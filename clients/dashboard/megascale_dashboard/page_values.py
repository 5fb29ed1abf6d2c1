"""Values of messages in pages: JSON without protobuf, times in Unix seconds."""

from __future__ import annotations

import math
from typing import Any

from google.protobuf import duration_pb2, timestamp_pb2

from megascale.v1 import types_pb2

# A page, or a part of one, as its JSON twin has it.
Page = dict[str, Any]


def time_s(stamp: timestamp_pb2.Timestamp) -> float | None:
    """Unix seconds; None where the field is absent."""
    return stamp.seconds + stamp.nanos / 1e9 if stamp.seconds or stamp.nanos else None


def duration_s(span: duration_pb2.Duration) -> float:
    """Seconds."""
    return span.seconds + span.nanos / 1e9


def finite(value: float) -> float | None:
    """The number; None for NaN and infinity, which JSON lacks, such as a step without a loss."""
    return value if math.isfinite(value) else None


def event(line: types_pb2.Event) -> Page:
    """A line of the audit log: what, when, who decided, by which rule, on what evidence."""
    return {
        "seq": line.seq,
        "time_s": time_s(line.time),
        "subject": line.subject,
        "reason": line.reason,
        "message": line.message,
        "actor": line.actor,
        "policy": line.policy,
        "mode": line.mode,
        "attempt": line.attempt,
        "outcome": line.outcome,
        "evidence": [
            {"kind": piece.kind, "source": piece.source, "text": piece.digest, "uri": piece.uri}
            for piece in line.evidence
        ],
    }
