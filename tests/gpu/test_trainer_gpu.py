"""The trainer on CUDA and NCCL: layouts against one device, repeatability, resume, and a step that never waits.

One process per device, forked from a template that imported torch and never touched CUDA. Layouts that need more
devices than there are skip.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.harness.ranks import RankPool, rank_pool
from tests.harness.training import assemble, hiding, tiny_job

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

TRAIN = "tests.harness.training:train"
STEPS = 10
# bf16 keeps 8 bits: activations differ by 2^-8 between layouts, which a loss of 5.7 averaged over tokens mostly cancels
TOLERANCES = {"fp32": 1e-4, "bf16": 3e-2}
LAYOUTS: list[dict[str, Any]] = [
    {"tp": 2},
    {"pp": 2},
    {"dp": 2},
    {"pp": 2, "virtual_stages": 2},
    {"tp": 2, "pp": 2},
    {"pp": 2, "virtual_stages": 2, "dp": 2, **hiding("pp")},
    {"pp": 4, **hiding("pp")},
    {"tp": 4},
    {"tp": 2, "pp": 2, "dp": 2, **hiding("pp")},
    {"tp": 8},
    {"tp": 2, **hiding("tp")},
    {"tp": 2, "recompute": "full", **hiding("tp")},
    {"tp": 2, "pp": 2, "virtual_stages": 2, **hiding("tp", "pp")},
    {"tp": 4, **hiding("tp")},
    {"tp": 8, **hiding("tp")},
    {"dp": 2, **hiding("dp")},
    {"pp": 2, "virtual_stages": 2, "dp": 2, **hiding("pp", "dp")},
    {"tp": 2, "pp": 2, "dp": 2, **hiding("tp", "pp", "dp")},
]


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with rank_pool() as ready:
        yield ready


def _world_size(parallelism: dict[str, Any]) -> int:
    return math.prod(parallelism.get(axis, 1) for axis in ("tp", "pp", "dp"))


def _name(parallelism: dict[str, Any]) -> str:
    return "".join(
        key + (str(value) if isinstance(value, int) else "-".join(value)) for key, value in parallelism.items()
    )


def _need(devices: int) -> None:
    if torch.cuda.device_count() < devices:
        pytest.skip(f"needs {devices} CUDA devices, there are {torch.cuda.device_count()}")


def _job(precision: str, parallelism: dict[str, Any], block: str = "parallel", **training: Any) -> dict[str, Any]:
    """A job whose local widths stay multiples of 8 at tp 8."""
    return tiny_job(
        model={"block": block, "hidden_size": 128, "heads": 8, "sequence_length": 64},
        parallelism=parallelism,
        training={"precision": precision, **training},
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("block", ["parallel", "serial"])
@pytest.mark.parametrize("parallelism", LAYOUTS, ids=_name)
def test_layout_trains_as_one_device(
    parallelism: dict[str, Any], block: str, precision: str, pool: RankPool, tmp_path: Path
) -> None:
    world_size = _world_size(parallelism)
    _need(world_size)
    [expected] = pool.run(TRAIN, 1, tmp_path / "one", 120, job=_job(precision, {}, block), steps=STEPS)
    many = pool.run(TRAIN, world_size, tmp_path / "many", 120, job=_job(precision, parallelism, block), steps=STEPS)
    ours, theirs = ([record["loss"] for record in found["records"]] for found in (many[0], expected))
    for result in many:
        assert result["records"] == many[0]["records"]
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=TOLERANCES[precision])
    assert theirs[-1] < theirs[0] - 0.3, "the model did not learn: the comparison proves little"
    initial = assemble(tmp_path / "many", "initial", world_size)
    for name, values in assemble(tmp_path / "one", "initial", 1).items():
        np.testing.assert_array_equal(initial[name], values, err_msg=name)


@pytest.mark.parametrize(
    ("sizes", "samples"),
    [({"pp": 2}, 8), ({"pp": 2, "virtual_stages": 2}, 8), ({"pp": 2}, 1), ({"pp": 4}, 2)],
)
def test_posting_receives_ahead_changes_no_bit(
    sizes: dict[str, Any], samples: int, pool: RankPool, tmp_path: Path
) -> None:
    """With few micro-batches, too, where a stage's first gradient answers its last forward."""
    _need(sizes["pp"])
    jobs = [
        _job("bf16", sizes | overlap, deterministic=True, global_batch_size=samples) for overlap in ({}, hiding("pp"))
    ]
    plain, ahead = (
        pool.run(TRAIN, sizes["pp"], tmp_path / str(n), 120, job=job, steps=3) for n, job in enumerate(jobs)
    )
    assert ahead == plain


