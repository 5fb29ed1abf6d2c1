"""Storage of checkpoints: the few operations that the commit protocol needs, and their file form.

Paths are relative to the storage's root and use '/'. Nothing is ever overwritten: a file appears
complete and durable, and only if its name was free. Calls block; run them in threads.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

from megascale_common.service.errors import RequestError


class Storage(Protocol):
    """Root of a tree of immutable files."""

    @property
    def uri(self) -> str:
        """URI of the root."""

    def write(self, path: str, chunks: Iterable[bytes | memoryview]) -> int:
        """Write a new file, durably, and return its size in bytes.

        Raises:
            FileExistsError: the name is taken.
            OSError: the file cannot be written; nothing is left of it.
        """

    def create(self, path: str, data: bytes) -> bool:
        """Write a new small file if its name is free; False when it is taken."""

    def read(self, path: str) -> bytes:
        """All bytes of a small file. FileNotFoundError when there is none."""

    def read_into(self, path: str, offset: int, target: memoryview) -> int:
        """Fill ``target`` from ``offset`` on; returns fewer bytes only at the file's end."""

    def size(self, path: str) -> int | None:
        """Size in bytes, None when there is no such file."""

    def names(self, folder: str) -> list[str]:
        """Names of the complete files in ``folder``, sorted; none when it does not exist."""

    def remove_unfinished(self, folder: str) -> int:
        """Remove unfinished files in ``folder``; returns how many.

        A writer that still runs then fails, so the folder must belong to a fenced attempt.
        """


def open_storage(uri: str) -> Storage:
    """Storage at ``uri``: an absolute path or file:///path.

    Raises:
        RequestError: another scheme, a remote host, or a relative path.
    """
    parts = urlsplit(uri)
    if parts.scheme not in ("", "file") or parts.netloc not in ("", "localhost"):
        raise RequestError(
            f"checkpoint uri {uri!r} is not supported: give an absolute path or file:///path"
        )
    path = Path(unquote(parts.path) if parts.scheme else uri)
    if not path.is_absolute():
        raise RequestError(
            f"checkpoint uri {uri!r} is relative, and each node would resolve it differently: "
            "give an absolute path"
        )
    return FileStorage(path)


def join(uri: str, path: str) -> str:
    """URI of ``path`` below ``uri``."""
    return f"{uri.rstrip('/')}/{path}"


def split(uri: str) -> tuple[str, str]:
    """Folder and name of a file's URI."""
    folder, _, name = uri.rpartition("/")
    return folder, name


class FileStorage:
    """A folder on a file system with hard links (ext4, xfs, NFS, Lustre).

    link(2) is the create-if-absent: it fails when the name exists, atomically and on every client
    of a shared file system, where rename(2) would overwrite.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    @property
    def uri(self) -> str:
        """The folder's path."""
        return str(self._root)

    def write(self, path: str, chunks: Iterable[bytes | memoryview]) -> int:
        """See :meth:`Storage.write`."""
        target = self._at(path)
        _make_folder(target.parent)
        size = 0
        # Order: write, fsync the file, link it to its name, fsync the folder. A crash before the
        # link leaves a temporary file that no reader sees; after the link the bytes are on disk, so
        # a name never leads to a file that is cut short. The name itself is durable only after the
        # last fsync, and only then may anything refer to it.
        with _names(target), _temporary(target) as (descriptor, name):
            for chunk in chunks:
                _write_all(descriptor, memoryview(chunk))
                size += len(chunk)
            os.fsync(descriptor)
            _link(name, target)
        _sync_folder(target.parent)
        return size

    def create(self, path: str, data: bytes) -> bool:
        """See :meth:`Storage.create`."""
        try:
            self.write(path, [data])
        except FileExistsError:
            return False
        return True

    def read(self, path: str) -> bytes:
        """See :meth:`Storage.read`."""
        return self._at(path).read_bytes()

    def read_into(self, path: str, offset: int, target: memoryview) -> int:
        """See :meth:`Storage.read_into`."""
        done = 0
        with self._at(path).open("rb", buffering=0) as file:
            while done < len(target):
                count = os.preadv(file.fileno(), [target[done:]], offset + done)
                if count == 0:
                    break
                done += count
        return done

    def size(self, path: str) -> int | None:
        """See :meth:`Storage.size`."""
        try:
            return self._at(path).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def names(self, folder: str) -> list[str]:
        """See :meth:`Storage.names`. Temporary files start with "." and are not listed."""
        try:
            return sorted(name for name in os.listdir(self._at(folder)) if not name.startswith("."))
        except FileNotFoundError:
            return []

    def remove_unfinished(self, folder: str) -> int:
        """See :meth:`Storage.remove_unfinished`."""
        count = 0
        with suppress(FileNotFoundError):
            for entry in os.scandir(self._at(folder)):
                if entry.name.startswith("."):
                    os.unlink(entry.path)
                    count += 1
        return count

    def _at(self, path: str) -> Path:
        # Paths also come from manifests, which may be damaged or of foreign origin.
        parts = path.split("/")
        if not path or any(part in ("", ".", "..") for part in parts):
            raise RequestError(f"path {path!r} does not stay below {self._root}")
        return self._root.joinpath(*parts)


@contextmanager
def _temporary(target: Path) -> Iterator[tuple[int, str]]:
    """A temporary file beside ``target``, removed at the end in any case."""
    # In the target's own folder, because a link cannot cross file systems; the name starts with "."
    # so that names() skips it and remove_unfinished() finds it.
    descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        yield descriptor, name
    finally:
        os.close(descriptor)
        with suppress(FileNotFoundError):  # a later attempt may have removed it as unfinished
            os.unlink(name)


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:  # a write may be partial, near a quota for example
        data = data[os.write(descriptor, data) :]


@contextmanager
def _names(target: Path) -> Iterator[None]:
    """Give an error of a descriptor the name of its file: "no space left" alone helps nobody."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(target)) from error


def _link(source: str, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
            text = (
                "this file system has no hard links, which commits need: "
                "use ext4, xfs, NFS or Lustre"
            )
            raise OSError(error.errno, text, str(target)) from error
        raise


def _make_folder(folder: Path) -> None:
    """Create ``folder`` durably, parents first: each new name is synced in its parent folder."""
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    try:
        folder.mkdir(exist_ok=True)  # another rank may create it at the same time
    except FileExistsError as error:
        # Not the error of a file that was written before: this one may go away.
        text = "a file is where a folder is needed"
        raise NotADirectoryError(errno.ENOTDIR, text, str(folder)) from error
    _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
