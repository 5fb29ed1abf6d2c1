"""The trainer as a library: steps of a job of one rank, a checkpoint's text, nothing written."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.harness.by_hand import STEPS, HandRun, small_job, write_job
from tests.harness.snippets import block

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

    monkeypatch.chdir(tmp_path)
    page = block("docs/by-hand.md", "load_config").code.replace("job.yaml", "job.json")
    exec(compile(page, "docs/by-hand.md", "exec"), {})
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == f"restored step {STEPS}"
    assert [line.split()[0] for line in shown[1:4]] == [str(STEPS + n) for n in (1, 2, 3)]
