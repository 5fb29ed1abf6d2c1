"""Every layout trains as one process does: losses within a tolerance, initial weights exactly."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.harness.ranks import RankPool
from tests.harness.training import EXPERTS, assemble, hiding, tiny_job

from megascale_trainer.trainer import StepRecord

STEPS, FEW_STEPS = 20, 3
# float32 keeps a loss of 5 to 5e-7; sums in another order differ by that much, and were seen to
# differ by 2.3e-7
LOSS_TOLERANCE = 5e-6

TRAIN = "tests.harness.training:train"

# Overlapped GEMMs run in row chunks: another order of sums inside the library, hence a tolerance
# and not bits. Larger micro-batches where many ranks communicate in every layer: fewer of them, and
# the grouping of samples is compared as well.
LAYOUTS: dict[str, tuple[dict[str, Any], int]] = {
    "one, full recompute": ({"recompute": "full"}, 4),
    "one, selective recompute": ({"recompute": "selective"}, 4),
    "pp2vpp2dp2, overlapped pp and dp": (
        {"pp": 2, "virtual_stages": 2, "dp": 2, **hiding("pp", "dp")},
        1,
    ),
    "pp4vpp2, full recompute, overlapped pp": (
        {"pp": 4, "virtual_stages": 2, "recompute": "full", **hiding("pp")},
        2,
    ),
    "tp2pp2vpp2 uneven, selective recompute, overlapped tp and pp": (
        {
            "tp": 2,
            "pp": 2,
            "virtual_stages": 2,
            "stage_layers": [3, 2, 2, 1],
            "recompute": "selective",
            **hiding("tp", "pp"),
        },
        4,
    ),
    "tp2pp2dp2": ({"tp": 2, "pp": 2, "dp": 2}, 1),
    "tp2pp2dp2, all overlapped": ({"tp": 2, "pp": 2, "dp": 2, **hiding("tp", "pp", "dp")}, 2),
    "tp4, overlapped tp": ({"tp": 4, **hiding("tp")}, 4),
    "pp4, overlapped pp": ({"pp": 4, **hiding("pp", "peer_edges")}, 1),
    "pp3": ({"pp": 3}, 2),
    "dp4, overlapped dp": ({"dp": 4, **hiding("dp")}, 1),
    "ep2dp2": ({"ep": 2, "dp": 2}, 2),
    "ep2dp2 by token": ({"ep": 2, "dp": 2, "expert_exchange": "tokens"}, 2),
    "ep4tp2dp2pp2 by token, zero bubble, selective recompute": (
        {
            "ep": 4,
            "tp": 2,
            "dp": 2,
            "pp": 2,
            "expert_exchange": "tokens",
            "pipeline_schedule": "zero_bubble",
            "recompute": "selective",
        },
        1,
    ),
    "cp2": ({"cp": 2}, 4),
    "cp4dp2, overlapped dp": ({"cp": 4, "dp": 2, **hiding("dp")}, 2),
    "tp2cp2pp2, all overlapped, selective recompute": (
        {"tp": 2, "cp": 2, "pp": 2, "recompute": "selective", **hiding("tp", "pp", "dp")},
        2,
    ),
    "ep4tp2cp2dp2": ({"ep": 4, "tp": 2, "cp": 2, "dp": 2}, 2),
    "ep2dp2pp2, all overlapped, selective recompute": (
        {"ep": 2, "dp": 2, "pp": 2, "recompute": "selective", **hiding("pp", "dp")},
        2,
    ),
    "ep4tp2dp4, overlapped dp": ({"ep": 4, "tp": 2, "dp": 4, **hiding("dp")}, 2),
    "ep2tp2pp2dp2, all overlapped, full recompute": (
        {"ep": 2, "tp": 2, "pp": 2, "dp": 2, "recompute": "full", **hiding("tp", "pp", "dp")},
        2,
    ),
    "ep4tp2dp2pp2 in uneven stages, zero bubble": (
        {
            "ep": 4,
            "tp": 2,
            "dp": 2,
            "pp": 2,
            "stage_layers": [3, 1],
            "pipeline_schedule": "zero_bubble",
            "recompute": "selective",
        },
        1,
    ),
    "tp2pp2, overlapped tp and pp, zero bubble, loss in chunks": (
        {"tp": 2, "pp": 2, "pipeline_schedule": "zero_bubble", **hiding("tp", "pp")},
        2,
    ),
    "tp2cp2, loss in chunks": ({"tp": 2, "cp": 2}, 4),
    "tp2dp2, overlapped dp, loss in chunks": ({"tp": 2, "dp": 2, **hiding("dp")}, 2),
    "tp2dp2, full recompute, overlapped tp and dp": (
        {"tp": 2, "dp": 2, "recompute": "full", **hiding("tp", "dp")},
        2,
    ),
}
MODELS: dict[str, dict[str, Any]] = {
    "parallel": {"block": "parallel"},
    "serial": {"block": "serial"},
    "grouped": {
        "layers": 8,
        "hidden_size": 32,
        "block": "serial",
        "mlp": "swiglu",
        "norm": "rmsnorm",
        "kv_heads": 2,
        "ffn_size": 101,
        "layer_windows": [9, 0, 5, 9, 0, 31, 1, 9],
        "positions": "learned",
        "bias": False,
        "attention_bias": True,
        "qk_norm": True,
        "tie_embeddings": True,
    },
    "experts": {**EXPERTS, "norm": "rmsnorm", "kv_heads": 2},
    "experts, more heads": {**EXPERTS, "norm": "rmsnorm"},
    "long": {
        "block": "serial",
        "mlp": "swiglu",
        "heads": 8,
        "kv_heads": 4,
        "layer_windows": [9, 0, 5, 0],
        "positions": "learned",
        "attention_bias": True,
        "qk_norm": True,
    },
    "norms over all heads": {
        **EXPERTS,
        "norm": "rmsnorm",
        "kv_heads": 2,
        "qk_norm": True,
        "qk_norm_over": "projection",
    },
}


@pytest.fixture(scope="module")
def reference(
    pool: RankPool, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, int], tuple[Any, Path]]:
    """What one process computes for a model, run once per model and number of steps."""

    @functools.cache
    def run(model: str, steps: int) -> tuple[Any, Path]:
        folder = tmp_path_factory.mktemp(model)
        return pool.run(TRAIN, 1, folder, job=_job(model), steps=steps)[0], folder

    return run


@pytest.mark.parametrize(
    ("layout", "model", "steps"),
    [
        # Its eight ranks without overlap: the serial model below has them with all of it.
        pytest.param("tp2pp2dp2", "parallel", FEW_STEPS, marks=pytest.mark.slow),
        ("tp2pp2dp2, all overlapped", "serial", FEW_STEPS),
        pytest.param("tp4, overlapped tp", "parallel", STEPS, marks=pytest.mark.slow),
        pytest.param("pp4, overlapped pp", "serial", STEPS, marks=pytest.mark.slow),
        ("dp4, overlapped dp", "parallel", FEW_STEPS),
        pytest.param("dp4, overlapped dp", "parallel", STEPS, marks=pytest.mark.slow),
        pytest.param("pp3", "parallel", FEW_STEPS, marks=pytest.mark.slow),
        ("tp2dp2, full recompute, overlapped tp and dp", "serial", FEW_STEPS),
        pytest.param(
            *("tp2dp2, full recompute, overlapped tp and dp", "grouped", FEW_STEPS),
            marks=pytest.mark.slow,
        ),
        ("tp2pp2, overlapped tp and pp, zero bubble, loss in chunks", "grouped", FEW_STEPS),
        ("tp2cp2, loss in chunks", "long", FEW_STEPS),
        pytest.param(
            *("tp2dp2, overlapped dp, loss in chunks", "grouped", FEW_STEPS),
            marks=pytest.mark.slow,
        ),
        ("ep2dp2", "experts", FEW_STEPS),
        ("ep2dp2 by token", "experts", FEW_STEPS),
        ("ep4tp2dp2pp2 by token, zero bubble, selective recompute", "experts", FEW_STEPS),
        ("cp2", "long", FEW_STEPS),
        ("cp4dp2, overlapped dp", "parallel", FEW_STEPS),
        ("tp2cp2pp2, all overlapped, selective recompute", "long", FEW_STEPS),
        ("ep4tp2cp2dp2", "experts, more heads", FEW_STEPS),
        ("tp2dp2, full recompute, overlapped tp and dp", "experts", FEW_STEPS),
        pytest.param(
            *("ep2dp2pp2, all overlapped, selective recompute", "norms over all heads", FEW_STEPS),
            marks=pytest.mark.slow,
        ),
        ("ep4tp2dp4, overlapped dp", "experts", FEW_STEPS),
        ("ep2tp2pp2dp2, all overlapped, full recompute", "experts", FEW_STEPS),
        ("ep4tp2dp2pp2 in uneven stages, zero bubble", "experts", FEW_STEPS),
        ("one, full recompute", "parallel", FEW_STEPS),
        ("one, selective recompute", "serial", FEW_STEPS),
        ("pp2vpp2dp2, overlapped pp and dp", "parallel", FEW_STEPS),
        pytest.param(
            *("pp4vpp2, full recompute, overlapped pp", "grouped", FEW_STEPS),
            marks=pytest.mark.slow,
        ),
        ("tp2pp2vpp2 uneven, selective recompute, overlapped tp and pp", "grouped", FEW_STEPS),
    ],
)
def test_layout_trains_as_one_process(
    layout: str,
    model: str,
    steps: int,
    pool: RankPool,
    reference: Callable[[str, int], tuple[Any, Path]],
    tmp_path: Path,
) -> None:
    sizes, micro_batch_size = LAYOUTS[layout]
    # bucket_mib 0: every layer is a bucket of its own, where the reference has one bucket for all
    training = {"micro_batch_size": micro_batch_size, "bucket_mib": 0}
    # Of 32, 64 or 128 tokens that a tp group has of a micro-batch; the last chunk has fewer.
    loss = {"chunk_rows": 27} if "loss in chunks" in layout else {}
    job = _job(model, parallelism=sizes, training=training, loss=loss)
    world_size = math.prod(sizes.get(axis, 1) for axis in ("tp", "cp", "pp", "dp"))
    results = pool.run(TRAIN, world_size, tmp_path, job=job, steps=steps)
    expected, folder = reference(model, steps)
    for result in results:
        assert _shared(result) == _shared(results[0]), (
            "ranks disagree on what they computed together"
        )
    ours, theirs = (
        [StepRecord(**record) for record in found["records"]] for found in (results[0], expected)
    )
    assert theirs[-1].loss < theirs[0].loss - (0.5 if steps == STEPS else 0.05), (
        "the model did not learn: the comparison proves little"
    )
    for our, their in zip(ours, theirs, strict=True):
        assert our.loss == pytest.approx(their.loss, abs=LOSS_TOLERANCE)
        assert our.z_loss == pytest.approx(their.z_loss, rel=1e-4)
        assert our.balance == pytest.approx(their.balance, rel=1e-4)
        assert our.router_z == pytest.approx(their.router_z, rel=1e-4)
        assert our.gradient_norm == pytest.approx(their.gradient_norm, rel=1e-4)
        assert our.clip_factor == pytest.approx(their.clip_factor, rel=1e-4)
        assert (our.consumed_tokens, our.learning_rate) == (
            their.consumed_tokens,
            their.learning_rate,
        )
    for kind, tolerance in (("initial", 0.0), ("final", 1e-3)):
        values_of = [assemble(tmp_path, kind, world_size), assemble(folder, kind, 1)]
        assert values_of[0].keys() == values_of[1].keys()
        for name in values_of[0]:
            np.testing.assert_allclose(
                values_of[0][name], values_of[1][name], rtol=0, atol=tolerance, err_msg=name
            )


def _job(
    model: str, *, loss: dict[str, Any] | None = None, **sections: dict[str, Any]
) -> dict[str, Any]:
    auxiliary = {"sequence_balance": 0.03, "global_balance": 0.02, "router_z_loss": 1e-3}
    of_model = auxiliary if model.startswith("experts") else {}
    return tiny_job(model=MODELS[model], loss={**of_model, **(loss or {})}, **sections)


def _shared(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The records of a rank, without the loads of its own experts."""
    return [
        {key: value for key, value in record.items() if not key.startswith("expert_")}
        for record in result["records"]
    ]


