"""Predictions from a calibration beside what was measured on the same kind of device."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megascale_planner.devices import GPUS, BadCalibration
from megascale_planner.prediction import predict_lines, with_measured_share
from megascale_planner.systems import SYSTEMS
from megascale_trainer.rates import ON_CPU, measure_step

DATA = Path(__file__).resolve().parents[1] / "data" / "planner"


def calibration(**training: Any) -> str:
    row = {"layers": 4, "hidden": 4096, "heads": 32, "micro_batch": 4, "global_batch": 16}
    return json.dumps({"version": 1, "rates": {}, "training": {**row, **training}})


@pytest.mark.parametrize("gpu", ["h100", "h200"])
def test_a_calibrated_planner_predicts_other_models_and_fp8(
    gpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 2026-11-24, one device: 12 rows of 1B to 175B widths; the step of the calibration is none.
    # All FP8 products were summed fast.
    monkeypatch.setitem(SYSTEMS, "ours", replace(SYSTEMS["ours"], fp8_sums=1.0))
    rows = [json.loads(line) for line in (DATA / f"one-{gpu}.jsonl").read_text().splitlines()]
    text = (DATA / f"calibration-{gpu}.json").read_text()
    found = list(predict_lines((json.dumps(row["row"]) for row in rows), text))
    errors = [
        abs(answer["step_time_s"] / row["step_time_s"] - 1)
        for row, answer in zip(rows, found, strict=True)
    ]
    assert len(errors) == 12 and statistics.mean(errors) < 0.035 and max(errors) < 0.07
    by_table = list(predict_lines(json.dumps(row["row"]) for row in rows))
    for row, answer in zip(rows, by_table, strict=True):
        assert answer["step_time_s"] == pytest.approx(row["step_time_s"], rel=0.13)


def test_the_share_predicts_the_step_that_it_is_from() -> None:
    ours, gpu = SYSTEMS["ours"], GPUS["h100"]
    (as_fitted,) = predict_lines([json.dumps(json.loads(calibration())["training"])])
    same = with_measured_share(ours, gpu, calibration(step_time_s=as_fitted["step_time_s"]))
    assert same.kernel_share == pytest.approx(ours.kernel_share, rel=1e-6)
    slower = with_measured_share(ours, gpu, calibration(step_time_s=2 * as_fitted["step_time_s"]))
    assert slower.kernel_share < 0.5 * same.kernel_share
    assert "the calibration's step" in dict(slower.sources)["kernel_share"]
    # Another's software was not measured, nor was any by an older file.
    theirs = SYSTEMS["megascale"]
    assert with_measured_share(theirs, gpu, calibration(step_time_s=1.0)) is theirs
    assert with_measured_share(ours, gpu, '{"version": 1, "rates": {}}') is ours


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (calibration(), r"training\.step_time_s: None"),
        (calibration(step_time_s=0), r"training\.step_time_s: 0"),
        (calibration(step_time_s=True), r"training\.step_time_s"),
        (calibration(step_time_s=1e6), "idle machine"),
        (calibration(step_time_s=1.0, heads=0), r"training\.heads"),
        ('{"version": 1, "rates": {}, "training": 3}', "training"),
    ],
)
def test_a_step_that_cannot_be_used_is_named(text: str, named: str) -> None:
    with pytest.raises(BadCalibration, match=named):
        with_measured_share(SYSTEMS["ours"], GPUS["h100"], text)


def test_a_step_is_measured() -> None:
    found = measure_step(torch.device("cpu"), 0.01)
    assert found.items() >= ON_CPU.items() and found["global_batch"] == 16
    assert 0 < found["step_time_s"] < 60
