"""File storage: complete files or none, never overwritten, never outside the root."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megascale_checkpoint.storage import FileStorage, open_storage
from megascale_common.service.errors import RequestError


def test_exactly_one_creator_wins(tmp_path: Path) -> None:
    storage = FileStorage(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(lambda number: storage.create("log/1.json", b"%d" % number), range(32)))
    assert won.count(True) == 1
    assert storage.read("log/1.json") == b"%d" % won.index(True)
    assert os.listdir(tmp_path / "log") == ["1.json"]


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    storage = FileStorage(tmp_path)

    def chunks() -> Iterator[bytes]:
        yield b"half"
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="disk is full"):
        storage.write("a/file", chunks())
    assert os.listdir(tmp_path / "a") == []
    assert storage.write("a/file", [b"whole", memoryview(b" thing")]) == 11
    with pytest.raises(FileExistsError):
        storage.write("a/file", [b"other"])
    assert storage.read("a/file") == b"whole thing"


def test_reading_parts_and_sizes(tmp_path: Path) -> None:
    storage = FileStorage(tmp_path)
    storage.create("file", b"0123456789")
    target = memoryview(bytearray(4))
    assert storage.read_into("file", 3, target) == 4 and bytes(target) == b"3456"
    assert storage.read_into("file", 8, target) == 2
    assert (
        storage.size("file") == 10
        and storage.size("none") is None
        and storage.size("file/x") is None
    )
    assert storage.names("none") == [] and storage.names("commits") == []


@pytest.mark.parametrize("path", ["../x", "a/../../x", "/etc/passwd", "", "a//b", "."])
def test_paths_stay_below_the_root(tmp_path: Path, path: str) -> None:
    with pytest.raises(RequestError, match="does not stay below"):
        FileStorage(tmp_path / "root").read(path)


@pytest.mark.parametrize("uri", ["gs://bucket/x", "relative/path", "file://host/path"])
def test_other_uris_are_refused_with_a_remedy(uri: str) -> None:
    with pytest.raises(RequestError, match="give an absolute path"):
        open_storage(uri)


def test_a_path_and_its_file_uri_are_the_same(tmp_path: Path) -> None:
    open_storage(f"{tmp_path}/a b").create("x", b"1")
    assert open_storage(f"file://{tmp_path}/a%20b").read("x") == b"1"


def test_a_file_in_place_of_a_folder_is_no_file_that_was_written_before(tmp_path: Path) -> None:
    storage = FileStorage(tmp_path)
    (tmp_path / "attempts").write_text("in the way")
    with pytest.raises(NotADirectoryError, match="a file is where a folder is needed"):
        storage.write("attempts/one/rank", [b"data"])
    with pytest.raises(NotADirectoryError):
        storage.create("attempts/one/rank", b"data")
    (tmp_path / "attempts").unlink()
    assert storage.create("attempts/one/rank", b"data")
