"""Step records for the trackers that people use: TensorBoard, Weights & Biases, MLflow.

Curves have the names of the step record's fields. A job has one folder and one run in each tracker,
which all its attempts continue. A thread passes the records on, because trackers' libraries can
wait for a disk or a server: a tracker that fails or falls behind loses its own records, but delays
no step. The libraries are imported only for jobs that ask for them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from megascale_job import loading
from megascale_job.config import JobConfig, TelemetryConfig

MOST_WAITING = 10_000  # waiting records; further ones are dropped and counted
CLOSE_TIMEOUT_S = 60.0
_PACKAGES = {
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow-skinny or mlflow",
}
# Fields that say when and where a step was: they are no curves.
NOT_SCALARS = frozenset({"step", "attempt", "completed_at_s"})

Record = Mapping[str, Any]


class Tracker(Protocol):
    """One tracker's run."""

    def add(self, record: Record) -> None:
        """Take the record of a step."""

    def close(self) -> None:
        """End this attempt's part of the run."""


def problem_of(telemetry: TelemetryConfig) -> str:
    """The package that the job's trackers lack here, with field and remedy; "" if there is none."""
    for name, package in _PACKAGES.items():
        if getattr(telemetry, name) and importlib.util.find_spec(name) is None:
            return (
                f"trainer.telemetry.{name}: the package {package} is not installed where rank 0 "
                "runs: pip install 'megascale[trackers]', or leave the field out"
            )
    return ""


class Trackers:
    """All trackers of a job, on the rank that reports.

    ``folder`` is the job's, ``done`` the step from which the attempt continues.
    """

    def __init__(self, config: JobConfig, folder: Path, done: int) -> None:
        self._records: queue.Queue[Record | None] = queue.Queue(MOST_WAITING)
        self._dropped = 0
        wanted = _wanted(config, folder, done)
        self._thread = threading.Thread(
            target=self._run, args=(wanted,), name="trackers", daemon=True
        )
        self._begun = bool(wanted)
        if wanted:
            self._thread.start()

    def add(self, record: Record) -> None:
        """Pass a record on; never waits."""
        if not self._begun:
            return
        try:
            self._records.put_nowait(record)
        except queue.Full:
            self._dropped += 1
            if self._dropped == 1:
                print("trackers cannot follow: step records are dropped", flush=True)

    def close(self) -> None:
        """Wait until the trackers have taken all records, at most CLOSE_TIMEOUT_S."""
        if not self._begun:
            return
        self._records.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            print("a tracker has not taken all step records; the run ends without it", flush=True)

    def _run(self, wanted: dict[str, Callable[[], Tracker]]) -> None:
        trackers: dict[str, Tracker] = {}
        for name, begin in wanted.items():
            with _guarded(name, trackers):
                trackers[name] = begin()
        while (record := self._records.get()) is not None:
            for name, tracker in list(trackers.items()):
                with _guarded(name, trackers):
                    tracker.add(record)
        for name, tracker in list(trackers.items()):
            with _guarded(name, trackers):
                tracker.close()


@contextlib.contextmanager
def _guarded(name: str, trackers: dict[str, Tracker]) -> Iterator[None]:
    """Print an exception of the body and drop the tracker."""
    try:
        yield
    except Exception as error:  # a library can raise anything
        trackers.pop(name, None)
        print(f"tracker {name} is given up: {type(error).__name__}: {error}", flush=True)


def _wanted(config: JobConfig, folder: Path, done: int) -> dict[str, Callable[[], Tracker]]:
    telemetry = config.telemetry
    found: dict[str, Callable[[], Tracker]] = {}
    if telemetry.tensorboard:
        found["tensorboard"] = lambda: _Tensorboard(folder / "tensorboard", done)
    if telemetry.wandb:
        found["wandb"] = lambda: _Wandb(config, folder)
    if telemetry.mlflow:
        found["mlflow"] = lambda: _Mlflow(config, folder)
    return found


def scalars(record: Record) -> dict[str, float]:
    """The values of a step record that are curves, by field."""
    return {
        name: value
        for name, value in record.items()
        if name not in NOT_SCALARS
        and isinstance(value, int | float)
        and not isinstance(value, bool)
    }


class _Tensorboard:
    """An event file of this attempt in ``folder``, which the job's attempts share.

    An earlier attempt may have gone further than ``done``: TensorBoard then hides its later steps.
    """

    def __init__(self, folder: Path, done: int) -> None:
        # The writer inside of torch's SummaryWriter, used directly: one event per record, where the
        # SummaryWriter would write one per curve.
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event: Any = event_pb2.Event
        self._summary: Any = summary_pb2.Summary
        self._writer: Any = EventFileWriter(str(folder))
        if done:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._writer.add_event(
                self._event(wall_time=time.time(), step=done + 1, session_log=start)
            )

    def add(self, record: Record) -> None:
        values = [
            self._summary.Value(tag=name, simple_value=value)
            for name, value in scalars(record).items()
        ]
        summary = self._summary(value=values)
        at = {"wall_time": record["completed_at_s"], "step": record["step"]}
        self._writer.add_event(self._event(**at, summary=summary))
        self._writer.flush()  # the job may be killed at any step

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    """A run of Weights & Biases; without WANDB_MODE it is offline, in ``folder``/wandb."""

    def __init__(self, config: JobConfig, folder: Path) -> None:
        import wandb

        mode: Any = os.environ.get("WANDB_MODE", "offline")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "megascale"),
            name=config.name,
            id=_kept_id(folder / "wandb-run"),
            resume="allow",
            dir=str(folder),
            mode=mode,
            config=loading.to_mapping(config),
            settings=wandb.Settings(console="off", silent=True),
        )
        # An attempt repeats steps of the one before; wandb's own steps only grow.
        self._run.define_metric("*", step_metric="step")

    def add(self, record: Record) -> None:
        self._run.log({"step": record["step"], **scalars(record)})

    def close(self) -> None:
        self._run.finish()


class _Mlflow:
    """A run of MLflow; without MLFLOW_TRACKING_URI its records are in ``folder``/mlflow."""

    def __init__(self, config: JobConfig, folder: Path) -> None:
        from mlflow.entities import Metric
        from mlflow.tracking import MlflowClient

        self._metric = Metric
        uri = os.environ.get("MLFLOW_TRACKING_URI", "")
        if not uri:
            # MLflow 3 requires this statement that a file store is intended.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            uri = (folder / "mlflow").as_uri()
        self._client = MlflowClient(tracking_uri=uri)
        self._id = self._run_id(config, folder / "mlflow-run")

    def _run_id(self, config: JobConfig, kept: Path) -> str:
        if kept.exists():
            return kept.read_text().strip()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "megascale")
        found = self._client.get_experiment_by_name(name)
        experiment = (
            found.experiment_id if found is not None else self._client.create_experiment(name)
        )
        run = self._client.create_run(experiment, run_name=config.name)
        for section, values in loading.to_mapping(config).items():
            if isinstance(values, dict):
                for field, value in values.items():
                    self._client.log_param(run.info.run_id, f"{section}.{field}", str(value)[:500])
        kept.write_text(run.info.run_id)
        return str(run.info.run_id)

    def add(self, record: Record) -> None:
        at_ms, step = int(record["completed_at_s"] * 1e3), int(record["step"])
        metrics = [
            self._metric(name, float(value), at_ms, step) for name, value in scalars(record).items()
        ]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._id)


def _kept_id(path: Path) -> str:
    """The id in the file, or a new one that is stored there: later attempts continue its run."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(secrets.token_hex(4))
    return path.read_text().strip()
