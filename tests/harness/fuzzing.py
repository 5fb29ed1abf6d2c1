"""Requests that nobody would send, for real servers: random, mutated, and bytes that are broken.

A request is made from a number, so that a failure is repeated by its number. Texts that may be
paths stay below a folder of the test.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message

from megascale_common.node.process import stat_fields
from megascale_common.service import status

CALL_S = 2.0
MAX_DEPTH = 5
MAX_ITEMS = 4
_NUMBERS = (0, 1, -1, 2, 7, 255, 2**31 - 1, -(2**31), 2**32, 2**63 - 1, -(2**63), 2**64 - 1)
_FLOATS = (0.0, -0.0, 1.5, -1.0, 1e308, -1e308, 5e-324, float("inf"), float("-inf"), float("nan"))
_TEXTS = (
    "", " ", "x", "n1", "n2", "default", "jobs/x", "nodes/n1", "cluster", "0", "-1", "t0", "0.x",
    "é", "\u202e", "\n", "\0", "a" * 63, "a" * 64, "a" * 5000, "../..", "%s%n", "{}", "[::]:1",
    "127.0.0.1:1", ":", "s3:", "ftp://x/y", "9" * 400,
)  # fmt: skip
_32_BITS, _64_BITS = (-(2**31), 2**31 - 1), (-(2**63), 2**63 - 1)
_BOUNDS = {
    FieldDescriptor.TYPE_INT32: _32_BITS,
    FieldDescriptor.TYPE_SINT32: _32_BITS,
    FieldDescriptor.TYPE_SFIXED32: _32_BITS,
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_FIXED32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.TYPE_FIXED64: (0, 2**64 - 1),
}
# Answers of a server that works, beside OK; a call that takes longer than CALL_S is no failure.
WORKS = {
    "INVALID_ARGUMENT", "NOT_FOUND", "ALREADY_EXISTS", "PERMISSION_DENIED", "FAILED_PRECONDITION",
    "ABORTED", "OUT_OF_RANGE", "RESOURCE_EXHAUSTED", "UNAVAILABLE", "DATA_LOSS",
    "DEADLINE_EXCEEDED", "UNAUTHENTICATED",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Maker:
    """Makes messages; ``samples`` are valid ones by full name, ``folder`` is where paths lie."""

    folder: Path
    samples: Mapping[str, Sequence[Message]] = field(default_factory=dict)

    def request(self, method: MethodDescriptor, chance: random.Random) -> bytes:
        """One request of the method, broken in one of ten."""
        message = self.message(method.input_type, chance)
        data = message.SerializeToString()
        return _broken(data, chance) if chance.random() < 0.1 else data

    def message(self, kind: Descriptor, chance: random.Random) -> Message:
        """A random message, or a valid one with some fields that are random."""
        samples = self.samples.get(kind.full_name, ())
        made = message_factory.GetMessageClass(kind)()
        if samples and chance.random() < 0.8:
            made.CopyFrom(chance.choice(samples))
            for _ in range(chance.choice((0, 1, 1, 2, 4))):
                self._mutate(made, chance)
        else:
            self._fill(made, chance, MAX_DEPTH)
        return made

    def _mutate(self, message: Message, chance: random.Random) -> None:
        """Change one field, somewhere below."""
        while True:
            present = [value for field, value in message.ListFields() if _is_single(field)]
            if not present or chance.random() < 0.3:
                break
            message = chance.choice(present)
        fields = message.DESCRIPTOR.fields
        if not fields:
            return
        which = chance.choice(fields)
        if chance.random() < 0.3:
            message.ClearField(which.name)
        else:
            self._set(message, which, chance, 2)

    def _fill(self, message: Message, chance: random.Random, depth: int) -> None:
        share = chance.choice((0.2, 0.5, 0.9))
        for each in message.DESCRIPTOR.fields:
            if chance.random() < share:
                self._set(message, each, chance, depth)

    def _set(self, message: Any, which: FieldDescriptor, chance: random.Random, depth: int) -> None:
        if which.message_type is not None and which.message_type.GetOptions().map_entry:
            key, value = which.message_type.fields
            target = getattr(message, which.name)
            for _ in range(chance.randint(0, MAX_ITEMS)):
                name = self._value(key, chance)
                if value.message_type is None:
                    target[name] = self._value(value, chance)
                elif depth:
                    self._fill(target[name], chance, depth - 1)
        elif which.message_type is not None:
            if not depth:
                return
            if which.is_repeated:
                for _ in range(chance.randint(0, MAX_ITEMS)):
                    self._fill(getattr(message, which.name).add(), chance, depth - 1)
            else:
                inner = getattr(message, which.name)
                inner.SetInParent()
                self._fill(inner, chance, depth - 1)
        elif which.is_repeated:
            count = chance.choice((0, 1, 2, MAX_ITEMS, 300))
            getattr(message, which.name).extend(self._value(which, chance) for _ in range(count))
        else:
            setattr(message, which.name, self._value(which, chance))

    def _value(self, which: FieldDescriptor, chance: random.Random) -> Any:
        kinds = FieldDescriptor
        if which.type == kinds.TYPE_BOOL:
            return chance.random() < 0.5
        if which.type in (kinds.TYPE_DOUBLE, kinds.TYPE_FLOAT):
            return chance.choice(_FLOATS)
        if which.type == kinds.TYPE_STRING:
            return self._text(which.name, chance)
        if which.type == kinds.TYPE_BYTES:
            return chance.randbytes(chance.choice((0, 1, 100)))
        if which.type == kinds.TYPE_ENUM:
            return chance.choice((*[value.number for value in which.enum_type.values], 77, -1))
        low, high = _BOUNDS.get(which.type, _64_BITS)
        return min(max(chance.choice(_NUMBERS), low), high)

    def _text(self, name: str, chance: random.Random) -> str:
        if chance.random() < 0.2 or name.endswith("uri"):
            below = chance.choice(("", "x", "a/b", "é", "a" * 300, "file"))
            return chance.choice(("", "file://")) + str(self.folder / below)
        return chance.choice(_TEXTS)


def _is_single(which: FieldDescriptor) -> bool:
    return which.message_type is not None and not which.is_repeated


def _broken(data: bytes, chance: random.Random) -> bytes:
    """The bytes with some of them changed, left out, or more."""
    bytes_ = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(bytes_) + 1)
        kind = chance.randrange(3)
        if kind == 0:
            bytes_[at:at] = chance.randbytes(chance.choice((1, 8, 64)))
        elif kind == 1:
            del bytes_[at : at + chance.choice((1, 8, 64))]
        elif bytes_:
            bytes_[min(at, len(bytes_) - 1)] ^= 1 << chance.randrange(8)
    return bytes(bytes_)


def call(
    channel: grpc.Channel, method: MethodDescriptor, requests: Sequence[bytes], token: str
) -> str:
    """Call an RPC; "" if the answer is one of a server that works, else what is wrong with it."""
    shape = ("stream" if method.client_streaming else "unary") + "_" + (
        "stream" if method.server_streaming else "unary"
    )  # fmt: skip
    name = f"/{method.containing_service.full_name}/{method.name}"
    stub = getattr(channel, shape)(name)
    sent: Any = iter(requests) if method.client_streaming else requests[0]
    metadata = (("authorization", f"Bearer {token}"),)
    try:
        answer = stub(sent, timeout=CALL_S, metadata=metadata)
        if method.server_streaming:
            with contextlib.suppress(StopIteration):
                next(answer)
            answer.cancel()
    except grpc.RpcError as error:
        return _wrong(error)
    return ""


def _wrong(error: Any) -> str:
    code, text = error.code().name, error.details() or ""
    if code not in WORKS:
        return f"{code}: {text}"
    if code in ("DEADLINE_EXCEEDED", "UNAVAILABLE", "CANCELLED"):
        return ""
    if len(text) < 8 or len(text) > 8000 or status.read(error).reason == "UNKNOWN":
        return f"{code} without a clear error: {text[:300]!r}"
    return ""


@dataclass(frozen=True, slots=True)
class Held:
    """What a process holds: descriptors, threads, bytes of memory."""

    descriptors: int
    threads: int
    memory_bytes: int

    @classmethod
    def of(cls, pid: int) -> Held:
        """By /proc."""
        page = os.sysconf("SC_PAGE_SIZE")
        resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * page
        threads = int(stat_fields(pid)[17])
        return cls(len(os.listdir(f"/proc/{pid}/fd")), threads, resident)
