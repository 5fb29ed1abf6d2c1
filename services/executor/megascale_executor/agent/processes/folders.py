"""Folders of a node: of attempts, of jobs' processes under other accounts, and shared caches.

Note [Folders of other accounts]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
An agent that runs jobs under other accounts is root, and opens files in the attempts' folders by
name. A job that could replace such a file by a link would make root write elsewhere. So the
attempt's folder belongs to the agent, is sticky, and holds the agent's files before any process of
the job runs: the account can add files to it, but can neither replace nor remove those of the
agent. Files that the agent never opens, such as records for other tools, are in a folder of the
account.

Note [Shared caches]
~~~~~~~~~~~~~~~~~~~~
A cached folder, such as fetched code, is made once per content. Agents of one host can share the
cache, so kernel locks (flock), which end with their holder, order them: the builder of a folder
holds its lock exclusively, users share it, and only a folder without a holder is removed. A folder
is complete once it contains its mark; a folder that a killed builder left without one is built
again.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megascale_common.node import files
from megascale_common.node.account import Account
from megascale_common.node.files import AttemptFolder
from megascale_executor.agent import asyncio_tasks

MAX_KEPT = 8  # folders of one kind: the newest, and all that are in use
_MARK = ".complete"
_POLL_S = 0.1

Build = Callable[[Path], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class HeldFolder:
    """A complete folder, which is not removed before it is released."""

    path: Path
    lock: int

    def release(self) -> None:
        """Allow the removal of the folder; call it once."""
        os.close(self.lock)


class FolderCache:
    """The folders of one kind in ``base``, by a key that names their content.

    See Note [Shared caches].
    """

    def __init__(self, base: Path, max_kept: int = MAX_KEPT) -> None:
        self._base = base
        self._max_kept = max_kept
        self._builds: dict[str, asyncio.Task[None]] = {}

    async def hold(self, key: str, build: Build) -> HeldFolder:
        """The folder of ``key``, which ``build`` makes if there is none, one builder at a time.

        A build continues when its callers are cancelled, so that the next one finds the folder.

        Raises:
            OSError: the cache cannot be written.
            Exception: what ``build`` raises; nothing is kept then.
        """
        self._base.mkdir(mode=0o755, parents=True, exist_ok=True)
        while (held := self._complete(key)) is None:
            task = self._builds.get(key)
            if task is None:
                task = asyncio.create_task(self._build(key, build), name=f"build-{key[:12]}")
                self._builds[key] = task
                task.add_done_callback(lambda done: self._forget(key, done))
            await asyncio.shield(task)
        return held

    async def close(self) -> None:
        """Cancel builds in progress."""
        for task in list(self._builds.values()):
            await asyncio_tasks.cancelled(task)

    def _forget(self, key: str, done: asyncio.Task[None]) -> None:
        del self._builds[key]
        if not done.cancelled():
            done.exception()  # mark it as retrieved: the callers may all be gone

    def _complete(self, key: str) -> HeldFolder | None:
        path, lock = self._base / key, self._open(key)
        if _try(lock, fcntl.LOCK_SH) and (path / _MARK).exists():
            os.utime(path / _MARK)
            return HeldFolder(path, lock)
        os.close(lock)
        return None

    async def _build(self, key: str, build: Build) -> None:
        """Build the folder, or wait a moment while another process does."""
        path, lock = self._base / key, self._open(key)
        try:
            if not _try(lock, fcntl.LOCK_EX):
                await asyncio.sleep(_POLL_S)
                return
            if (path / _MARK).exists():
                return
            await asyncio.to_thread(_remove, path)
            try:
                await build(path)
                (path / _MARK).touch()
            except BaseException:
                await asyncio.to_thread(_remove, path)
                raise
            await asyncio.to_thread(self._prune, key)
        finally:
            os.close(lock)

    def _open(self, key: str) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        return os.open(self._base / f"{key}.lock", flags, 0o600)

    def _prune(self, kept: str) -> None:
        """Remove the oldest unused folders beyond the limit."""
        marks = sorted(
            self._base.glob(f"*/{_MARK}"), key=lambda mark: mark.stat().st_mtime, reverse=True
        )
        for mark in marks[self._max_kept :]:
            key = mark.parent.name
            if key == kept:
                continue
            lock = self._open(key)
            try:
                if _try(lock, fcntl.LOCK_EX):
                    _remove(mark.parent)
            finally:
                os.close(lock)


def _try(lock: int, kind: int) -> bool:
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
        return True
    return False


def _remove(path: Path) -> None:
    """Remove a folder; its mark first, so that the rest never counts as complete."""
    (path / _MARK).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


_PASSABLE = 0o711
_STICKY = 0o1770


def prepare(folder: AttemptFolder, account: Account | None, ranks: Sequence[int]) -> Path:
    """Make the attempt's folder; returns the folder for its processes' files for other tools.

    See Note [Folders of other accounts].

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
    """Socket path of an attempt's data loader, in the agent's folder of sockets."""
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
            raise PermissionError(f"{file} exists already and is not the agent's")
    finally:
        os.close(descriptor)


def lock_node(node_folder: Path, node: str) -> int:
    """Lock ``agent.lock`` in the node's folder until this process ends; returns its descriptor.

    Raises:
        OSError: another agent holds it; the text names its process.
    """
    descriptor = os.open(node_folder / "agent.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        # The kernel releases the lock when the process ends, however it ends. So a file without a
        # lock means nothing.
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
    return AttemptFolder(node_folder / files.attempt_folder(job, attempt))


def newest_attempt(node_folder: Path, job: str) -> int:
    """Highest attempt of ``job`` with files on this node; 0 when there is none."""
    numbers = [
        path.name.removeprefix("attempt-")
        for path in (node_folder / "jobs" / job).glob("attempt-*")
    ]
    return max((int(number) for number in numbers if number.isdecimal()), default=0)
