"""Benchmarks on CPU ranks: communication left out, sweeps with failures in them, and figures."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from benchmarks.compare_losses import compare, read_losses
from benchmarks.peers import pair
from benchmarks.product_loop import EDGE_STEPS, write_random_tokens
from tests.harness.ranks import REPOSITORY, RankPool

LAYOUT = [
    "--tp",
    "2",
    "--pp",
    "2",
    "--vpp",
    "2",
    "--dp",
    "2",
    "--seq",
    "32",
    "--global-batch",
    "8",
    "--steps",
    "4",
]


def _results(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    """What throughput.py measured: stdout is one JSON object and nothing else."""
    results: list[dict[str, Any]] = json.loads(done.stdout)["results"]
    return results


@pytest.mark.slow
def test_a_rank_can_train_while_its_peers_do_nothing(pool: RankPool, tmp_path: Path) -> None:
    program = "tests.harness.benchmarking:steps_without_peers"
    for result in pool.run(program, 8, tmp_path, arguments=LAYOUT):
        assert result["finite"], "arbitrary values must stay of ordinary size"
        assert result["copied"] > 0


def test_a_trainer_that_is_freed_leaves_no_operation_behind(pool: RankPool, tmp_path: Path) -> None:
    options = ["--dp", "2", "--overlap", "dp", "--seq", "32", "--global-batch", "4"]
    program = "tests.harness.benchmarking:freed"
    for found in pool.run(program, 2, tmp_path, arguments=[*options, "--steps", "4"]):
        none, after_a_leg, freed = found["waiting"]
        assert none == freed == 0 and after_a_leg > 0, found
        assert found["gone"], "somebody still holds the trainer, and so its memory"


@pytest.mark.slow
def test_a_measurement_has_all_figures(pool: RankPool, tmp_path: Path) -> None:
    options = [
        "--tp",
        "2",
        "--pp",
        "2",
        "--seq",
        "32",
        "--global-batch",
        "8",
        "--steps",
        "5",
        "--rounds",
        "2",
        "--layers",
        "2",
    ]
    options += [
        "--against",
        "block=serial",
        "--exposed",
        "all,tp",
        "--repeats",
        "2",
        "--profile",
        "trace.json",
    ]
    results = pool.run("tests.harness.benchmarking:measured", 4, tmp_path, arguments=options)
    found = results[0]
    assert found["step_time_s"]["steps"] == 4, "two timed steps in each of two rounds"
    tokens = found["global_batch_size"] * found["sequence_length"] / found["step_time_s"]["p50"]
    assert found["tokens_per_s_per_device"] == pytest.approx(tokens / 4)
    assert [row["label"] for row in found["variants"]] == ["block=serial", "measured"]
    assert found["variants"][1]["gain_over_previous"]["pairs"] == 2
    whole = found["exposed"]["all"]
    bubble_s = whole["of_which_ideal_bubble"] * whole["step_time_s"]
    assert bubble_s == pytest.approx(whole["step_time_without_s"] / 4), (
        "two stages, four micro-batches"
    )
    assert "of_which_ideal_bubble" not in found["exposed"]["tp"], (
        "the other stage is still waited for"
    )
    for shares in found["exposed"].values():
        assert shares["min"] <= shares["share"] <= shares["max"] < 1.0
    assert found["repeats"]["losses_bitwise_equal"], "a CPU repeats itself bit for bit"
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    for other in results[1:]:
        assert other["step_time_s"] == found["step_time_s"], (
            "all ranks report the time of the slowest"
        )


@pytest.mark.slow
def test_a_sweep_goes_on_after_a_failure(tmp_path: Path) -> None:
    small = {"seq": 32, "global_batch": 8, "steps": 4, "initial": "exact"}
    sweep = [
        {"name": "tp", **small, "tp": 2, "losses": "tp.jsonl"},
        {"name": "tp again", **small, "tp": 2, "losses": "again.jsonl"},
        {"name": "lost", **small, "data": str(tmp_path / "nowhere")},
        {"name": "large", "tp": 4},
        {
            "name": "dp",
            **small,
            "losses": "dp.jsonl",
            "environment": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        },
    ]
    (tmp_path / "sweep.json").write_text(json.dumps(sweep))
    command = [
        sys.executable,
        "benchmarks/throughput.py",
        "--device",
        "cpu",
        "--ranks",
        "2",
        "--json",
    ]
    command += [
        "--sweep",
        str(tmp_path / "sweep.json"),
        "--folder",
        str(tmp_path),
        "--results",
        "results.jsonl",
    ]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr[-2000:]
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    found = {line["name"]: line for line in lines}
    assert set(found) == {"tp", "tp again", "lost", "large", "dp"}
    assert "cannot be read" in found["lost"]["failed"]
    assert "is not the 2 ranks" in found["large"]["failed"]
    assert found["dp"]["environment"] == {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert [line["name"] for line in _results(done)] == [line["name"] for line in lines]
    reported = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    assert {line["name"] for line in reported} == set(found), "each as it comes"
    first, again, *others = (
        read_losses(tmp_path / f"{name}.jsonl") for name in ("tp", "again", "dp")
    )
    assert len(first) == 4
    assert again == first, "whole, though less had to warm up"
    curves = [first, *others]
    assert compare(*curves, tolerance=1e-5)["first_step_above_tolerance"] is None


@pytest.mark.slow
def test_ranks_that_hang_are_ended(tmp_path: Path) -> None:
    entries = [
        {"name": "stuck", "seq": 4096, "global_batch": 512},
        {"name": "next", "seq": 32, "steps": 4},
    ]
    (tmp_path / "sweep.json").write_text(json.dumps(entries))
    command = [
        sys.executable,
        "benchmarks/throughput.py",
        "--device",
        "cpu",
        "--limit-s",
        "2",
        "--json",
    ]
    command += ["--sweep", str(tmp_path / "sweep.json"), "--folder", str(tmp_path)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    first, second = _results(done)
    assert first == {"entry": 0, "name": "stuck", "failed": "did nothing within 2 s"}
    assert second["name"] == "next", (
        "on a busy machine it may fail in the same way; what counts is that it had its turn"
    )


@pytest.mark.slow
def test_a_command_does_not_outlast_its_budget(tmp_path: Path) -> None:
    entries = [
        {"name": "long", "seq": 4096, "global_batch": 512},
        {"name": "next", "seq": 32, "steps": 4},
    ]
    (tmp_path / "sweep.json").write_text(json.dumps(entries))
    command = [
        sys.executable,
        "benchmarks/throughput.py",
        "--device",
        "cpu",
        "--budget-s",
        "3",
        "--json",
    ]
    command += ["--sweep", str(tmp_path / "sweep.json"), "--folder", str(tmp_path)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    found = {line["name"]: line["skipped"] for line in _results(done)}
    assert found == dict.fromkeys(("long", "next"), "the time is up (--budget-s)")


@pytest.mark.slow
def test_nothing_new_starts_when_the_time_is_up(pool: RankPool, tmp_path: Path) -> None:
    options = ["--tp", "2", "--seq", "32", "--global-batch", "4", "--steps", "4", "--rounds", "3"]
    program = "tests.harness.benchmarking:measured"
    for result in pool.run(program, 2, tmp_path / "ranks", arguments=options, deadline=1.0):
        assert result["rounds"] == 1, "a round that has started is finished"
    command = [
        sys.executable,
        "benchmarks/throughput.py",
        "--device",
        "cpu",
        "--budget-s",
        "1e-9",
        "--json",
    ]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    [line] = _results(done)
    assert "the time is up" in line["skipped"]


def test_the_products_loop_is_measured_with_all_of_its_parts(
    pool: RankPool, tmp_path: Path
) -> None:
    write_random_tokens(tmp_path / "corpus", 512)
    options = ["--tp", "2", "--seq", "32", "--global-batch", "8", "--steps", "5", "--layers", "2"]
    tracker = "tensorboard" if find_spec("tensorboard") else "none"
    options += ["--data", str(tmp_path / "corpus"), "--trackers", tracker]
    program = "tests.harness.benchmarking:losses_of_both_loops"
    for rank, found in enumerate(pool.run(program, 2, tmp_path / "ranks", arguments=options)):
        assert len(found["product"]) == 5
        assert found["product"] == found["bare"], "the loader's samples are those of the bare step"
        # A layer alone gathers and scatters twice in each direction.
        assert found["product operations"] > 8 * (5 + EDGE_STEPS)
        assert found["bare operations"] == 0, "the bare step writes no status page"
        written = list((tmp_path / "ranks").rglob(f"loader-1-rank-{rank}/**/events.out.*"))
        assert bool(written) == (rank == 0 and tracker != "none"), (
            "step records reach the tracker of rank 0"
        )
        log = (tmp_path / "ranks" / f"loader-1-rank-{rank}" / "log").read_text()
        assert "step 3: loss" in log


@pytest.mark.slow
def test_the_overhead_of_the_loop_is_a_figure_with_a_bound(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/loop_overhead.py", "--preset", "tiny", "--device", "cpu"]
    command += ["--seq", "32", "--steps", "5", "--rounds", "3", "--folder", str(tmp_path)]
    for most, status in (("1e9", 0), ("-1e9", 1)):
        words = [*command, f"--most-percent={most}"]
        done = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stderr[-2000:]
        found = json.loads(done.stdout.splitlines()[-1])
        assert found["pairs"] == 3
        assert found["holds"] is (status == 0)
        assert found["least_percent"] <= found["overhead_percent"] < found["upper_95_percent"]


@pytest.mark.slow
def test_a_row_is_measured_beside_its_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bar's ranks get their numbers; one start of ours measures all that it can."""
    program = (
        "import json, os, sys; figures = {'tokens_per_s_per_device': 7.0, 'mfu_causal': None}; "
        "print(json.dumps({**figures, 'rank': os.environ['RANK']}), file=open(sys.argv[1], 'a'))"
    )
    command = pair.command

    def bar_of_our_own(row: pair.Row, side: str, steps: int, results: Path) -> list[str]:
        return (
            [sys.executable, "-c", program, str(results)]
            if side == pair.BAR
            else command(row, side, steps, results)
        )

    monkeypatch.setattr(pair, "command", bar_of_our_own)
    shape = {"preset": "tiny", "layers": 2, "tp": 2, "seq": 32, "global_batch": 8}
    ours = {
        "plain": {},
        "overlapped": {"overlap": "tp"},
        "lost": {"data": str(tmp_path / "nowhere")},
    }
    rows = [
        {
            "name": "small",
            "devices": 2,
            "bar": "none",
            "shape": shape,
            "bar_options": {},
            "ours": ours,
        }
    ]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    arguments = ["--rows", str(tmp_path / "rows.json"), "--rounds", "1", "--steps", "4"]
    assert pair.main([*arguments, "--results", str(tmp_path / "pairs.jsonl")]) == 1
    lines = {
        line["side"]: line
        for line in map(json.loads, (tmp_path / "pairs.jsonl").read_text().splitlines())
    }
    assert list(lines) == ["bar", *ours]
    assert lines["bar"]["rank"] in ("0", "1")
    assert "cannot be read" in lines["lost"]["failed"]
    for side in ("plain", "overlapped"):
        assert lines[side]["tokens_per_s_per_device"] > 0
        assert lines[side]["overlap"] == (["tp"] if side == "overlapped" else [])


@pytest.mark.slow
@pytest.mark.parametrize("legs", ["megascale", "megascale,dcp-async,dcp-staged,dcp-process"])
def test_saves_beside_torchs_own_have_all_figures_and_restore_what_was_saved(legs: str) -> None:
    script = REPOSITORY / "benchmarks" / "checkpoint_dcp.py"
    options = ["--mib", "12", "--saves", "2", "--pairs", "1", "--work-s", "0.05", "--legs", legs]
    done = subprocess.run(
        [sys.executable, str(script), *options], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert set(result["legs"]) == set(legs.split(","))
    for leg, figures in result["legs"].items():
        assert figures["wrong_values"] == [0, 0, 0]
        assert figures["written_per_state"][1] == pytest.approx(1.0, abs=0.01), leg
        # A new process reads its modules as well, which a state of 24 MiB does not outweigh.
        assert 1.0 <= figures["read_per_state"][0] < 1.2, leg
        assert all(figures[name][0] > 0 for name in ("stall_s", "durable_s", "restore_s")), leg
