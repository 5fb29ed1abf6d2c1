"""Overlapped matmuls over real shared memory: the plain ones' bits at any timing, and fallbacks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.harness.ranks import RankPool
from tests.harness.training import tiny_job

PROGRAMS = "tests.harness.tensor_products"


@pytest.mark.parametrize(
    ("size", "dtype", "chunks"),
    [(2, "fp32", [1, 2, 5]), (3, "bf16", [1, 4]), (4, "fp32", [1, 2, 3, 7])],
)
def test_results_are_the_plain_ones(
    size: int, dtype: str, chunks: list[int], pool: RankPool, tmp_path: Path
) -> None:
    arguments = {
        "dtype": dtype,
        "chunks": chunks,
        "operations": 24,
        "part_bytes": 4096,
        "delay_s": 1e-3,
    }
    for wrong in pool.run(f"{PROGRAMS}:compare", size, tmp_path, **arguments):
        assert len(wrong) == 2 * len(chunks)
        assert set(wrong.values()) == {0}, wrong


@pytest.mark.parametrize(("size", "chunks"), [(2, [1, 2, 5]), (3, [1, 4]), (4, [1, 2, 3])])
def test_gemms_in_fp8_are_the_plain_ones(
    size: int, chunks: list[int], pool: RankPool, tmp_path: Path
) -> None:
    arguments = {"chunks": chunks, "operations": 24, "part_rows": 20, "delay_s": 1e-3}
    for wrong in pool.run("tests.harness.fp8_gemms:compare", size, tmp_path, **arguments):
        assert len(wrong) == 2 * len(chunks)
        assert set(wrong.values()) == {0}, wrong


def test_memory_is_shared(pool: RankPool, tmp_path: Path) -> None:
    for rank, result in enumerate(pool.run(f"{PROGRAMS}:memory_is_shared", 3, tmp_path)):
        assert result["reason"] == ""
        assert result["found"] == [10 * rank + writer for writer in range(3)]
        assert "12" in result["error"], "an access beyond the memory is refused, with its size"


def test_partial_sums_are_added_in_float32_and_rounded_once(pool: RankPool, tmp_path: Path) -> None:
    for total in pool.run(f"{PROGRAMS}:sum_is_wide", 4, tmp_path):
        assert total == torch.tensor(259.0).bfloat16().item()


def test_an_operation_larger_than_its_slot_is_refused(pool: RankPool, tmp_path: Path) -> None:
    for error in pool.run(f"{PROGRAMS}:too_much", 2, tmp_path):
        assert error == "an operation needs 1040 bytes of peer memory, a slot has 1024"


@pytest.mark.parametrize(
    ("ranks", "overlap", "one_host", "products", "cause"),
    [
        (2, True, True, "OverlappedMatmuls", ""),
        (2, False, True, "PlainMatmuls", ""),
        (2, True, False, "PlainMatmuls", "its ranks are on different hosts"),
        (1, True, True, "PlainMatmuls", ""),
    ],
    ids=["overlapped", "not set", "two hosts", "one rank"],
)
def test_the_plain_matmuls_are_the_fallback_and_the_log_gives_the_cause(
    ranks: int,
    overlap: bool,
    one_host: bool,
    products: str,
    cause: str,
    pool: RankPool,
    tmp_path: Path,
) -> None:
    for result in pool.run(
        f"{PROGRAMS}:choice", ranks, tmp_path, overlap=overlap, one_host=one_host
    ):
        assert result["products"] == products
        assert result["log"].count("\n") == (1 if cause else 0)
        assert cause in result["log"]


@pytest.mark.slow
def test_bf16_trains_as_the_plain_version(pool: RankPool, tmp_path: Path) -> None:
    """Activations of 8 bits are rounded at other places, which mostly cancels in the loss.

    The loss is 5.7, averaged over 256 tokens.
    """
    losses = []
    for overlap in (False, True):
        job = tiny_job(
            parallelism={"tp": 2, "overlap": {"tp": overlap}}, training={"precision": "bf16"}
        )
        [first, second] = pool.run(
            "tests.harness.training:train", 2, tmp_path / str(overlap), job=job, steps=6
        )
        assert first["records"] == second["records"]
        losses.append([record["loss"] for record in first["records"]])
    assert losses[1] == pytest.approx(losses[0], abs=1e-2)


@pytest.mark.parametrize(
    ("block", "recompute", "overlap", "per_layer"),
    [
        ("parallel", "none", False, 4),
        ("parallel", "none", True, 4),
        ("serial", "none", True, 8),
        ("serial", "full", True, 11),
    ],
)
def test_a_layer_gathers_and_scatters_no_more_than_it_must(
    block: str, recompute: str, overlap: bool, per_layer: int, pool: RankPool, tmp_path: Path
) -> None:
    """One each for a pair of projections and a direction.

    Full recompute repeats all but the layer's last scatter.
    """
    counts = []
    for layers in (1, 2):
        job = tiny_job(
            model={"block": block, "layers": layers},
            parallelism={"tp": 2, "recompute": recompute, "overlap": {"tp": overlap}},
            training={"global_batch_size": 3},
        )
        program = "tests.harness.training:status_rows"
        rows = pool.run(program, 2, tmp_path / str(layers), job=job)
        assert all(entered == completed for row in rows for entered, completed in row.values())
        counts.append(rows[0]["tp"][0])
    assert counts[1] - counts[0] == 3 * per_layer, "three micro-batches"
