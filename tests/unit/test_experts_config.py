"""The fields of experts: bad ones are refused by field, and a dense job is stored without them."""

from __future__ import annotations

from typing import Any

import pytest

from megascale.v1 import job_pb2
from megascale_job import loading
from megascale_job.config import ExpertsConfig, JobConfig
from megascale_job.problems import JobError, JobProblem
from megascale_job.wire import spec as job_spec

MODEL: dict[str, Any] = {
    "layers": 4,
    "hidden_size": 64,
    "heads": 4,
    "vocab_size": 257,
    "sequence_length": 128,
}
WITH_EXPERTS: dict[str, Any] = {
    **MODEL,
    "block": "serial",
    "mlp": "swiglu",
    "ffn_size": 128,
    "experts": {"count": 8},
}


def values_of(changes: dict[str, Any], model: dict[str, Any] = WITH_EXPERTS) -> dict[str, Any]:
    """A job's plain values with changes by path below ``trainer``."""
    values: dict[str, Any] = {
        "model": {**model, "experts": dict(model.get("experts", {}))},
        "parallelism": {},
        "loss": {},
        "training": {"steps": 60, "global_batch_size": 24},
        "data": {"sources": [{"prefix": "/data/corpus"}]},
    }
    for path, value in changes.items():
        *sections, name = path.split(".")
        place = values
        for section in sections:
            place = place[section]
        place[name] = value
    return {"name": "demo", "trainer": values}


def job(changes: dict[str, Any], model: dict[str, Any] = WITH_EXPERTS) -> JobConfig:
    return loading.from_mapping(values_of(changes, model))


def refusals(changes: dict[str, Any], model: dict[str, Any] = WITH_EXPERTS) -> list[JobProblem]:
    try:
        job(changes, model)
    except JobError as error:
        return list(error.problems)
    return []


