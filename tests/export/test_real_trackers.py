"""Weights & Biases and MLflow themselves, offline: the calls that unit tests only record."""

from __future__ import annotations

import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.harness.ranks import REPOSITORY
from tests.unit.test_trackers import CURVES, RECORD, job

from megascale_trainer.telemetry.trackers import Trackers

pytestmark = pytest.mark.export

_HEADER_BYTES, _BLOCK_BYTES = 7, 1 << 15
_WHOLE, _LAST = 1, 4


def records(data: bytes) -> Iterator[bytes]:
    """The records of a .wandb file: LevelDB's log format behind a header of as many bytes."""
    at, parts = _HEADER_BYTES, b""
    while at + _HEADER_BYTES <= len(data):
        left = _BLOCK_BYTES - at % _BLOCK_BYTES
        if left < _HEADER_BYTES:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        at += _HEADER_BYTES
        parts += data[at : at + size]
        at += size
        if kind in (_WHOLE, _LAST):
            yield parts
            parts = b""


def test_wandb_takes_the_records_of_all_attempts_into_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.delenv("WANDB_MODE", raising=False)
    for attempt in ("0, 1, 2", "1, 2, 3"):  # each a process of its own, as an attempt is
        code = (
            "import pathlib, sys; from tests.unit.test_trackers import job, run; "
            f"run(job(wandb=True), pathlib.Path(sys.argv[1]), {attempt})"
        )
        command = [sys.executable, "-c", code, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=REPOSITORY)
        assert done.stdout == "", "a tracker that is given up says so"
    kept = (tmp_path / "wandb-run").read_text()
    files = sorted((tmp_path / "wandb").glob(f"offline-run-*/run-{kept}.wandb"))
    assert len(files) == 2, "one file an attempt, one run"
    logged = []
    for file in files:
        for data in records(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                logged.append({item.key or item.nested_key[0]: item.value_json for item in items})
    assert [values["step"] for values in logged] == ["1", "2", "2", "3"]
    assert all(values.keys() >= CURVES for values in logged)


def test_mlflow_keeps_one_run_with_the_records_own_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = pytest.importorskip("mlflow.tracking").MlflowClient
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    sound: dict[str, Any] = {**RECORD, "gradient_norm": 1.0, "z_loss": 0.5}
    for done, steps in ((0, (1, 2)), (1, (2, 3))):
        found = Trackers(job(mlflow=True), tmp_path, done)
        for step in steps:
            found.add({**sound, "step": step})
        found.close()
    kept = client(tracking_uri=(tmp_path / "mlflow").as_uri())
    number = (tmp_path / "mlflow-run").read_text()
    assert kept.get_run(number).data.metrics.keys() == CURVES
    assert [metric.step for metric in kept.get_metric_history(number, "loss")] == [1, 2, 2, 3]
