"""Where a node's files are: logs and status pages, under the run folder."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from megascale_common.node import attempt_files
from megascale_common.node.attempt_files import AttemptFolder


def lock_node(node_folder: Path, node: str) -> int:
    """Lock ``agent.lock`` in the node's folder until this process ends; returns its descriptor.

    Raises:
        OSError: another agent holds it; the message names its process.
    """
    descriptor = os.open(node_folder / "agent.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        # The kernel releases the lock with the process, however it ends; a file that is left means
        # nothing.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, 20, 0).decode(errors="replace").strip()
        os.close(descriptor)
        raise OSError(
            f"node {node} already runs here as pid {holder or 'unknown'}: end that agent, "
            "or give this one another --node or --run-folder"
        ) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


def attempt_folder(node_folder: Path, job: str, attempt: int) -> AttemptFolder:
    """The folder of an attempt; not created."""
    return AttemptFolder(node_folder / attempt_files.attempt_folder(job, attempt))


def newest_attempt(node_folder: Path, job: str) -> int:
    """Highest attempt of ``job`` with files on this node; 0 when there is none."""
    numbers = [
        path.name.removeprefix("attempt-")
        for path in (node_folder / "jobs" / job).glob("attempt-*")
    ]
    return max((int(number) for number in numbers if number.isdecimal()), default=0)
