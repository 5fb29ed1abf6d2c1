"""Overlapped data parallelism between processes gives the plain version's numbers, bit for bit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from tests.harness.ranks import RankPool
from tests.harness.training import tiny_job


@pytest.mark.parametrize(
    ("sizes", "training"),
    [
        ({"dp": 2, "recompute": "selective"}, {"bucket_mib": 0}),
        ({"dp": 4}, {"micro_batch_size": 1}),
        ({"tp": 2, "dp": 2, "recompute": "full"}, {"bucket_mib": 0}),
        ({"pp": 2, "virtual_stages": 2, "dp": 2, "stage_layers": [1, 2, 2, 1]}, {"bucket_mib": 0}),
    ],
    ids=["dp2", "dp4", "tp2dp2", "pp2vpp2dp2"],
)
def test_overlap_changes_no_bit(
    sizes: dict[str, Any], training: dict[str, Any], pool: RankPool, tmp_path: Path
) -> None:
    layers = sum(sizes.get("stage_layers", [3]))
    jobs = [
        tiny_job(
            model={"layers": layers},
            parallelism={**sizes, "overlap": {"dp": overlap}},
            training={"micro_batch_size": 2, **training},
        )
        for overlap in (False, True)
    ]
    world_size = math.prod(sizes.get(axis, 1) for axis in ("tp", "pp", "dp"))
    results = pool.run(
        "tests.harness.training:train_in_several_ways", world_size, tmp_path, jobs=jobs
    )
    for plain, overlapped in results:
        assert overlapped == plain
        assert "skipped=True" in plain[1]
        assert "skipped=False" in plain[2]


def test_the_status_page_counts_what_is_under_way(pool: RankPool, tmp_path: Path) -> None:
    job = tiny_job(parallelism={"dp": 2, "overlap": {"dp": True}})
    for rows in pool.run("tests.harness.training:status_rows", 2, tmp_path, job=job):
        assert rows["dp"] == [4, 4], "a bucket of each buffer, reduced and gathered"
        assert rows["world"] == [1, 1]
