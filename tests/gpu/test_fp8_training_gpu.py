"""Training with the layers' GEMMs in FP8 on CUDA: layouts beside bf16, and a resumed run."""

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
# Of a loss of 5.7: FP8 keeps 3 bits of a value, which mostly cancels in a mean over 512 tokens.
LOSS_TOLERANCE = 3e-2
LAYOUTS: list[dict[str, Any]] = [
    {"tp": 2},
    {"tp": 2, **hiding("tp")},
    {"tp": 4, "recompute": "full", **hiding("tp")},
    {"tp": 2, "pp": 2, "virtual_stages": 2, "recompute": "selective", **hiding("tp", "pp")},
    {"tp": 2, "dp": 2, **hiding("tp", "dp")},
]
KINDS = [
    (block, form, kernels)
    for block in ("parallel", "serial")
    for form in ("hybrid", "e4m3")
    for kernels in ("triton", "torch")
]


def _job(
    parallelism: dict[str, Any],
    block: str,
    form: str,
    kernels: str,
    precision: str = "fp8",
    **training: Any,
) -> dict[str, Any]:
    return tiny_job(
        model={"block": block, "hidden_size": 128, "heads": 8, "sequence_length": 64},
        parallelism=parallelism,
        training={
            "precision": precision,
            "fp8": {"format": form},
            "kernels": kernels,
            "micro_batch_size": 2,
            **training,
        },
    )


def _gather(kind: str) -> dict[str, Any]:
    return {"fp8": {"parameter_gather": kind}, "deterministic": True}


def _need(parallelism: dict[str, Any]) -> int:
    devices = math.prod(parallelism.get(axis, 1) for axis in ("tp", "pp", "dp"))
    if torch.cuda.device_count() < devices:
        pytest.skip(f"needs {devices} CUDA devices, there are {torch.cuda.device_count()}")
    return devices


@pytest.fixture(scope="module")
def in_bf16(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """Losses of one device in bf16, by block."""
    jobs = [_job({}, block, "hybrid", "torch", "bf16") for block in ("parallel", "serial")]
    program, folder = "tests.harness.training:train_each", tmp_path_factory.mktemp("bf16")
    [found] = pool.run(program, 1, folder, jobs=jobs, steps=STEPS)
    losses = [[record["loss"] for record in records] for records in found]
    return dict(zip(("parallel", "serial"), losses, strict=True))


@pytest.mark.parametrize("parallelism", [{}, *LAYOUTS], ids=str)
def test_layout_trains_as_bf16_does(
    parallelism: dict[str, Any],
    in_bf16: dict[str, list[float]],
    pool: RankPool,
    tmp_path: Path,
) -> None:
    ranks = _need(parallelism)
    jobs = [_job(parallelism, *kind) for kind in KINDS]
    program = "tests.harness.training:train_each"
    many = pool.run(program, ranks, tmp_path, jobs=jobs, steps=STEPS)
    assert all(records == many[0] for records in many), "ranks report different records"
    for kind, records in zip(KINDS, many[0], strict=True):
        theirs = in_bf16[kind[0]]
        assert theirs[-1] < theirs[0] - 0.3, "the model did not learn"
        ours = [record["loss"] for record in records]
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=LOSS_TOLERANCE, err_msg=str(kind))


@pytest.mark.parametrize("parallelism", [{}, *LAYOUTS[-2:]], ids=str)
def test_a_resumed_run_is_the_same_run(
    parallelism: dict[str, Any], pool: RankPool, tmp_path: Path
) -> None:
    job = _job(parallelism, "parallel", "hybrid", "triton", deterministic=True)
    program = "tests.harness.training:train_and_resume"
    for result in pool.run(program, _need(parallelism), tmp_path, job=job):
        assert result["resumed"] == result["uninterrupted"]
        assert result["states_equal"]


@pytest.mark.parametrize(
    "parallelism", [{"dp": 2, **hiding("dp")}, {"tp": 2, "dp": 2, **hiding("tp", "dp")}], ids=str
)
def test_weights_that_travel_in_fp8_change_no_bit(
    parallelism: dict[str, Any], pool: RankPool, tmp_path: Path
) -> None:
    """With an evaluation, a skipped step, graphs from the third step on, and a host far ahead."""
    jobs = [
        _job(parallelism, block, "hybrid", "triton", **_gather(kind), cuda_graphs=graphs)
        for block, graphs in (("parallel", True), ("serial", False))
        for kind in ("bf16", "fp8")
    ]
    program, ranks = "tests.harness.training:train_in_several_ways", _need(parallelism)
    for found in pool.run(program, ranks, tmp_path, jobs=jobs, lag_cycles=10**7):
        assert found[0::2] == found[1::2]


@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_operands_arrive_as_they_are(kernels: str, pool: RankPool, tmp_path: Path) -> None:
    """Through NCCL, also where one rank's shard has a NaN or an Inf."""
    parallelism = {"dp": 2}
    job = _job(parallelism, "parallel", "hybrid", kernels, bucket_mib=0)
    program = "tests.harness.fp8_gather:publish_in_both_ways"
    for result in pool.run(program, _need(parallelism), tmp_path, job=job, kernels=kernels):
        assert (result["differ"], result["moved"], result["travelling"]) == ([], 0, 4)
        assert result["broken"][0] == 0 and all(result["broken"][1:])


def test_a_step_that_is_not_finite_is_skipped(pool: RankPool, tmp_path: Path) -> None:
    parallelism = {"tp": 1, "dp": 2}
    job = _job(parallelism, "parallel", "hybrid", "triton")
    program = "tests.harness.training:train_with_a_broken_replica"
    for result in pool.run(program, _need(parallelism), tmp_path, job=job):
        assert result["skipped"] == [False, True, False]
        assert result["unchanged"]


def test_the_choice_of_algorithms_needs_no_more_memory_than_training(
    pool: RankPool, tmp_path: Path
) -> None:
    """On 2026-11-24 a layer of 175B's width took 3.9 GiB more than its steps, before the first."""
    job = _job({}, "parallel", "hybrid", "triton")
    job["model"] |= {"hidden_size": 4096, "heads": 32, "layers": 1}
    (found,) = pool.run("tests.harness.training:peaks_of_memory", 1, tmp_path, job=job)
    assert found["constructed"] < found["trained"], found
