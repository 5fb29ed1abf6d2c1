"""Where a worker was that stood still when it was stopped: its stack, or what the kernel shows.

The worker's signal handler (faulthandler) writes the stacks of all its threads to its log, even
from inside a hung call. What it has written there is read back and shortened to the thread that
took the signal, which is the one that trains. A process that is stopped, or that waits in the
kernel without interruption, writes none: then its state is the evidence.
"""

from __future__ import annotations

import re
from pathlib import Path

from megascale_common.node.process import stat_fields

MAX_FRAMES = 6
MAX_READ_BYTES = 1 << 16  # of what a process writes of all its threads
MAX_CHARS = 600

_FRAME = re.compile(r'^  File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<name>\S+)$')
_CURRENT = re.compile(r"^Current thread 0x[0-9a-f]+.*\(most recent call first\):$")
_STATES = {
    "T": "is stopped (T): it executes nothing until it gets SIGCONT",
    "t": "is stopped by a debugger (t)",
    "D": "waits in the kernel without interruption (D)",
    "Z": "has ended (Z)",
}


def log_end(log: Path) -> int:
    """Bytes that a log has by now; 0 if it cannot be read."""
    try:
        return log.stat().st_size
    except OSError:
        return 0


def stack_since(log: Path, start: int) -> str:
    """The stack that was written to ``log`` from byte ``start`` on, innermost frame first.

    As ``name (folder/file.py:12) < caller (...)``; "" if there is none.
    """
    try:
        with log.open("rb") as file:
            file.seek(start)
            text = file.read(MAX_READ_BYTES).decode(errors="replace")
    except OSError:
        return ""
    frames: list[str] = []
    inside = False
    for line in text.splitlines():
        found = _FRAME.match(line)
        if _CURRENT.match(line):
            frames, inside = [], True
        elif inside and found is not None:
            file_name = "/".join(Path(found["file"]).parts[-2:])
            frames.append(f"{found['name']} ({file_name}:{found['line']})")
        else:
            inside = False
    return " < ".join(frames[:MAX_FRAMES])[:MAX_CHARS]


def kernel_state(pid: int) -> str:
    """Why a process writes no stack: its state, and where it waits in the kernel."""
    fields = stat_fields(pid)
    if not fields:
        return "has ended"
    text = _STATES.get(fields[0], f"wrote no stack in time (state {fields[0]})")
    try:
        where = Path(f"/proc/{pid}/wchan").read_text().strip("\0\n ")
    except OSError:
        where = ""
    return f"{text}, at {where}" if where not in ("", "0") else text
