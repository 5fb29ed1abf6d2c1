"""Trackers: one run per job, the record's names everywhere, and no step lost to any of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.harness.training import tiny_job
from tests.unit.test_event_file import RECORD, events

from megascale_common.job.config import JobConfig, TelemetryConfig, from_accepted
from megascale_trainer.telemetry import trackers
from megascale_trainer.telemetry.trackers import Trackers, problem_of

CURVES = {"loss", "gradient_norm", "z_loss", "consumed_tokens"}
# What it was called with, as JSON lines: the library itself needs a network or minutes.
_WANDB = """
import json
from pathlib import Path

def note(*what):
    with open(LOG, "a") as file:
        file.write(json.dumps(what, default=str) + "\\n")

class Settings:
    def __init__(self, **options): pass

class Run:
    def define_metric(self, name, step_metric): note("metric", name, step_metric)
    def log(self, values): note("log", values)
    def finish(self): note("finish")

def init(**options):
    note("init", {name: options[name] for name in ("id", "mode", "dir", "name", "resume")})
    return Run()
"""
_BROKEN = """
class Settings:
    def __init__(self, **options): pass
def init(**options):
    raise OSError("no space left on device")
"""


def job(**telemetry: bool) -> JobConfig:
    return from_accepted(tiny_job(telemetry=telemetry))


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> Path:
    """A package wandb with ``code``; returns the file that LOG names."""
    log = folder / "calls.jsonl"
    site = folder / "site"
    site.mkdir()
    (site / "wandb.py").write_text(f"LOG = {str(log)!r}\n{code}")
    monkeypatch.syspath_prepend(site)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    return log


def run(config: JobConfig, folder: Path, done: int, *steps: int) -> None:
    """An attempt that goes on from ``done`` and records ``steps``."""
    found = Trackers(config, folder, done)
    for step in steps:
        found.add({**RECORD, "step": step})
    found.close()


def test_all_attempts_of_a_job_write_one_run_with_the_records_own_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    log = install(tmp_path, monkeypatch, _WANDB)
    config = job(wandb=True)
    run(config, tmp_path, 0, 1, 2)
    run(config, tmp_path, 1, 2)
    calls: list[list[Any]] = [json.loads(line) for line in log.read_text().splitlines()]
    begun = [options for what, *options in calls if what == "init"]
    assert begun[0] == begun[1]
    assert begun[0][0]["mode"] == "offline" and begun[0][0]["resume"] == "allow"
    logged = [values[0] for what, *values in calls if what == "log"]
    assert [values["step"] for values in logged] == [1, 2, 2]
    assert logged[0].keys() == {"step", *CURVES}
    assert [what for what, *_ in calls].count("finish") == 2


def test_a_later_attempt_hides_what_an_earlier_one_has_written_beyond_it(tmp_path: Path) -> None:
    config = job(tensorboard=True)
    run(config, tmp_path, 6, 7)
    _, restart, step = events(tmp_path / "tensorboard")
    assert (restart.step, restart.session_log.status) == (7, 1)
    assert {value.tag for value in step.summary.value} == CURVES


def test_a_tracker_that_fails_costs_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(tmp_path, monkeypatch, _BROKEN)
    run(job(wandb=True, tensorboard=True), tmp_path, 0, 1)
    assert "tracker wandb is given up: OSError: no space" in capsys.readouterr().out
    assert len(list(events(tmp_path / "tensorboard"))) == 2


def test_a_tracker_that_cannot_follow_loses_records_and_holds_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trackers, "MOST_WAITING", 2)
    monkeypatch.setattr(trackers, "CLOSE_TIMEOUT_S", 0.0)
    code = "import time\nclass Settings:\n    def __init__(self, **o): pass\n"
    install(tmp_path, monkeypatch, code + "def init(**o): time.sleep(2)\n")
    found = Trackers(job(wandb=True), tmp_path, 0)
    for step in range(5):
        found.add({**RECORD, "step": step})
    assert capsys.readouterr().out.count("records are dropped") == 1


def test_a_missing_library_is_named_with_its_extra() -> None:
    assert problem_of(TelemetryConfig(tensorboard=True)) == ""
    for name in ("wandb", "mlflow"):
        if name in sys.modules:
            continue
        problem = problem_of(TelemetryConfig(**{name: True}))
        assert f"trainer.telemetry.{name}" in problem and "megascale[trackers]" in problem
