"""A dry run of benchmarks/operators.py: every operator and way here gives figures and is right."""

from __future__ import annotations

import json

import pytest
import torch
from benchmarks import operators
from benchmarks.operator_cases import Case, Cost
from benchmarks.operator_timing import Meter

pytest.importorskip("triton")

WAYS = "eager,torch_fused,plain,fused,flash"  # not compile, which takes a C++ compiler and a minute


@pytest.mark.slow
def test_a_dry_run_measures_every_operator(capsys: pytest.CaptureFixture[str]) -> None:
    assert operators.main(["--quick", "--ways", WAYS]) == 0
    found = json.loads(capsys.readouterr().out)
    machine, rows = found["machine"], found["rows"]
    assert machine["copy_gb_per_s"] > 0
    assert {row["operator"] for row in rows if row["way"] == "eager"} == set(operators.OPERATORS)
    measured = [row for row in rows if not row["problem"]]
    assert {
        ("cross_entropy", "fused"),
        ("adamw", "fused"),
        ("lamb", "fused"),
        ("weight_gradient", "fused"),
    } <= {(row["operator"], row["way"]) for row in measured}
    for row in measured:
        assert row["error_rms"] <= (1e-6 if machine["dtype"] == "float32" else 2e-2), row
        assert 0 < row["low_us"] <= row["median_us"] <= row["high_us"], row
        assert row["floor_us"] > 0, row


def test_the_table_has_one_line_for_each_row(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--quick", "--only", "adamw", "--ways", "eager,fused"]
    assert operators.main(arguments) == 0
    _, *table = capsys.readouterr().err.splitlines()
    assert len(table) == 4
    assert len({line.count("|") for line in table}) == 1
    assert operators.main([*arguments, "--json"]) == 0
    printed = capsys.readouterr()
    machine, *rows = map(json.loads, printed.err.splitlines())
    assert json.loads(printed.out) == {"machine": machine, "rows": rows}


def test_a_way_that_is_wrong_shows_and_one_that_breaks_fails_alone() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ones = torch.ones(4, device=device)

    def breaks() -> list[torch.Tensor]:
        raise RuntimeError("broken")

    def absent() -> list[torch.Tensor]:
        raise ImportError("not installed")

    case = Case(
        "4",
        {"forward": Cost(bytes=100, flops=40)},
        {
            "eager": lambda dtype: {"forward": lambda: [ones.to(dtype)]},
            "plain": lambda dtype: {"forward": absent},
            "fused": lambda dtype: {"forward": breaks},
            "flash": lambda dtype: {"forward": lambda: [1.5 * ones.to(dtype)]},
        },
    )
    meter = Meter(device, 2, quick=True)
    rows = {
        row.way: row
        for row in operators.measure(
            "made up", case, torch.float32, meter, (10.0, 2.0), list(case.ways)
        )
    }
    assert rows["eager"].error_max == 0.0
    # 40 FLOP at 2 a second take longer than 100 bytes at 10 a second.
    assert rows["eager"].floor_us == 20e6
    assert rows["flash"].error_rms == pytest.approx(0.5)
    assert (rows["plain"].failed, rows["plain"].problem) == (False, "ImportError: not installed")
    assert (rows["fused"].failed, rows["fused"].problem) == (True, "RuntimeError: broken")


def test_an_unknown_operator_is_refused_with_the_known_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        operators.main(["--only", "adamw,nonsense"])
    assert "unknown: nonsense; known: layernorm" in capsys.readouterr().err
