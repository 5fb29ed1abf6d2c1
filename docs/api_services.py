"""Services and calls of the wire contract with their comments, read from the protos.

A comment above an rpc is prose, then ``Callers:`` and ``Errors:``; each error is one bullet,
``- CODE (REASON): when``. The comment above a service may have ``Errors:`` of every call.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import resources

from google.protobuf.descriptor import FileDescriptor, MethodDescriptor

from megascale.v1 import checkpoint_pb2, driver_pb2, executor_pb2, job_pb2, link_pb2, types_pb2
from megascale_job.wire.fields import proto_comments

# In the order of the page: what clients call first.
FILES = (driver_pb2, link_pb2, executor_pb2, checkpoint_pb2, types_pb2, job_pb2)

_BLOCK = re.compile(r"((?:^ *//.*\n)*)^ *(?:service|rpc) (\w+)", re.MULTILINE)
_ERROR = re.compile(r"([A-Z_, ]+?)(?: \(([A-Z_]+)\))?: (.+)")


@dataclass(frozen=True, slots=True)
class Error:
    """One way in which a call fails; ``reason`` is empty if it carries no ErrorInfo."""

    codes: tuple[str, ...]
    reason: str
    when: str


@dataclass(frozen=True, slots=True)
class Comment:
    """The structured comment above a service or an rpc."""

    text: str
    callers: tuple[str, ...]
    errors: tuple[Error, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """One rpc."""

    method: MethodDescriptor
    comment: Comment

    @property
    def name(self) -> str:
        """Name of the rpc."""
        return str(self.method.name)


@dataclass(frozen=True, slots=True)
class Service:
    """One service and its calls, in the order of the proto."""

    name: str
    comment: Comment
    calls: tuple[Call, ...]


def services() -> tuple[Service, ...]:
    """All services of the contract."""
    found = []
    for file in FILES:
        comments = {name: parse(block) for block, name in _BLOCK.findall(_text(file.DESCRIPTOR))}
        for name, service in file.DESCRIPTOR.services_by_name.items():
            calls = tuple(Call(method, comments[method.name]) for method in service.methods)
            found.append(Service(name, comments[name], calls))
    return tuple(found)


def field_comments() -> dict[str, str]:
    """Comments by ``Message``, ``Message.field``, ``Enum`` and ``Enum.VALUE`` over all protos."""
    return {
        key: text for file in FILES for key, text in proto_comments(_text(file.DESCRIPTOR)).items()
    }


def parse(block: str) -> Comment:
    """The comment in ``block``, whose lines begin with ``//``.

    Raises:
        ValueError: a bullet under ``Errors:`` has another form.
    """
    lines = [line.strip().removeprefix("//").strip() for line in block.splitlines()]
    at = lines.index("Errors:") if "Errors:" in lines else len(lines)
    errors: list[str] = []
    for line in filter(None, lines[at + 1 :]):
        if line.startswith("- "):
            errors.append(line.removeprefix("- "))
        else:
            errors[-1] += f" {line}"
    callers = next((line for line in lines[:at] if line.startswith("Callers: ")), "")
    prose = " ".join(line for line in lines[:at] if line and line != callers)
    names = callers.removeprefix("Callers: ").split(", ") if callers else ()
    return Comment(prose, tuple(names), tuple(map(_error, errors)))


def _error(bullet: str) -> Error:
    found = _ERROR.fullmatch(bullet)
    if found is None:
        raise ValueError(f"not of the form CODE (REASON): when: {bullet!r}")
    return Error(tuple(found[1].split(", ")), found[2] or "", found[3])


def _text(file: FileDescriptor) -> str:
    name = file.name.rpartition("/")[2]
    return resources.files("megascale.v1").joinpath(name).read_text(encoding="utf-8")
