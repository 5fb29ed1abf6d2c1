"""Files and sockets of an attempt whose processes run under another account than the agent.

The agent, which is root then, opens by name what lies in these folders. So the account may make
files beside those that the agent reads and writes, and can neither replace nor remove those: the
attempt's folder is the agent's, sticky, and holds the agent's files before any process of the job
runs. What the agent never opens, such as records for other tools, lies in a folder of the account.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from megascale_common.node.account import Account
from megascale_common.node.attempt_files import AttemptFolder

_PASSABLE = 0o711
_STICKY = 0o1770


def prepare(folder: AttemptFolder, account: Account | None, ranks: Sequence[int]) -> Path:
    """Make the attempt's folder; returns where its processes keep files for other tools.

    Raises:
        OSError: a folder or file cannot be made, or is not the agent's.
    """
    folder.path.mkdir(parents=True, exist_ok=True)
    if account is None:
        return folder.path
    job = folder.path.parent
    for passed in (job.parent.parent, job.parent, job):  # nodes/NODE, jobs, jobs/JOB
        passed.chmod(_PASSABLE)
    for file in (folder.config, folder.loader_log, *map(folder.log, ranks)):
        _make_own(file)
    os.chown(folder.path, os.getuid(), account.gid)
    folder.path.chmod(_STICKY)
    folder.config.chmod(0o644)
    kept = job / f"files-of-{account.name}"
    kept.mkdir(mode=0o700, exist_ok=True)
    os.chown(kept, account.uid, account.gid)
    return kept / folder.path.name


def loader_socket(folder: Path, attempt: int, account: Account | None) -> Path:
    """Where the data loader of an attempt listens, in the agent's folder of sockets."""
    if account is None:
        return folder / f"loader-{attempt}.sock"
    own = folder / str(attempt)
    own.mkdir(mode=0o700, exist_ok=True)
    os.chown(own, account.uid, account.gid)
    return own / "loader.sock"


def _make_own(file: Path) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(file, flags, 0o640)
    try:
        found = os.fstat(descriptor)
        if found.st_uid != os.getuid() or found.st_nlink != 1:
            raise PermissionError(f"{file} is there already, and is not the agent's")
    finally:
        os.close(descriptor)
