"""Private folders with short paths for the unix sockets of a process and its children.

The kernel limits a socket's path to 108 bytes. An owner file in each folder holds process id and
start time. With both, the next owner of the same name can tell that the former one is dead, even if
its process id is in use again, and removes its folder.

Each socket is served by one process of the node to the others of the same user.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import socket
import stat
from pathlib import Path

from megascale_common.node.process import start_ticks

_OWNER_FILE = "owner"
_PASSABLE = 0o711
_MAX_FOLDER_BYTES = 80  # leaves 27 for the longest socket name


def create_socket_folder(
    cluster: str, node: str, incarnation: str, *, passable: bool = False
) -> Path:
    """A new private folder for this agent's sockets; removes those of dead agents of the node.

    Args:
        passable: other accounts can pass through it to a socket or folder of their own, but can
            neither list nor change it.

    Raises:
        OSError: the folder cannot be made, or its parent belongs to another user.
    """
    parent = _passable_parent() if passable else _socket_parent()
    prefix = hashlib.sha256(f"{cluster}/{node}".encode()).hexdigest()[:12]
    _remove_stale(parent, prefix)
    folder = parent / f"{prefix}-{incarnation}"
    folder.mkdir(mode=0o700)
    if passable:
        folder.chmod(_PASSABLE)
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
    """``$XDG_RUNTIME_DIR/megascale``, mode 0700.

    ``/tmp/megascale-UID`` if XDG_RUNTIME_DIR is unset, not writable, or too long for socket paths.
    """
    candidates = [Path(f"/tmp/megascale-{os.getuid()}")]
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime and len(runtime.encode()) < _MAX_FOLDER_BYTES - 50 and os.access(runtime, os.W_OK):
        candidates.insert(0, Path(runtime) / "megascale")
    parent = candidates[0]
    with contextlib.suppress(FileExistsError):
        parent.mkdir(mode=0o700)
    return _checked(parent, 0o700)


def _passable_parent() -> Path:
    """``/tmp/megascale-UID-jobs``, mode 0711: a user's runtime folder is closed to others."""
    parent = Path(f"/tmp/megascale-{os.getuid()}-jobs")
    with contextlib.suppress(FileExistsError):
        parent.mkdir(mode=0o700)
        parent.chmod(_PASSABLE)
    return _checked(parent, _PASSABLE)


def _checked(parent: Path, mode: int) -> Path:
    # Every user can make files in /tmp, so a folder of another user, or a link to one, is refused.
    found = parent.lstat()
    unwanted = stat.S_IMODE(found.st_mode) & ~mode
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or unwanted:
        raise OSError(
            f"{parent} must be a folder of mode {mode:04o} that belongs to user {os.getuid()}; "
            "remove it"
        )
    return parent


def listen(path: Path, server: str, backlog: int) -> socket.socket:
    """A listening stream socket at ``path``, mode 0600.

    A socket file that a dead process left behind is replaced. ``server`` names the process in the
    error's text.

    Raises:
        OSError: another process listens there, the path is another kind of file, is too long for a
            unix socket, or cannot be written.
    """
    if path.exists() and stat.S_ISSOCK(path.stat().st_mode):
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(str(path)) == 0:
                raise OSError(f"another {server} listens on {path}")
        path.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # By umask and not by a later chmod, so that no other user can connect in between.
    mask = os.umask(0o177)
    try:
        listener.bind(str(path))
    except OSError:
        listener.close()
        raise
    finally:
        os.umask(mask)
    listener.listen(backlog)
    return listener
