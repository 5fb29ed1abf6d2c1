"""A checkpoint of another model whose shapes are the same is detected."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
from tests.harness.exporting import MODELS, job_of

from megascale_job.config import DataConfig, DataSource, ExpertsConfig, JobConfig
from megascale_job.loading import to_json
from megascale_trainer.optimizer.step_control import learning_rate
from megascale_trainer.process.loaded_model import (
    differences,
    model_fields,
    other_data,
    other_schedule,
    position_of,
    schedule_of,
)

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


def test_another_scaling_is_shown_and_one_from_before_yarn_is_the_same() -> None:
    llama3 = job_of(MODELS["llama3"][1]).model
    carried = model_fields(llama3)
    assert list(carried["rope_scaling"]) == [
        "kind",
        "factor",
        "low_frequency_factor",
        "high_frequency_factor",
        "original_sequence_length",
    ]
    assert differences({**carried, "layer_windows": ()}, llama3) == ([], [])
    assert "beta_fast" not in to_json(job_of(MODELS["llama3"][1]))
    yarn = job_of(MODELS["llama-yarn"][1]).model
    carried = json.loads(json.dumps(model_fields(yarn)))
    assert differences(carried, yarn) == ([], [])
    other = replace(yarn, rope_scaling=replace(yarn.rope_scaling, attention_factor=0.0))
    refused, (changed,) = differences(carried, other)
    assert not refused and changed.startswith("trainer.model.rope_scaling: {'kind': 'yarn'")
    assert "'attention_factor': 0.0}" in changed and "'attention_factor': 1.5}" in changed


EXPERTS = ExpertsConfig(count=8, top_k=4, ffn_size=32, score="sigmoid", groups=2)


def test_a_dense_model_is_described_as_before_there_were_experts() -> None:
    assert model_fields(MODEL).keys() == asdict(MODEL).keys() - {"experts", "qk_norm_over"}
    assert differences(model_fields(MODEL), MODEL) == ([], [])
    model = replace(MODEL, experts=EXPERTS)
    carried = json.loads(json.dumps(model_fields(model)))
    assert carried["experts"] == asdict(EXPERTS)
    assert differences({**carried, "layer_windows": ()}, model) == ([], [])


def test_another_router_is_refused_and_fewer_experts_per_token_are_shown() -> None:
    model = replace(MODEL, experts=EXPERTS)
    other = replace(MODEL, experts=replace(EXPERTS, score="softmax", top_k=2))
    assert differences(model_fields(other), model) == (
        ["trainer.model.experts.score: sigmoid here and softmax in the checkpoint"],
        ["trainer.model.experts.top_k: 4 here and 2 in the checkpoint"],
    )
    refused, changed = differences(model_fields(MODEL), model)
    assert "trainer.model.experts.groups: 2 here and 1 in the checkpoint" in refused
    assert "trainer.model.experts.count: 8 here and 0 in the checkpoint" in changed


def test_a_norm_of_q_and_k_that_covers_more_is_refused() -> None:
    heads = replace(MODEL, qk_norm=True)
    projection = replace(heads, qk_norm_over="projection")
    carried = json.loads(json.dumps(model_fields(projection)))
    words = "trainer.model.qk_norm_over: {} here and {} in the checkpoint"
    assert differences(carried, projection) == ([], [])
    assert differences(carried, heads) == ([words.format("heads", "projection")], [])
    assert differences(model_fields(heads), projection) == (
        [words.format("projection", "heads")],
        [],
    )


def test_the_width_of_an_expert_can_be_left_out() -> None:
    written = replace(MODEL, experts=replace(EXPERTS, ffn_size=MODEL.ffn_width))
    model = replace(MODEL, experts=replace(EXPERTS, ffn_size=0))
    assert differences(model_fields(written), model) == ([], [])


SOURCES = (DataSource(prefix="/a", weight=0.7), DataSource(prefix="/b", weight=0.3))
JOB = replace(job_of(MODELS["llama"][1]), data=DataConfig(sources=SOURCES))
IDENTITIES = ("11", "22")


def stored(job: JobConfig = JOB, identities: tuple[str, ...] = IDENTITIES) -> dict[str, Any]:
    """As it comes back from a checkpoint."""
    found: dict[str, Any] = json.loads(json.dumps(position_of(job, identities)))
    return found


def with_data(**values: Any) -> JobConfig:
    return replace(JOB, data=replace(JOB.data, **values))


def test_the_same_data_is_taken_and_so_is_an_earlier_versions() -> None:
    assert other_data(stored(), position_of(JOB, IDENTITIES)) == ([], [])
    moved = with_data(sources=tuple(replace(each, prefix=f"/new{each.prefix}") for each in SOURCES))
    assert other_data(stored(), position_of(moved, IDENTITIES)) == ([], []), "elsewhere on disk"
    for earlier in (None, {}, {"shuffle": "documents", "blend": "weights"}):
        assert other_data(earlier, position_of(JOB, IDENTITIES)) == ([], [])


@pytest.mark.parametrize(
    ("job", "identities", "field"),
    [
        (with_data(shuffle="samples"), IDENTITIES, "trainer.data.shuffle: samples here and docu"),
        (with_data(blend="tokens"), IDENTITIES, "trainer.data.blend: tokens here and weights in"),
        (with_data(seed=7), IDENTITIES, "trainer.data.seed: 7 here and 1234 in the checkpoint"),
        (
            replace(JOB, model=replace(JOB.model, sequence_length=8)),
            IDENTITIES,
            "trainer.model.sequence_length: 8 here and",
        ),
        (JOB, ("11", "33"), "trainer.data.sources[1].prefix: another corpus than in the checkpoi"),
        (JOB, ("22", "11"), "trainer.data.sources[0].prefix: another corpus than in the checkpoi"),
        (
            with_data(sources=(SOURCES[0], replace(SOURCES[1], weight=0.4))),
            IDENTITIES,
            "trainer.data.sources[1].weight: 0.4 here and 0.3 in the checkpoint",
        ),
        (
            with_data(sources=(*SOURCES, SOURCES[0])),
            (*IDENTITIES, "11"),
            "trainer.data.sources: 3 here and 2 in the checkpoint",
        ),
    ],
)
def test_a_position_in_other_data_is_refused_by_field(
    job: JobConfig, identities: tuple[str, ...], field: str
) -> None:
    refused, _ = other_data(stored(), position_of(job, identities))
    assert len([line for line in refused if line.startswith(field)]) == 1, refused


def test_of_very_many_sources_a_checkpoint_has_a_digest() -> None:
    many = with_data(sources=(SOURCES[0],) * 1024)
    identities = tuple(f"{number:032x}" for number in range(1024))
    found = stored(many, identities)
    assert len(json.dumps(found)) < 400
    assert other_data(found, position_of(many, identities)) == ([], [])
    refused, _ = other_data(found, position_of(many, (*identities[1:], identities[0])))
    assert refused[0].startswith("trainer.data.sources: some of the 1024 corpora")


def test_another_order_of_a_blend_is_said() -> None:
    earlier = {"shuffle": "documents", "blend": "weights"}
    refused, changed = other_data(earlier, position_of(JOB, IDENTITIES, blend_scheme=2))
    assert not refused and changed[0].startswith("trainer.data.sources: ")


def test_a_schedule_that_changes_at_a_resume_is_said_with_both_rates() -> None:
    job = replace(JOB, training=replace(JOB.training, steps=20))
    written = json.loads(json.dumps(schedule_of(job)))
    assert other_schedule(written, job, 20) == other_schedule(None, job, 20) == []
    longer = replace(job, training=replace(job.training, steps=40))
    (said,) = other_schedule(written, longer, 20)
    rate = learning_rate(longer, 20)
    assert "trainer.training.steps 20 in the checkpoint and 40 here" in said
    assert f"of step 20 was {learning_rate(job, 19):.6g} and that of step 21 is {rate:.6g}" in said
    constant = replace(longer, schedule=replace(job.schedule, decay="constant"))
    assert "trainer.schedule.decay cosine in" in other_schedule(written, constant, 10)[0]
    ended = json.loads(json.dumps(schedule_of(constant)))
    assert other_schedule(ended, replace(constant, training=job.training), 10) == [], (
        "a constant rate does not depend on the steps"
    )
