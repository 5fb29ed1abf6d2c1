"""Weights that travel over dp as e4m3 bytes: the bits of training are those of the bf16 gather."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from tests.harness.ranks import RankPool
from tests.harness.training import hiding, tiny_job

MODELS: dict[str, dict[str, Any]] = {
    "parallel, bias": {"block": "parallel"},
    "serial, no bias": {"block": "serial", "mlp": "swiglu", "ffn_size": 128, "bias": False},
    "tied": {"norm": "rmsnorm", "tie_embeddings": True, "attention_bias": True, "bias": False},
}
# With the first layer in bf16 the bucket of the first of two stages travels in bf16.
IN_BF16 = {"tied": 1}
# In MiB: one bucket of a stage, embedding and head included; a bucket for each unit.
WHOLE, UNITS = 64, 0


@pytest.mark.parametrize(
    ("model", "sizes", "bucket_mib"),
    [
        ("parallel, bias", {"dp": 2, "tp": 2}, UNITS),
        pytest.param("serial, no bias", {"dp": 4}, WHOLE, marks=pytest.mark.slow),
        ("tied", {"dp": 2, "pp": 2}, WHOLE),
        pytest.param("parallel, bias", {"dp": 4, "tp": 2}, WHOLE, marks=pytest.mark.slow),
        pytest.param("parallel, bias", {"dp": 4}, UNITS, marks=pytest.mark.slow),
        pytest.param("serial, no bias", {"dp": 2, "tp": 2, "pp": 2}, UNITS, marks=pytest.mark.slow),
        pytest.param("tied", {"dp": 1}, UNITS, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_every_bit_is_that_of_the_gather_in_bf16(
    model: str, sizes: dict[str, Any], bucket_mib: int, pool: RankPool, tmp_path: Path
) -> None:
    """Losses, norms, an evaluation, a step with NaN and states, plain and overlapped."""
    jobs = [
        _job(model, {**sizes, **hiding(*overlapped)}, gather, bucket_mib=bucket_mib)
        for gather, overlapped in (("bf16", ()), ("fp8", ()), ("fp8", ("dp",)))
    ]
    program = "tests.harness.training:train_in_several_ways"
    for in_bf16, *in_fp8 in pool.run(program, math.prod(sizes.values()), tmp_path, jobs=jobs):
        assert in_fp8 == [in_bf16, in_bf16]


def test_a_resumed_run_is_the_same_run(pool: RankPool, tmp_path: Path) -> None:
    """The restored values are cast again: no byte that has travelled is part of a checkpoint."""
    job = _job("parallel, bias", {"dp": 2, **hiding("dp")}, "fp8")
    for result in pool.run("tests.harness.training:train_and_resume", 2, tmp_path, job=job):
        assert result["resumed"] == result["uninterrupted"]
        assert result["states_equal"]


@pytest.mark.parametrize(
    ("bucket_mib", "broken"),
    [
        pytest.param(WHOLE, [0, 2, 3, 3, 2], marks=pytest.mark.slow),
        (UNITS, [0, 4, 4, 8, 4]),
    ],
)
def test_operands_biases_and_embeddings_arrive_as_they_are_and_half_as_many_bytes_travel(
    bucket_mib: int, broken: list[int], pool: RankPool, tmp_path: Path
) -> None:
    """Also where one rank's shard has a NaN or an Inf, and in biases -0 and NaN."""
    job = _job("parallel, bias", {"dp": 4}, "fp8", bucket_mib=bucket_mib)
    program = "tests.harness.fp8_gather:publish_in_both_ways"
    results = pool.run(program, 4, tmp_path, job=job)
    layers = 4
    for result in results:
        assert result["differ"] == []
        assert result["moved"] == 0, "graphs read an operand where it was"
        assert result["broken"] == broken, "weights that one rank broke are broken on all"
        in_bf16, *in_fp8 = result["gathered"]
        assert result["travelling"] == (1 if bucket_mib else layers)
        for found in in_fp8:
            halves = sum(2 * ours == theirs for ours, theirs in zip(found, in_bf16, strict=True))
            same = sum(ours == theirs for ours, theirs in zip(found, in_bf16, strict=True))
            assert (halves, same) == (result["travelling"], len(in_bf16) - halves)
        biases = layers * 2 * 512  # q, k, v and up, 64, 64, 64 and 256 values, and alignment
        ends = 2 * 2 * 304 * 64 if bucket_mib else 0  # embedding and head, padded
        assert result["reduced"] == [[], [biases + ends], [biases + ends]]


def _job(model: str, sizes: dict[str, Any], gather: str, **training: Any) -> dict[str, Any]:
    fp8 = {"parameter_gather": gather, "layers_at_start_in_bf16": IN_BF16.get(model, 0)}
    training = {"precision": "fp8", "fp8": fp8, "global_batch_size": 4, **training}
    return tiny_job(model=MODELS[model], parallelism=sizes, training=training)
