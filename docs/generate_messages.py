"""Write the client's enums and views, clients/python/megascale_client/messages.py, from the protos.

python -m docs.generate_messages [--check]
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Iterator
from importlib import resources

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor

from docs import pages
from megascale.v1 import driver_pb2, types_pb2
from megascale_job.wire.fields import proto_comments

MODULE = pages.REPOSITORY / "clients" / "python" / "megascale_client" / "messages.py"
MARKERS = (
    "# Begin of the generated part: change the protos, then run `make docs`.",
    "# End of the generated part.",
)
# What the client returns. A view is made of those that have an enum, themselves or in a message
# that they hold; of the others the client returns the message. A job's spec is what a user writes.
ROOTS: tuple[Descriptor, ...] = (
    driver_pb2.WatchJobResponse.DESCRIPTOR,
    driver_pb2.Job.DESCRIPTOR,
    driver_pb2.EvictNodeResponse.DESCRIPTOR,
    driver_pb2.SuspendJobResponse.DESCRIPTOR,
    driver_pb2.ResumeJobResponse.DESCRIPTOR,
    driver_pb2.RestartJobResponse.DESCRIPTOR,
    driver_pb2.UpdateJobResponse.DESCRIPTOR,
    driver_pb2.DrainNodeResponse.DESCRIPTOR,
    driver_pb2.SetPolicyResponse.DESCRIPTOR,
    driver_pb2.CordonNodeResponse.DESCRIPTOR,
    driver_pb2.UncordonNodeResponse.DESCRIPTOR,
    types_pb2.CheckResult.DESCRIPTOR,
)
_SCALARS = {
    FieldDescriptor.CPPTYPE_INT32: "int",
    FieldDescriptor.CPPTYPE_INT64: "int",
    FieldDescriptor.CPPTYPE_UINT32: "int",
    FieldDescriptor.CPPTYPE_UINT64: "int",
    FieldDescriptor.CPPTYPE_DOUBLE: "float",
    FieldDescriptor.CPPTYPE_FLOAT: "float",
    FieldDescriptor.CPPTYPE_BOOL: "bool",
    FieldDescriptor.CPPTYPE_STRING: "str",
}
_WIDTH = 100
_TERMINAL = "TERMINAL_PHASES = frozenset({JobPhase.SUCCEEDED, JobPhase.FAILED, JobPhase.CANCELLED})"


def names() -> list[str]:
    """All names of the module."""
    views = _views()
    return ["TERMINAL_PHASES", *sorted({each.name for each in (*views, *_enums(views))})]


def text() -> str:
    """The enums, then the views, each after those that it holds."""
    proto = resources.files("megascale.v1")
    comments = {
        key: value
        for file in ("types.proto", "driver.proto")
        for key, value in proto_comments(proto.joinpath(file).read_text(encoding="utf-8")).items()
    }
    views = _views()
    # The first and the last lines are no classes, between which and a comment the formatter wants
    # two empty lines.
    lines = ["__all__ = [", *(f'    "{name}",' for name in names()), "]", "", ""]
    lines += [line for enum in _enums(views) for line in _enum(enum, comments)]
    lines += [line for message in views for line in _view(message, views, comments)]
    return "\n".join([*lines, _TERMINAL])


def _views() -> list[Descriptor]:
    found: list[Descriptor] = []

    def visit(message: Descriptor) -> bool:
        if message in found:
            return True
        if message.file.name.endswith("job.proto"):
            return False
        inner = [visit(f.message_type) for f in message.fields if f.message_type is not None]
        if any(inner) or any(field.enum_type is not None for field in message.fields):
            found.append(message)
            return True
        return False

    for root in ROOTS:
        visit(root)
    return found


def _enums(views: Iterable[Descriptor]) -> list[EnumDescriptor]:
    found = (field.enum_type for message in views for field in message.fields)
    return sorted({enum.name: enum for enum in found if enum is not None}.values(), key=_name)


def _name(enum: EnumDescriptor) -> str:
    return enum.name


def _enum(enum: EnumDescriptor, comments: dict[str, str]) -> Iterator[str]:
    prefix = enum.values[0].name.removesuffix("UNSPECIFIED")
    yield from (f"class {enum.name}(NamedEnum):", *_docstring(comments[enum.name]), "")
    for value in enum.values:
        yield from _comment(comments.get(f"{enum.name}.{value.name}", ""))
        yield f"    {value.name.removeprefix(prefix)} = {value.number}"
    yield from ("", "")


def _view(message: Descriptor, views: list[Descriptor], comments: dict[str, str]) -> Iterator[str]:
    head = f"class {message.name}(View, of={_module(message)}.{message.name}):"
    doc = comments[message.name] or f"The answer of {message.name.removesuffix('Response')}."
    yield from (head, *_docstring(doc), "", f"    proto: {_module(message)}.{message.name}")
    for field in message.fields:
        yield f"    {field.name}: {_type(field, views)}"
    yield from ("", "")


def _docstring(comment: str) -> list[str]:
    first, _, rest = comment.partition(". ")
    if not rest:
        return [f'    """{comment}"""']
    wrapped = textwrap.wrap(rest, _WIDTH - 4)
    return [f'    """{first}.', "", *(f"    {line}" for line in wrapped), '    """']


def _comment(comment: str) -> list[str]:
    return [f"    # {line}" for line in textwrap.wrap(comment, _WIDTH - 6)]


def _type(field: FieldDescriptor, views: list[Descriptor]) -> str:
    inner = field.message_type
    if inner is not None and inner.GetOptions().map_entry:
        key, value = (inner.fields_by_name[name] for name in ("key", "value"))
        return f"Mapping[{_SCALARS[key.cpp_type]}, {_SCALARS[value.cpp_type]}]"
    if field.enum_type is not None:
        plain = field.enum_type.name
    elif inner is not None:
        plain = inner.name if inner in views else f"{_module(inner)}.{inner.name}"
    else:
        plain = _SCALARS[field.cpp_type]
    return f"Sequence[{plain}]" if field.is_repeated else plain


def _module(message: Descriptor) -> str:
    return message.file.name.rsplit("/", 1)[-1].replace(".proto", "_pb2")


def main() -> int:
    """Write or check; the exit status of :func:`docs.pages.run`."""
    return pages.run(MODULE, text, markers=MARKERS)


if __name__ == "__main__":
    sys.exit(main())