@pytest.mark.parametrize(
    ("sizes", "micro_batch_size", "overlapped"),
    [({"dp": 4}, 1, True), ({"tp": 2, "dp": 2}, 2, False)],
    ids=["dp4, overlapped", "tp2dp2"],
)
def test_experts_have_the_same_bits_for_any_ep(
    sizes: dict[str, int], micro_batch_size: int, overlapped: bool, pool: RankPool, tmp_path: Path
) -> None:
    """In deterministic mode, whatever ranks the rows of an expert meet on."""
    found = []
    for ep in (1, 2, 4):
        folder = tmp_path / str(ep)
        folder.mkdir()
        parallelism = {**sizes, "ep": ep, **(hiding("dp") if overlapped else {})}
        training = {"micro_batch_size": micro_batch_size, "deterministic": True}
        job = _job("experts", parallelism=parallelism, training=training)
        results = pool.run(TRAIN, 4, folder, job=job, steps=FEW_STEPS)
        records = [StepRecord(**record) for record in results[0]["records"]]
        found.append((records, assemble(folder, "final", 4)))
    (records, states), *others = found
    for other, values in others:
        assert [record.loss for record in other] == [record.loss for record in records]
        assert [record.balance for record in other] == [record.balance for record in records]
        # float64 squares are added shard by shard, and ep cuts the shards.
        norms = [record.gradient_norm for record in records]
        assert [record.gradient_norm for record in other] == pytest.approx(norms, rel=1e-15)
        for name, value in states.items():
            np.testing.assert_array_equal(values[name], value, err_msg=name)


