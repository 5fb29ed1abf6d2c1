"""docs/cli.md lists every command, and the commands below it."""

from __future__ import annotations

import re

import pytest
from docs.pages import DOCS
from tests.harness.command_line import command

pytestmark = pytest.mark.check

PAGE = (DOCS / "cli.md").read_text()
ROWS = dict(re.findall(r"(?m)^\| (`megascale [^|]+`) \| (.+) \|$", PAGE))
LISTED = {
    name: row for names, row in ROWS.items() for name in re.findall(r"megascale ([\w-]+)", names)
}


def commands(*group: str) -> set[str]:
    """The commands that ``megascale GROUP --help`` lists."""
    text = command(*group, "--help").stdout
    shown = text.partition("Commands ─")[2] if group else text.partition("First steps ─")[2]
    return set(re.findall(r"(?m)^│ ([a-z][a-z-]+)  ", shown))


def test_every_command_has_one_line() -> None:
    assert commands() == set(LISTED)


@pytest.mark.parametrize(
    "group",
    [
        "certs",
        "checkpoint",
        "code",
        "config",
        "data",
        "net",
        "node",
        "pipeline",
        "platform",
        "sim",
        "slurm",
        "spans",
    ],
)
def test_the_line_of_a_group_names_its_commands(group: str) -> None:
    below = commands(group)
    assert below and below <= set(re.findall(r"`([a-z]+)`", LISTED[group]))
