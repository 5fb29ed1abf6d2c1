"""A heartbeat as it arrived: bytes, of which only the fields that can matter are parsed.

Nearly all heartbeats repeat the one before except for counters, times, steps and status pages. To
detect that, a heartbeat is parsed by a message that has only the fields that can decide anything:
the *signs*. Unknown fields are dropped, and the rest is serialized again and compared with the
result for the heartbeat before, all in the protobuf library. Only if the two differ, the whole
heartbeat is parsed and :mod:`megascale_driver.presence.evidence` evaluates it. The message is
derived from the one on the wire and from evidence's list of fields, so that it cannot differ from
either.
"""

from __future__ import annotations

from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, timestamp_pb2
from google.protobuf.timestamp_pb2 import Timestamp

from megascale.v1 import link_pb2
from megascale_driver.presence.evidence import AT_WORK, FIELDS, MEMORY_FIELDS

_Field = descriptor_pb2.FieldDescriptorProto

# Fields that are read from every heartbeat and decide nothing.
_CLOCKS: Final = (
    "seq",
    "sent_at",
    "ack_driver_received_at",
    "ack_driver_sent_at",
    "ack_received_at",
)
_PACKAGE: Final = "megascale.driver.presence"


def _kept() -> dict[str, set[str]]:
    """The fields to keep by message; messages that are not listed are compared as bytes."""
    kept = {"ConnectRequest": {"heartbeat"}, "Heartbeat": set(_CLOCKS)}
    for path in FIELDS:
        name, _, inner = path.partition(".")
        kept["Heartbeat"].add(name)
        if inner:
            message = link_pb2.Heartbeat.DESCRIPTOR.fields_by_name[name].message_type
            assert message is not None, path
            kept.setdefault(message.name, set()).add(inner)
    return kept


_KEPT: Final = _kept()


def _request_of_signs() -> Any:
    """The class of ConnectRequest with only the signs."""
    file = descriptor_pb2.FileDescriptorProto(
        name="megascale/driver/presence.proto",
        package=_PACKAGE,
        syntax="proto3",
        dependency=[timestamp_pb2.DESCRIPTOR.name],
    )
    for name, kept in _KEPT.items():
        message = file.message_type.add(name=name)
        for field in link_pb2.DESCRIPTOR.message_types_by_name[name].fields:
            if field.name in kept:
                _add(message, field)
    pool = descriptor_pool.Default()
    pool.AddSerializedFile(file.SerializeToString())
    request = pool.FindMessageTypeByName(f"{_PACKAGE}.ConnectRequest")
    return message_factory.GetMessageClass(request)


def _add(message: descriptor_pb2.DescriptorProto, field: Any) -> None:
    """Add a field of the message on the wire, with its number and a type of the same encoding."""
    found = message.field.add(name=field.name, number=field.number, type=field.type)
    found.label = _Field.LABEL_REPEATED if field.is_repeated else _Field.LABEL_OPTIONAL
    if field.type == _Field.TYPE_ENUM:
        found.type = _Field.TYPE_INT32
    elif field.type == _Field.TYPE_MESSAGE:
        inner = field.message_type
        if inner.full_name == Timestamp.DESCRIPTOR.full_name:
            found.type_name = f".{inner.full_name}"
        elif inner.name in _KEPT:
            found.type_name = f".{_PACKAGE}.{inner.name}"
        else:
            found.type = _Field.TYPE_BYTES


_parse: Final = _request_of_signs().FromString


class Arrival:
    """One heartbeat, in the form in which its stream brought it."""

    __slots__ = ("_signs", "_whole", "raw", "seq")

    def __init__(self, raw: bytes, signs: Any) -> None:
        self.raw = raw
        self._signs = signs
        self.seq: int = signs.seq
        self._whole: link_pb2.Heartbeat | None = None

    @property
    def at_work(self) -> bool:
        """True if snapshots in memory are slow evidence: no attempt is about to start."""
        return self._signs.phase in AT_WORK

    def whole(self) -> link_pb2.Heartbeat:
        """The complete heartbeat, parsed once.

        Raises:
            google.protobuf.message.DecodeError: a part of it is not a valid message.
        """
        if self._whole is None:
            self._whole = whole(self.raw)
        return self._whole

    def clocks(self) -> tuple[int, int, int, int]:
        """The four times of clock offsets, nanoseconds; the last three 0 without an answer.

        When it was sent; when the driver received and answered the one before; when that answer
        came back. The first and the last by the node's clock.
        """
        signs = self._signs
        sent_ns = _nanoseconds(signs.sent_at)
        if not signs.HasField("ack_received_at"):
            return sent_ns, 0, 0, 0
        return (
            sent_ns,
            _nanoseconds(signs.ack_driver_received_at),
            _nanoseconds(signs.ack_driver_sent_at),
            _nanoseconds(signs.ack_received_at),
        )

    def signature(self, memory: bool) -> bytes:
        """The deciding fields as bytes; call once. ``memory``: including snapshots in memory."""
        signs = self._signs
        # The message is used up by this: it is cheaper than a copy, and the clocks were read
        # before.
        for name in _CLOCKS:
            signs.ClearField(name)
        if not memory:
            for item in signs.checkpoints:
                for name in MEMORY_FIELDS:
                    item.ClearField(name)
        signs.DiscardUnknownFields()
        found: bytes = signs.SerializeToString()
        return found


def parsed(raw: bytes) -> Arrival | None:
    """The heartbeat in a serialized ConnectRequest; None if it has another message.

    Raises:
        google.protobuf.message.DecodeError: the bytes are not a ConnectRequest.
    """
    request = _parse(raw)
    return Arrival(raw, request.heartbeat) if request.HasField("heartbeat") else None


def whole(raw: bytes) -> link_pb2.Heartbeat:
    """The complete heartbeat in a serialized ConnectRequest.

    Raises:
        google.protobuf.message.DecodeError: the bytes are not a ConnectRequest.
    """
    return link_pb2.ConnectRequest.FromString(raw).heartbeat


def _nanoseconds(stamp: Timestamp) -> int:
    return stamp.seconds * 1_000_000_000 + stamp.nanos
