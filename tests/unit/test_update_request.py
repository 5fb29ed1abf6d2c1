"""What an update may change of a job: what its checkpoints do not depend on."""

from __future__ import annotations

from typing import Any

import pytest
from tests.harness.training import tiny_job

from megascale_common.job.config import from_accepted
from megascale_common.job.problems import JobError
from megascale_driver.update_request import changed_fields


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"recompute": "full"}, "recompute"),
        ({"pipeline_schedule": "zero_bubble"}, "pipeline_schedule"),
        ({"overlap": {"tp": False, "pp": True, "dp": False}}, "overlap.pp"),
    ],
)
def test_how_a_step_is_computed_may_change(change: dict[str, Any], field: str) -> None:
    old, new = (from_accepted(tiny_job(parallelism={"pp": 2, **more})) for more in ({}, change))
    assert changed_fields(old, new) == [f"trainer.parallelism.{field}"]


def test_the_layout_of_ranks_cannot_change() -> None:
    old, new = (from_accepted(tiny_job(parallelism={"pp": stages})) for stages in (2, 4))
    with pytest.raises(JobError, match=r"trainer\.parallelism\.pp: 4 instead of 2"):
        changed_fields(old, new)
