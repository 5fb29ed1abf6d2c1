"""Log files of ranks: their last lines, new lines as they come, classes of errors in them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

from megascale.v1 import link_pb2

DEFAULT_LINES = 100
MAX_LINES = 100_000
MAX_LINE_CHARS = 16_384
_BLOCK_BYTES = 65_536
_MAX_TAIL_BYTES = 16 << 20
_POLL_S = 0.2

MAX_SAMPLE_BYTES = 512
MAX_SIGNATURES = 32
_MAX_SIGNATURE_CHARS = 120
_SCAN_BYTES_PER_BEAT = 256 * 1024
# Lines that are reported to the driver. Parts of words, because libraries join them to others
# (RuntimeError, NCCL_ERROR).
_ERROR = re.compile(
    r"error|exception|fatal|nccl warn|xid|segfault|out of memory|killed|traceback", re.IGNORECASE
)
# What may differ between two lines of one class: numbers, addresses, quoted names, paths.
_VARIABLE = re.compile(r"0x[0-9a-f]+|\d+(?:[.:]\d+)*|'[^']*'|\"[^\"]*\"|/\S+", re.IGNORECASE)


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


def signature(line: str) -> str | None:
    """Class of a line that reports an error; None for other lines.

    It is the same for lines that differ only in numbers, quoted names and paths.
    """
    if _ERROR.search(line) is None:
        return None
    return " ".join(_VARIABLE.sub("#", line).split())[:_MAX_SIGNATURE_CHARS]


@dataclass(slots=True)
class _Position:
    rank: int
    offset: int = 0
    unfinished: bytes = b""


class LogScanner:
    """Counts the classes of errors in what has been added to the ranks' logs.

    It reads and keeps a bounded amount per call.
    """

    def __init__(self) -> None:
        self._positions: dict[Path, _Position] = {}
        self._found: dict[str, link_pb2.LogFingerprint] = {}

    def watch(self, logs: dict[int, Path]) -> None:
        """Scan these files, by rank, from now on, and no others."""
        self._positions = {path: _Position(rank) for rank, path in logs.items()}

    def collect(self) -> list[link_pb2.LogFingerprint]:
        """Classes seen since the last call."""
        for path, position in self._positions.items():
            self._scan(path, position)
        found, self._found = list(self._found.values()), {}
        return found

    def _scan(self, path: Path, position: _Position) -> None:
        try:
            with path.open("rb") as file:
                file.seek(position.offset)
                data = file.read(_SCAN_BYTES_PER_BEAT)
        except OSError:
            return
        position.offset += len(data)
        *lines, rest = (position.unfinished + data).split(b"\n")
        position.unfinished = rest[-MAX_LINE_CHARS:]
        for line in lines:
            self._count(position.rank, _text(line))

    def _count(self, rank: int, line: str) -> None:
        found = signature(line)
        if found is None:
            return
        known = self._found.get(found)
        if known is not None:
            known.count += 1
        elif len(self._found) < MAX_SIGNATURES:
            sample = line.strip().encode()[:MAX_SAMPLE_BYTES].decode(errors="ignore")
            self._found[found] = link_pb2.LogFingerprint(
                signature=found, count=1, first_rank=rank, sample_line=sample
            )


def _text(line: bytes) -> str:
    return line.rstrip(b"\r").decode(errors="replace")[:MAX_LINE_CHARS]
