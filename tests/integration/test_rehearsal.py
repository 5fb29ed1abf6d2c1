"""A rehearsal before a step changes no bit of it, and comes once for each kind of micro-batch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from tests.harness.ranks import RankPool
from tests.harness.training import hiding, tiny_job


@pytest.mark.parametrize(
    ("parallelism", "batch"),
    [
        # Two micro-batches of two kinds: rehearsed, they are as many as a step has.
        ({"pp": 2, "dp": 2, **hiding("pp", "dp")}, {"global_batch_size": 4}),
        (
            {"pp": 2, "virtual_stages": 2, "pipeline_schedule": "zero_bubble", **hiding("pp")},
            {"global_batch_size": 4},
        ),
        ({"tp": 2, "pp": 2, **hiding("tp", "pp")}, {"global_batch_size": 4}),
    ],
    ids=["dp", "zero bubble", "tp"],
)
def test_a_rehearsed_run_is_the_run_without(
    parallelism: dict[str, Any], batch: dict[str, Any], pool: RankPool, tmp_path: Path
) -> None:
    # Some 17 documents a sequence, which count as 16 or 32.
    job = tiny_job(model={"sequence_length": 144}, parallelism=parallelism, training=batch)
    ranks = math.prod(parallelism.get(axis, 1) for axis in ("tp", "pp", "dp"))
    program = "tests.harness.rehearsing:with_and_without"
    chunks = parallelism.get("virtual_stages", 1)
    several = False
    for found in pool.run(program, ranks, tmp_path, job=job, steps=3):
        several = several or max(found["new"]) == 2
        assert found["with"] == found["without"]
        *kinds, in_all = [chunks * number for number in found["kinds"]]
        *training, last = found["rehearsed"]
        assert training == kinds
        evaluated = last - in_all
        assert 0 < evaluated <= in_all, "an evaluation has kernels of its own"
    assert several, "no step had two new kinds"
