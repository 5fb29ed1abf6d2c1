"""What `ps` and `top` show of a worker: its rank and its job instead of the template's command.

A forked process has the command line of the process that forked it. The kernel reads it from the
memory in which it was passed (proc_pid_stat(5), arg_start and arg_end), so writing there changes
what `ps -o args` shows, within the length of the original.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from megascale_common.node.process import stat_fields

_NAME_BYTES = 15  # TASK_COMM_LEN of the kernel, less the closing zero


def show(title: str, name: str) -> None:
    """Show ``title`` as this process's arguments, and ``name`` (15 bytes of it) as its name.

    Both are for people only: where the kernel does not offer them, nothing changes.
    """
    try:
        Path("/proc/self/comm").write_bytes(name.encode()[:_NAME_BYTES])
        fields = stat_fields(os.getpid())
        start, end = int(fields[45]), int(fields[46])
    except (OSError, IndexError, ValueError):
        return
    if 0 < start < end:
        # The zeros behind the title overwrite what is left of the old arguments; the last byte
        # stays zero, or the kernel would read on into the environment.
        room = end - start
        text = title.encode()[: room - 1]
        ctypes.memmove(start, text + bytes(room - len(text)), room)
