"""The detector of docs/how-to/add-a-detector.md works with the four files that the page shows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.unit.test_how_to import HOW_TO, REPOSITORY, blocks, rows

pytestmark = pytest.mark.check

PAGE = HOW_TO / "add-a-detector.md"
# The folders of the exercise lie before those of the package, as if its files were there.
CONFTEST = """
import megascale_driver.analysis, megascale_driver.core.signs, megascale_driver.shell

for package, folder in (
    (megascale_driver.analysis, "analysis"),
    (megascale_driver.core.signs, "core/signs"),
    (megascale_driver.shell, "shell"),
):
    package.__path__.append(f"{__file__.rpartition('/')[0]}/{folder}")
"""
FOUND = """
from megascale_driver.core import machine
from megascale_driver.core.values.reasons import REASONS
from megascale_driver.core.values.rules import RULES
from megascale_driver.shell.leadership import watches


def test_nothing_else_names_it() -> None:
    assert "COMMITS_LAG" in REASONS and "commit-lag" in RULES
    assert {kind.__name__ for kind in machine._HANDLERS} >= {"CommitsLag", "TrafficStood"}
    engine = type("Engine", (), {"__getattr__": lambda self, name: self})()
    assert [name for name, _ in watches(engine)] == ["traffic", "commit_lag"]
"""


def test_four_files_are_a_detector(tmp_path: Path) -> None:
    shown = dict(blocks(PAGE))
    assert [cells[0].split("`")[1] for cells in rows(PAGE.read_text())] == [
        "analysis/commit_lag.py",
        "shell/commit_lag_watch.py",
        "core/signs/commit_lag.py",
        "test_commit_lag.py",
    ]
    assert len(shown) == 4
    for name, code in (*shown.items(), ("conftest.py", CONFTEST), ("test_found.py", FOUND)):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull,
         "--rootdir", str(tmp_path), str(tmp_path)],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), *sys.path])},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 passed" in done.stdout


def test_the_files_of_the_page_are_formatted(tmp_path: Path) -> None:
    for name, code in blocks(PAGE):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code)
    configuration = str(REPOSITORY / "pyproject.toml")
    for command in (["check", "--ignore", "INP001,I001"], ["format", "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--config", configuration, "."],
            cwd=tmp_path, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
