"""The trainer on CUDA and NCCL: layouts against one device, repeatability, resume, no host sync.

One process per device, forked from a template that imported torch and never touched CUDA, and kept
for all tests. A layout's groups are made once for several jobs, because connecting takes longer
than training. Layouts that need more devices than there are skip.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.harness.ranks import RankPool
from tests.harness.training import assemble, hiding, tiny_job

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TRAIN_EACH = "tests.harness.training:train_each"
STEPS = 10
# bf16 keeps 8 bits: activations differ by 2^-8 between layouts, which mostly cancels in a loss of
# 5.7 averaged over tokens.
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


def _world_size(parallelism: dict[str, Any]) -> int:
    return math.prod(parallelism.get(axis, 1) for axis in ("tp", "pp", "dp"))


def _name(parallelism: dict[str, Any]) -> str:
    return "".join(
        key + ("-".join(value) if isinstance(value, dict) else str(value))
        for key, value in parallelism.items()
    )


def _need(devices: int) -> None:
    if torch.cuda.device_count() < devices:
        pytest.skip(f"needs {devices} CUDA devices, there are {torch.cuda.device_count()}")


def _job(
    precision: str,
    parallelism: dict[str, Any],
    block: str = "parallel",
    *,
    tied: bool = False,
    **training: Any,
) -> dict[str, Any]:
    """A job whose local widths stay multiples of 8 at tp 8."""
    sizes = {"hidden_size": 128, "heads": 8, "sequence_length": 64}
    return tiny_job(
        model={"block": block, "tie_embeddings": tied, **sizes},
        parallelism=parallelism,
        training={"precision": precision, **training},
    )


KINDS = [(precision, block) for precision in ("fp32", "bf16") for block in ("parallel", "serial")]


@pytest.fixture(scope="module")
def alone(
    pool: RankPool, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[list[dict[str, Any]]]]:
    """One device's run of each of ``KINDS``: the folder of its values, and the records."""
    folder = tmp_path_factory.mktemp("alone")
    jobs = [_job(precision, {}, block) for precision, block in KINDS]
    [records] = pool.run(TRAIN_EACH, 1, folder, jobs=jobs, steps=STEPS)
    return folder, records


@pytest.mark.parametrize("parallelism", LAYOUTS, ids=_name)
def test_layout_trains_as_one_device(
    parallelism: dict[str, Any],
    alone: tuple[Path, list[list[dict[str, Any]]]],
    pool: RankPool,
    tmp_path: Path,
) -> None:
    world_size = _world_size(parallelism)
    _need(world_size)
    jobs = [_job(precision, parallelism, block) for precision, block in KINDS]
    many = pool.run(TRAIN_EACH, world_size, tmp_path, jobs=jobs, steps=STEPS)
    assert all(records == many[0] for records in many), "ranks report different records"
    folder, expected = alone
    for number, (precision, block) in enumerate(KINDS):
        kind = f"{precision}, {block} block"
        ours, theirs = (
            [record["loss"] for record in found[number]] for found in (many[0], expected)
        )
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=TOLERANCES[precision], err_msg=kind)
        assert theirs[-1] < theirs[0] - 0.3, (
            f"{kind}: the model did not learn: the comparison proves little"
        )
        initial = assemble(tmp_path / str(number), "initial", world_size)
        for name, values in assemble(folder / str(number), "initial", 1).items():
            np.testing.assert_array_equal(initial[name], values, err_msg=f"{kind}: {name}")


@pytest.mark.parametrize(
    "parallelism",
    [
        {"tp": 2},
        {"pp": 2},
        {"pp": 2, "virtual_stages": 2, "dp": 2, **hiding("pp", "dp")},
        {"pp": 4, **hiding("pp")},
    ],
    ids=_name,
)
def test_tied_embeddings_train_as_on_one_device(
    parallelism: dict[str, Any], pool: RankPool, tmp_path: Path
) -> None:
    world_size = _world_size(parallelism)
    _need(world_size)
    found = []
    for layout, ranks in (({}, 1), (parallelism, world_size)):
        job = _job("fp32", layout, tied=True)
        folder = tmp_path / str(ranks)
        records = pool.run(TRAIN_EACH, ranks, folder, jobs=[job], steps=STEPS)
        found.append([record["loss"] for record in records[0][0]])
    np.testing.assert_allclose(found[1], found[0], rtol=0, atol=TOLERANCES["fp32"])
    assert found[0][-1] < found[0][0] - 0.3, "the model did not learn"


