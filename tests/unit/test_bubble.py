"""The ideal bubble against a pipeline counted by hand."""

from __future__ import annotations

import pytest
from tests.harness.training import tiny_job

from megascale_job.loading import from_accepted
from megascale_job.sizes.flops import ideal_bubble


@pytest.mark.parametrize(
    ("pp", "virtual_stages", "micro_batches", "schedule", "expected"),
    [
        # The second stage waits for one micro-batch's forward and backward, and computes four.
        (2, 1, 4, "1f1b", 1 / 4),
        (2, 2, 16, "1f1b", 1 / 32),
        (2, 2, 16, "zero_bubble", 1 / 96),
        (1, 1, 4, "1f1b", 0.0),
    ],
)
def test_it_is_relative_to_the_work(
    pp: int, virtual_stages: int, micro_batches: int, schedule: str, expected: float
) -> None:
    parallelism = {"pp": pp, "virtual_stages": virtual_stages, "pipeline_schedule": schedule}
    batch = {"global_batch_size": micro_batches, "micro_batch_size": 1}
    config = from_accepted(tiny_job(parallelism=parallelism, training=batch))
    assert ideal_bubble(config) == pytest.approx(expected)
