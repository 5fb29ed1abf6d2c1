"""Dry runs of a convergence study on CPUs: batches of two sizes, and runs that end at a limit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.harness.ranks import REPOSITORY

SCRIPT = "benchmarks/convergence.py"
SMALL, NOISE, LARGE = (
    "AdamW 0.001",
    "AdamW 0.001, other rounding",
    "AdamW 0.001, 4 times the batch",
)


def _run(*options: str, **environment: str) -> str:
    hidden = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(
        [sys.executable, SCRIPT, "--study", "lamb", "--quick", "--steps", "16", *options],
        cwd=REPOSITORY,
        env={**os.environ, **hidden, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def _rows(output: str) -> list[dict[str, Any]]:
    found = json.loads(output.splitlines()[-1])
    assert found["failed"] == 0
    rows: list[dict[str, Any]] = found["rows"]
    return rows


@pytest.mark.slow
def test_runs_end_at_their_limit_and_are_compared_as_far_as_they_came(tmp_path: Path) -> None:
    folder = ("--folder", str(tmp_path))
    rows = _rows(_run(*folder, "--runs", SMALL))
    assert [(row["run"], row["steps"]) for row in rows] == [(SMALL, 16), (NOISE, 16), (LARGE, 4)]
    assert {row["tokens"] for row in rows} == {16 * 2 * 32}
    assert 0 < rows[1]["max_step_difference"] < 0.02, "noise of a rounding"
    assert rows[2]["difference"] > 0.1, "4 steps learn less than 16"
    _run(*folder, "--only", LARGE, CONVERGENCE_DEADLINE="0")
    rows = _rows(_run(*folder, "--read"))
    assert [row["steps"] for row in rows] == [16, 16, 1], "the step that the limit falls in"
    assert rows[2]["tokens"] == 4 * 2 * 32 and rows[2]["difference"] is not None
    assert _rows(_run(*folder, "--limit-s", "0.001")) == [], "nothing has started"
