"""The trainer as a library: steps of a job of one rank, a checkpoint's text, nothing written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.harness.by_hand import STEPS, HandRun, small_job, write_job
from tests.harness.snippets import block
from typer.testing import CliRunner

from megascale_cli.app import build_app
from megascale_job.visible import visible
from megascale_trainer import Trainer, load_config


def test_a_step_a_checkpoint_and_a_sample_of_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = write_job(tmp_path, small_job(tmp_path, parallelism={"dp": 2}))
    run = HandRun(tmp_path, job, 2)
    try:
        assert run.end() == 0, run.story()
    finally:
        run.close()
    before = sorted(path for path in (tmp_path / "checkpoints").rglob("*"))

    trainer = Trainer(load_config(job), "cpu")
    losses = [record.loss for record in trainer.steps(3)]
    # Two replicas sum in another order than one rank.
    assert losses == pytest.approx(list(run.losses().values())[:3], abs=5e-6)

    assert trainer.restore() == STEPS
    trained = trainer.evaluate([trainer.batches(0)])
    assert trained < losses[0]
    text = trainer.generate("a", 8)
    assert text.startswith("a") and len(text.encode()) > 1
    assert trainer.generate("a", 8) == text
    drawn = [trainer.generate("a", 8, temperature=1.0, seed=seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert sorted(path for path in (tmp_path / "checkpoints").rglob("*")) == before

    _generate_prints_the_same(job, trainer, tmp_path)
    monkeypatch.chdir(tmp_path)
    page = block("docs/by-hand.md", "load_config").code.replace("job.yaml", "job.json")
    exec(compile(page, "docs/by-hand.md", "exec"), {})
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == f"restored step {STEPS}"
    assert [line.split()[0] for line in shown[1:4]] == [str(STEPS + n) for n in (1, 2, 3)]

    newest = next((tmp_path / "checkpoints").glob(f"attempts/*/step-{STEPS:09}/*.safetensors"))
    data = bytearray(newest.read_bytes())
    data[-5] ^= 1
    newest.write_bytes(data)
    done = CliRunner().invoke(build_app(), ["generate", str(job), "--tokens", "1", "--json"])
    assert done.exit_code == 0, done.output
    assert "a newer checkpoint is not used" in done.stderr and newest.name in done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["step"] < STEPS and len(found["passed_over"]) == 1


def _generate_prints_the_same(job: Path, trainer: Trainer, folder: Path) -> None:
    """`megascale generate` prints what the library makes of the checkpoint, or why it cannot."""
    assert trainer.restored
    wanted = trainer.generate("a", 8, temperature=0.8, seed=3)
    command = ["generate", str(job), "--prompt", "a", "--tokens", "8", "--seed", "3"]
    done = CliRunner().invoke(build_app(), [*command, "--device", "cpu", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {
        "job": trainer.config.name,
        "step": STEPS,
        "prompt": "a",
        "text": wanted,
        "passed_over": [],
    }
    done = CliRunner().invoke(build_app(), [*command, "--device", "cpu"])
    assert done.stdout.rstrip("\n").endswith(visible(wanted).rstrip("\n"))

    new = json.loads(job.read_text())
    new["checkpoint"]["uri"] = str(folder / "nothing-yet")
    (folder / "new.json").write_text(json.dumps(new))
    for given, status, words in (
        ([str(folder / "new.json")], 4, "no complete checkpoint"),
        ([str(folder / "lost.json")], 2, "cannot be read"),
        (["py12m"], 2, "megascale config show py12m > py12m.yaml"),
        ([str(job), "--device", "abacus"], 5, "abacus"),
        ([str(job), "--temperature", "-1"], 2, "0 or more"),
    ):
        done = CliRunner().invoke(build_app(), ["generate", "--device", "cpu", *given])
        assert done.exit_code == status, done.output
        assert words in done.stderr
