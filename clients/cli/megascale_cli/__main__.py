"""`megascale` and `python -m megascale_cli`."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from typing import Any, TextIO


class ReaderLeft(SystemExit):
    """The reader of stdout (head, less) has ended: the command ends with status 0.

    It is not an OSError, so that no command mistakes it for an error of its own files.
    """


class _Stream(io.FileIO):
    """stdout or stderr; once its reader has left, the rest is discarded."""

    def write(self, data: Any) -> int:
        """Write; end the command if the reader of its stdout has left."""
        try:
            return super().write(data)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            if self.fileno() == 1:
                raise ReaderLeft(0) from None
            return len(data)


def _quiet(stream: TextIO) -> TextIO:
    """The stream over _Stream; unchanged if it has no descriptor (None: it is closed)."""
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    raw = _Stream(stream.fileno(), "w", closefd=False)
    return io.TextIOWrapper(
        raw if stream.write_through else io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def main() -> None:
    """Run the command line."""
    # Before a command runs there is nothing to clean up: Ctrl-C ends the process at once.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.stdout = _quiet(sys.stdout)
    sys.stderr = _quiet(sys.stderr)
    from megascale_cli.app import build_app

    app = build_app()
    # A script that runs `megascale up &` starts it with SIGINT ignored, as some CI runners do; a
    # SIGINT that is sent to it must still end it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        app(prog_name="megascale")
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        with contextlib.suppress(ReaderLeft):  # the command has done its work, and has its status
            if sys.stdout is not None:
                sys.stdout.flush()


if __name__ == "__main__":
    main()
