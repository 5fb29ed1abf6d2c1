"""Unix sockets at a path, on which a process of the node serves the others of its user."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path


def listen(path: Path, server: str, backlog: int) -> socket.socket:
    """A listening stream socket at ``path``, mode 0600.

    The socket file that a dead ``server`` (for the error's text) left behind is replaced.

    Raises:
        OSError: another process listens there, something else lies there, or the path is too long
            for a unix socket or cannot be written.
    """
    if path.exists() and stat.S_ISSOCK(path.stat().st_mode):
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(str(path)) == 0:
                raise OSError(f"another {server} listens on {path}")
        path.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # By the mask, not by chmod afterwards: nobody else can connect in between.
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
