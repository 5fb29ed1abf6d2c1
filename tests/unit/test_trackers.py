"""Trackers: one run per job, the record's names everywhere, and no step lost to any of them."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.harness.training import tiny_job

from megascale_job.config import JobConfig, TelemetryConfig
from megascale_job.loading import from_accepted
from megascale_trainer.telemetry import trackers
from megascale_trainer.telemetry.trackers import Trackers, problem_of

RECORD = {
    "step": 300,
    "loss": 2.5,
    "gradient_norm": float("nan"),
    "z_loss": 1e300,
    "consumed_tokens": 1 << 40,
    "mfu_causal": None,
    "attempt": 2,
    "completed_at_s": 1_700_000_000.25,
}
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


def curves(folder: Path) -> dict[str, list[Any]]:
    """What TensorBoard shows of a job's folder: the events of each curve."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = accumulator.EventAccumulator(str(folder / "tensorboard"))
    found.Reload()
    return {tag: found.Scalars(tag) for tag in found.Tags()["scalars"]}


def test_tensorboard_shows_every_number_of_the_record_at_its_step(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    found = Trackers(job(tensorboard=True), tmp_path, 0)
    found.add(RECORD)
    found.add({**RECORD, "step": 301, "evaluation_loss": 3.0})
    found.close()
    shown = curves(tmp_path)
    assert shown.keys() == CURVES | {"evaluation_loss"}
    assert [(event.step, event.value) for event in shown["loss"]] == [(300, 2.5), (301, 2.5)]
    assert shown["loss"][0].wall_time == RECORD["completed_at_s"]
    assert shown["z_loss"][0].value == math.inf, "beyond float32"
    assert math.isnan(shown["gradient_norm"][0].value)
    assert [event.step for event in shown["evaluation_loss"]] == [301]


def test_a_later_attempt_hides_what_an_earlier_one_has_written_beyond_it(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    config = job(tensorboard=True)
    run(config, tmp_path, 0, 1, 2, 3)
    run(config, tmp_path, 1, 2)
    shown = curves(tmp_path)
    assert shown.keys() == CURVES
    assert [event.step for event in shown["loss"]] == [1, 2]


def test_a_tracker_that_fails_costs_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tensorboard")
    install(tmp_path, monkeypatch, _BROKEN)
    run(job(wandb=True, tensorboard=True), tmp_path, 0, 1)
    assert "tracker wandb is given up: OSError: no space" in capsys.readouterr().out
    assert curves(tmp_path).keys() == CURVES
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "tensorboard").write_text("in the way")
    run(job(tensorboard=True), tmp_path / "other", 0, 1)
    assert "tracker tensorboard is given up" in capsys.readouterr().out


def test_a_tracker_that_cannot_follow_loses_records_and_holds_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trackers, "MOST_WAITING", 2)
    code = "class Settings:\n    def __init__(self, **o): pass\n"
    install(tmp_path, monkeypatch, code + "def init(**o): raise OSError(GO.wait())\n")
    go = threading.Event()
    monkeypatch.setattr(importlib.import_module("wandb"), "GO", go, raising=False)
    found = Trackers(job(wandb=True), tmp_path, 0)
    for step in range(5):
        found.add({**RECORD, "step": step})
    assert capsys.readouterr().out.count("records are dropped") == 1
    go.set()
    found.close()


def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    assert problem_of(TelemetryConfig()) == ""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name in ("tensorboard", "wandb", "mlflow"):
        problem = problem_of(TelemetryConfig(**{name: True}))
        assert f"trainer.telemetry.{name}" in problem and "megascale[trackers]" in problem
