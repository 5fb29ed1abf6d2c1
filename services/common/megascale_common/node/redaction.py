"""Keeps the values of secrets out of what is printed and reported.

A secret is an environment variable whose name stands in MEGASCALE_SECRETS, as the agent sets it for
the processes of a job. What they print through Python's streams, tracebacks included, has the name
in place of the value. What a library writes to the descriptors itself is not changed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TextIO, cast

NAMES_VARIABLE = "MEGASCALE_SECRETS"
# A shorter value stands in too many texts by chance, and is no secret worth the name.
MIN_CHARS = 4


class Redactor:
    """Replaces the values of secrets by their names."""

    def __init__(self, secrets: Mapping[str, str]) -> None:
        # Long ones first: one secret may be a part of another.
        known = sorted(secrets.items(), key=lambda item: -len(item[1]))
        self._values = [
            (part, f"[secret {name}]")
            for name, value in known
            for part in dict.fromkeys([value, *value.splitlines()])
            if len(part) >= MIN_CHARS
        ]

    def __call__(self, text: str) -> str:
        """``text`` without the values."""
        for value, shown in self._values:
            if value in text:
                text = text.replace(value, shown)
        return text


class _Redacted:
    """A text stream whose writes are redacted; all else is the stream's own."""

    def __init__(self, stream: TextIO, redact: Redactor) -> None:
        self._stream, self._redact = stream, redact

    def write(self, text: str) -> int:
        self._stream.write(self._redact(text))
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


def redact_streams(environment: Mapping[str, str] = os.environ) -> None:
    """Redact what this process prints from now on; does nothing where there are no secrets.

    To be called again when ``sys.stdout`` or ``sys.stderr`` are replaced.
    """
    names = [name for name in environment.get(NAMES_VARIABLE, "").split(",") if name]
    if not names:
        return
    redact = Redactor({name: environment.get(name, "") for name in names})
    sys.stdout = cast(TextIO, _Redacted(sys.stdout, redact))
    sys.stderr = cast(TextIO, _Redacted(sys.stderr, redact))
