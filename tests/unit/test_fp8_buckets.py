"""Which buckets of parameters travel as e4m3 bytes: those of which that way moves fewer bytes."""

from __future__ import annotations

from typing import Any

import pytest
from tests.harness.training import tiny_job

from megascale_job.config import JobConfig
from megascale_job.loading import from_accepted
from megascale_job.sizes.parameter_table import elements_of, fp8_buckets, parameter_table


def _job(
    layers: int = 4, precision: str = "fp8", gather: str = "fp8", bucket_mib: int = 0, **fp8: Any
) -> JobConfig:
    training = {
        "precision": precision,
        "fp8": {"parameter_gather": gather, **fp8},
        "bucket_mib": bucket_mib,
    }
    return from_accepted(
        tiny_job(
            model={"layers": layers}, parallelism={"tp": 2, "dp": 2, "pp": 1}, training=training
        )
    )


@pytest.mark.parametrize(
    ("changes", "units"),
    [
        ({}, [("layers.0",), ("layers.1",), ("layers.2",), ("layers.3",)]),
        ({"precision": "bf16"}, []),
        ({"gather": "bf16"}, []),
        ({"layers_at_start_in_bf16": 1, "layers_at_end_in_bf16": 2}, [("layers.1",)]),
        # Embedding and head are 17 % of a bucket of all four layers, and 29 % of one of two.
        (
            {"bucket_mib": 64},
            [("embedding", "layers.0", "layers.1", "layers.2", "layers.3", "head")],
        ),
        ({"bucket_mib": 64, "layers": 2}, []),
        ({"bucket_mib": 64, "layers_at_end_in_bf16": 1}, []),
    ],
    ids=str,
)
def test_buckets_that_are_mostly_weights_in_fp8_travel(
    changes: dict[str, Any], units: list[tuple[str, ...]]
) -> None:
    config = _job(**changes)
    assert [
        found.bucket.units for found in fp8_buckets(config, parameter_table(config, 1))
    ] == units


def test_a_bucket_has_all_its_tensors_as_weights_or_as_the_rest() -> None:
    config = _job(bucket_mib=64)
    table = parameter_table(config, 3)
    [found] = fp8_buckets(config, table)
    stored = [tensor for tensor in table.tensors if tensor.buffer == found.buffer]
    assert sorted(stored, key=lambda tensor: tensor.offset) == sorted(
        (*found.weights, *found.rest), key=lambda tensor: tensor.offset
    )
    assert elements_of(found.weights) == 4 * 12 * 64 * 64 // 2
    names = {tensor.name for tensor in found.rest}
    biases = {f"layers.{layer}.in.bias" for layer in range(4)}
    assert names == {"embedding.weight", "head.weight", *biases}
