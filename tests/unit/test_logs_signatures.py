"""Each signature of the collections that others keep has its category, role and action here.

``tests/data/logs/signatures.csv`` has one line of log for each; its README says where they are
from and where the action differs from what its source advises.
"""

from __future__ import annotations

import csv
from pathlib import Path

from megascale_driver.analysis.logs.correlation import classify

FILE = Path(__file__).resolve().parents[1] / "data" / "logs" / "signatures.csv"


def _rows() -> list[dict[str, str]]:
    with FILE.open() as file:
        return list(csv.DictReader(file))


def test_every_collected_signature_is_matched_as_its_source_advises() -> None:
    wrong = []
    for row in _rows():
        found = classify(row["line"])
        got = {"category": found.category, "role": found.role, "action": found.action}
        if any(row[key] != got[key] for key in got):
            wrong.append((row["code"], got))
    assert not wrong


def test_the_collection_is_whole() -> None:
    rows = _rows()
    codes = [row["code"] for row in rows]
    assert len(set(codes)) == len(codes) == 277
    xid = {code.split()[1] for code in codes if code.startswith("XID ")}
    sxid = {code.split()[1] for code in codes if code.startswith("SXID ")}
    assert (len(xid), len(sxid)) == (118, 93)
    assert {row["action"] for row in rows} == {"none", "alert", "restart", "evict_restart", "stop"}
