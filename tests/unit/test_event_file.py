"""Event files, read back by protobuf's own decoder and a CRC-32C that goes bit by bit."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from megascale_trainer.telemetry.event_file import EventFile

RECORD = {
    "step": 300,
    "loss": 2.5,
    "gradient_norm": float("nan"),
    "z_loss": 1e300,
    "consumed_tokens": 1 << 40,
    "mfu_causal": None,
    "attempt": 2,
    "completed_at_s": 1_700_000_000.25,
}


def crc32c(data: bytes) -> int:
    """By polynomial division, one bit at a time."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ 0x82F63B78 * (crc & 1)
    return crc ^ 0xFFFFFFFF


def unmask(masked: int) -> int:
    """The inverse of TFRecord's mask."""
    rotated = (masked - 0xA282EAD8) & 0xFFFFFFFF
    return (rotated >> 17 | rotated << 15) & 0xFFFFFFFF


def event_class() -> Any:
    """The scalars of ``tensorflow.Event``, numbered as in tensorflow/core/util/event.proto."""
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="event.proto", package="tensorflow", syntax="proto3"
    )
    event, summary = file.message_type.add(name="Event"), file.message_type.add(name="Summary")
    value = summary.nested_type.add(name="Value")
    for name, number, kind in (
        ("wall_time", 1, kinds.TYPE_DOUBLE),
        ("step", 2, kinds.TYPE_INT64),
        ("file_version", 3, kinds.TYPE_STRING),
    ):
        event.field.add(name=name, number=number, type=kind, label=kinds.LABEL_OPTIONAL)
    event.field.add(
        name="summary",
        number=5,
        type=kinds.TYPE_MESSAGE,
        type_name=".tensorflow.Summary",
        label=kinds.LABEL_OPTIONAL,
    )
    event.field.add(
        name="session_log",
        number=7,
        type=kinds.TYPE_MESSAGE,
        type_name=".tensorflow.SessionLog",
        label=kinds.LABEL_OPTIONAL,
    )
    session = file.message_type.add(name="SessionLog")
    session.field.add(name="status", number=1, type=kinds.TYPE_INT32, label=kinds.LABEL_OPTIONAL)
    summary.field.add(
        name="value",
        number=1,
        type=kinds.TYPE_MESSAGE,
        type_name=".tensorflow.Summary.Value",
        label=kinds.LABEL_REPEATED,
    )
    value.field.add(name="tag", number=1, type=kinds.TYPE_STRING, label=kinds.LABEL_OPTIONAL)
    value.field.add(
        name="simple_value", number=2, type=kinds.TYPE_FLOAT, label=kinds.LABEL_OPTIONAL
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tensorflow.Event"))


def events(folder: Path) -> Iterator[Any]:
    """The events of the one file in ``folder``, every checksum verified."""
    (path,) = folder.iterdir()
    assert path.name.startswith("events.out.tfevents.")
    data = path.read_bytes()
    while data:
        (size, length_crc), rest = struct.unpack("<QI", data[:12]), data[12:]
        assert unmask(length_crc) == crc32c(data[:8])
        body, (body_crc,) = rest[:size], struct.unpack("<I", rest[size : size + 4])
        assert unmask(body_crc) == crc32c(body)
        yield event_class().FromString(body)
        data = rest[size + 4 :]


def test_the_readers_checksum_is_crc32c() -> None:
    assert crc32c(b"123456789") == 0xE3069283  # the catalogue's check value


def test_every_number_of_the_record_is_a_scalar_at_its_step(tmp_path: Path) -> None:
    file = EventFile(tmp_path / "tensorboard")
    file.add(RECORD)
    file.add({**RECORD, "step": 301, "evaluation_loss": 3.0})
    version, first, second = events(tmp_path / "tensorboard")  # whole before the file is closed
    file.close()
    assert version.file_version == "brain.Event:2"
    assert (first.step, first.wall_time) == (300, RECORD["completed_at_s"])
    values = {value.tag: value.simple_value for value in first.summary.value}
    assert values.keys() == {"loss", "gradient_norm", "z_loss", "consumed_tokens"}
    assert (values["loss"], values["z_loss"], values["consumed_tokens"]) == (
        2.5,
        math.inf,
        float(1 << 40),
    )
    assert math.isnan(values["gradient_norm"])
    assert {value.tag for value in second.summary.value} - values.keys() == {"evaluation_loss"}


def test_what_cannot_be_written_costs_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    file = EventFile(tmp_path / "file")
    file.add(RECORD)
    file.close()
    assert (tmp_path / "file").read_text() == "in the way"
