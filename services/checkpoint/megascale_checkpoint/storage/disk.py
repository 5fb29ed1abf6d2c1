"""The system calls that :class:`FileStorage` is made of.

They are a layer of their own so that a test can put a model of a disk in their place, one that
loses what was not synced when it crashes (tests/crash).
"""

from __future__ import annotations

import os
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Status:
    """What stands at a path; ``inode`` and ``device`` distinguish it from what stood there."""

    is_folder: bool
    size_bytes: int
    inode: int
    device: int


class Disk(Protocol):
    """System calls on paths and descriptors. All raise OSError.

    Attributes:
        durable: folders whose names this process has synced, with their inode; not again for each
            file.
        failed: folders whose last sync failed. A second fsync of the same state may report success
            although the kernel has dropped what could not be written.
    """

    durable: dict[Path, int]
    failed: set[Path]

    def create_temporary(self, folder: Path, prefix: str) -> tuple[int, str]:
        """A new file of its own name, open for writing: descriptor and path."""

    def write(self, descriptor: int, data: memoryview) -> int:
        """Write some of ``data``; returns how many bytes."""

    def fsync(self, descriptor: int) -> None:
        """Make a file's bytes durable."""

    def close(self, descriptor: int) -> None:
        """Close a descriptor."""

    def open(self, path: Path) -> int:
        """Open a file for reading."""

    def pread(self, descriptor: int, target: memoryview, offset: int) -> int:
        """Fill some of ``target`` from ``offset`` on; returns how many bytes, 0 at the end."""

    def link(self, source: str, target: Path) -> None:
        """Give a file a second name; FileExistsError when the name is taken."""

    def rename(self, source: str, target: Path) -> None:
        """Move a file to a name, in place of what stood there, atomically."""

    def unlink(self, path: str | Path) -> None:
        """Remove a name."""

    def mkdir(self, path: Path) -> None:
        """Make a folder; FileExistsError when the name is taken."""

    def rmdir(self, path: Path) -> None:
        """Remove an empty folder."""

    def listdir(self, path: Path) -> list[str]:
        """All names in a folder."""

    def sync_folder(self, path: Path) -> None:
        """Make the names in a folder durable."""

    def status(self, path: Path) -> Status:
        """What stands at ``path``."""


class SystemDisk:
    """The operating system's own calls."""

    def __init__(self) -> None:
        self.durable: dict[Path, int] = {}
        self.failed: set[Path] = set()

    def create_temporary(self, folder: Path, prefix: str) -> tuple[int, str]:
        """See :class:`Disk`."""
        return tempfile.mkstemp(prefix=prefix, dir=folder)

    def write(self, descriptor: int, data: memoryview) -> int:
        """See :class:`Disk`."""
        return os.write(descriptor, data)

    def fsync(self, descriptor: int) -> None:
        """See :class:`Disk`."""
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        """See :class:`Disk`."""
        os.close(descriptor)

    def open(self, path: Path) -> int:
        """See :class:`Disk`."""
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def pread(self, descriptor: int, target: memoryview, offset: int) -> int:
        """See :class:`Disk`."""
        return os.preadv(descriptor, [target], offset)

    def link(self, source: str, target: Path) -> None:
        """See :class:`Disk`."""
        os.link(source, target)

    def rename(self, source: str, target: Path) -> None:
        """See :class:`Disk`."""
        os.rename(source, target)

    def unlink(self, path: str | Path) -> None:
        """See :class:`Disk`."""
        os.unlink(path)

    def mkdir(self, path: Path) -> None:
        """See :class:`Disk`."""
        os.mkdir(path)

    def rmdir(self, path: Path) -> None:
        """See :class:`Disk`."""
        os.rmdir(path)

    def listdir(self, path: Path) -> list[str]:
        """See :class:`Disk`."""
        return os.listdir(path)

    def sync_folder(self, path: Path) -> None:
        """See :class:`Disk`."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def status(self, path: Path) -> Status:
        """See :class:`Disk`."""
        found = os.stat(path)
        return Status(stat.S_ISDIR(found.st_mode), found.st_size, found.st_ino, found.st_dev)


SYSTEM = SystemDisk()
