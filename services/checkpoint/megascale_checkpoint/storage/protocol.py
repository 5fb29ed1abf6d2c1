"""The storage interface of the commit protocol: a tree of immutable files with few verbs.

Paths are relative to the storage's root and use '/'. Nothing is ever overwritten: a file appears
complete and durable, and only if its name was free. Calls block; run them in threads. Several
threads can use one storage object at the same time.

Every verb raises OSError if the storage does not answer, is full or refuses. After an OSError of
:meth:`Storage.create` the outcome is unknown, because the file can exist although the reply was
lost: :func:`settle` finds out. Why that matters: Note [Fenced append].
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from typing import Protocol

from megascale_common.service.errors import DamagedError, RequestError

_FIRST_READ_BYTES = 1 << 16  # holds nearly every record and manifest


class Storage(Protocol):
    """Root of a tree of immutable files."""

    @property
    def uri(self) -> str:
        """URI of the root, with which ``open_storage`` opens the same tree."""

    def check(self) -> None:
        """Write and remove a small file, to find out whether the storage can be used.

        Raises:
            OSError: it cannot; the text gives the remedy if one is known.
        """

    def write(self, path: str, chunks: Iterable[bytes | memoryview]) -> int:
        """Write a new file of any size, durably, and return its size in bytes.

        Raises:
            FileExistsError: the name is taken.
            OSError: the file cannot be written, or its reply was lost and it exists all the same;
                write it again under another name.
        """

    def create(self, path: str, data: bytes) -> bool:
        """Write a new small file if its name is free, atomically; False if it is taken.

        Raises:
            OSError: the outcome is unknown; see :func:`settle`.
        """

    def confirm(self, path: str, data: bytes) -> bool:
        """Settle an unknown outcome: True if ``path`` holds exactly ``data``, durably.

        A file with these bytes that may not be durable yet is made durable first. False if there is
        no file, or one with other bytes.
        """

    def read(self, path: str) -> bytes:
        """All bytes of a small file. FileNotFoundError if there is none."""

    def read_into(self, path: str, offset: int, target: memoryview) -> int:
        """Fill ``target`` from ``offset`` on; returns fewer bytes only at the file's end.

        FileNotFoundError if there is no file.
        """

    def size(self, path: str) -> int | None:
        """Size in bytes; None if there is no such file."""

    def names(self, folder: str, after: str = "") -> list[str]:
        """Names of the complete files and of the folders in ``folder``, sorted.

        Only names greater than ``after``. Empty if the folder does not exist; the folder "" is the
        root.
        """

    def delete(self, path: str) -> bool:
        """Remove a file or an empty folder, durably; False if there is none."""

    def remove_unfinished(self, folder: str) -> int:
        """Remove unfinished files in ``folder``; return their number.

        A writer that still runs then fails, so the folder must belong to a fenced attempt.
        """


def reads_as(storage: Storage, path: str, data: bytes) -> bool:
    """:meth:`Storage.confirm` for a storage in which everything that can be read is durable."""
    try:
        return storage.read(path) == data
    except FileNotFoundError:
        return False


def settle(storage: Storage, path: str, data: bytes) -> bool:
    """Create ``path`` with ``data`` if its name is free; True if it then holds ``data``, durably.

    For bytes that no other writer would write, such as a record with its writer's name: an earlier
    call whose reply was lost is then recognised as a success.

    Raises:
        OSError: the outcome is still unknown. Call again with the same bytes, and write no others
            to ``path`` before.
    """
    try:
        if storage.create(path, data):
            return True
    except OSError:
        if storage.confirm(path, data):
            return True
        raise
    return storage.confirm(path, data)


def read_bounded(storage: Storage, path: str, max_bytes: int, name: str) -> bytes:
    """All bytes of a file of at most ``max_bytes``; ``name`` is its name in errors.

    Raises:
        DamagedError: it is larger, so other software has written it. It is not read.
        FileNotFoundError: there is none.
    """
    first = bytearray(min(_FIRST_READ_BYTES, max_bytes + 1))
    count = storage.read_into(path, 0, memoryview(first))
    if count < len(first):
        return bytes(first[:count])
    size = storage.size(path)
    if size is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
    if size > max_bytes:
        raise DamagedError(name, f"has {size} bytes, and such a file has {max_bytes} at most")
    rest = bytearray(size - count)
    count = storage.read_into(path, len(first), memoryview(rest))
    return bytes(first + rest[:count])


def join(uri: str, path: str) -> str:
    """URI of ``path`` below ``uri``."""
    return f"{uri.rstrip('/')}/{path}"


def split(uri: str) -> tuple[str, str]:
    """Folder and name of a file's URI."""
    folder, _, name = uri.rpartition("/")
    return folder, name


def check_path(path: str, root: str) -> list[str]:
    """Split a relative path into its parts.

    Checked because paths also come from manifests, which can be damaged or of foreign origin.

    Raises:
        RequestError: the path does not stay below ``root``.
    """
    parts = path.split("/")
    if not path or any(part in ("", ".", "..") for part in parts):
        raise RequestError(f"path {path!r} does not stay below {root}")
    return parts
