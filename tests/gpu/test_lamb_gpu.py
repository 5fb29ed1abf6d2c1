"""LAMB in the trainer on CUDA: fused as plain, every layout as one device, bits, and no sync."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.harness.ranks import RankPool
from tests.harness.training import hiding, tiny_job

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TRAIN_EACH = "tests.harness.training:train_each"
STEPS = 6
LAMB = {"name": "lamb", "learning_rate": 0.02, "epsilon": 1e-6}
LAYOUTS: list[dict[str, Any]] = [
    {"tp": 2},
    {"dp": 2, **hiding("dp")},
    {"pp": 2, "virtual_stages": 2, **hiding("pp")},
    {"tp": 2, "pp": 2},
    {"tp": 2, "dp": 2, **hiding("tp", "dp")},
]


def _job(parallelism: dict[str, Any], **training: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 128, "heads": 8, "sequence_length": 64, "tie_embeddings": True}
    return tiny_job(
        model=sizes,
        parallelism=parallelism,
        optimizer=LAMB,
        training={"kernels": "triton", **training},
    )


def _devices(parallelism: dict[str, Any]) -> int:
    """The devices of a layout; skips where there are fewer."""
    wanted = math.prod(parallelism.get(axis, 1) for axis in ("tp", "pp", "dp"))
    if torch.cuda.device_count() < wanted:
        pytest.skip(f"needs {wanted} CUDA devices, there are {torch.cuda.device_count()}")
    return wanted


def _losses(records: list[dict[str, Any]]) -> list[float]:
    return [record["loss"] for record in records]


@pytest.mark.parametrize("parallelism", [{}, *LAYOUTS], ids=str)
def test_layout_with_fused_kernels_trains_as_one_device_without(
    parallelism: dict[str, Any], pool: RankPool, tmp_path: Path
) -> None:
    world_size = _devices(parallelism)
    plain = _job({}, kernels="torch")
    [[wanted]] = pool.run(TRAIN_EACH, 1, tmp_path / "one", jobs=[plain], steps=STEPS)
    [found, *_] = pool.run(
        TRAIN_EACH, world_size, tmp_path / "many", jobs=[_job(parallelism)], steps=STEPS
    )
    assert _losses(found[0]) == pytest.approx(_losses(wanted), abs=1e-4)
    assert _losses(wanted)[-1] < _losses(wanted)[0] - 0.1, "it did not learn"


@pytest.mark.parametrize("parallelism", [{}, *LAYOUTS], ids=str)
def test_deterministic_mode_repeats_and_resumes_bit_for_bit(
    parallelism: dict[str, Any], pool: RankPool, tmp_path: Path
) -> None:
    world_size = _devices(parallelism)
    job = _job(parallelism, precision="bf16", deterministic=True)
    first = pool.run(TRAIN_EACH, world_size, tmp_path / "a", jobs=[job, job], steps=STEPS)
    for one, two in first:
        assert one == two
    for result in pool.run(
        "tests.harness.training:train_and_resume", world_size, tmp_path / "b", job=job
    ):
        assert result["resumed"] == result["uninterrupted"]
        assert result["states_equal"]


@pytest.mark.parametrize("parallelism", [{}, {"tp": 2}, {"dp": 2, **hiding("dp")}], ids=str)
def test_a_step_never_waits_for_the_device(
    parallelism: dict[str, Any], pool: RankPool, tmp_path: Path
) -> None:
    world_size = _devices(parallelism)
    jobs = [_job(parallelism, precision="bf16", deterministic=mode) for mode in (False, True)]
    program = "tests.harness.training:step_without_sync"
    assert pool.run(program, world_size, tmp_path, jobs=jobs) == [2] * world_size