@pytest.mark.parametrize(
    "sizes",
    [pytest.param({"pp": 2}, marks=pytest.mark.slow), {"pp": 2, "virtual_stages": 2}],
)
def test_overlapped_edges_change_no_bit(
    sizes: dict[str, Any], pool: RankPool, tmp_path: Path
) -> None:
    jobs = [
        tiny_job(parallelism=sizes | overlap)
        for overlap in ({}, hiding("pp"), hiding("pp", "peer_edges"))
    ]
    _assert_same_bits(jobs, 2, pool, tmp_path)


@pytest.mark.parametrize(
    ("model", "sizes", "micro_batch_size", "chunk_rows"),
    [
        pytest.param("serial", {"pp": 2}, 1, 0, marks=pytest.mark.slow),
        ("parallel", {"pp": 2}, 2, 27),
        ("parallel", {"pp": 2, "virtual_stages": 2, "dp": 2, **hiding("pp", "dp")}, 1, 0),
        pytest.param(
            "grouped",
            {"tp": 2, "pp": 2, "recompute": "selective", **hiding("tp", "pp")},
            4,
            0,
            marks=pytest.mark.slow,
        ),
        ("parallel", {"pp": 4, "recompute": "full", **hiding("pp")}, 1, 0),
    ],
)
def test_splitting_backwards_changes_no_bit(
    model: str,
    sizes: dict[str, Any],
    micro_batch_size: int,
    chunk_rows: int,
    pool: RankPool,
    tmp_path: Path,
) -> None:
    """Weight gradients of all micro-batches are added in the order of 1F1B."""
    jobs = [
        tiny_job(
            model=MODELS[model],
            parallelism={**sizes, "pipeline_schedule": schedule},
            training={"micro_batch_size": micro_batch_size, "bucket_mib": 0},
            loss={"chunk_rows": chunk_rows},
        )
        for schedule in ("1f1b", "zero_bubble")
    ]
    ranks = math.prod(sizes.get(axis, 1) for axis in ("tp", "cp", "pp", "dp"))
    _assert_same_bits(jobs, ranks, pool, tmp_path)


