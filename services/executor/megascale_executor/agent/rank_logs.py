"""Log files of ranks: their last lines, and new lines as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

DEFAULT_LINES = 100
MAX_LINES = 100_000
MAX_LINE_CHARS = 16_384
_BLOCK_BYTES = 65_536
_MAX_TAIL_BYTES = 16 << 20
_POLL_S = 0.2


def tail(path: Path, lines: int) -> tuple[list[str], int]:
    """The last ``lines`` lines of a file, and the offset after them, from which to follow it.

    A line that is still being written is left out. At most 16 MiB from the end are read.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        end = position = file.seek(0, 2)
        blocks: list[bytes] = []
        newlines = 0
        while position > 0 and newlines <= lines and end - position < _MAX_TAIL_BYTES:
            step = min(_BLOCK_BYTES, position)
            position -= step
            file.seek(position)
            blocks.append(file.read(step))
            newlines += blocks[-1].count(b"\n")
    data = b"".join(reversed(blocks))
    whole, newline, unfinished = data.rpartition(b"\n")
    if not newline:
        return [], end - len(unfinished)
    return [_text(line) for line in whole.split(b"\n")[-lines:]] if lines > 0 else [], end - len(
        unfinished
    )


async def follow(path: Path, offset: int, is_over: Callable[[], bool]) -> AsyncIterator[str]:
    """Lines written after ``offset``, as they come; ends with the file once ``is_over``."""
    pending = b""
    while True:
        over = is_over()  # called before reading, so that nothing written before the end is missed
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read(_BLOCK_BYTES)
        offset += len(data)
        *whole, pending = (pending + data).split(b"\n")
        for line in whole:
            yield _text(line)
        if len(pending) > MAX_LINE_CHARS:
            yield _text(pending)
            pending = b""
        if not data:
            if over:
                break
            await asyncio.sleep(_POLL_S)
    if pending:
        yield _text(pending)


def _text(line: bytes) -> str:
    return line.rstrip(b"\r").decode(errors="replace")[:MAX_LINE_CHARS]
