"""Write docs/job-spec.md from the protos' comments and the defaults in the code; --check only
compares.

python docs/generate_job_spec.py [--check]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from megascale_common.job.wire.fields import REQUIRED, Field, MessageFields, job_fields

PAGE = Path(__file__).with_name("job-spec.md")
HEAD = """# The job specification

Generated from `proto/megascale/v1/job.proto` and the defaults in `megascale_common/job/config.py` by
`docs/generate_job_spec.py`; `make check` compares. Do not edit.

A job file is the message JobSpec in YAML (or JSON): the same field names, nested the same way, enum values by their
short names. `megascale init` writes one with every field, `megascale plan job.yaml` says what it needs and what would
be refused, `megascale submit job.yaml` runs it. Unknown fields are refused by name. Relative paths of a file start at
the file's own folder. A field that is left out takes its default; *required* fields have none.
"""


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *_message(job_fields(), "")]).rstrip() + "\n"


def _message(message: MessageFields, path: str) -> Iterator[str]:
    yield f"## `{path}`" if path else "## The job"
    yield ""
    yield message.comment
    yield ""
    yield "| field | type | default | meaning |"
    yield "|---|---|---|---|"
    for field in message.fields:
        yield f"| `{field.name}` | {_type(field, path)} | {_default(field)} | {_cell(field.comment)} |"
    yield ""
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
    return field.type


def _default(field: Field) -> str:
    if field.default is REQUIRED:
        return "*required*"
    if field.message is not None or field.default in ("", {}, ()):
        return "none" if field.default in ("", {}, ()) else ""
    if isinstance(field.default, bool):
        return f"`{str(field.default).lower()}`"
    return f"`{field.default:g}`" if isinstance(field.default, float) else f"`{field.default}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> int:
    """Write the page, or with --check compare; the exit status."""
    parser = argparse.ArgumentParser(description="Write docs/job-spec.md.")
    parser.add_argument("--check", action="store_true", help="only say whether the page is fresh")
    if not parser.parse_args().check:
        PAGE.write_text(page(), encoding="utf-8")
        return 0
    if PAGE.exists() and PAGE.read_text(encoding="utf-8") == page():
        return 0
    print(f"{PAGE} is stale: run `make docs`", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