def _assert_same_bits(jobs: list[dict[str, Any]], ranks: int, pool: RankPool, folder: Path) -> None:
    """The jobs report the same in every step, and end with the same states on every rank."""
    first, *others = (
        pool.run(TRAIN, ranks, folder / str(n), job=job, steps=2) for n, job in enumerate(jobs)
    )
    assert others == [first] * len(others)
    for rank, other in itertools.product(range(ranks), range(1, len(jobs))):
        with (
            np.load(folder / f"0/final-{rank}.npz") as theirs,
            np.load(folder / f"{other}/final-{rank}.npz") as ours,
        ):
            for name in theirs.files:
                np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)


@pytest.mark.parametrize(
    "overlap", [hiding(), hiding("pp", "peer_edges")], ids=["communicator", "peer memory"]
)
def test_a_posted_receive_is_entered_when_it_is_waited_for(
    overlap: dict[str, Any], pool: RankPool, tmp_path: Path
) -> None:
    """A stage that hangs in its own computation must not seem to wait for others."""
    job = tiny_job(parallelism={"pp": 2, **overlap})
    rows = pool.run("tests.harness.training:posted_receive_rows", 2, tmp_path, job=job)[1]
    (entered, completed), connected = rows["posted"], rows["before"]
    assert (entered, completed) == tuple(connected)
    assert rows["waited"] == [entered + 1, completed + 1]
    assert rows["received"] == [7.0] * 4


