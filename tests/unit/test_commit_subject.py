"""The subject of the last commit: `<room>: <verb> <what>` in at most 60 characters."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.check

MOST_CHARACTERS = 60
_SUBJECT = re.compile(r"[a-z][a-z0-9 ,/_-]*: [a-z]\S* \S")
_REMEDY = "reword it with `git commit --amend`; CONTRIBUTING.md has an example"


def problem_of(subject: str) -> str:
    """What is wrong with a subject; empty if nothing is."""
    if not _SUBJECT.match(subject):
        return f"{subject!r} is not `<room>: <verb> <what>`: {_REMEDY}"
    if len(subject) > MOST_CHARACTERS:
        return f"{subject!r} has {len(subject)} characters of {MOST_CHARACTERS}: {_REMEDY}"
    return ""


def test_the_last_commit_has_a_subject_of_this_form() -> None:
    if shutil.which("git") is None:
        pytest.skip("no git")
    command = ["git", "log", "-1", "--format=%P%n%s"]
    shown = subprocess.run(
        command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    if shown.returncode:
        pytest.skip("this tree is not a clone")
    parents, subject = shown.stdout.splitlines()[:2]
    if len(parents.split()) < 2:  # a merge names its branches
        assert not problem_of(subject)


@pytest.mark.parametrize(
    ("subject", "good"),
    [
        ("trainer: fuse the first weight gradient", True),
        ("tests, docs: move page checks to make check", True),
        ("Fuse the first weight gradient", False),
        ("trainer: fusing", False),
        ("trainer: fuse the first weight gradient of each step and measure it", False),
    ],
)
def test_subjects_that_are_taken_and_refused(subject: str, good: bool) -> None:
    assert bool(problem_of(subject)) is not good
