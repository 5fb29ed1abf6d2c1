"""The full diagnostics of a node's GPUs: values are plausible, and NVML answers."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a CUDA device"),
]


def run(test: str) -> dict[str, Any]:
    devices = ",".join(map(str, range(torch.cuda.device_count())))
    command = [sys.executable, "-m", "megascale_trainer.node_tests", test, "--device", "cuda"]
    command += ["--devices", devices, "--seconds", "3"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode == 0, found.stderr
    answer: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
    return answer


@pytest.mark.parametrize(
    ("test", "least"),
    [("gemm", 10.0), ("memory_bandwidth", 100.0), ("host_copy", 1.0), ("bitwise", None)],
)
def test_every_gpu_is_measured(test: str, least: float | None) -> None:
    answer = run(test)
    assert answer["tools"]["cuda"]
    assert len(answer["measured"]) >= torch.cuda.device_count()
    for each in answer["measured"]:
        assert not each["wrong"]
        assert each["value"] is None if least is None else each["value"] > least


@pytest.mark.parametrize("test", ["device_copy", "all_to_all"])
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 CUDA devices")
def test_gpus_exchange_data(test: str) -> None:
    for each in run(test)["measured"]:
        assert not each["wrong"] and each["value"] > 1.0


def test_nvml_reports_every_gpu() -> None:
    pytest.importorskip("pynvml", reason="needs the extra nvml")
    found = subprocess.run(
        [sys.executable, "-m", "megascale_executor.counters.nvml"],
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    devices = json.loads(found.stdout)["devices"]
    assert len(devices) >= torch.cuda.device_count()
    for device in devices:
        assert device["uuid"].startswith("GPU-") and device["power_mw"] > 0
