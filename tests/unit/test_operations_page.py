"""The runbook's pages have exactly the events, rules, metrics and checks that the code has."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest
from deploy.grafana.catalogue import EVERY_SERVICE, families
from docs import generate_alarms
from tests.harness.snippets import RUNBOOK

from megascale_driver.core.values.reasons import REASONS, Reason
from megascale_driver.core.values.rules import RULES
from megascale_executor.diagnostics.registry import BUILT_IN, Registry

pytestmark = pytest.mark.check

REPOSITORY = Path(__file__).resolve().parents[2]
DOCS = REPOSITORY / "docs"
CORE = REPOSITORY / "services" / "driver" / "megascale_driver" / "core"


def section(page: str, heading: str) -> str:
    return (DOCS / page).read_text().split(f"\n## {heading}")[1].split("\n## ")[0]


def rows(page: str, heading: str) -> list[list[str]]:
    """Cells of the first table under a heading."""
    lines = [line for line in section(page, heading).splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_reason_has_one_entry_and_the_pages_are_fresh() -> None:
    page = (DOCS / "alarms.md").read_text()
    assert sorted(re.findall(r"(?m)^### (\w+)$", page)) == sorted(REASONS)
    assert set(re.findall(r"\]\(#(\w+)\)", page)) == {name.lower() for name in REASONS}
    assert [row[0] for row in rows("switches.md", "Rules")] == [f"`{name}`" for name in RULES]
    assert generate_alarms.main(["--check"]) == 0


def test_an_alarm_says_what_the_system_does() -> None:
    alarms = [one for one in REASONS.values() if one.severity in ("warning", "critical")]
    assert [one.name for one in alarms if not one.response] == []


def test_every_rule_of_a_reason_is_known() -> None:
    assert {reason.rule for reason in REASONS.values()} - {""} <= set(RULES)
    assert not [one.name for one in REASONS.values() if one.cause and one.routine]


@functools.cache
def named() -> set[str]:
    """The reasons that the code of the core names, apart from their definitions.

    A detector can define its reason in its own module of the core.
    """
    found = set()
    for path in set(CORE.rglob("*.py")) - {CORE / "values" / "reasons.py"}:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "reasons":
                found.add(node.attr)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                found.add(node.id)
    return found


@pytest.mark.parametrize("reason", REASONS)
def test_every_reason_is_emitted_by_the_core(reason: str) -> None:
    assert reason in named(), f"{reason} is defined but nothing writes it"


@pytest.mark.parametrize("name", ["NODE_DEAD", "NEW"])
def test_a_reason_is_defined_once_and_by_a_known_rule(name: str) -> None:
    with pytest.raises(ValueError, match="defined twice"):
        Reason(name, meaning="it happened", rule="none" if name == "NEW" else "")


def test_every_metric_is_listed_under_its_service() -> None:
    table = {cells[0].strip("`"): cells[2] for cells in rows("monitoring.md", "Metrics")}
    own = [family for family in families() if family.service != EVERY_SERVICE]
    assert table == {family.name: family.service for family in own}


def test_every_diagnostic_check_is_named() -> None:
    nodes = section("operations.md", "Nodes")
    assert all(f"`{name}`" in nodes for name in Registry(made() for made in BUILT_IN).names)


def test_the_runbook_lists_its_pages_and_needs_no_clone() -> None:
    contents = (DOCS / "operations.md").read_text()
    assert all(f"({page})" in contents for page in RUNBOOK if page != "operations.md")
    for page in set(RUNBOOK) - {"alarms.md"}:
        assert not re.findall(r"`(?:driver|executor|link)/\w+\.sh", (DOCS / page).read_text())
