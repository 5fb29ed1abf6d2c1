"""`megascale plan search`, `spares`, `checkpoint`, `goodput` and `calibrate`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megascale_cli.app import build_app
from megascale_job.sizes.failures import best_interval_s, mtbf_s
from megascale_trainer.rates import VERSION


@pytest.fixture
def runner() -> CliRunner:
    return CliRunner()


def run(runner: CliRunner, line: str) -> tuple[int, str]:
    """Exit status and output."""
    done = runner.invoke(build_app(), ["plan", *line.split()], env={"COLUMNS": "80"})
    return done.exit_code, done.output


def test_a_search_shows_layouts_reasons_and_sources(runner: CliRunner) -> None:
    code, output = run(runner, "search --model 175b --gpus 1536 --gpu h100 --top 3")
    assert code == 0
    for part in ("recompute", "MFU causal / full", "cannot", "memory: needs", "kernel_share"):
        assert part in output
    code, output = run(runner, "search --model llama3-8b --gpus 16 --global-batch 24 --json")
    found = json.loads(output)
    assert (code, found["global_batch"]) == (0, 24)
    assert found["ranked"][0]["step_time_s"] == sum(found["ranked"][0]["terms"].values())
    assert all(item["reason"] for item in found["rejected"])
    assert all(item["source"] for item in found["sources"])


def test_a_search_of_experts_shows_ep(runner: CliRunner) -> None:
    line = "search --model qwen3-30b-a3b --gpus 16 --global-batch 512"
    code, output = run(runner, f"{line} --top 3")
    assert code == 0
    assert " ep " in output and "experts" in output and "hidden_ep" in output
    found = json.loads(run(runner, f"{line} --json")[1])
    assert {row["ep"] for row in found["ranked"]} <= {1, 2, 4, 8}
    assert found["ranked"][0]["terms"]["experts"] > 0
    wide = json.loads(run(runner, f"{line} --ep-across-nodes --top 1000 --json")[1])
    assert 16 in {row["ep"] for row in (*wide["ranked"], *wide["rejected"])}


def test_the_plan_of_a_job_with_experts_shows_them(runner: CliRunner, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    line = f"init --model qwen3-30b-a3b --output {file}"
    assert runner.invoke(build_app(), line.split()).exit_code == 0
    code, output = run(runner, f"{file} --offline")
    assert code == 0
    for part in (
        "30.5 billion parameters, 3.35 billion active for a token",
        "128 in each of 48 layers, a token chooses 8; ep 8: 16 experts of a layer on a rank",
        "predicted on H100s",
        "MFU 2",
        "of active parameters; the fullest rank of ep is taken to have 1.11 times the mean rows",
        "with even loads of experts",
    ):
        assert part in output
    facts = json.loads(run(runner, f"{file} --offline --json")[1])
    step = facts["predicted_step"]
    assert step["low_s"] < step["step_s"] < step["high_s"]
    tokens = facts["tokens_per_step"] / facts["world_size"]
    assert step["tokens_per_s_of_a_device"] == pytest.approx(tokens / step["step_s"])
    forced = file.read_text().replace("  training:\n", "  training:\n    forced_balance: true\n")
    file.write_text(forced)
    even = json.loads(run(runner, f"{file} --offline --json")[1])["predicted_step"]
    assert even["imbalance"] == 1.0 and even["step_s"] < step["step_s"]
    for ep, field in (("3", "trainer.parallelism.ep"), ("16", "trainer.parallelism.ep")):
        file.write_text(forced.replace("ep: 8", f"ep: {ep}"))
        code, output = run(runner, f"{file} --offline --json")
        found = json.loads(output)
        assert code == 2 and "predicted_step" not in found
        assert found["refused"][0]["field"] == field and found["refused"][0]["remedy"]


def test_the_plan_of_a_dense_job_says_nothing_of_experts(runner: CliRunner, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    assert runner.invoke(build_app(), f"init --output {file}".split()).exit_code == 0
    facts = json.loads(run(runner, f"{file} --offline --json")[1])
    assert not {"experts", "active_parameters", "predicted_step"} & {*facts}
    assert "expert" not in run(runner, f"{file} --offline")[1]


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("search --model 9t --gpus 8", "--model"),
        ("search --model qwen3-30b-a3b --gpus 8 --block parallel", "experts need serial"),
        ("search --model 7b --gpus 8 --gpu v100", "gpu"),
        ("search --model 7b --gpus 8 --system theirs", "system"),
        ("search --model 7b --gpus 8 --block both-of-them", "--block"),
        ("search --model 7b --gpus 8 --calibration absent.json", "absent.json"),
        ("search --model 7b --gpus 8 --gpu a100-80g --precision fp8", "precision"),
        ("search --model 7b --gpus 999999", "gpus"),
        ("spares --gpus 0", "gpus"),
    ],
)
def test_a_mistake_is_named(runner: CliRunner, line: str, named: str) -> None:
    code, output = run(runner, line)
    assert code == 2
    assert named in output


def test_nothing_that_fits_is_an_answer_of_its_own(runner: CliRunner) -> None:
    code, output = run(runner, "search --model 175b --gpus 8")
    assert code == 2
    assert "0 layouts can run" in output


def test_spares_checkpoint_and_goodput_use_the_services_formulas(runner: CliRunner) -> None:
    assert json.loads(run(runner, "spares --gpus 8192 --json")[1])["spares"] == 4
    found = json.loads(run(runner, "checkpoint --gpus 16384 --save-cost-s 2 --json")[1])
    assert found["interval_s"] == best_interval_s(2, mtbf_s(50_000, 16384))
    slow = json.loads(run(runner, "goodput --gpus 16384 --restart-s 1500 --json")[1])
    quick = json.loads(run(runner, "goodput --gpus 16384 --restart-s 180 --json")[1])
    assert 0.85 < slow["ettr"] < slow["ettr_if"]["restart_halved"] < quick["ettr"] < 1


def test_a_job_file_is_still_planned_and_help_shows_both(runner: CliRunner) -> None:
    code, output = run(runner, "absent.yaml")
    assert (code, "absent.yaml" in output) == (2, True)
    code, output = run(runner, "--help")
    assert code == 0
    for word in ("search", "spares", "checkpoint", "goodput", "calibrate"):
        assert word in output


def test_a_machine_is_measured_and_the_search_reads_the_file(
    runner: CliRunner, tmp_path: Path
) -> None:
    file = tmp_path / "cpu.json"
    code, _ = run(runner, f"calibrate --device cpu --budget-s 0.05 --output {file}")
    found = json.loads(file.read_text())
    assert (code, found["version"]) == (0, VERSION)
    assert set(found["rates"]) == {"gemm_flops", "attention_flops", "copy_bytes_s"}
    code, output = run(runner, f"search --model 7b --gpus 8 --gpu h200 --calibration {file} --json")
    assert code == 0
    assert json.loads(output)["ranked"][0]["step_time_s"] > 60  # a CPU's rates
    assert run(runner, f"calibrate --device tpu --output {file}")[0] == 2
