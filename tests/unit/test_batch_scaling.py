"""The fields of a LAMB run at another batch: the rule of the paper's Table 4."""

from __future__ import annotations

import pytest
from tests.harness.training import tiny_job

from megascale_cli.jobfile import _lines
from megascale_cli.planning import plan_job
from megascale_job.config import JobConfig
from megascale_job.loading import from_accepted
from megascale_job.sizes.flops import scaled_batch
from megascale_job.wire.spec import to_proto


def _job(batch: int, steps: int, rate: float, warmup: int, dp: int = 1) -> JobConfig:
    return from_accepted(
        tiny_job(
            training={"global_batch_size": batch, "steps": steps},
            optimizer={"name": "lamb", "learning_rate": rate},
            schedule={"warmup_steps": warmup},
            parallelism={"dp": dp},
        )
    )


@pytest.mark.parametrize(
    ("batch", "denominator", "warmup_ratio"),
    # arXiv 1904.00962, Table 4: batch, learning rate 5 / (denominator * 1e3), warm-up
    [
        (512, 2**3, 1 / 320),
        (1024, 2**2.5, 1 / 160),
        (2048, 2**2, 1 / 80),
        (8192, 2**1, 1 / 20),
        (32768, 2**0, 1 / 5),
    ],
)
def test_the_rule_gives_the_papers_table(
    batch: int, denominator: float, warmup_ratio: float
) -> None:
    base = _job(512, 1_000_000, 5 / (2**3 * 1e3), 3125)
    found = scaled_batch(base, batch / 512)
    assert found.global_batch_size == batch
    assert found.learning_rate == pytest.approx(5 / (denominator * 1e3))
    assert found.warmup_steps / found.steps == pytest.approx(warmup_ratio, rel=1e-3)
    assert found.steps * batch == 512_000_000


def test_the_batch_stays_one_that_the_layout_can_run_and_no_sample_is_left_out() -> None:
    found = scaled_batch(_job(8, 21, 1e-3, 20, dp=4), 1.4)
    assert found.global_batch_size == 12
    assert found.steps == 14
    assert found.warmup_steps == 14


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan"), float("inf")])
def test_a_factor_that_is_none_is_refused(factor: float) -> None:
    with pytest.raises(ValueError, match=r"factor: .* give 4 for 4 times the batch"):
        scaled_batch(_job(8, 20, 1e-3, 0), factor)


def test_the_plan_of_a_lamb_job_has_larger_batches() -> None:
    job = tiny_job(
        training={"global_batch_size": 16, "steps": 100},
        optimizer={"name": "lamb", "learning_rate": 2.5e-3},
        schedule={"warmup_steps": 20},
        data={"sources": [{"prefix": "/corpus"}]},
    )
    plan = plan_job(to_proto(from_accepted(job)), 8, 0)
    assert [row["global_batch_size"] for row in plan["larger_batches"]] == [32, 64, 128]
    [line] = [line for line in _lines(plan) if line.startswith("larger batch 32")]
    assert line.endswith("50 steps, 20 of warm-up, learning rate 0.00354")
    other = from_accepted({**job, "optimizer": {"name": "adamw"}})
    assert "larger_batches" not in plan_job(to_proto(other), 8, 0)
