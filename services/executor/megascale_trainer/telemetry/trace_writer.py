"""Writes a profiler's events to a gzipped Chrome trace, on a thread of low priority.

The profiler writes its JSON outside the interpreter's lock (measured with torch 2.13), and so does
zlib.
"""

from __future__ import annotations

import os
import shutil
import threading
import zlib
from pathlib import Path
from typing import Any, Literal

from megascale_common.node.messages import ProfileSteps

State = Literal["written", "skipped", "failed"]

MAX_RAW_BYTES = 2 << 30  # of a trace before compression; browsers give up earlier
MIN_FREE_BYTES = 1 << 30  # a trace is not worth a full disk
_WRITER_NICENESS = 10
_PART_BYTES = 1 << 20
_GZIP = 16 + zlib.MAX_WBITS
_END = b'"traceName"'  # the last key that the profiler writes


class TraceWriter(threading.Thread):
    """Writes one trace; ``outcome`` holds state, detail and size once it has ended."""

    def __init__(self, command: ProfileSteps, profile: Any) -> None:
        super().__init__(name="trace-writer", daemon=True)
        self.command = command
        self.outcome: tuple[State, str, int] = ("failed", "the writer ended without a result", 0)
        self._profile = profile

    def run(self) -> None:
        """Body of the thread."""
        # Of this thread alone: on Linux priorities belong to threads.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _WRITER_NICENESS)
        try:
            size_bytes = write_trace(self._profile, Path(self.command.path))
            self.outcome = ("written", "", size_bytes)
        except Exception as error:
            self.outcome = ("failed", text_of(error), 0)
        finally:
            self._profile = None


def write_trace(profile: Any, path: Path) -> int:
    """Write what a profiler has collected to ``path`` as gzipped JSON; returns its size in bytes.

    All of it is written, or nothing.

    Raises:
        OSError: no room, or the trace cannot be written.
        ValueError: it is larger than MAX_RAW_BYTES.
    """
    free_bytes = shutil.disk_usage(path.parent).free
    if free_bytes < MIN_FREE_BYTES:
        raise OSError(
            f"{path.parent} has {free_bytes} bytes left; "
            f"a trace is not written below {MIN_FREE_BYTES}"
        )
    raw, packed = path.with_name(f".{path.name}.raw"), path.with_name(f".{path.name}.part")
    try:
        profile.export_chrome_trace(str(raw))
        _check_whole(raw)
        _compress(raw, packed)
        packed.replace(path)
    finally:
        # The profiler has a name of its own for an unfinished file.
        for unfinished in path.parent.glob(f".{path.name}.*"):
            unfinished.unlink(missing_ok=True)
    return path.stat().st_size


def text_of(error: Exception) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {error}"


def _check_whole(raw: Path) -> None:
    """Raise if a trace is absent or cut: the profiler itself raises nothing then."""
    if not raw.exists():
        raise OSError(
            f"the profiler left no file in {raw.parent}: is the disk full? "
            "The rank's log has its messages"
        )
    size_bytes = raw.stat().st_size
    if size_bytes > MAX_RAW_BYTES:
        raise ValueError(
            f"the trace has {size_bytes} bytes, the limit is {MAX_RAW_BYTES}; profile fewer steps"
        )
    with raw.open("rb") as file:
        file.seek(max(size_bytes - 2 * len(str(raw)) - 1024, 0))
        tail = file.read()
    if _END not in tail or not tail.rstrip().endswith(b"}"):
        raise OSError(f"the trace was cut after {size_bytes} bytes: is the disk full?")


def _compress(raw: Path, packed: Path) -> None:
    packer = zlib.compressobj(level=1, wbits=_GZIP)
    with raw.open("rb") as source, packed.open("wb") as target:
        while part := source.read(_PART_BYTES):
            target.write(packer.compress(part))
        target.write(packer.flush())
