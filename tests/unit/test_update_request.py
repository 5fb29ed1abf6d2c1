"""What an update may change of a job: what its checkpoints do not depend on."""

from __future__ import annotations

import re
from typing import Any

import pytest
from tests.harness.training import tiny_job

from megascale_driver.service.job_requests import changed_fields
from megascale_job.loading import from_accepted
from megascale_job.problems import JobError


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


@pytest.mark.parametrize(
    ("section", "values", "field"),
    [
        ("data", {"seed": 7}, "trainer.data.seed: 7 instead of 1234"),
        ("data", {"shuffle": "samples"}, "trainer.data.shuffle: 'samples' instead of"),
        ("data", {"blend": "tokens"}, "trainer.data.blend: 'tokens' instead of"),
        ("training", {"global_batch_size": 16}, "trainer.training.global_batch_size: 16 instead"),
    ],
)
def test_what_gives_the_data_position_its_meaning_cannot_change(
    section: str, values: dict[str, Any], field: str
) -> None:
    old, new = (from_accepted(tiny_job(**more)) for more in ({}, {section: values}))
    with pytest.raises(JobError, match=re.escape(field)):
        changed_fields(old, new)


@pytest.mark.parametrize(("before", "after"), [(0.001, 0.01), (0.0, 0.001), (0.001, 0.0)])
def test_a_bias_gets_another_rate_but_neither_comes_nor_goes(before: float, after: float) -> None:
    old, new = (
        from_accepted(
            tiny_job(
                model={
                    "block": "serial",
                    "mlp": "swiglu",
                    "bias": False,
                    "experts": {"count": 8, "bias_rate": rate},
                }
            )
        )
        for rate in (before, after)
    )
    field = "trainer.model.experts.bias_rate"
    if before and after:
        assert changed_fields(old, new) == [field]
        return
    with pytest.raises(JobError, match=re.escape(field)):
        changed_fields(old, new)
