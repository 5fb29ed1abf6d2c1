"""Where a node's files are, and the removal of what a dead agent of the same node left.

Logs and status pages are under the run folder. Unix sockets are in a private folder with a short
path, because the kernel takes at most 108 bytes of it. An owner file in that folder holds process
id and start time: the next agent of the node detects by them that the owner is dead, even when the
id is in use again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path

from megascale_common.node import attempt_files
from megascale_common.node.process import start_ticks

_OWNER_FILE = "owner"
_MAX_FOLDER_BYTES = 80  # leaves 27 for the longest socket name


@dataclass(frozen=True, slots=True)
class AttemptFolder:
    """Files of one attempt of a job on this node."""

    path: Path

    def log(self, rank: int) -> Path:
        """Output of a rank."""
        return self.path / f"rank-{rank:05d}.log"

    def status_page(self, rank: int) -> Path:
        """Status page of a rank."""
        return self.path / f"status-{rank:05d}.page"

    @property
    def config(self) -> Path:
        """The job as the loader reads it."""
        return self.path / "config.json"

    @property
    def tensorboard(self) -> Path:
        """Folder of the event files, on rank 0's node."""
        return self.path / "tensorboard"

    @property
    def loader_log(self) -> Path:
        """Output of the data loader."""
        return self.path / "loader.log"


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


def create_socket_folder(cluster: str, node: str, incarnation: str) -> Path:
    """A new private folder for this agent's sockets; removes those of dead agents of the node.

    Raises:
        OSError: the folder cannot be made, or its parent belongs to another user.
    """
    parent = _socket_parent()
    prefix = hashlib.sha256(f"{cluster}/{node}".encode()).hexdigest()[:12]
    _remove_stale(parent, prefix)
    folder = parent / f"{prefix}-{incarnation}"
    folder.mkdir(mode=0o700)
    (folder / _OWNER_FILE).write_text(f"{os.getpid()} {start_ticks(os.getpid())}\n")
    return folder


def _remove_stale(parent: Path, prefix: str) -> list[Path]:
    stale = [folder for folder in parent.glob(f"{prefix}-*") if not _owner_lives(folder)]
    for folder in stale:
        shutil.rmtree(folder, ignore_errors=True)
    return stale


def _owner_lives(folder: Path) -> bool:
    try:
        pid, started = (int(word) for word in (folder / _OWNER_FILE).read_text().split())
    except (OSError, ValueError):
        return False
    return start_ticks(pid) == started


def _socket_parent() -> Path:
    """``$XDG_RUNTIME_DIR/megascale``, or ``/tmp/megascale-UID`` where that is unusable; mode 0700.

    Unusable: unset, not writable, or too long for the paths of sockets.
    """
    candidates = [Path(f"/tmp/megascale-{os.getuid()}")]
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime and len(runtime.encode()) < _MAX_FOLDER_BYTES - 50 and os.access(runtime, os.W_OK):
        candidates.insert(0, Path(runtime) / "megascale")
    parent = candidates[0]
    with contextlib.suppress(FileExistsError):
        parent.mkdir(mode=0o700)
    # Anybody may make files in /tmp: a folder of another user, or a link to one, is refused.
    found = parent.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise OSError(
            f"{parent} must be a folder of mode 0700 that belongs to user {os.getuid()}; remove it"
        )
    return parent
