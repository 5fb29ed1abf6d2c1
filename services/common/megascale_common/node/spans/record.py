"""One span in 32 bytes: operation, time, step and micro-batch.

``start_ns`` is CLOCK_MONOTONIC of the rank's host, also for operations on a device. ``seq`` counts
the spans of the same operation within its step, from 0, so that the n-th all-gather of a group is
the same one on all of its members. A figure uses some fields for other numbers: see
:data:`megascale_common.node.spans.ops.HOT_EXPERT`.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

# start_ns, duration_ns, step, op, micro_batch, seq, aux
SPAN = struct.Struct("<qqIHHII")
NO_MICRO_BATCH = 0xFFFF
_CHUNK_BITS, _STREAM_BITS = 8, 8
_CHUNK_MASK, _STREAM_MASK = (1 << _CHUNK_BITS) - 1, (1 << _STREAM_BITS) - 1
# Flags.
DEVICE_TIMED = 1  # measured with events of the device, not with the host's clock
SUMMED = 2  # the time of several pieces, from the begin of the first: it does not say when it ended


class Span(NamedTuple):
    """The fields of a record, in the order of :data:`SPAN`."""

    start_ns: int
    duration_ns: int
    step: int
    op: int
    micro_batch: int = NO_MICRO_BATCH
    seq: int = 0
    aux: int = 0


def pack_aux(chunk: int = 0, stream: int = 0, flags: int = 0) -> int:
    """``aux`` of a span: the rank's model chunk, a stream's number, flags (16 bits).

    Raises:
        ValueError: a value does not fit its bits.
    """
    if not (0 <= chunk <= _CHUNK_MASK and 0 <= stream <= _STREAM_MASK and 0 <= flags <= 0xFFFF):
        raise ValueError(f"chunk {chunk}, stream {stream} and flags {flags} do not fit in 32 bits")
    return chunk | stream << _CHUNK_BITS | flags << (_CHUNK_BITS + _STREAM_BITS)


def chunk_of(aux: int) -> int:
    """The rank's model chunk (virtual stage) of a span."""
    return aux & _CHUNK_MASK


def stream_of(aux: int) -> int:
    """Number of the stream on which the span ran; 0 is the rank's main one."""
    return aux >> _CHUNK_BITS & _STREAM_MASK


def flags_of(aux: int) -> int:
    """Flags of a span, such as :data:`DEVICE_TIMED`."""
    return aux >> (_CHUNK_BITS + _STREAM_BITS)


def to_columns(records: bytes) -> bytes:
    """Records rearranged so that the k-th bytes of all are adjacent, which compresses better.

    Raises:
        ValueError: not a whole number of records.
    """
    _check_whole(records)
    return b"".join(records[place :: SPAN.size] for place in range(SPAN.size))


def from_columns(columns: bytes) -> bytes:
    """The inverse of :func:`to_columns`.

    Raises:
        ValueError: not a whole number of records.
    """
    _check_whole(columns)
    count = len(columns) // SPAN.size
    records = bytearray(len(columns))
    for place in range(SPAN.size):
        records[place :: SPAN.size] = columns[place * count : (place + 1) * count]
    return bytes(records)


def _check_whole(data: bytes) -> None:
    if len(data) % SPAN.size:
        raise ValueError(f"{len(data)} bytes are not a whole number of spans of {SPAN.size} bytes")
