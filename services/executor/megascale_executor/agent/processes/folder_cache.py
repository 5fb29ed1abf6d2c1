"""Folders that are made once for each content and shared: fetched code, installed environments.

Agents of one host may share the cache. Locks of the kernel, which end with their holder, order
them: who builds a folder holds its lock alone, who uses it shares it, and only what nobody holds is
removed. A folder counts once its mark stands in it; what a killed builder left is built anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from megascale_executor.agent import asyncio_tasks

MAX_KEPT = 8  # of one kind; the newest, and all that are in use
_MARK = ".complete"
_POLL_S = 0.1

Build = Callable[[Path], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class HeldFolder:
    """A complete folder, which stays until it is released."""

    path: Path
    lock: int

    def release(self) -> None:
        """Let the folder be removed when others are newer; call it once."""
        os.close(self.lock)


class FolderCache:
    """The folders of one kind in ``base``, by a key that names their content."""

    def __init__(self, base: Path, max_kept: int = MAX_KEPT) -> None:
        self._base, self._max_kept = base, max_kept
        self._builds: dict[str, asyncio.Task[None]] = {}

    async def hold(self, key: str, build: Build) -> HeldFolder:
        """The folder of ``key``; built by ``build`` where there is none, by one builder at a time.

        A build goes on when its callers are cancelled: the next one finds the folder.

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
        """End builds that still run."""
        for task in list(self._builds.values()):
            await asyncio_tasks.cancelled(task)

    def _forget(self, key: str, done: asyncio.Task[None]) -> None:
        del self._builds[key]
        if not done.cancelled():
            done.exception()  # whoever waits has it; nobody may wait any more

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
        """Remove the oldest folders beyond the limit that nobody uses."""
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
    """Remove a folder; its mark first, so that a part of it never counts."""
    (path / _MARK).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)
