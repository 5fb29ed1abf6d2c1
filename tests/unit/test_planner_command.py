"""`python -m megascale_planner predict` as another program meets it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megascale_planner.__main__ import main

ROW = {"layers": 24, "hidden": 2048, "heads": 16}


def test_rows_go_in_and_as_many_lines_come_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        f"{json.dumps({'id': 'a', **ROW})}\n \n{json.dumps({'id': 'b', 'tp': 5, **ROW})}\n[1]\nx\n"
    )
    assert main(["predict", str(rows)]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [item["id"] for item in found] == ["a", "b", 4, 5]
    assert ["refused" in item for item in found] == [False, True, True, True]


def test_a_calibration_changes_what_is_predicted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, measured = tmp_path / "rows.jsonl", tmp_path / "measured.json"
    rows.write_text(json.dumps(ROW))
    measured.write_text(json.dumps({"version": 1, "rates": {"gemm_flops": 1e14}}))
    assert main(["predict", str(rows)]) == 0
    assert main(["predict", str(rows), "--calibration", str(measured)]) == 0
    plain, slow = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert slow["terms"]["gemm"] > 5 * plain["terms"]["gemm"]
    measured.write_text("{}")
    assert main(["predict", str(rows), "--calibration", str(measured)]) == 0
    assert "version" in json.loads(capsys.readouterr().out)["refused"]


def test_a_file_that_cannot_be_read_is_a_usage_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["predict", str(tmp_path / "absent")]) == 2
    assert "absent" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["guess"])
    assert ended.value.code == 2
