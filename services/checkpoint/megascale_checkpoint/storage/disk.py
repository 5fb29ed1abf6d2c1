"""The system calls that :class:`FileStorage` is made of.

They are a layer of their own so that a test can put a model of a disk in their place, one that
loses what was not synced when it crashes (tests/crash).
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

# Only a lookup: needs no right to read the folder, and no call to the server of a shared one.
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
MAX_NAME_TRIES = 100  # of a temporary file; eight random digits are taken once in four billion


@dataclass(frozen=True, slots=True)
class Status:
    """What stands at a path; ``inode`` and ``device`` distinguish it from what stood there."""

    is_folder: bool
    size_bytes: int
    inode: int
    device: int
    is_link: bool = False


def link_error(path: str | Path) -> OSError:
    """The refusal of a symbolic link below the root of a storage."""
    text = (
        "a symbolic link, and nothing below a checkpoint folder is followed: put the files "
        "themselves there, or remove the link"
    )
    return OSError(errno.ELOOP, text, str(path))


def is_link_error(error: OSError) -> bool:
    """Whether a call was refused because of a symbolic link."""
    return error.errno == errno.ELOOP


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
    """The operating system's own calls; see :class:`Disk` for each.

    Args:
        root: below this folder no symbolic link is followed, whoever puts one there and whenever:
            each call opens the folders on the way one by one. The root itself, and what is above
            it, may be links. None: links are followed anywhere.
    """

    def __init__(self, root: Path | None = None) -> None:
        self.durable: dict[Path, int] = {}
        self.failed: set[Path] = set()
        self._root = root

    def below(self, root: Path) -> SystemDisk:
        """The same disk, bounded by ``root``; it knows what this one has synced."""
        disk = SystemDisk(root)
        disk.durable = self.durable
        disk.failed = self.failed
        return disk

    def create_temporary(self, folder: Path, prefix: str) -> tuple[int, str]:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        for _ in range(MAX_NAME_TRIES):
            path = folder / f"{prefix}{secrets.token_hex(4)}"
            with self._within(path) as (parent, name):
                try:
                    return os.open(name, flags, 0o600, dir_fd=parent), str(path)
                except FileExistsError:
                    continue
        raise FileExistsError(errno.EEXIST, "no temporary name is free", str(folder))

    def write(self, descriptor: int, data: memoryview) -> int:
        return os.write(descriptor, data)

    def fsync(self, descriptor: int) -> None:
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def open(self, path: Path) -> int:
        with self._within(path) as (parent, name):
            # O_NONBLOCK: opening a pipe, which is no file of a checkpoint, must not wait.
            flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | _nofollow(parent)
            return os.open(name, flags, dir_fd=parent)

    def pread(self, descriptor: int, target: memoryview, offset: int) -> int:
        return os.preadv(descriptor, [target], offset)

    def link(self, source: str, target: Path) -> None:
        with self._within(Path(source)) as (here, old), self._within(target) as (there, new):
            os.link(old, new, src_dir_fd=here, dst_dir_fd=there, follow_symlinks=False)

    def rename(self, source: str, target: Path) -> None:
        with self._within(Path(source)) as (here, old), self._within(target) as (there, new):
            os.rename(old, new, src_dir_fd=here, dst_dir_fd=there)

    def unlink(self, path: str | Path) -> None:
        with self._within(Path(path)) as (parent, name):
            os.unlink(name, dir_fd=parent)

    def mkdir(self, path: Path) -> None:
        with self._within(path) as (parent, name):
            os.mkdir(name, dir_fd=parent)

    def rmdir(self, path: Path) -> None:
        with self._within(path) as (parent, name):
            os.rmdir(name, dir_fd=parent)

    def listdir(self, path: Path) -> list[str]:
        with self._opened_folder(path) as descriptor:
            return os.listdir(descriptor)

    def sync_folder(self, path: Path) -> None:
        with self._opened_folder(path) as descriptor:
            os.fsync(descriptor)

    def status(self, path: Path) -> Status:
        with self._within(path) as (parent, name):
            found = os.stat(name, dir_fd=parent, follow_symlinks=parent is None)
        mode = found.st_mode
        is_folder, is_link = stat.S_ISDIR(mode), stat.S_ISLNK(mode)
        return Status(is_folder, found.st_size, found.st_ino, found.st_dev, is_link)

    @contextmanager
    def _opened_folder(self, path: Path) -> Iterator[int]:
        with self._within(path) as (parent, name):
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | _nofollow(parent)
            try:
                descriptor = os.open(name, flags, dir_fd=parent)
            except NotADirectoryError:
                _refuse_link(name, parent, path)
                raise
            try:
                yield descriptor
            finally:
                os.close(descriptor)

    @contextmanager
    def _within(self, path: Path) -> Iterator[tuple[int | None, str]]:
        """The folder that holds ``path``, opened, and the name in it; None and the path above.

        Raises:
            OSError: there is no such folder, or a link on the way; names the whole path.
        """
        root = self._root
        if root is None or root not in path.parents:
            yield None, str(path)
            return
        *folders, name = path.relative_to(root).parts
        parent = os.open(root, _FOLDER)
        try:
            place = root
            for each in folders:
                place = place / each
                try:
                    below = os.open(each, _FOLDER | os.O_NOFOLLOW, dir_fd=parent)
                except NotADirectoryError:
                    _refuse_link(each, parent, place)
                    raise
                os.close(parent)
                parent = below
            yield parent, name
        except OSError as error:
            # The kernel was given a name alone.
            if error.errno == errno.ELOOP and error.filename == name:
                raise link_error(path) from error
            if error.filename is None or str(error.filename).startswith("/"):
                raise
            raise OSError(error.errno, error.strerror, str(path)) from error
        finally:
            os.close(parent)


def _nofollow(parent: int | None) -> int:
    return 0 if parent is None else os.O_NOFOLLOW


def _refuse_link(name: str, parent: int | None, path: Path) -> None:
    """Raise :func:`link_error` where a link is in place of a folder."""
    found = os.stat(name, dir_fd=parent, follow_symlinks=parent is None)
    if stat.S_ISLNK(found.st_mode):
        raise link_error(path)


SYSTEM = SystemDisk()
