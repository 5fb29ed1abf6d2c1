"""File storage: complete files or none, never overwritten, never outside the root."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megascale_checkpoint.storage import FileStorage, open_storage
from megascale_common.service.errors import RequestError


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


@pytest.mark.parametrize(("link", "path"), [("a", "a/b/file"), ("a/b", "a/b/file")])
def test_no_folder_below_the_root_is_reached_through_a_link(
    tmp_path: Path, link: str, path: str
) -> None:
    elsewhere, root = tmp_path / "elsewhere", tmp_path / "root"
    (elsewhere / "b").mkdir(parents=True)
    (elsewhere / "file").write_text("a stranger's")
    (elsewhere / "b" / "file").write_text("a stranger's")
    (root / link).parent.mkdir(parents=True)
    (root / link).symlink_to(elsewhere)
    storage, folder = FileStorage(root), path.rpartition("/")[0]
    for call in (
        lambda: storage.read(path),
        lambda: storage.read_into(path, 0, memoryview(bytearray(4))),
        lambda: storage.size(path),
        lambda: storage.names(folder),
        lambda: storage.delete(path),
        lambda: storage.remove_unfinished(folder),
        lambda: storage.create(f"{folder}/new", b"1"),
        lambda: storage.confirm(path, b"a stranger's"),
        lambda: storage.write(f"{folder}/new", [b"1"]),
    ):
        with pytest.raises(OSError, match="symbolic link") as refused:
            call()
        assert str(root / link) in str(refused.value)
    assert sorted(os.listdir(elsewhere)) == ["b", "file"]
    assert os.listdir(elsewhere / "b") == ["file"]
    # The link itself can be removed, and then what it named is whole.
    assert storage.delete(link) and not (root / link).is_symlink()
    assert (elsewhere / "file").read_text() == "a stranger's"


def test_no_file_below_the_root_is_a_link(tmp_path: Path) -> None:
    outside, root = tmp_path / "outside", tmp_path / "root"
    outside.write_text("a stranger's")
    root.mkdir()
    (root / "file").symlink_to(outside)
    storage = FileStorage(root)
    for call in (
        lambda: storage.read("file"),
        lambda: storage.size("file"),
        lambda: storage.confirm("file", b"a stranger's"),
    ):
        with pytest.raises(OSError, match=f"symbolic link.*{root}/file"):
            call()
    assert not storage.create("file", b"mine")
    assert storage.delete("file") and outside.read_text() == "a stranger's"


def test_the_root_itself_may_be_a_link_and_a_step_inside_may_not(tmp_path: Path) -> None:
    real, step = tmp_path / "real", "attempts/attempt-000001/step-000000010"
    FileStorage(real).create(f"{step}/manifest.json", b"1")
    (tmp_path / "root").symlink_to(real)
    assert open_storage(f"{tmp_path}/root").read(f"{step}/manifest.json") == b"1"
    assert open_storage(f"{tmp_path}/root/{step}").read("manifest.json") == b"1"
    (real / step).rename(tmp_path / "archive")
    (real / step).symlink_to(tmp_path / "archive")
    with pytest.raises(OSError, match="symbolic link"):
        open_storage(f"{tmp_path}/root/{step}").read("manifest.json")


def test_a_pipe_in_place_of_a_file_does_not_hold_its_reader(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "file")
    with pytest.raises(OSError):
        FileStorage(tmp_path).read_into("file", 0, memoryview(bytearray(1)))
