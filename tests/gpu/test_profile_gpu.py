"""Traces of ranks on CUDA: the kernels of the steps named, and the same losses as without."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.harness.ranks import RankPool
from tests.harness.training import tiny_job

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PROGRAM = "tests.harness.profiling:train_under_profiler"
STEPS = 7


@pytest.mark.parametrize("pp", [1, 2])
def test_a_trace_has_the_kernels_of_its_steps_and_changes_no_loss(
    pp: int, pool: RankPool, tmp_path: Path
) -> None:
    if torch.cuda.device_count() < pp:
        pytest.skip(f"needs {pp} CUDA devices, there are {torch.cuda.device_count()}")
    job = tiny_job(parallelism={"pp": pp}, training={"precision": "bf16", "deterministic": True})
    commands = {
        "2": {"id": "one", "first_step": 3, "last_step": 4},
        "5": {"id": "two", "first_step": 6, "last_step": 6},
    }
    found = {}
    for name, given in (("with", commands), ("without", {})):
        found[name] = pool.run(
            PROGRAM, pp, tmp_path / name, 120, job=job, steps=STEPS, commands=given
        )
    assert [rank["losses"] for rank in found["with"]] == [
        rank["losses"] for rank in found["without"]
    ]
    for rank, outcome in enumerate(found["with"]):
        assert [answer["state"] for answer in outcome["answers"]] == ["written", "written"], (
            outcome["answers"]
        )
        for name, steps in (("one", [3, 4]), ("two", [6])):
            _check_trace(tmp_path / "with" / f"trace-{name}-{rank}.json.gz", steps)


def _check_trace(path: Path, steps: list[int]) -> None:
    """The trace has these steps, and nearly every kernel launched in the last of them.

    So the rank waited for the device before it ended the trace.
    """
    events: list[dict[str, Any]] = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    spans = {event["name"]: event for event in events if event.get("cat") == "user_annotation"}
    assert {name for name in spans if name.startswith("step ")} == {
        f"step {step}" for step in steps
    }
    assert {"forward 0.0", "backward 0.0", "optimizer"} <= spans.keys()
    last = spans[f"step {steps[-1]}"]
    end = last["ts"] + last["dur"]
    launched = {
        event["args"]["correlation"]
        for event in events
        if event.get("cat") == "cuda_runtime"
        and "LaunchKernel" in event["name"]
        and last["ts"] <= event["ts"] < end
    }
    seen = {event["args"]["correlation"] for event in events if event.get("cat") == "kernel"}
    assert launched and len(launched & seen) >= 0.9 * len(launched)