@pytest.mark.parametrize(
    ("sizes", "samples"),
    [({"pp": 2}, 8), ({"pp": 2, "virtual_stages": 2}, 8), ({"pp": 2}, 1), ({"pp": 4}, 2)],
)
def test_overlapped_edges_change_no_bit(
    sizes: dict[str, Any], samples: int, pool: RankPool, tmp_path: Path
) -> None:
    """With few micro-batches, too, where a stage's first gradient answers its last forward."""
    _need(sizes["pp"])
    jobs = [
        _job("bf16", sizes | overlap, deterministic=True, global_batch_size=samples)
        for overlap in ({}, hiding("pp"), hiding("pp", "peer_edges"))
    ]
    for plain, *ahead in pool.run(TRAIN_EACH, sizes["pp"], tmp_path, jobs=jobs, steps=3):
        assert ahead == [plain, plain]


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
    # three times in the same processes, the last one through groups of its own
    first = pool.run(TRAIN_EACH, world_size, tmp_path / "a", jobs=[job, job], steps=STEPS)
    second = pool.run(TRAIN_EACH, world_size, tmp_path / "b", jobs=[job], steps=STEPS)
    for (one, two), [three] in zip(first, second, strict=True):
        assert one == two == three
    resumed = pool.run(
        "tests.harness.training:train_and_resume", world_size, tmp_path / "c", job=job
    )
    for result in resumed:
        assert result["resumed"] == result["uninterrupted"]
        assert result["states_equal"]


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
    parallelism: dict[str, Any], pool: RankPool, tmp_path: Path
) -> None:
    world_size = _world_size(parallelism)
    _need(world_size)
    jobs = [
        {**_job("bf16", parallelism), "data": {"document_attention": documents}}
        for documents in (True, False)
    ]
    program = "tests.harness.training:step_without_sync"
    assert pool.run(program, world_size, tmp_path, jobs=jobs) == [2] * world_size


@pytest.mark.parametrize("parallelism", [{"dp": 2}, {"tp": 2, "dp": 2, "recompute": "full"}])
def test_overlapped_data_parallelism_changes_no_bit(
    parallelism: dict[str, Any], pool: RankPool, tmp_path: Path
) -> None:
    world_size = _world_size(parallelism)
    _need(world_size)
    # With two replicas a sum has one order, so that NCCL's choice of algorithm has no effect.
    jobs = [
        _job("bf16", {**parallelism, "overlap": {"dp": overlap}}, deterministic=True, bucket_mib=0)
        for overlap in (False, True)
    ]
    program = "tests.harness.training:train_in_several_ways"
    for plain, overlapped in pool.run(
        program, world_size, tmp_path, jobs=jobs, lag_cycles=1_000_000_000
    ):
        assert overlapped == plain


def test_the_status_page_follows_the_device(pool: RankPool, tmp_path: Path) -> None:
    _need(2)
    job = _job("bf16", {"dp": 2})
    for result in pool.run(
        "tests.harness.training:page_of_a_busy_device", 2, tmp_path, 120, job=job
    ):
        assert result == {"busy": [2, 1], "done": [2, 2], "goes_first": True}


def test_all_ranks_skip_together(pool: RankPool, tmp_path: Path) -> None:
    _need(2)
    job = _job("bf16", {"dp": 2})
    for result in pool.run(
        "tests.harness.training:train_with_a_broken_replica", 2, tmp_path, job=job
    ):
        assert result["skipped"] == [False, True, False]
        assert result["votes"] == [0, 1, 0]
        assert result["unchanged"]


def test_an_update_waits_for_a_snapshot_on_another_stream(pool: RankPool, tmp_path: Path) -> None:
    [result] = pool.run(
        "tests.harness.training:snapshot_beside_a_step", 1, tmp_path, job=_job("bf16", {})
    )
    assert result == {"copied_what_was": True, "went_on": True}


@pytest.mark.parametrize("parallelism", [{}, {"pp": 2, "virtual_stages": 2, **hiding("pp")}])
def test_evaluation_is_the_loss_of_a_step_without_the_step(
    parallelism: dict[str, Any], pool: RankPool, tmp_path: Path
) -> None:
    world_size = _world_size(parallelism)
    _need(world_size)
    for result in pool.run(
        "tests.harness.training:evaluate", world_size, tmp_path, job=_job("fp32", parallelism)
    ):
        assert result["before"][0] == pytest.approx(result["losses"][0], abs=TOLERANCES["fp32"])
        assert result["after"] == pytest.approx(result["again"], abs=1e-6)
        assert result["after"] < result["before"][1]


def test_recomputing_changes_memory_and_not_the_losses(pool: RankPool, tmp_path: Path) -> None:
    jobs = [_job("bf16", {"recompute": kind}) for kind in ("none", "selective", "full")]
    [runs] = pool.run(TRAIN_EACH, 1, tmp_path, jobs=jobs, steps=STEPS)
    plain, *others = ([record["loss"] for record in records] for records in runs)
    for losses in others:
        np.testing.assert_allclose(losses, plain, rtol=0, atol=TOLERANCES["bf16"])
