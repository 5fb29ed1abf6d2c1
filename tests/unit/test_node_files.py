"""A file that readers must see whole is replaced at once, and a failure leaves the old one."""

from __future__ import annotations

from pathlib import Path

import pytest

from megascale_common.node.files import replace_file


def test_a_reader_of_the_old_file_keeps_it_whole(tmp_path: Path) -> None:
    path = tmp_path / "driver.address"
    replace_file(path, "127.0.0.1:1\n")
    with path.open() as reader:
        replace_file(path, "127.0.0.1:22222\n")
        assert reader.read() == "127.0.0.1:1\n"
    assert path.read_text() == "127.0.0.1:22222\n"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_replacement_leaves_no_draft(tmp_path: Path) -> None:
    path = tmp_path / "driver.address"
    path.mkdir()
    with pytest.raises(OSError):
        replace_file(path, "127.0.0.1:1\n")
    assert list(tmp_path.iterdir()) == [path] and path.is_dir()
