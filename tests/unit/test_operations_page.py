"""docs/operations.md lists exactly the events, metrics and checks that the code has."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest
from deploy.grafana.catalogue import EVERY_SERVICE, families
from docs import generate_events

from megascale_driver.core.values.reasons import REASONS, RULES, define
from megascale_executor.diagnostics.registry import BUILT_IN, Registry

pytestmark = pytest.mark.check

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = (REPOSITORY / "docs" / "operations.md").read_text()
CORE = REPOSITORY / "services" / "driver" / "megascale_driver" / "core"


def rows(heading: str) -> list[list[str]]:
    """Cells of the first table under a heading."""
    section = PAGE.split(f"\n## {heading}")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_table_of_events_is_that_of_the_records() -> None:
    assert rows("Events") == [
        [f"`{reason.name}`", reason.meaning, reason.remedy] for reason in REASONS.values()
    ]
    assert generate_events.main(["--check"]) == 0


def test_every_rule_of_a_reason_is_known() -> None:
    assert {reason.rule for reason in REASONS.values()} - {""} <= set(RULES)
    assert not [one.name for one in REASONS.values() if one.cause and one.routine]


@functools.cache
def named() -> set[str]:
    """The reasons that the code of the core names, apart from their definitions."""
    found = set()
    for path in set(CORE.rglob("*.py")) - {CORE / "values" / "reasons.py"}:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "reasons":
                found.add(node.attr)
    return found


@pytest.mark.parametrize("reason", REASONS)
def test_every_reason_is_emitted_by_the_core(reason: str) -> None:
    assert reason in named(), f"{reason} is defined but nothing writes it"


@pytest.mark.parametrize("name", ["NODE_DEAD", "NEW"])
def test_a_reason_is_defined_once_and_by_a_known_rule(name: str) -> None:
    with pytest.raises(ValueError, match="defined twice"):
        define(name, meaning="it happened", rule="none" if name == "NEW" else "")


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
