"""TensorBoard event files of the step records, for jobs with ``telemetry.tensorboard``.

An event file is a sequence of records: length (u64), masked CRC-32C of the length, data, masked
CRC-32C of the data, all little-endian (TFRecord, tensorflow/core/lib/io/record_writer.cc). The data
are ``Event`` messages (tensorflow/core/util/event.proto); the few fields that scalars need are
encoded here, so that the trainer needs no TensorFlow. Files grow by whole records, so they can be
read while the job runs.
"""

from __future__ import annotations

import math
import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_VERSION = "brain.Event:2"
_MASK_DELTA = 0xA282EAD8
_CASTAGNOLI = 0x82F63B78  # reflected
# When and where the step was: not a curve of its own.
NOT_SCALARS = frozenset({"step", "attempt", "completed_at_s"})
_START = 1  # of SessionLog.SessionStatus
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # protobuf wire types


class EventFile:
    """One event file in ``folder``; an error of writing is printed once and never raised.

    ``first_step``: earlier files of the folder have an attempt that went further. What they say on
    this step and later ones is no longer shown.
    """

    def __init__(self, folder: Path, first_step: int = 0) -> None:
        self._descriptor = -1
        try:
            folder.mkdir(parents=True, exist_ok=True)
            name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
            self._descriptor = os.open(
                folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600
            )
        except OSError as error:
            self._give_up(error)
        self._write(_double(1, time.time()) + _text(3, _VERSION))
        if first_step:
            restart = _message(7, _integer(1, _START))
            self._write(_double(1, time.time()) + _integer(2, first_step) + restart)

    def add(self, record: Mapping[str, Any]) -> None:
        """Write one step: every number of the record becomes a scalar of that name at the step."""
        values = b"".join(
            _message(1, _text(1, name) + _float(2, value))
            for name, value in scalars(record).items()
        )
        header = _double(1, float(record["completed_at_s"])) + _integer(2, int(record["step"]))
        self._write(header + _message(5, values))

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _write(self, event: bytes) -> None:
        if self._descriptor < 0:
            return
        length = struct.pack("<Q", len(event))
        data = (
            length
            + struct.pack("<I", masked_crc32c(length))
            + event
            + struct.pack("<I", masked_crc32c(event))
        )
        try:
            # A reader takes half a record for the end of the file and would never read on.
            if os.write(self._descriptor, data) < len(data):
                raise OSError("the disk is full")
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        print(f"TensorBoard events are not written any more: {error}", flush=True)
        self.close()


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """The values of a step record that are curves, under the record's own names."""
    return {
        name: value
        for name, value in record.items()
        if name not in NOT_SCALARS
        and isinstance(value, int | float)
        and not isinstance(value, bool)
    }


def masked_crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli), rotated and offset as TFRecord stores it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + _MASK_DELTA) & 0xFFFFFFFF


def _table_entry(value: int) -> int:
    for _ in range(8):
        value = (value >> 1) ^ (_CASTAGNOLI if value & 1 else 0)
    return value


_TABLE = tuple(_table_entry(value) for value in range(256))


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def _key(field: int, wire_type: int) -> bytes:
    return _varint(field << 3 | wire_type)


def _integer(field: int, value: int) -> bytes:
    return _key(field, _VARINT) + _varint(value)


def _double(field: int, value: float) -> bytes:
    return _key(field, _FIXED64) + struct.pack("<d", value)


def _float(field: int, value: float) -> bytes:
    try:
        return _key(field, _FIXED32) + struct.pack("<f", value)
    except OverflowError:  # beyond float32
        return _key(field, _FIXED32) + struct.pack("<f", math.copysign(math.inf, value))


def _message(field: int, value: bytes) -> bytes:
    return _key(field, _BYTES) + _varint(len(value)) + value


def _text(field: int, value: str) -> bytes:
    return _message(field, value.encode())
