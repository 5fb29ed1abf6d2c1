"""Dry runs of the FP8 benchmarks on CPU ranks: overlapped layers in every way, and loss curves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks import fp8_gradients
from benchmarks.convergence_studies import STUDIES
from tests.harness.interpreter import interpret_without_cuda
from tests.harness.ranks import REPOSITORY

interpret_without_cuda()  # before the next line: kernels of other modules run in the interpreter
pytest.importorskip("triton")


def _run(*command: str) -> dict[str, object]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(
        [sys.executable, *command],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    found: dict[str, object] = json.loads(ended.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_a_layer_is_measured_in_every_way(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")
    options = ("--tp", "2", "--models", "7b", "--quick", "--rounds", "1", "--chunks", "2")
    rows = tmp_path / "rows.jsonl"
    found = _run(
        *(*launcher, "benchmarks/fp8_overlap.py", *options),
        *("--only", "check,layers", "--formats", "bf16;fp8, e5m2 gradients"),
        *("--results", str(rows)),
    )
    assert isinstance(found["rows"], list)
    assert [json.loads(line) for line in rows.read_text().splitlines()] == found["rows"]
    ways = {"none", "exposed", "overlapped, 2", "cut, 2"}
    for name in ("bf16", "fp8, e5m2 gradients"):
        runs = {row["run"] for row in found["rows"] if row["section"] == "layers"}
        assert {f"{name}; {way}" for way in ways} <= runs
    errors = [row["error"] for row in found["rows"] if row["section"] == "check"]
    assert len(errors) == 2 and max(errors) < 1e-3, "another order of sums in bf16"


@pytest.mark.slow
def test_loss_curves_in_fp8_lie_beside_those_in_bf16(tmp_path: Path) -> None:
    options = ("--study", "fp8", "--folder", str(tmp_path), "--quick", "--steps", "12")
    found = _run("benchmarks/convergence.py", *options)
    assert isinstance(found["rows"], list) and found["failed"] == 0
    assert {row["run"] for row in found["rows"]} == set(STUDIES["fp8"].runs)
    for row in found["rows"]:
        assert row["steps"] == 12 and row["last_tenth"] < row["first"]
        assert row["max_step_difference"] < 0.02, row
        assert (row["max_step_difference"] == 0) == (row["run"] == "bf16"), row


@pytest.mark.slow
def test_branches_go_on_from_the_state_of_the_first_run(tmp_path: Path) -> None:
    def losses(*options: str) -> dict[str, list[tuple[int, float]]]:
        shared = ("--study", "fp8", "--folder", str(tmp_path), "--quick", "--steps", "12")
        assert _run("benchmarks/convergence.py", *shared, *options)["failed"] == 0
        lines = {
            path.stem: [json.loads(line) for line in path.read_text().splitlines()]
            for path in tmp_path.glob("*.jsonl")
        }
        return {
            name: [(line["step"], line["loss"]) for line in found] for name, found in lines.items()
        }

    whole = losses("--runs", "bf16")["bf16-1234"]
    found = losses("--runs", "bf16", "--branch-at", "6")
    assert found["trunk-1234"] + found["bf16-1234"] == whole, "bit for bit"
    others = [found[name] for name in ("bf16-other-sums-1234", "fp8-hybrid-ends-in-bf16-1234")]
    for other in others:
        assert [step for step, _loss in other] == list(range(7, 13))
        assert abs(other[0][1] - found["bf16-1234"][0][1]) < 0.01, "the state, other rounding"
    assert others[1][0][1] != found["bf16-1234"][0][1], "FP8"
    read = losses("--runs", "bf16", "--branch-at", "6", "--evaluate", "3")
    assert [step for step, _loss in read["bf16-1234"]] == [6, 7, 8]
    assert read["bf16-1234"][0][1] == pytest.approx(found["bf16-1234"][0][1], abs=1e-6)
    assert read["bf16-1234"][1][1] != pytest.approx(found["bf16-1234"][1][1], abs=1e-6)


@pytest.mark.slow
def test_gradients_of_one_state_lie_beside_those_of_bf16(tmp_path: Path) -> None:
    options = ("--study", "fp8", "--folder", str(tmp_path), "--quick", "--steps", "12")
    options = (*options, "--branch-at", "6", "--evaluate", "2")
    assert _run("benchmarks/convergence.py", *options, "--runs", "no sums")["failed"] == 0
    rows = _run("benchmarks/fp8_gradients.py", *options)["rows"]
    assert isinstance(rows, list) and len(rows) == 9 * 3
    for row in rows[:3]:
        assert row["run"] == "next batch" and row["direction"][0] < 0.9, row
    for row in rows[3:]:
        worst = 0.005 if row["run"] == "bf16, other sums" else 0.2
        assert max(row["error"]) < worst and len(row["error"]) == 2, row
        assert (max(row["error"]) > 0.005) == row["run"].endswith("fast"), row
        assert row["length"] == pytest.approx([1, 1], abs=0.05), row
        assert row["direction"] == pytest.approx([1, 1], abs=0.02), row


def test_gradients_without_a_state_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--study", "fp8", "--folder", str(tmp_path), "--branch-at", "6", "--evaluate", "2"]
    assert fp8_gradients.main(options) == 2
    assert "state-1234.pt: train it with convergence.py --branch-at" in capsys.readouterr().err
