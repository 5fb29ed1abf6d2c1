"""docs/operations.md lists exactly the events, metrics and checks that the code has."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path
from typing import get_args

import pytest
from deploy.grafana.catalogue import EVERY_SERVICE, families

from megascale_driver.core.values.reasons import Reason
from megascale_executor.diagnostics.registry import BUILT_IN, Registry

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = (REPOSITORY / "docs" / "operations.md").read_text()
CORE = REPOSITORY / "services" / "driver" / "megascale_driver" / "core"


def rows(heading: str) -> list[list[str]]:
    """Cells of the first table under a heading."""
    section = PAGE.split(f"\n## {heading}")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_reason_is_explained_and_none_is_made_up() -> None:
    table = rows("Events")
    assert [cells[0].strip("`") for cells in table] == list(get_args(Reason)), (
        "same list, same order"
    )
    assert all(len(cells) == 3 and cells[1] and cells[2] for cells in table)


@functools.cache
def written() -> set[str]:
    """The words in the code of the core that are not declarations (``Literal["..."]``)."""
    found = set()
    # Enumerations in state.py share some of the words.
    for path in set(CORE.rglob("*.py")) - {CORE / "values" / "state.py"}:
        tree = ast.parse(path.read_text())
        declared = {
            id(n) for a in ast.walk(tree) if isinstance(a, ast.Subscript) for n in ast.walk(a.slice)
        }
        found |= {
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in declared
        }
    return found


@pytest.mark.parametrize("reason", get_args(Reason))
def test_every_reason_is_emitted_by_the_core(reason: str) -> None:
    assert reason in written(), f"{reason} is declared but nothing writes it"


def test_every_metric_is_listed_under_its_service() -> None:
    table = {cells[0].strip("`"): cells[2] for cells in rows("Metrics")}
    own = [family for family in families() if family.service != EVERY_SERVICE]
    assert table == {family.name: family.service for family in own}


def test_every_diagnostic_check_is_named() -> None:
    section = PAGE.split("\n## Nodes")[1].split("\n## ")[0]
    assert all(f"`{name}`" in section for name in Registry(made() for made in BUILT_IN).names)


def test_every_script_and_file_that_the_page_names_is_there() -> None:
    scripts = set(
        re.findall(r"`((?:driver|executor|checkpoint|link)/[a-z_]+\.sh|health\.sh)", PAGE)
    )
    assert len(scripts) >= 8
    for script in scripts:
        assert (REPOSITORY / "clients" / "grpcurl" / script).is_file(), script
