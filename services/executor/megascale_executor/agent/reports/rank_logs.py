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


def ending(path: Path, lines: int) -> tuple[int, int]:
    """Where the last ``lines`` lines of a file begin and end; it may be followed from their end.

    A line that is still being written is left out. At most 16 MiB from the end are looked at, and
    none of it is kept.

    Raises:
        OSError: the file cannot be read.
    """
    end, left = 0, lines + 1  # newlines: that of the last line, and that before the first one
    with path.open("rb") as file:
        size = position = file.seek(0, 2)
        while position > 0 and size - position < _MAX_TAIL_BYTES:
            position = max(0, position - _BLOCK_BYTES)
            file.seek(position)
            block = file.read(min(_BLOCK_BYTES, size - position))
            at = len(block)
            while (at := block.rfind(b"\n", 0, at)) >= 0:
                end, left = end or position + at + 1, left - 1
                if not left:
                    return position + at + 1, end
    return position, end or position


async def between(path: Path, begin: int, end: int) -> AsyncIterator[str]:
    """The lines of a part of a file that ends with a newline, read block by block."""
    pending = b""
    while begin < end:
        with path.open("rb") as file:
            file.seek(begin)
            data = file.read(min(_BLOCK_BYTES, end - begin))
        if not data:  # the file was cut
            return
        begin += len(data)
        *whole, pending = (pending + data).split(b"\n")
        for line in whole:
            yield _text(line)
        pending = pending[: 4 * MAX_LINE_CHARS]  # more of a line is not shown


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
