"""Benchmarks on CUDA devices: figures, the split of a step, a configuration without room."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.harness.ranks import REPOSITORY, RankPool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 CUDA devices"),
]

SMALL = ["--seq", "256", "--global-batch", "8", "--steps", "6"]


@pytest.mark.parametrize(
    "layout", [["--tp", "2"], ["--pp", "2"], ["--dp", "2"]], ids=["tp", "pp", "dp"]
)
def test_figures_and_the_split_of_a_step(layout: list[str], pool: RankPool, tmp_path: Path) -> None:
    options = [*layout, *SMALL, "--exposed", "all", "--rounds", "2", "--profile", "trace.json.gz"]
    program = "tests.harness.benchmarking:measured"
    found = pool.run(program, 2, tmp_path, arguments=options)[0]
    assert found["memory_gib"] > 0
    assert found["step_time_s"]["min"] > 0
    split = found["profile"]
    assert split["exclusive_ms"]["gemm"] > 0
    assert split["busy_ms"]["communication"] > 0
    assert sum(split["exclusive_ms"].values()) == pytest.approx(split["step_ms"])
    assert found["exposed"]["all"]["share"] < 1.0


@pytest.mark.parametrize(
    "way",
    [[], ["--cuda-graphs"], ["--precision", "fp8"], ["--precision", "fp8", "--cuda-graphs"]],
    ids=["bf16", "bf16, graphs", "fp8", "fp8, graphs"],
)
def test_the_memory_of_a_trainer_is_free_when_the_next_one_is_measured(
    way: list[str], pool: RankPool, tmp_path: Path
) -> None:
    """In FP8 on 2026-11-22, 23 and 27 the parameters of the trainer before were still allocated."""
    options = ["--dp", "2", "--overlap", "dp", *way, *SMALL]
    for found in pool.run("tests.harness.benchmarking:freed", 2, tmp_path, arguments=options):
        before, after_a_leg, freed = found["allocated"]
        assert freed - before < 0.01 * (after_a_leg - before), found


def test_a_rank_can_train_while_its_peer_does_nothing(pool: RankPool, tmp_path: Path) -> None:
    program = "tests.harness.benchmarking:steps_without_peers"
    for result in pool.run(program, 2, tmp_path, arguments=["--tp", "2", *SMALL]):
        assert result["finite"]
        assert result["copied"] > 0


def test_a_sweep_goes_on_after_a_configuration_that_has_no_room(tmp_path: Path) -> None:
    small = {"seq": 256, "global_batch": 8, "steps": 4}
    sweep = [
        {"name": "175B on two devices", "preset": "175b-stage", "layers": 96, "tp": 2, "steps": 4},
        {"name": "tp", "tp": 2, **small, "deterministic": True, "repeats": 2},
    ]
    (tmp_path / "sweep.json").write_text(json.dumps(sweep))
    command = [
        sys.executable,
        "benchmarks/throughput.py",
        "--ranks",
        "2",
        "--json",
        "--folder",
        str(tmp_path),
    ]
    command += ["--sweep", str(tmp_path / "sweep.json")]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    lines = {line["name"]: line for line in json.loads(done.stdout)["results"]}
    assert "OutOfMemory" in lines["175B on two devices"]["failed"], done.stderr[-2000:]
    assert lines["tp"]["repeats"]["losses_bitwise_equal"]
