"""Training from CUDA graphs is training without: the same numbers in every layout."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.harness.ranks import RankPool
from tests.harness.training import hiding, tiny_job

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

STEPS = 8
LAYOUTS: list[dict[str, Any]] = [
    {},
    {"recompute": "full"},
    {"tp": 2, "recompute": "selective", **hiding("tp")},
    {"tp": 2, "recompute": "full", **hiding("tp")},
    {"pp": 2},
    {"pp": 2, "virtual_stages": 2, **hiding("pp")},
    {"pp": 2, "pipeline_schedule": "zero_bubble", **hiding("pp")},
    {"dp": 2, **hiding("dp")},
    {"tp": 2},
    {"tp": 2, "pp": 2, "virtual_stages": 2, **hiding("tp", "pp")},
    {
        "tp": 2,
        "pp": 2,
        "virtual_stages": 2,
        "recompute": "selective",
        "pipeline_schedule": "zero_bubble",
        **hiding("tp", "pp"),
    },
    {"pp": 4, "pipeline_schedule": "zero_bubble", **hiding("pp")},
    {"tp": 2, "pp": 2, "dp": 2, **hiding("tp", "pp", "dp")},
]
KINDS = [
    (block, precision, kernels)
    for block in ("parallel", "serial")
    for precision, kernels in (("bf16", "triton"), ("fp8", "triton"), ("fp32", "torch"))
]


def _job(
    parallelism: dict[str, Any],
    kind: tuple[str, str, str],
    *,
    graphs: bool,
    chunk_rows: int = 0,
    **training: Any,
) -> dict[str, Any]:
    block, precision, kernels = kind
    return tiny_job(
        model={"block": block, "hidden_size": 128, "heads": 8, "sequence_length": 64},
        parallelism=parallelism,
        training={
            "precision": precision,
            "kernels": kernels,
            "micro_batch_size": 2,
            "cuda_graphs": graphs,
            **training,
        },
        loss={"chunk_rows": chunk_rows},
    )


def _need(parallelism: dict[str, Any]) -> int:
    devices = math.prod(parallelism.get(axis, 1) for axis in ("tp", "pp", "dp"))
    if torch.cuda.device_count() < devices:
        pytest.skip(f"needs {devices} CUDA devices, there are {torch.cuda.device_count()}")
    return devices


# The loss of the last layouts is in chunks, the last of them with fewer rows.
@pytest.mark.parametrize(
    ("parallelism", "chunk_rows"),
    [
        *((parallelism, 0) for parallelism in LAYOUTS),
        ({}, 40),
        ({"tp": 2, **hiding("tp")}, 40),
        ({"pp": 2, "pipeline_schedule": "zero_bubble", **hiding("pp")}, 40),
    ],
    ids=str,
)
def test_a_replayed_run_is_the_run_without_graphs(
    parallelism: dict[str, Any], chunk_rows: int, pool: RankPool, tmp_path: Path
) -> None:
    """The documents of a micro-batch change from step to step, and their number doubles."""
    ranks = _need(parallelism)
    jobs = [
        _job(parallelism, kind, graphs=graphs, chunk_rows=chunk_rows, deterministic=True)
        for kind in KINDS
        for graphs in (False, True)
    ]
    program = "tests.harness.training:train_each"
    many = pool.run(program, ranks, tmp_path, jobs=jobs, steps=STEPS)
    assert all(records == many[0] for records in many), "ranks report different records"
    wrong = []
    for number, kind in enumerate(KINDS):
        plain, graphed = (
            np.array([[record["loss"], record["gradient_norm"]] for record in records])
            for records in many[0][2 * number : 2 * number + 2]
        )
        assert plain[-1, 0] < plain[0, 0] - 0.3, "the model did not learn"
        if not np.array_equal(plain, graphed):
            wrong.append((kind, np.abs(plain - graphed).max(0).tolist()))
    assert not wrong, wrong


@pytest.mark.parametrize("parallelism", [{}, {"tp": 2, **hiding("tp")}], ids=str)
def test_evaluation_and_skipped_steps_between_replays_change_nothing(
    parallelism: dict[str, Any], pool: RankPool, tmp_path: Path
) -> None:
    jobs = [
        _job(parallelism, KINDS[0], graphs=graphs, deterministic=True) for graphs in (False, True)
    ]
    program = "tests.harness.training:train_in_several_ways"
    for plain, graphed in pool.run(
        program, _need(parallelism), tmp_path, jobs=jobs, lag_cycles=10**7
    ):
        assert graphed == plain
