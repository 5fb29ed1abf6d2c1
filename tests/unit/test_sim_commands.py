"""`megascale sim`: tables, JSON, files and refusals."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megascale_cli.app import build_app

runner = CliRunner()


def run(line: str, status: int = 0) -> str:
    done = runner.invoke(build_app(), ["sim", *line.split()], env={"COLUMNS": "160"})
    assert done.exit_code == status, done.output
    return done.output


def test_orders_are_compared_as_table_json_and_csv(tmp_path: Path) -> None:
    line = "ecmp --hosts 128 --pp 4 --order pp-inner --order random --phase dp --qps 1 --seeds 2"
    table = run(line)
    assert "simulated" in table and "pp-inner" in table and "random" in table
    found = json.loads(run(f"{line} --json --csv {tmp_path}/rows.csv"))
    assert found["simulated"] and len(found["rows"]) == 4
    rows = list(csv.DictReader((tmp_path / "rows.csv").open()))
    assert [row["order"] for row in rows] == ["pp-inner", "pp-inner", "random", "random"]
    assert float(rows[0]["mean_rate"]) > float(rows[2]["mean_rate"])


def test_controls_are_compared_and_swept() -> None:
    line = "cc --arm dcqcn --arm swift --senders 4 --senders 8 --megabytes 4"
    found = json.loads(run(f"{line} --json"))
    assert [(row["arm"], row["senders"]) for row in found["rows"]] == [
        ("dcqcn", 4), ("dcqcn", 8), ("swift", 4), ("swift", 8),
    ]  # fmt: skip
    assert set(found["sources"]) == {"dcqcn", "swift"}
    assert "ours" in found["sources"]["swift"]
    assert "simulated" in run(line)


@pytest.mark.parametrize("line", ["split", "ecmp --hosts 64 --seeds 1 --qps 1", "cc --megabytes 1"])
def test_plots_are_drawn(tmp_path: Path, line: str) -> None:
    pytest.importorskip("matplotlib")
    run(f"{line} --plot {tmp_path}/plot.png")
    assert (tmp_path / "plot.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("cc --arm best", "--arm best: unknown; give one of dcqcn"),
        ("cc --senders 9000", "give 1 to 4,096"),
        ("ecmp --hosts 10 --pp 4", "give a divisor of the hosts"),
        ("ecmp --order fast", "give one of pp-inner"),
        ("split --json --plot /nowhere/plot.png", "--plot:"),
        ("cc --arm swift --megabytes 1 --csv /nowhere/rows.csv", "--csv /nowhere/rows.csv:"),
    ],
)
def test_mistakes_are_refused_with_a_remedy(line: str, problem: str) -> None:
    assert problem in run(line, status=2)
