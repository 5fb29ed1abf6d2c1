"""Write the fields of docs/job-spec.md from the protos' comments and the defaults in the code.

python -m docs.generate_job_spec [--check]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from docs import pages
from megascale_job.wire.fields import REQUIRED, Field, MessageFields, job_fields

PAGE = pages.DOCS / "job-spec.md"


def text() -> str:
    """Every field of the job, message by message."""
    return "\n".join(_message(job_fields(), ""))


def _message(message: MessageFields, path: str) -> Iterator[str]:
    yield f"## `{path}`" if path else "## The job"
    yield ""
    yield message.comment
    yield ""
    rows = [
        (f"`{field.name}`", _type(field, path), _default(field), field.comment)
        for field in message.fields
    ]
    yield from pages.table(("field", "type", "default", "meaning"), rows)
    for field in message.fields:
        if any(choice.comment for choice in field.choices):
            yield f"Values of `{field.name}`:"
            yield ""
            for choice in field.choices:
                yield (
                    f"- `{choice.name}`: {choice.comment}"
                    if choice.comment
                    else f"- `{choice.name}`"
                )
            yield ""
    for field in message.fields:
        if field.message is not None:
            yield from _message(field.message, _path(field, path))


def _path(field: Field, path: str) -> str:
    name = f"{field.name}[]" if field.repeated else field.name
    return f"{path}.{name}" if path else name


def _type(field: Field, path: str) -> str:
    if field.message is not None:
        inner = _path(field, path)
        anchor = "".join(letter for letter in inner if letter.isalnum() or letter in "_-")
        return f"[{'list' if field.repeated else 'mapping'}](#{anchor})"
    if field.choices:
        return ", ".join(f"`{choice.name}`" for choice in field.choices)
    return f"{field.type}, {field.bounds}" if field.bounds is not None else field.type


def _default(field: Field) -> str:
    if field.default is REQUIRED:
        return "*required*"
    if field.message is not None or field.default in ("", {}, ()):
        return "none" if field.default in ("", {}, ()) else ""
    if isinstance(field.default, bool):
        return f"`{str(field.default).lower()}`"
    return f"`{field.default:g}`" if isinstance(field.default, float) else f"`{field.default}`"


if __name__ == "__main__":
    sys.exit(pages.run(PAGE, text))
