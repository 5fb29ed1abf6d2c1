"""Each signature of the collections that others keep has its category, role and action here.

``tests/data/logs/signatures.csv`` has one line of log for each; its README says where they are
from and where the action differs from what its source advises. ``standing.csv`` has the wordings
that libraries, drivers and schedulers have used for long, category by category.
"""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from megascale_common.node.logs.categories import DOMAINS
from megascale_driver.analysis.logs.correlation import classify

LOGS = Path(__file__).resolve().parents[1] / "data" / "logs"


def _rows(name: str = "signatures") -> list[dict[str, str]]:
    with (LOGS / f"{name}.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("name", ["signatures", "standing"])
def test_every_collected_line_has_its_category_role_and_action(name: str) -> None:
    wrong = []
    for row in _rows(name):
        found = classify(row["line"])
        got = {"category": found.category, "role": found.role, "action": found.action}
        if any(row[key] != got[key] for key in got):
            wrong.append((row["line"], got))
    assert not wrong


def test_standing_wordings_are_of_all_kinds() -> None:
    rows = _rows("standing")
    assert len({row["line"] for row in rows}) == len(rows) >= 400
    categories = {row["category"] for row in rows}
    assert categories == set(DOMAINS) - {"unknown", "gpu_recovery_action"}


def test_the_collection_is_whole() -> None:
    rows = _rows()
    codes = [row["code"] for row in rows]
    assert len(set(codes)) == len(codes) == 277
    xid = {code.split()[1] for code in codes if code.startswith("XID ")}
    sxid = {code.split()[1] for code in codes if code.startswith("SXID ")}
    assert (len(xid), len(sxid)) == (118, 93)
    assert {row["action"] for row in rows} == {"none", "alert", "restart", "evict_restart", "stop"}