@pytest.mark.slow
def test_a_job_repeats_and_resumes_bit_for_bit(pool: RankPool, tmp_path: Path) -> None:
    sizes = {"tp": 2, "pp": 2, "dp": 2, **hiding("tp", "pp", "dp")}
    job = tiny_job(parallelism=sizes, training={"micro_batch_size": 2})
    program = "tests.harness.training:train_and_resume"
    results = pool.run(program, 8, tmp_path / "first", job=job, steps=2)
    again = pool.run(TRAIN, 8, tmp_path / "second", job=job, steps=4)
    for result, repeated in zip(results, again, strict=True):
        assert result["resumed"] == result["uninterrupted"] == results[0]["uninterrupted"]
        assert result["states_equal"]
        losses = [record["loss"] for record in repeated["records"]]
        assert losses[2:] == result["uninterrupted"], "the same job ran to other bits"


def test_all_ranks_skip_and_vote_together(pool: RankPool, tmp_path: Path) -> None:
    job = tiny_job(parallelism={"tp": 2, "dp": 2})
    results = pool.run("tests.harness.training:train_with_a_broken_replica", 4, tmp_path, job=job)
    for result in results:
        assert result["skipped"] == [False, True, False]
        assert result["votes"] == [0, 6, 0], "ranks 0 to 3 voted 0, 1, 2, 3 in the second step"
        assert result["unchanged"]
        assert result["loss"] == results[0]["loss"]


def test_the_status_page_counts_what_every_group_did(pool: RankPool, tmp_path: Path) -> None:
    job = tiny_job(parallelism={"tp": 2, "pp": 2, "dp": 2, **hiding("pp")})
    for rows in pool.run("tests.harness.training:status_rows", 8, tmp_path, job=job):
        assert set(rows) == {"world", "tp", "dp", "pp0-1.activation", "pp0-1.gradient"}
        for name, (entered, completed) in rows.items():
            assert entered == completed > 0, name
        assert rows["world"][0] == 1
        assert rows["pp0-1.activation"][0] == 4, (
            "one message for each of the replica's micro-batches"
        )


@pytest.mark.slow
def test_a_rank_that_stalls_fails_its_group_in_time(pool: RankPool, tmp_path: Path) -> None:
    results = pool.run(
        "tests.harness.training:stall", 4, tmp_path, job=tiny_job(parallelism={"tp": 2, "dp": 2})
    )
    # rank 3 stalls until the others have failed; its tp peer is rank 2, its dp peer rank 1; rank 0
    # shares only the world with it
    waited = [result["waited_s"] for result in results]
    assert max(waited[:3]) > 1.5, waited  # the others lose a peer that has given up
    assert all(
        "imed out" in result["error"] or "onnection" in result["error"] for result in results[:3]
    ), results


def test_evaluation_is_the_loss_of_a_step_without_the_step(pool: RankPool, tmp_path: Path) -> None:
    program = "tests.harness.training:evaluate"
    one = pool.run(program, 1, tmp_path / "one", job=tiny_job())[0]
    interleaved = {"tp": 2, "pp": 2, "virtual_stages": 2, **hiding("tp", "pp")}
    job = tiny_job(parallelism=interleaved, training={"micro_batch_size": 2})
    for result in [one, *pool.run(program, 4, tmp_path / "interleaved", job=job)]:
        assert result["before"][0] == pytest.approx(result["losses"][0], abs=LOSS_TOLERANCE)
        assert result["after"] == result["again"], "an evaluation changes nothing"
        assert result["after"] < result["before"][1], "it saw what training did"
        for name in ("before", "losses", "after"):
            assert result[name] == pytest.approx(one[name], abs=LOSS_TOLERANCE)
