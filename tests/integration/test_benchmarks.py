"""One dry run of each benchmark on a CPU: it ends well, and its last line is one JSON object."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.options import entry_of, job, read_sweep, to_arguments
from benchmarks.peers import megatron_te, pair

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
LIMIT_S = 540.0  # most end within 20 s on an idle machine
# The command line of a dry run, and a key of its figures.
DRY_RUNS = {
    "throughput": (
        "--preset tiny --device cpu --tp 2 --dp 2 --steps 5 --against block=serial --rounds 2"
        " --profile trace.json.gz",
        "results",
    ),
    "operators": ("--quick --only layernorm,documents,cross_entropy,adamw", "rows"),
    "convergence": ("--study fp8 --folder {folder} --quick --steps 20 --runs bf16", "rows"),
    "snapshot_steps": (
        "--device cpu --ranks 2 --preset tiny --block-steps 8 --most-slower 9",
        "slower_with_snapshots",
    ),
    "recovery": (
        "--preset tiny --device cpu --nodes 1 --devices-per-node 2 --tp 2 --fault worker"
        " --snapshot-interval 1",
        "fault_to_first_new_step_s",
    ),
    "heartbeats": (
        "--nodes 8 --interval 0.2 --window 1 --windows 1 --warmup 0.5 --reconnect"
        " --max-p99-ms 5000",
        "core_share",
    ),
    "fleet": ("--nodes 20 --lines 500 --rounds 1", "failover_s"),
    "group_start": ("--ranks 128 --rounds 1", "ranks"),
    "grouped_gemm": ("--quick", "lines"),
}
# A measurement that a busy machine makes miss its bound still prints its figures.
MAY_MISS = ("heartbeats", "fleet", "snapshot_steps")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(LIMIT_S + 30.0)]


def _run(script: str, *options: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / script), *options]
    return subprocess.run(
        command, check=False, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S
    )


@pytest.mark.parametrize("name", DRY_RUNS)
def test_a_dry_run_prints_its_figures(name: str, tmp_path: Path) -> None:
    options, key = DRY_RUNS[name]
    done = _run(f"{name}.py", *options.format(folder=tmp_path).split(), folder=tmp_path)
    allowed = (0, 1) if name in MAY_MISS else (0,)
    assert done.returncode in allowed, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1])[key]


def test_runs_are_compared_at_one_state(tmp_path: Path) -> None:
    """The same sums in another order change gradients less than another batch does."""
    options = f"--study experts-fp8 --folder {tmp_path} --quick --steps 4 --branch-at 4 --state 2"
    done = _run("convergence.py", *options.split(), "--runs", "bf16", folder=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads(done.stdout.splitlines()[-1])["at_state"]
    router = {row["run"]: row["gradients"]["router"]["error"] for row in rows}
    assert router["bf16, other sums"] < 0.1 * router["next batch"]


def test_a_pair_takes_turns_past_a_row_that_fails(tmp_path: Path) -> None:
    """The bar is the trainer itself."""
    shape = {"preset": "tiny-experts", "steps": 4}
    common = {"devices": 1, "bar": "../throughput", "shape": shape, "bar_options": {"name": "bar"}}
    rows = [
        {"name": "refused", **common, "ours": {"ep 3": {"ep": 3}}},
        {"name": "measured", **common, "ours": {"a": {}, "b": {"routing": "balanced"}}},
    ]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    done = _run("peers/pair.py", "--rows", "rows.json", "--rounds", "2", folder=tmp_path)
    assert done.returncode == 1, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    turns = [(turn["row"], turn["side"], turn["round"]) for turn in found["turns"]]
    measured = [("measured", side, turn) for turn in (0, 1) for side in ("bar", "a", "b")]
    assert turns == [("refused", "bar", 0), ("refused", "ep 3", 0), *measured]
    assert [(ratio["row"], ratio["ours"]) for ratio in found["ratios"]] == [
        ("measured", "a"),
        ("measured", "b"),
    ]


@pytest.mark.parametrize("script", ["live_faults.py", "peers/megatron_te.py"])
def test_a_benchmark_that_needs_gpus_shows_its_options(script: str, tmp_path: Path) -> None:
    done = _run(script, "--help", folder=tmp_path)
    assert done.returncode == 0 and "usage" in done.stdout, done.stderr[-3000:]


def test_a_sweep_continues_after_a_measurement_that_fails(tmp_path: Path) -> None:
    sweep = [
        {"name": "refused", "preset": "tiny", "tp": 3},
        {"name": "measured", "preset": "tiny", "tp": 2, "steps": 5},
    ]
    (tmp_path / "sweep.json").write_text(json.dumps(sweep))
    options = "--sweep sweep.json --ranks 2 --device cpu"
    done = _run("throughput.py", *options.split(), folder=tmp_path)
    refused, measured = json.loads(done.stdout.splitlines()[-1])["results"]
    assert done.returncode == 1
    assert "failed" in refused and measured["tokens_per_s_per_device"] > 0


def test_every_sweep_and_row_can_be_read() -> None:
    for path in (BENCHMARKS / "sweeps").glob("*.json"):
        assert read_sweep(path, ()), path
    for path in (BENCHMARKS / "peers").glob("rows-*.json"):
        for row in json.loads(path.read_text()):
            devices = row["devices"]
            for values in pair.sweep(row, pair.BAR, 5):
                assert megatron_te.job_of(megatron_te.parsed(values), devices)
            for values in pair.sweep(row, pair.OURS, 5):
                assert job(entry_of(to_arguments(values)).run, devices, cuda=True)