@pytest.mark.parametrize(
    "parallelism",
    [
        {},
        {"tp": 2},
        {"tp": 2, **hiding("tp")},
        {"tp": 2, "pp": 2, "dp": 2},
        {"dp": 2, **hiding("dp")},
        {"tp": 2, "pp": 2, **hiding("tp", "pp")},
        {"tp": 2, "pp": 2, "dp": 2, **hiding("tp", "pp", "dp")},
    ],
    ids=_name,
)
def test_deterministic_mode_repeats_and_resumes_bit_for_bit(
    parallelism: dict[str, Any], pool: RankPool, tmp_path: Path
) -> None:
    world_size = _world_size(parallelism)
    _need(world_size)
    job = _job("bf16", parallelism, deterministic=True)
    first, second = (pool.run(TRAIN, world_size, tmp_path / run, 120, job=job, steps=STEPS) for run in ("a", "b"))
    assert first == second
    resumed = pool.run("tests.harness.training:train_and_resume", world_size, tmp_path / "c", 120, job=job)
    for result in resumed:
        assert result["resumed"] == result["uninterrupted"]
        assert result["states_equal"]


@pytest.mark.parametrize("documents", [True, False])
@pytest.mark.parametrize(
    "parallelism",
    [
        {},
        {"tp": 2},
        {"tp": 2, **hiding("tp")},
        {"pp": 2, **hiding("pp")},
        {"dp": 2},
        {"dp": 2, "recompute": "full", **hiding("dp")},
    ],
    ids=_name,
)
def test_a_step_never_waits_for_the_device(
    parallelism: dict[str, Any], documents: bool, pool: RankPool, tmp_path: Path
) -> None:
    world_size = _world_size(parallelism)
    _need(world_size)
    job = {**_job("bf16", parallelism), "data": {"document_attention": documents}}
    for result in pool.run("tests.harness.training:step_without_sync", world_size, tmp_path, 120, job=job):
        assert result["error"] == ""


@pytest.mark.parametrize("parallelism", [{"dp": 2}, {"tp": 2, "dp": 2, "recompute": "full"}])
def test_overlapped_data_parallelism_changes_no_bit(
    parallelism: dict[str, Any], pool: RankPool, tmp_path: Path
) -> None:
    world_size = _world_size(parallelism)
    _need(world_size)
    # with two replicas a sum has one order, so that NCCL's choice of algorithm does not show
    jobs = [
        _job("bf16", {**parallelism, "overlap": {"dp": overlap}}, deterministic=True, bucket_mib=0)
        for overlap in (False, True)
    ]
    program = "tests.harness.training:train_in_several_ways"
    for plain, overlapped in pool.run(program, world_size, tmp_path, 120, jobs=jobs, lag_cycles=1_000_000_000):
        assert overlapped == plain


def test_the_status_page_follows_the_device(pool: RankPool, tmp_path: Path) -> None:
    _need(2)
    job = _job("bf16", {"dp": 2})
    for result in pool.run("tests.harness.training:page_of_a_busy_device", 2, tmp_path, 120, job=job):
        assert result == {"busy": [2, 1], "done": [2, 2], "goes_first": True}


def test_all_ranks_skip_together(pool: RankPool, tmp_path: Path) -> None:
    _need(2)
    job = _job("bf16", {"dp": 2})
    for result in pool.run("tests.harness.training:train_with_a_broken_replica", 2, tmp_path, 120, job=job):
        assert result["skipped"] == [False, True, False]
        assert result["votes"] == [0, 1, 0]
        assert result["unchanged"]


def test_an_update_waits_for_a_snapshot_on_another_stream(pool: RankPool, tmp_path: Path) -> None:
    [result] = pool.run("tests.harness.training:snapshot_beside_a_step", 1, tmp_path, 120, job=_job("bf16", {}))
    assert result == {"copied_what_was": True, "went_on": True}


@pytest.mark.parametrize("parallelism", [{}, {"pp": 2, "virtual_stages": 2, **hiding("pp")}])
def test_evaluation_is_the_loss_of_a_step_without_the_step(
    parallelism: dict[str, Any], pool: RankPool, tmp_path: Path
) -> None:
    world_size = _world_size(parallelism)
    _need(world_size)
    for result in pool.run("tests.harness.training:evaluate", world_size, tmp_path, 120, job=_job("fp32", parallelism)):
        assert result["before"][0] == pytest.approx(result["losses"][0], abs=TOLERANCES["fp32"])
        assert result["after"] == pytest.approx(result["again"], abs=1e-6)
        assert result["after"] < result["before"][1]


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputing_changes_memory_and_not_the_losses(recompute: str, pool: RankPool, tmp_path: Path) -> None:
    records = [
        pool.run(TRAIN, 1, tmp_path / kind, 120, job=_job("bf16", {"recompute": kind}), steps=STEPS)[0]["records"]
        for kind in ("none", recompute)
    ]
    losses = [[record["loss"] for record in run] for run in records]
    np.testing.assert_allclose(losses[0], losses[1], rtol=0, atol=TOLERANCES["bf16"])
