"""The parts of the benchmarks of live faults and starts that need no cluster and no GPU."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from benchmarks import live_faults, live_injection, predict_rows, start_timeline
from benchmarks.live_evidence import counters_of, flight_verdict
from benchmarks.presets import Run, job
from tests.unit.test_flight_recorder import WORLD, dump, entry, inside

from megascale_client import parse_job
from megascale_driver.telemetry.store import _COUNTER_SCHEMA, write_table


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("layout", [{"dp": 4}, {"tp": 2, "dp": 2}])
def test_the_job_fits_the_four_devices(device: str, layout: dict[str, int], tmp_path: Path) -> None:
    spec = parse_job(live_faults.job(device, "live", tmp_path, layout))
    parallel = spec.trainer.parallelism
    assert (parallel.tp or 1) * (parallel.dp or 1) == 4
    assert spec.trainer.optimizer.name == live_injection.OPTIMIZER


def test_a_rank_hangs_while_it_is_told_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "before")
    site = tmp_path / "site"
    hanging = live_injection.HangingRank(site)
    module = _loaded(site / "hanging_adamw.py")
    waits: list[float] = []

    def sleep(for_s: float) -> None:
        waits.append(for_s)
        if len(waits) == 3:
            hanging.end()

    monkeypatch.setattr(module.time, "sleep", sleep)
    optimizers = []
    for rank in (2, 1):
        monkeypatch.setattr(module.distributed, "get_rank", lambda rank=rank: rank)
        monkeypatch.setattr(module.AdamW, "__init__", lambda self, setup: None)
        monkeypatch.setattr(module.AdamW, "update", lambda self, *arguments: None)
        section = hanging.section(2)
        setup = SimpleNamespace(config=SimpleNamespace(options=section["options"]))
        optimizers.append(module.HangingAdamW(setup))
    hanging.begin()
    optimizers[1].update()
    assert not waits, "another rank does not hang"
    optimizers[0].update()
    assert len(waits) == 3
    optimizers[0].update()
    assert len(waits) == 3, "it goes on once the file is gone"


def test_the_gpu_of_a_rank_is_read_from_its_log(tmp_path: Path) -> None:
    log = tmp_path / "rank.log"
    log.write_text("rank 2 of 4: tp 0 dp 2 pp 0 on cuda:3, attempt 1, job slowed, torch 2.11\n")
    assert live_injection.device_of(log) == 3
    log.write_text("rank 2 of 4: tp 0 dp 2 pp 0 on cpu, attempt 1\n")
    with pytest.raises(live_injection.DemoFailed, match="names no GPU"):
        live_injection.device_of(log)


def test_counters_of_gpus_are_summed_up_by_name_and_reason(tmp_path: Path) -> None:
    rows = [
        ("n1", "gpu_sm_clock_hertz", "GPU-a", 1, 1.9e9),
        ("n2", "gpu_sm_clock_hertz", "GPU-b", 1, 1.5e9),
        ("n1", "gpu_throttled", "GPU-a:power_cap", 1, 1.0),
        ("n1", "gpu_throttled", "GPU-a:sw_thermal", 1, 0.0),
        ("n1", "network_sent_bytes_total", "eth0", 1, 5.0),
    ]
    columns = dict(zip(_COUNTER_SCHEMA.names, map(list, zip(*rows, strict=True)), strict=True))
    path = tmp_path / "slowed" / "attempt-000001" / "counters-1-1-a.parquet"
    write_table(pa.table(columns).cast(_COUNTER_SCHEMA), path)
    found = counters_of(tmp_path)
    assert found["files"] == 1
    assert found["gpu_sm_clock_hertz"] == {
        "samples": 2, "nodes": 2, "targets": 2, "least": 1.5e9, "mean": 1.7e9, "most": 1.9e9,
    }  # fmt: skip
    assert found["gpu_throttled:power_cap"]["mean"] == 1.0
    assert found["gpu_throttled:sw_thermal"]["most"] == 0.0
    assert "network_sent_bytes_total" not in found
    assert counters_of(tmp_path / "nothing") == {"files": 0}


def test_records_of_nccl_are_collected_from_all_nodes_and_read(tmp_path: Path) -> None:
    for rank in range(4):
        folder = tmp_path / "nodes" / f"n{1 + rank // 2}" / "jobs" / "hung" / "attempt-000001"
        folder.mkdir(parents=True, exist_ok=True)
        data = dump(entry(WORLD, 1, "completed")) if rank == 2 else inside(2)
        (folder / f"nccl_trace_rank_{rank:05d}.json").write_bytes(data)
    found = flight_verdict(tmp_path, "hung", tmp_path / "flight")
    assert found["culprits"] == [2]
    assert len(found["dumps"]) == 4
    json.dumps(found)
    assert flight_verdict(tmp_path, "other", tmp_path / "none") == {"dumps": {}}


def test_each_configuration_of_ours_is_asked_once_under_its_own_name() -> None:
    rows = json.loads(predict_rows.ROWS.read_text())
    asked = list(predict_rows.questions(rows, "h200"))
    names = [row["id"] for row in asked]
    assert len(set(names)) == len(names), "each once"
    assert {"30b TP4, fp8, serial block", "7b DP4, bf16, parallel block"} <= set(names)
    by_name = {row["id"]: row for row in asked}
    one = by_name["7b TP2 PP2 VPP2, fp8, serial block"]
    assert (one["tp"], one["pp"], one["vpp"], one["dp"], one["global_batch"]) == (2, 2, 2, 1, 64)
    assert (one["precision"], one["block"]) == ("fp8", "serial")
    assert all(row["tp"] * row["pp"] * row["dp"] == 4 for row in asked)


def test_predictions_are_written_with_the_calibration_that_they_come_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "predicted.jsonl"
    assert predict_rows.main(["--gpu", "h200", "--output", str(output)]) == 0
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert printed["step_time_s"].keys() == {line["id"] for line in lines}
    assert {line["calibration"] for line in lines} == {"table"}
    missing = ["--calibration", str(tmp_path / "none.json")]
    assert predict_rows.main(["--gpu", "h200", "--output", str(output), *missing]) == 2


def test_starts_are_of_layouts_that_fit_their_ranks() -> None:
    for name, _ in start_timeline.STARTS:
        run = Run(preset="1b", layers=8, steps=10, **start_timeline.LAYOUTS[name])  # type: ignore[arg-type]
        assert job(run, start_timeline.RANKS, cuda=True).layout.world_size == start_timeline.RANKS


def _loaded(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("hanging_adamw", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
