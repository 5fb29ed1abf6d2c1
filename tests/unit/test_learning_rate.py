"""The learning-rate schedule at its corners, and its shape in between."""

from __future__ import annotations

import pytest
from tests.harness.training import tiny_job

from megascale_job.loading import from_accepted
from megascale_trainer.optimizer.step_control import learning_rate


@pytest.mark.parametrize("decay", ["cosine", "linear"])
def test_warm_up_peak_and_end(decay: str) -> None:
    config = from_accepted(
        tiny_job(
            training={"steps": 101},
            schedule={"warmup_steps": 10, "decay": decay, "min_ratio": 0.1},
            optimizer={"learning_rate": 1.0},
        )
    )
    rates = [learning_rate(config, step) for step in range(120)]
    assert rates[:10] == pytest.approx([(n + 1) / 10 for n in range(10)])
    assert rates[10] == pytest.approx(1.0)
    assert rates[55] == pytest.approx(0.55)
    assert rates[100] == pytest.approx(0.1)
    assert rates[101:] == pytest.approx([0.1] * 19), (
        "past the last step the rate stays at its minimum"
    )
    assert sorted(rates[10:101], reverse=True) == rates[10:101]


def test_constant_without_warm_up() -> None:
    config = from_accepted(
        tiny_job(
            schedule={"warmup_steps": 0, "decay": "constant"}, optimizer={"learning_rate": 0.5}
        )
    )
    assert {learning_rate(config, step) for step in range(30)} == {0.5}


def test_a_run_of_one_step() -> None:
    config = from_accepted(
        tiny_job(
            training={"steps": 1}, schedule={"warmup_steps": 0}, optimizer={"learning_rate": 0.5}
        )
    )
    assert learning_rate(config, 0) == 0.5
