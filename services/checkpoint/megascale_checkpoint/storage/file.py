"""FileStorage: a folder on a file system with hard links (ext4, xfs, NFS, Lustre).

link(2) is the create-if-absent: it fails when the name exists, atomically and on every client of a
shared file system, where rename(2) would overwrite.

What is reported as written survives a crash of the host: the file is synced before it gets its
name, the name before success is reported, and every folder on the way down as well. A failed sync
is never repeated on the same state, because the kernel may have dropped what it could not write and
would report success: a file is written anew, and a folder is changed before it is synced again.

Nothing below the root is followed, read or written through a symbolic link: whoever can write into
a checkpoint folder could else have a daemon of another user read and remove files elsewhere, and a
step that was moved to an archive with a link left behind would be removed there. A link is refused
with its name; :meth:`FileStorage.delete` removes the link itself.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megascale_checkpoint.storage.disk import SYSTEM, Disk, link_error
from megascale_checkpoint.storage.protocol import check_path

# Unfinished files start with it: names() leaves them out, remove_unfinished() finds them.
UNFINISHED = "."


class FileStorage:
    """A folder. See :class:`Storage` for its verbs.

    Args:
        root: the folder; made when something is written.
        disk: what the system calls go to; by default the system, bounded by ``links_above``.
        uri: address of the folder, when it is not its path.
        links_above: the folder below which nothing is followed, where it is not ``root`` itself but
            above it.
    """

    def __init__(
        self,
        root: Path,
        disk: Disk | None = None,
        uri: str = "",
        links_above: Path | None = None,
    ) -> None:
        self._root = root
        self._uri = uri or str(root)
        self._disk: Disk = disk if disk is not None else SYSTEM.below(links_above or root)

    @property
    def uri(self) -> str:
        """The folder's path."""
        return self._uri

    def check(self) -> None:
        """See :meth:`Storage.check`; also finds out whether there are hard links."""
        self._make_folder(self._root)
        target = self._root / f"{UNFINISHED}check"
        with _names(target), self._temporary(target) as (descriptor, name):
            self._write_all(descriptor, memoryview(b"check"))
            self._disk.fsync(descriptor)
            linked = f"{name}.linked"
            self._link(name, Path(linked))
            self._disk.unlink(linked)

    def write(self, path: str, chunks: Iterable[bytes | memoryview]) -> int:
        target = self._at(path)
        self._make_folder(target.parent)
        size = 0
        # Order: write, fsync the file, link it to its name, fsync the folder. A crash before the
        # link leaves a temporary file that no reader sees; after the link the bytes are on disk, so
        # a name never leads to a file that is cut short. The name itself is durable only after the
        # last fsync, and only then may anything refer to it.
        with _names(target), self._temporary(target) as (descriptor, name):
            for chunk in chunks:
                self._write_all(descriptor, memoryview(chunk))
                size += len(chunk)
            self._disk.fsync(descriptor)
            self._link(name, target)
        self._sync_folder(target.parent)
        return size

    def create(self, path: str, data: bytes) -> bool:
        try:
            self.write(path, [data])
        except FileExistsError:
            return False
        return True

    def confirm(self, path: str, data: bytes) -> bool:
        """See :meth:`Storage.confirm`.

        The same bytes are written to a file of their own, which takes the name's place: whether the
        first file or its name reached the disk is unknown, and no reader sees a difference.
        """
        target = self._at(path)
        try:
            if self.read(path) != data:
                return False
        except (FileNotFoundError, NotADirectoryError):
            return False
        self._make_folder(target.parent)
        with _names(target), self._temporary(target) as (descriptor, name):
            self._write_all(descriptor, memoryview(data))
            self._disk.fsync(descriptor)
            self._disk.rename(name, target)
        self._sync_folder(target.parent)
        return True

    def read(self, path: str) -> bytes:
        target = self._at(path)
        data = bytearray(self._disk.status(target).size_bytes)
        count = self.read_into(path, 0, memoryview(data))
        return bytes(data[:count])

    def read_into(self, path: str, offset: int, target: memoryview) -> int:
        done, place = 0, self._at(path)
        descriptor = self._disk.open(place)
        try:
            with _names(place):
                while done < len(target):
                    count = self._disk.pread(descriptor, target[done:], offset + done)
                    if count == 0:
                        break
                    done += count
        finally:
            self._disk.close(descriptor)
        return done

    def size(self, path: str) -> int | None:
        try:
            found = self._disk.status(self._at(path))
        except (FileNotFoundError, NotADirectoryError):
            return None
        if found.is_link:
            raise link_error(self._at(path))
        return found.size_bytes

    def names(self, folder: str, after: str = "") -> list[str]:
        try:
            found = self._disk.listdir(self._at(folder) if folder else self._root)
        except FileNotFoundError:
            return []
        return sorted(n for n in found if n > after and not n.startswith(UNFINISHED))

    def delete(self, path: str) -> bool:
        """See :meth:`Storage.delete`; of a link, the link alone is removed."""
        target = self._at(path)
        try:
            if self._disk.status(target).is_folder:
                self._disk.rmdir(target)
            else:
                self._disk.unlink(target)
        except (FileNotFoundError, NotADirectoryError):
            # An earlier call may have removed the name without making that durable.
            with suppress(FileNotFoundError, NotADirectoryError):
                self._sync_folder(target.parent)
            return False
        self._sync_folder(target.parent)
        return True

    def remove_unfinished(self, folder: str) -> int:
        count = 0
        with suppress(FileNotFoundError):
            for name in self._disk.listdir(self._at(folder)):
                if name.startswith(UNFINISHED):
                    self._disk.unlink(self._at(folder) / name)
                    count += 1
        return count

    def _at(self, path: str) -> Path:
        return self._root.joinpath(*check_path(path, str(self._root)))

    @contextmanager
    def _temporary(self, target: Path) -> Iterator[tuple[int, str]]:
        """A temporary file beside ``target``, removed at the end in any case."""
        # In the target's own folder, because a link cannot cross file systems.
        descriptor, name = self._disk.create_temporary(
            target.parent, f"{UNFINISHED}{target.name.lstrip(UNFINISHED)}."
        )
        try:
            yield descriptor, name
        finally:
            self._disk.close(descriptor)
            with suppress(FileNotFoundError):  # renamed, or removed as unfinished
                self._disk.unlink(name)

    def _write_all(self, descriptor: int, data: memoryview) -> None:
        while data:  # a write may be partial, near a quota for example
            data = data[self._disk.write(descriptor, data) :]

    def _link(self, source: str, target: Path) -> None:
        try:
            self._disk.link(source, target)
        except OSError as error:
            if error.errno in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
                text = (
                    "this file system has no hard links, which commits need: "
                    "use ext4, xfs, NFS or Lustre"
                )
                raise OSError(error.errno, text, str(target)) from error
            raise

    def _make_folder(self, folder: Path) -> None:
        """Create ``folder`` durably, parents first: each name is synced in its parent folder.

        Also a folder that stands there is synced once by each process: who made it may have been
        killed before its own sync, or after one that failed, or still be on the way to it.
        """
        inode = self._inode(folder)
        if inode is not None and self._disk.durable.get(folder) == inode:
            return
        if folder.parent == folder:
            return
        self._make_folder(folder.parent)
        inside = folder == self._root or self._root in folder.parents
        if inode is not None and inside:
            self._disk.failed.add(folder.parent)  # for all that this process knows
        if inode is None:
            with suppress(FileExistsError):  # another rank may create it at the same time
                self._disk.mkdir(folder)
            inode = self._inode(folder)
        if not self._is_mount(folder):
            try:
                self._sync_folder(folder.parent)
            except PermissionError:
                if inside:
                    raise  # above the root, a folder may be closed to reading
        if inode is not None:
            self._disk.durable[folder] = inode

    def _inode(self, folder: Path) -> int | None:
        try:
            found = self._disk.status(folder)
        except (FileNotFoundError, NotADirectoryError):
            return None
        if found.is_link:
            raise link_error(folder)
        if not found.is_folder:
            # Not the error of a file that was written before: this one may go away.
            text = "a file is where a folder is needed"
            raise NotADirectoryError(errno.ENOTDIR, text, str(folder))
        return found.inode

    def _is_mount(self, folder: Path) -> bool:
        """Whether a file system begins here: then its parent holds no name that must be synced."""
        return self._disk.status(folder).device != self._disk.status(folder.parent).device

    def _sync_folder(self, folder: Path) -> None:
        failed_before = folder in self._disk.failed
        if failed_before:
            # Changed first, so that it is written anew.
            with self._temporary(folder / "sync"):
                pass
        try:
            self._disk.sync_folder(folder)
        except OSError:
            self._disk.failed.add(folder)
            raise
        if failed_before:
            self._disk.failed.discard(folder)


@contextmanager
def _names(target: Path) -> Iterator[None]:
    """Give an error of a descriptor the name of its file: "no space left" alone helps nobody."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(target)) from error