EXPERTS, EP = "model.experts", "parallelism.ep"
# (changes, field, words of the problem, words of the remedy)
BAD: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "one order of sums, and sums by rank": (
        {
            EP: 2,
            "parallelism.dp": 2,
            "parallelism.expert_exchange": "tokens",
            "training.deterministic": True,
        },
        "parallelism.expert_exchange",
        "with trainer.training.deterministic",
        "use rows",
    ),
    "count below zero": ({f"{EXPERTS}.count": -1}, f"{EXPERTS}.count", "negative", "positive"),
    "count of a million": ({f"{EXPERTS}.count": 10**6}, f"{EXPERTS}.count", "range", "16384"),
    "nobody computes": ({f"{EXPERTS}.top_k": 0}, f"{EXPERTS}.top_k", "not positive", "at least 1"),
    "negative width": ({f"{EXPERTS}.ffn_size": -1}, f"{EXPERTS}.ffn_size", "negative", "leave it"),
    "negative shared width": (
        {f"{EXPERTS}.shared_ffn_size": -1},
        f"{EXPERTS}.shared_ffn_size",
        "negative",
        "0 for none",
    ),
    "negative dense layers": (
        {f"{EXPERTS}.dense_layers": -1},
        f"{EXPERTS}.dense_layers",
        "negative",
        "0 for none",
    ),
    "no layer left": (
        {f"{EXPERTS}.dense_layers": 4},
        f"{EXPERTS}.dense_layers",
        "leaves no layer of trainer.model.layers = 4",
        "at most 3",
    ),
    "scale of zero": ({f"{EXPERTS}.scale": 0}, f"{EXPERTS}.scale", "out of range", "above 0"),
    "no group": ({f"{EXPERTS}.groups": 0}, f"{EXPERTS}.groups", "not positive", "at least 1"),
    "no kept group": (
        {f"{EXPERTS}.groups_kept": 0},
        f"{EXPERTS}.groups_kept",
        "not positive",
        "at least 1",
    ),
    "negative rate": ({f"{EXPERTS}.bias_rate": -0.1}, f"{EXPERTS}.bias_rate", "range", "no bias"),
    "rate above one": ({f"{EXPERTS}.bias_rate": 1.5}, f"{EXPERTS}.bias_rate", "range", "0.001"),
    "more choices than experts": (
        {f"{EXPERTS}.top_k": 9},
        f"{EXPERTS}.top_k",
        "9 is above the 8 experts of the model",
        "at most 8",
    ),
    "more choices than kept experts": (
        {f"{EXPERTS}.top_k": 5, f"{EXPERTS}.groups": 4, f"{EXPERTS}.groups_kept": 2},
        f"{EXPERTS}.top_k",
        "5 is above the 4 experts of the kept groups",
        "larger trainer.model.experts.groups_kept",
    ),
    "groups that do not divide": (
        {f"{EXPERTS}.groups": 3},
        f"{EXPERTS}.groups",
        "count = 8 is not a multiple of 3",
        "divisor of 8",
    ),
    "more kept than there are": (
        {f"{EXPERTS}.groups": 2, f"{EXPERTS}.groups_kept": 3},
        f"{EXPERTS}.groups_kept",
        "3 is above trainer.model.experts.groups = 2",
        "at most 2",
    ),
    "parallel block": ({"model.block": "parallel"}, "model.block", "merges", "serial"),
    "gelu": ({"model.mlp": "gelu"}, "model.mlp", "gelu with experts", "swiglu"),
    "biases": ({"model.bias": True}, "model.bias", "no bias", "attention_bias"),
    "fields without a count": (
        {f"{EXPERTS}.count": 0, f"{EXPERTS}.top_k": 4},
        f"{EXPERTS}.count",
        "the model is dense",
        "number of experts",
    ),
    "ep over experts": (
        {EP: 3, "parallelism.dp": 3},
        EP,
        "count = 8 is not a multiple of ep = 3",
        "use 1",
    ),
    "ep over ranks": (
        {EP: 4, "parallelism.tp": 2, "parallelism.dp": 3},
        EP,
        "tp * cp * dp = 6, the ranks of a pipeline stage, is not a multiple of ep = 4",
        "divisor of 2",
    ),
    "ep of zero": ({EP: 0}, EP, "not positive", "at least 1"),
    "width for FP8": (
        {"training.precision": "fp8", f"{EXPERTS}.ffn_size": 24, "parallelism.tp": 2},
        f"{EXPERTS}.ffn_size",
        "24 is not a multiple of 16, as",
        "use 32",
    ),
    "shared width for FP8": (
        {"training.precision": "fp8", f"{EXPERTS}.shared_ffn_size": 48, "parallelism.tp": 2},
        f"{EXPERTS}.shared_ffn_size",
        "16 * tp = 32",
        "use 64",
    ),
    "dense layers' width for FP8": (
        {
            "training.precision": "fp8",
            f"{EXPERTS}.ffn_size": 32,
            f"{EXPERTS}.dense_layers": 1,
            "model.ffn_size": 40,
        },
        "model.ffn_size",
        "16 * tp = 16",
        "use 48",
    ),
    **{
        f"negative {name}": ({f"loss.{name}": -0.1}, f"loss.{name}", "out of range", "0 (off)")
        for name in ("sequence_balance", "global_balance", "router_z_loss")
    },
}


@pytest.mark.parametrize("case", BAD)
def test_bad_experts_are_refused_by_field_with_a_remedy(case: str) -> None:
    changes, field, problem, remedy = BAD[case]
    (found,) = refusals(changes)
    assert found.field == f"trainer.{field}"
    assert problem in found.problem and remedy in found.remedy, str(found)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (EP, 2),
        ("training.forced_balance", True),
        ("loss.sequence_balance", 0.01),
        ("loss.global_balance", 0.01),
        ("loss.router_z_loss", 0.001),
    ],
)
def test_a_dense_model_with_a_field_for_experts_is_refused(field: str, value: Any) -> None:
    (found,) = refusals({field: value, "parallelism.dp": 2}, MODEL)
    assert found.field == f"trainer.{field}"
    assert "the model has no experts" in found.problem
    assert "trainer.model.experts.count" in found.remedy


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {EP: 8, "parallelism.tp": 2, "parallelism.dp": 4, "parallelism.ep_across_nodes": True},
        {EP: 4, "parallelism.tp": 2, "parallelism.dp": 2, "parallelism.pp": 2},
        {f"{EXPERTS}.groups": 4, f"{EXPERTS}.groups_kept": 2, f"{EXPERTS}.top_k": 4},
        {f"{EXPERTS}.top_k": 8, f"{EXPERTS}.dense_layers": 3, f"{EXPERTS}.score": "sigmoid"},
        {f"{EXPERTS}.bias_rate": 1, "loss.sequence_balance": 1e-4, "model.attention_bias": True},
        # No layer has the model's own width.
        {"training.precision": "fp8", f"{EXPERTS}.ffn_size": 32, "model.ffn_size": 40},
    ],
)
def test_good_experts_have_no_problem(changes: dict[str, Any]) -> None:
    assert refusals(changes) == []


