"""A short soak holds its promises; its measurements are right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.soak.measure import slope
from tests.soak.run import Result

REPOSITORY = Path(__file__).resolve().parents[2]
MINUTES = "2"


def soak(*options: str) -> subprocess.CompletedProcess[str]:
    """Run ``python -m tests.soak``."""
    return subprocess.run(
        [sys.executable, "-m", "tests.soak", *options],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "options",
    [["--seed", "11"], ["--seed", "12", "--drivers", "3", "--tls"]],
    ids=["up", "three drivers with TLS"],
)
def test_a_short_soak_breaks_no_promise(options: list[str]) -> None:
    disks = [] if os.geteuid() == 0 else ["--no-disks"]
    ended = soak("--minutes", MINUTES, *options, *disks)
    assert ended.returncode == 0, ended.stderr[-8000:]
    result = json.loads(ended.stdout.splitlines()[-1])
    assert result["broken"] == [] and result["rounds"] >= 1
    assert result["losses_compared"] >= 150 and result["faults_in_all"] >= 10


@pytest.mark.parametrize(
    "options",
    [["--minutes", "0"], ["--minutes", "soon"], ["--drivers", "2"], ["--seed", "x"]],
)
def test_wrong_arguments_are_usage_errors(options: list[str]) -> None:
    ended = soak(*options)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert options[0] in ended.stderr


def test_slopes_are_those_of_a_line() -> None:
    assert slope([0.0, 1.0, 2.0, 3.0], [5.0, 7.0, 9.0, 11.0]) == pytest.approx(2.0)
    assert slope([0.0, 1.0, 2.0], [4.0, 4.0, 4.0]) == 0.0
    assert slope([1.0, 1.0], [1.0, 2.0]) == 0.0


def test_the_result_is_one_object() -> None:
    result = Result(seed=1, tls=False, drivers=1, faults={"kill": 2, "stop": 3})
    shown = json.loads(json.dumps(result.as_json()))
    assert (shown["seed"], shown["faults_in_all"], shown["broken"]) == (1, 5, [])
