"""A checkpoint of another model whose shapes are the same is detected."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
from tests.harness.exporting import MODELS, job_of

from megascale_common.job.config import DataConfig
from megascale_trainer.process.loaded_model import differences, order_of, other_order

MODEL = job_of(MODELS["llama"][1]).model


@pytest.mark.parametrize(
    "same",
    [
        MODEL,
        replace(MODEL, norm_bias=False),  # RMSNorm has none
        replace(MODEL, sequence_length=48, initializer_std=0.01),
        replace(MODEL, layer_windows=(0, 0, 0)),
    ],
)
def test_the_same_model_is_taken(same: object) -> None:
    assert differences(asdict(same), MODEL) == ([], [])  # type: ignore[call-overload]


def test_a_checkpoint_of_an_earlier_version_is_taken() -> None:
    assert differences(None, MODEL) == ([], [])


def test_defaults_are_what_they_stand_for() -> None:
    model = replace(MODEL, kv_heads=0, ffn_size=0, window=3)
    written = replace(MODEL, kv_heads=4, ffn_size=256, layer_windows=(3, 3, 3))
    assert differences(asdict(written), model) == ([], [])


def test_other_heads_are_refused_and_another_angle_is_shown() -> None:
    other = replace(MODEL, heads=8, kv_heads=4, rope_theta=1e4)
    assert differences(asdict(other), MODEL) == (
        [
            "trainer.model.heads: 4 here and 8 in the checkpoint",
            "trainer.model.kv_heads: 2 here and 4 in the checkpoint",
            "trainer.model.head_dim: 16 here and 8 in the checkpoint",
        ],
        ["trainer.model.rope_theta: 500000.0 here and 10000.0 in the checkpoint"],
    )


def test_a_position_under_another_rule_is_refused_and_an_earlier_versions_is_the_defaults() -> None:
    samples = DataConfig(shuffle="samples", blend="tokens")
    assert other_order(order_of(samples), samples) == []
    assert other_order(None, DataConfig()) == []
    refused = other_order(None, samples)
    assert [line.split(":")[0] for line in refused] == [
        "trainer.data.shuffle",
        "trainer.data.blend",
    ]
    assert "samples here and documents in the checkpoint" in refused[0]
