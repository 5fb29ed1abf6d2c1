"""Standard streams that never fail or block a process, and that hide the values of secrets.

A print or a log line must not end the process that writes it. Python's own streams raise when the
disk is full or the reader is gone, wait while a reader does not read, and turn the exit status into
120 if the last flush fails. These streams drop lines instead, and report how many as soon as a line
can be written again.

A secret is an environment variable whose name is in MEGASCALE_SECRETS, which the agent sets for the
processes of a job. Everything that these print through Python's streams, including tracebacks, has
the secret's name in place of its value. Output that a library writes to the descriptors directly is
not changed.
"""

from __future__ import annotations

import contextlib
import os
import select
import stat
import sys
import threading
from collections.abc import Callable, Mapping
from typing import TextIO, cast

# A write waits so long for the reader of a pipe or terminal. If that was not enough, later writes
# do not wait until the reader has read.
PATIENCE_S = 0.2
# A pipe that is ready takes this many bytes at once without blocking.
_BLOCK_BYTES = select.PIPE_BUF
MAX_UNFINISHED_CHARS = 64 * 1024  # of a line without an end; a longer one is written in parts

Notice = Callable[[int, str], str]


def _plain(count: int, why: str) -> str:
    lines = "1 line was" if count == 1 else f"{count} lines were"
    return f"[{lines} dropped here: {why}]"


class _Front:
    """A text stream in front of another; what it does not define is the other's."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write ``text``; returns its length in any case."""
        raise NotImplementedError

    def writelines(self, lines: list[str]) -> None:
        """Write each of ``lines``."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


class SteadyStream(_Front):
    """A text stream whose writes and flushes never raise; everything else is the stream's own.

    Args:
        notice: makes the line that reports dropped lines, from their number and the reason.
    """

    def __init__(self, stream: TextIO, notice: Notice = _plain) -> None:
        super().__init__(stream)
        self.notice = notice
        self._encoding = getattr(stream, "encoding", None) or "utf-8"
        # Reentrant, because a signal handler can print while its thread prints.
        self._lock = threading.RLock()
        self._unfinished = ""  # a line whose end is still to come
        self._cut = b""  # the rest of a line whose beginning is written
        self._dropped = 0
        self._why = ""
        self._stalled = False
        with contextlib.suppress(OSError, ValueError):
            stream.flush()

    def write(self, text: str) -> int:
        """Write ``text``, line by line; returns its length in any case."""
        if not isinstance(text, str):
            raise TypeError(f"a text stream takes str, not {type(text).__name__}")
        with self._lock:
            text_so_far = self._unfinished + text
            end = text_so_far.rfind("\n") + 1
            if len(text_so_far) - end > MAX_UNFINISHED_CHARS:
                end = len(text_so_far)
            self._unfinished = text_so_far[end:]
            if end:
                self._emit(text_so_far[:end])
        return len(text)

    def flush(self) -> None:
        """Write the unfinished line so far, and the report of dropped lines."""
        with self._lock:
            text = self._unfinished
            self._unfinished = ""
            self._emit(text)
            with contextlib.suppress(OSError, ValueError):
                self._stream.flush()  # its own buffer

    def _emit(self, text: str) -> None:
        data = text.encode(self._encoding, "backslashreplace")
        self._cut = self._put(self._cut)
        if self._dropped and not self._cut:
            notice = f"{self.notice(self._dropped, self._why)}\n".encode(self._encoding, "replace")
            left = self._put(notice)
            if len(left) < len(notice):
                self._dropped = 0
                self._cut = left
        if self._dropped or self._cut:
            self._dropped += _lines(data)
            return
        left = self._put(data)
        if left and len(left) < len(data) and data[-len(left) - 1 : -len(left)] != b"\n":
            cut, end, left = left.partition(b"\n")
            self._cut = cut + end
        self._dropped += _lines(left)

    def _put(self, data: bytes) -> bytes:
        """Write as much of ``data`` as possible without blocking; returns the rest."""
        try:
            descriptor = self._stream.fileno()
        except (OSError, ValueError, AttributeError):  # a stream in memory, or a closed one
            return self._put_text(data)
        try:
            waits = not stat.S_ISREG(os.fstat(descriptor).st_mode)
            while data:
                if waits and not self._ready(descriptor):
                    self._why = "the reader of this output does not read"
                    return data
                data = data[os.write(descriptor, data[:_BLOCK_BYTES] if waits else data) :]
        except OSError as error:
            self._why = error.strerror or str(error)
        return data

    def _put_text(self, data: bytes) -> bytes:
        if not data:
            return data
        try:
            self._stream.write(data.decode(self._encoding, "replace"))
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._why = str(error)
            return data
        return b""

    def _ready(self, descriptor: int) -> bool:
        poll = select.poll()
        poll.register(descriptor, select.POLLOUT)
        self._stalled = not poll.poll(0 if self._stalled else round(PATIENCE_S * 1e3))
        return not self._stalled


def _lines(data: bytes) -> int:
    """Number of lines in ``data``, including one without an end."""
    return data.count(b"\n") + bool(data and not data.endswith(b"\n"))


def steady(stream: TextIO, notice: Notice = _plain) -> TextIO:
    """A stream that writes to ``stream`` and never raises."""
    return cast(TextIO, SteadyStream(stream, notice))


def steady_streams(notice: Notice = _plain) -> None:
    """Make ``sys.stdout`` and ``sys.stderr`` steady; call it again after they are replaced."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, SteadyStream):
            stream.notice = notice
        elif stream is not None:
            setattr(sys, name, steady(stream, notice))


NAMES_VARIABLE = "MEGASCALE_SECRETS"
MIN_CHARS = 4  # a shorter value is in too many texts by chance


class Redactor:
    """Replaces the values of secrets by their names."""

    def __init__(self, secrets: Mapping[str, str]) -> None:
        # Long ones first, because one secret can be a part of another.
        known = sorted(secrets.items(), key=lambda item: -len(item[1]))
        self._values = [
            (part, f"[secret {name}]")
            for name, value in known
            for part in dict.fromkeys([value, *value.splitlines()])
            if len(part) >= MIN_CHARS
        ]

    def __call__(self, text: str) -> str:
        """``text`` with names in place of the values."""
        for value, shown in self._values:
            if value in text:
                text = text.replace(value, shown)
        return text


class _Redacted(_Front):
    """A text stream whose writes are redacted; everything else is the stream's own."""

    def __init__(self, stream: TextIO, redact: Redactor) -> None:
        super().__init__(stream)
        self._redact = redact

    def write(self, text: str) -> int:
        self._stream.write(self._redact(text))
        return len(text)


def redact_streams(environment: Mapping[str, str] = os.environ) -> None:
    """Redact the output of this process from now on; does nothing without secrets.

    Call it again after ``sys.stdout`` or ``sys.stderr`` are replaced.
    """
    names = [name for name in environment.get(NAMES_VARIABLE, "").split(",") if name]
    if not names:
        return
    redact = Redactor({name: environment.get(name, "") for name in names})
    sys.stdout = cast(TextIO, _Redacted(sys.stdout, redact))
    sys.stderr = cast(TextIO, _Redacted(sys.stderr, redact))
