"""The comparison of protos with an earlier commit."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.harness.driver import here

pytestmark = pytest.mark.check


def breaking(revision: str, tree: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(tree / "proto" / "breaking.py"), "--against", revision],
        capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.skipif(not shutil.which("buf") or not shutil.which("git"), reason="needs buf and git")
def test_a_field_that_moves_breaks_the_wire_contract(tmp_path: Path) -> None:
    """In a repository of its own, whose second state adds a field and whose third moves one."""
    shutil.copytree(
        here() / "proto", tmp_path / "proto", ignore=shutil.ignore_patterns("*.py[ci]", "*_pb2*")
    )

    def git(*words: str) -> None:
        who = ("-c", "user.name=n", "-c", "user.email=n@example.org")
        subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True)

    git("init", "-b", "main")
    git("add", ".")
    git("commit", "-m", "first")
    file = tmp_path / "proto/megascale/v1/job.proto"
    text = file.read_text()
    file.write_text(text.replace("string owner = 3;", "string owner = 3;\n  string site = 900;"))
    assert breaking("HEAD", tmp_path).returncode == 0
    file.write_text(text.replace("string owner = 3;", "string owner = 33;"))
    found = breaking("HEAD", tmp_path)
    assert found.returncode == 1 and '"owner"' in found.stdout + found.stderr
    assert breaking("no-such-tag", tmp_path).returncode == 2
