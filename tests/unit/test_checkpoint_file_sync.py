"""File storage and fsync: what is reported as written was synced; no failed sync is repeated."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from megascale_checkpoint.storage import FileStorage, settle
from megascale_checkpoint.storage.disk import SystemDisk


class FailingDisk(SystemDisk):
    """The real disk, which refuses some syncs and keeps an account of all.

    Attributes:
        synced: folders, in order.
        fail_folder: syncs of folders that fail from now on.
        fail_file: syncs of files that fail from now on.
        files: names under which the synced files were made, also those synced in vain.
    """

    def __init__(self) -> None:
        super().__init__()
        self.synced: list[Path] = []
        self.fail_folder = self.fail_file = 0
        self.files: list[str] = []

    def fsync(self, descriptor: int) -> None:
        self.files.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        if self.fail_file:
            self.fail_file -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().fsync(descriptor)

    def sync_folder(self, path: Path) -> None:
        if self.fail_folder:
            self.fail_folder -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        super().sync_folder(path)
        self.synced.append(path)


def test_after_a_failed_sync_the_file_is_written_anew(tmp_path: Path) -> None:
    disk = FailingDisk()
    storage = FileStorage(tmp_path, disk)
    disk.fail_file = 1
    with pytest.raises(OSError, match="record"):
        storage.create("log/record", b"one")
    assert storage.names("log") == [], "it has no name yet"
    assert settle(storage, "log/record", b"one")
    assert len(set(disk.files)) == len(disk.files) == 2, "a file was synced twice"


def test_an_unknown_outcome_is_settled_within_the_call(tmp_path: Path) -> None:
    disk = FailingDisk()
    storage = FileStorage(tmp_path, disk)
    storage.create("log/first", b"0")
    disk.fail_folder = 1
    assert settle(storage, "log/record", b"one")
    disk.fail_folder = 2
    with pytest.raises(OSError, match="log"):
        settle(storage, "log/next", b"two")
    assert settle(storage, "log/next", b"two"), "the reply was lost, the file is there"
    assert not settle(storage, "log/next", b"three")
    assert storage.read("log/next") == b"two"


def test_check_leaves_nothing_and_names_what_is_wrong(tmp_path: Path) -> None:
    FileStorage(tmp_path / "new" / "root").check()
    assert os.listdir(tmp_path / "new" / "root") == []
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(NotADirectoryError, match="a file is where a folder is needed"):
        FileStorage(tmp_path / "file" / "root").check()


def test_a_deleted_file_is_gone_and_its_folder_synced(tmp_path: Path) -> None:
    disk = FailingDisk()
    storage = FileStorage(tmp_path, disk)
    storage.create("a/file", b"1")
    assert storage.delete("a/file") and disk.synced[-1] == tmp_path / "a"
    assert not storage.delete("a/file") and not storage.delete("none/file")
    assert storage.names("") == ["a"]
    assert storage.delete("a") and storage.names("") == []
