"""Write services, messages and enums of docs/api.md from the protos and clients/grpcurl.

python -m docs.generate_api [--check]
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Iterator

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor

from docs import pages
from docs.api_examples import FOLDERS, example
from docs.api_services import FILES, Call, Error, Service, field_comments, services

PAGE = pages.DOCS / "api.md"
# The shell variable with the address of a service, as set at the top of the page.
_ADDRESSES = {"driver": "$DRIVER", "link": "$DRIVER", "executor": "$EXECUTOR"}
_SCALARS = {
    getattr(FieldDescriptor, name): name.removeprefix("TYPE_").lower()
    for name in dir(FieldDescriptor)
    if name.startswith("TYPE_")
}
_WELL_KNOWN = "google.protobuf."


def text() -> str:
    """Every service, call, message and enum."""
    found = services()
    inline = {
        message.name
        for service in found
        for call in service.calls
        for message in (call.method.input_type, call.method.output_type)
    }
    comments = field_comments()
    lines: list[str] = []
    for service in found:
        lines += _service(service, comments)
    lines += ["## Messages", "", "What requests and responses consist of.", ""]
    for file in FILES:
        for message in file.DESCRIPTOR.message_types_by_name.values():
            if message.name not in inline:
                lines += [f"### {message.name}", "", comments[message.name], ""]
                lines += _fields(message, comments)
    lines += ["## Enums", "", "The first value of each, `..._UNSPECIFIED = 0`, is never sent.", ""]
    for file in FILES:
        for enum in file.DESCRIPTOR.enum_types_by_name.values():
            lines += _enum(enum, comments)
    return "\n".join(lines)


def _service(service: Service, comments: dict[str, str]) -> Iterator[str]:
    yield from (f"## {service.name}", "", service.comment.text, "")
    yield from _errors("Errors of every call", service.comment.errors)
    for call in service.calls:
        yield from _call(service, call, comments)


def _call(service: Service, call: Call, comments: dict[str, str]) -> Iterator[str]:
    method = call.method
    kinds = ["stream" if streams else "unary" for streams in _streaming(call)]
    kind = "unary" if kinds == ["unary", "unary"] else f"{kinds[0]} request, {kinds[1]} response"
    yield from (f"### {call.name}", "", call.comment.text, "")
    yield f"Called by: {', '.join(call.comment.callers)}. Kind: {kind}."
    yield ""
    for title, message in (("Request", method.input_type), ("Response", method.output_type)):
        if message.fields:
            yield from (f"{title} `{message.name}`:", "")
            yield from _fields(message, comments)
        else:
            yield from (f"{title} `{message.name}` has no fields.", "")
    yield from _errors("Errors", call.comment.errors)
    yield from _example(service, call)


def _streaming(call: Call) -> tuple[bool, bool]:
    """Whether requests and responses are streams."""
    method = call.method
    return bool(method.client_streaming), bool(method.server_streaming)


def _errors(title: str, errors: Iterable[Error]) -> Iterator[str]:
    rows = [
        (
            ", ".join(f"`{code}`" for code in error.codes),
            f"`{error.reason}`" if error.reason else "",
            error.when,
        )
        for error in errors
    ]
    if rows:
        yield from (f"{title}:", "")
        yield from pages.table(("code", "reason", "when"), rows)


def _example(service: Service, call: Call) -> Iterator[str]:
    shown = example(service.name, call.name)
    address = _ADDRESSES.get(FOLDERS[service.name], "$CHECKPOINT")
    yield from (f"Example: {shown.purpose}", "", "```sh", shown.command, "# sends")
    yield f'call -d {shlex.quote(shown.request)} "{address}" {shown.method}'
    yield from ("```", "")


def _fields(message: Descriptor, comments: dict[str, str]) -> Iterator[str]:
    rows = [
        (
            f"`{field.name}`",
            _type(field),
            str(field.number),
            comments[f"{message.name}.{field.name}"],
        )
        for field in message.fields
    ]
    yield from pages.table(("field", "type", "number", "meaning"), rows)


def _type(field: FieldDescriptor) -> str:
    message = field.message_type
    if message is not None and message.GetOptions().map_entry:
        return f"map of {_scalar(message.fields[0])} to {_scalar(message.fields[1])}"
    if message is not None:
        kind = _linked(message)
    elif field.enum_type is not None:
        kind = _linked(field.enum_type)
    else:
        kind = _scalar(field)
    group = field.containing_oneof
    if group is not None:  # protoc makes a group of its own for every optional field
        return (
            f"{kind}, optional" if group.name.startswith("_") else f"{kind}, one of `{group.name}`"
        )
    # Older releases of protobuf have `label`, newer ones `is_repeated`, all of them this.
    return f"list of {kind}" if field.default_value == [] else kind


def _scalar(field: FieldDescriptor) -> str:
    return _SCALARS[field.type]


def _linked(target: Descriptor | EnumDescriptor) -> str:
    if target.full_name.startswith(_WELL_KNOWN):
        return f"`{target.full_name}`"
    return f"[{target.name}](#{target.name.lower()})"


def _enum(enum: EnumDescriptor, comments: dict[str, str]) -> Iterator[str]:
    yield from (f"### {enum.name}", "", comments[enum.name], "")
    rows = [
        (f"`{value.name}`", str(value.number), comments[f"{enum.name}.{value.name}"])
        for value in enum.values
        if value.number
    ]
    yield from pages.table(("value", "number", "meaning"), rows)


if __name__ == "__main__":
    sys.exit(pages.run(PAGE, text))
