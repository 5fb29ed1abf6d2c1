"""Ids of the traces under which the driver's decisions stand (W3C Trace Context). Pure.

All decisions about one attempt of a job are one trace. The ids follow from what is stored of a
line, so every driver gives the same ones, also after a change of leader. A job that is deleted and
submitted anew under its name numbers its attempts from 1 again, and goes on in the same traces.
"""

from __future__ import annotations

import hashlib

from megascale_driver.core.values.events import Audit


def trace_id(generation: int, line: Audit) -> str:
    """32 hexadecimal digits; "" where the cluster's generation is unknown (0).

    A line about no attempt shares its trace with those of the same moment and subject alone.
    """
    if not generation:
        return ""
    if line.log and line.attempt:
        return attempt_trace_id(generation, line.log, line.attempt)
    return _digest(16, generation, line.log or line.subject, f"at {line.at_s!r}")


def attempt_trace_id(generation: int, job: str, attempt: int) -> str:
    """The trace of an attempt."""
    return _digest(16, generation, job, f"attempt {attempt}")


def attempt_span_id(generation: int, job: str, attempt: int) -> str:
    """16 hexadecimal digits of the span that is the attempt, the parent of its decisions."""
    return _digest(8, generation, job, f"attempt {attempt}")


def span_id(generation: int, line: Audit) -> str:
    """16 hexadecimal digits of the span that is this line."""
    return _digest(8, generation, line.log, f"line {line.seq}")


def phase_span_id(generation: int, job: str, attempt: int, phase: str, since_s: float) -> str:
    """16 hexadecimal digits of the span that is a phase of an attempt."""
    return _digest(8, generation, job, f"attempt {attempt} {phase} {since_s!r}")


def _digest(size: int, generation: int, place: str, what: str) -> str:
    text = f"{generation}/{place}/{what}".encode()
    return hashlib.blake2b(text, digest_size=size).hexdigest()
