"""`python -m megascale_driver.planner predict` as another program meets it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megascale_driver.planner.__main__ import main

ROW = {"layers": 24, "hidden": 2048, "heads": 16}


def test_rows_go_in_and_as_many_lines_come_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        f"{json.dumps({'id': 'a', **ROW})}\n\n{json.dumps({'id': 'b', 'tp': 5, **ROW})}\n[1]\nx\n"
    )
    assert main(["predict", str(rows)]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [item["id"] for item in found] == ["a", "b", 4, 5]
    assert ["refused" in item for item in found] == [False, True, True, True]


def test_a_file_that_cannot_be_read_is_a_usage_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["predict", str(tmp_path / "absent")]) == 2
    assert "absent" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["guess"])
    assert ended.value.code == 2