def test_a_model_knows_its_layers_with_experts_and_their_width() -> None:
    model = job({f"{EXPERTS}.dense_layers": 1}).model
    assert [model.has_experts(layer) for layer in range(4)] == [False, True, True, True]
    assert model.expert_width == 128, "that of the model"
    assert job({f"{EXPERTS}.ffn_size": 32}).model.expert_width == 32
    dense = job({}, MODEL).model
    assert not any(dense.has_experts(layer) for layer in range(4))


def test_groups_that_share_a_node_are_whole_groups_of_tp_and_ep() -> None:
    sizes = {EP: 4, "parallelism.tp": 2, "parallelism.dp": 2}
    assert job(sizes).parallelism.node_group == 4
    assert job({**sizes, "parallelism.ep_across_nodes": True}).parallelism.node_group == 2
    assert job({**sizes, EP: 1}).parallelism.node_group == 2


def test_a_dense_job_is_stored_without_a_field_for_experts() -> None:
    dense = job({}, MODEL)
    for word in ("expert", "balance", "router", "ep_across_nodes"):
        assert word not in loading.to_json(dense)
    assert loading.from_json(loading.to_json(dense)) == dense


EVERY_FIELD: dict[str, Any] = {
    EXPERTS: {
        "count": 16,
        "top_k": 3,
        "ffn_size": 32,
        "shared_ffn_size": 48,
        "dense_layers": 2,
        "score": "sigmoid",
        "normalise": False,
        "scale": 2.5,
        "groups": 4,
        "groups_kept": 2,
        "bias_rate": 0.001,
    },
    EP: 2,
    "parallelism.dp": 2,
    "parallelism.ep_across_nodes": True,
    "training.forced_balance": True,
    "loss.sequence_balance": 0.01,
    "loss.global_balance": 0.02,
    "loss.router_z_loss": 0.003,
}


def test_experts_are_the_same_after_storage_and_after_the_wire() -> None:
    config = job(EVERY_FIELD)
    assert config.model.experts == ExpertsConfig(**EVERY_FIELD[EXPERTS])
    assert loading.from_json(loading.to_json(config)) == config
    wire = job_pb2.JobSpec.FromString(job_spec.to_proto(config).SerializeToString())
    assert job_spec.from_proto(wire) == config


def test_the_width_of_experts_is_shown_where_it_follows_from_the_models() -> None:
    shown = job_spec.effective(job_spec.to_proto(job({}))).trainer.model
    assert shown.experts.ffn_size == 128
    assert job_spec.effective(job_spec.to_proto(job({}, MODEL))).trainer.model.experts.ffn_size == 0


@pytest.mark.parametrize(
    ("experts", "field", "problem", "remedy"),
    [
        ({"counts": 8}, "experts.counts", "unknown field", "did you mean 'count'"),
        ({"count": "many"}, "experts.count", "expected a whole number", "write it as 4"),
        ({"count": 8, "top_k": 1.5}, "experts.top_k", "expected a whole number", "write it as 4"),
        ({"count": 8, "scale": "big"}, "experts.scale", "expected a number", "0.5"),
        ({"count": 8, "normalise": 1}, "experts.normalise", "true or false", "without quotes"),
        ({"count": 8, "score": "sigmod"}, "experts.score", "not one of", "did you mean 'sigmoid'"),
        (8, "experts", "expected a mapping", "count"),
        ([8], "experts", "expected a mapping", "count"),
    ],
)
def test_experts_that_cannot_be_read_are_refused_by_field(
    experts: Any, field: str, problem: str, remedy: str
) -> None:
    (found,) = refusals({EXPERTS: experts})
    assert found.field == f"trainer.model.{field}"
    assert problem in found.problem and remedy in found.remedy, str(found)
