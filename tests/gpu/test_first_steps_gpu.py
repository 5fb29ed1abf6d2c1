"""A job whose ranks have launched nothing yet: kernels are loaded before receives are posted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.harness.ranks import rank_pool
from tests.harness.training import hiding, tiny_job

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 CUDA devices"),
]
PP2 = {"pp": 2, **hiding("pp")}


@pytest.mark.parametrize(
    ("parallelism", "training"),
    [
        (PP2, {}),
        ({**PP2, "virtual_stages": 2}, {"precision": "bf16", "kernels": "triton"}),
        (
            {**PP2, "pipeline_schedule": "zero_bubble"},
            {"precision": "bf16", "kernels": "triton", "cuda_graphs": True},
        ),
    ],
    ids=["1f1b", "interleaved, fused", "zero bubble, graphs"],
)
def test_first_steps_with_posted_receives_end(
    parallelism: dict[str, Any],
    training: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some sequences are one document and others are not, which takes other kernels.

    On 2026-11-28 two ranks waited for ever: one loaded kernels for a forward, the other for a
    backward, each with a receive posted whose message came behind the other's.
    """
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    jobs = [
        tiny_job(
            model={"sequence_length": 16},
            parallelism={**parallelism, **overlap},
            training={"deterministic": True, **training},
        )
        for overlap in ({}, hiding())
    ]
    with rank_pool() as fresh:
        program = "tests.harness.training:train_each"
        for ahead, plain in fresh.run(program, 2, tmp_path, jobs=jobs, steps=4):
            assert ahead == plain
