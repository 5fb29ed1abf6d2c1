"""Reads a locked requirements file: which lines an agent lets pip install.

The agent may have more rights than the job. So pip gets no option from the file (other files,
indexes), builds nothing (which runs code), and installs only what a hash names. Errors give the
number of a line and never its text: the file may be any that the agent can read.
"""

from __future__ import annotations

import re
from pathlib import Path

from megascale_common.service.errors import AssignmentError

MAX_REQUIREMENTS_BYTES = 1 << 20  # several thousand lines with hashes
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*(\[[A-Za-z0-9._, -]*\])?"
_PINNED = r"\s*==\s*[A-Za-z0-9][A-Za-z0-9.!+_-]*"
_WHEEL = r"\s+@\s+(https|file)://[^\s;#]+\.whl"
_MARKER = r"(\s*;\s*[A-Za-z0-9_.'\"<>=!,() -]+?)?"
_HASHES = r"(\s+--hash=sha256:[0-9a-f]{64})+"
_LINE = re.compile(f"{_NAME}({_PINNED}|{_WHEEL}){_MARKER}{_HASHES}")
_COMMENT = re.compile(r"(^|\s+)#.*$")


def read(path: Path) -> bytes:
    """The requirements in ``path``, one in a line, comments and continuations removed.

    Raises:
        AssignmentError: it cannot be read, is too large, or has a line that is not a version or a
            wheel with its hashes.
    """
    field = f"environment.requirements {path}"
    try:
        with path.open("rb") as file:
            text = file.read(MAX_REQUIREMENTS_BYTES + 1)
    except OSError as error:
        raise AssignmentError(f"{field} cannot be read on this node: {error.strerror}") from None
    if len(text) > MAX_REQUIREMENTS_BYTES:
        raise AssignmentError(f"{field} has more than {MAX_REQUIREMENTS_BYTES >> 10} KiB")
    found, begun, began = [], "", 1
    for number, raw in enumerate(text.decode(errors="replace").splitlines(), start=1):
        line = _COMMENT.sub("", raw).strip()
        began = began if begun else number
        if line.endswith("\\"):
            begun += line[:-1] + " "
            continue
        line, begun = (begun + line).strip(), ""
        if line and not _LINE.fullmatch(line):
            raise AssignmentError(
                f"{field}, line {began}: give NAME==VERSION or NAME @ https://...whl, each with "
                "--hash=sha256:..., and no options (`uv pip compile --generate-hashes` writes it)"
            )
        if line:
            found.append(line)
    if begun or not found:
        raise AssignmentError(f"{field} ends within a requirement, or has none")
    return "\n".join([*found, ""]).encode()
