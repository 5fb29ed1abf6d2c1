"""The group of docs/how-to/add-a-parallel-axis.md is one name, and the rest follows from it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.unit.test_how_to import HOW_TO, blocks, rows
from tests.unit.test_how_to_block import run, tree

PAGE = HOW_TO / "add-a-parallel-axis.md"
# Of the tests that the page names: groups partition the ranks and are created alike, and a value
# has one owner. Buffers must train over the new group, too.
CHECKS = (
    "tests/unit/test_rank_layout.py",
    "tests/unit/test_group_start.py::test_all_members_create_a_group_as_the_same_one_in_their_sequence",
    "tests/unit/test_parameter_table.py::test_every_value_is_primary_on_exactly_one_rank",
)
TRAINS = (
    "tests/integration/test_trainer_equality.py::test_layout_trains_as_one_process"
    "[tp2dp2, full recompute, overlapped tp and dp-experts-3]"
)
CONSOLE = """
import doctest
import sys

failed, tried = doctest.testfile(sys.argv[1], module_relative=False)
assert tried and not failed
"""


@pytest.fixture(scope="module")
def with_group(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tree(tmp_path_factory.mktemp("group"), PAGE)


@pytest.mark.check
def test_the_page_lists_its_files() -> None:
    listed = [cells[0].strip("`") for cells in rows(PAGE.read_text())]
    assert listed == [name for name, _ in blocks(PAGE)]


@pytest.mark.check
def test_the_console_of_the_page_prints_what_it_shows(with_group: Path) -> None:
    (console,) = re.findall(r"```pycon\n(.*?)```", PAGE.read_text(), re.DOTALL)
    path = with_group / "console.txt"
    path.write_text(console)
    run(with_group, "-c", CONSOLE, str(path))


@pytest.mark.slow
def test_the_tests_that_the_page_names_pass_with_its_group(with_group: Path) -> None:
    run(with_group, "-m", "pytest", "-p", "no:cacheprovider", "-x", *CHECKS, TRAINS)
