"""A job for people: comments and defaults of fields, files of `init`, and figures of `plan`."""

from __future__ import annotations

import math
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from docs import generate_job_spec, pages

from megascale_cli.job_template import job_template
from megascale_cli.jobfile import init
from megascale_cli.planning import plan_job
from megascale_client import load_job, parse_job
from megascale_job import config as job_validation
from megascale_job.presets import MODELS
from megascale_job.wire import spec as job_spec
from megascale_job.wire.fields import (
    REQUIRED,
    Field,
    MessageFields,
    job_fields,
    proto_comments,
)

REPOSITORY = Path(__file__).resolve().parents[2]
# Fields whose comment has the default in words.
WORDS = {"ffn_size", "head_dim", "kv_heads", "stage_layers", "slots"}


def fields(message: MessageFields, path: str = "") -> Iterator[tuple[str, Field]]:
    for field in message.fields:
        where = f"{path}.{field.name}" if path else field.name
        yield where, field
        if field.message is not None:
            yield from fields(field.message, where)


FIELDS = dict(fields(job_fields()))


@pytest.mark.parametrize("where", FIELDS)
def test_a_field_has_a_comment_with_its_true_default(where: str) -> None:
    field = FIELDS[where]
    assert field.comment.endswith(".")
    stated = re.search(r"[Dd]efault (\S+?)[.;,]?(?:\s|$)", field.comment)
    if field.default is REQUIRED:
        assert "Required." in field.comment or field.message is not None
        assert stated is None
    elif stated is not None and field.name not in WORDS:
        assert yaml.safe_load(stated[1]) == field.default or float(stated[1]) == field.default
    elif field.message is None and field.name not in WORDS:
        assert field.default in ("", {}, (), 0)  # empty, which needs no comment


def test_comments_are_found_by_message_and_field() -> None:
    text = """
    // A thing.
    message Thing {
      // Two
      // lines.
      optional int32 size = 1;
      map<string, string> labels = 2;
      oneof kind {
        // Inside.
        Other other = 3;
      }
    }
    // Colours.
    enum Colour {
      COLOUR_UNSPECIFIED = 0;
      // As a stop sign.
      COLOUR_RED = 1;
    }
    """
    assert proto_comments(text) == {
        "Thing": "A thing.",
        "Thing.size": "Two lines.",
        "Thing.labels": "",
        "Thing.other": "Inside.",
        "Colour": "Colours.",
        "Colour.COLOUR_UNSPECIFIED": "",
        "Colour.COLOUR_RED": "As a stop sign.",
    }


# Of 80 GiB: the estimate leaves out workspaces and fragmentation.
_USABLE_BYTES = 70 * 2**30


def test_the_cli_offers_the_models_that_there_are() -> None:
    hint = typing.get_type_hints(init)["model"]
    assert typing.get_args(hint) == tuple(MODELS)


@pytest.mark.parametrize("model", MODELS)
def test_what_init_writes_is_acceptable_and_shows_every_field_at_its_default(
    model: str, tmp_path: Path
) -> None:
    text = job_template(model, "a-job")
    (tmp_path / "job.yaml").write_text(text)
    config = job_spec.from_proto(load_job(tmp_path / "job.yaml"))
    assert job_validation.validate(config) == []
    for where in FIELDS:
        # These lists are empty: a comment shows the fields of their items.
        if not where.startswith(("trainer.evaluation.sources.", "trainer.data.skips.")):
            assert re.search(rf"^ *(- |#)?{where.rpartition('.')[2]}:", text, re.M), where
    # With every default uncommented the job is the same.
    (tmp_path / "all.yaml").write_text(re.sub(r"^( *)#(\w+: )", r"\1\2", text, flags=re.M))
    assert len(re.findall(r"^ *#\w+: ", text, re.M)) > 30
    assert job_spec.from_proto(load_job(tmp_path / "all.yaml")) == config


@pytest.mark.parametrize("name", ["no", "123", "true", "null", "1e5"])
def test_a_name_that_yaml_would_read_as_another_type_stays_a_name(name: str) -> None:
    assert parse_job(yaml.safe_load(job_template("tiny", name))).name == name


@pytest.mark.parametrize("model", MODELS)
def test_a_model_has_the_size_that_its_summary_states_and_fits_its_devices(model: str) -> None:
    text = job_template(model, "x")
    stated = re.search(rf"A job: {model}, ([\d.]+) (million|billion) parameters on (\d+)", text)
    assert stated is not None
    job = parse_job(yaml.safe_load(re.sub(r"(prefix|uri): c", r"\1: /c", text)))
    plan = plan_job(job, 8, _USABLE_BYTES)
    assert plan["refused"] == []
    scale = {"million": 1e6, "billion": 1e9}[stated[2]]
    assert f"{plan['parameters'] / scale:.2f}" == stated[1]
    assert plan["world_size"] == int(stated[3])


@pytest.mark.parametrize(
    ("model", "ranks", "sizes"),
    [
        ("tiny", None, (1, 1, 1)),
        ("tiny", 1, (1, 1, 1)),
        ("tiny", 8, (1, 8, 1)),
        ("llama3-8b", 4, (4, 1, 1)),
        ("gpt-13b", 32, (2, 8, 2)),
        ("tiny-experts", 2, (1, 2, 1)),
        ("qwen3-30b-a3b", 4, (1, 4, 1)),
        ("mixtral-8x7b", 8, (2, 2, 2)),
    ],
)
def test_data_parallelism_takes_the_ranks_that_a_replica_leaves(
    model: str, ranks: int | None, sizes: tuple[int, int, int]
) -> None:
    text = job_template(model, "x", ranks=ranks)
    job = parse_job(yaml.safe_load(re.sub(r"(prefix|uri): c", r"\1: /c", text)))
    plan, found = plan_job(job, 8, 0), job_spec.from_proto(job).parallelism
    assert (found.tp, found.dp, found.pp) == sizes and plan["refused"] == []
    assert found.ep == min(MODELS[model].parallelism.get("ep", 1), found.tp * found.dp)
    count = math.prod(sizes)
    alone = "python -m megascale_trainer FILE" in text
    assert alone == (count == 1) and (alone or f"--nproc-per-node {count} " in text)


@pytest.mark.parametrize(
    ("model", "ranks", "words"),
    [
        ("llama3-8b", 2, "--ranks: 2 is not a multiple of 4"),
        ("tiny", 3, "--ranks: 3 replicas do not divide the 8 micro-batches"),
        ("tiny", 16, "--ranks: 16 replicas do not divide the 8 micro-batches"),
    ],
)
def test_ranks_that_do_not_fit_a_model_are_refused(model: str, ranks: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        job_template(model, "x", ranks=ranks)


PUBLISHED = {  # counted from the weights of the models
    "llama3-1b": 1_235_814_400,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "mixtral-8x7b": 46_702_792_704,
}


@pytest.mark.parametrize("model", PUBLISHED)
def test_published_models_have_their_number_of_parameters(model: str) -> None:
    job = parse_job(yaml.safe_load(job_template(model, "x").replace(": corpus", ": /corpus")))
    assert plan_job(job, 8, 0)["parameters"] == PUBLISHED[model]


def spec(**changes: Any) -> Any:
    """A job of 12 ranks whose figures can be computed by hand."""
    trainer: dict[str, Any] = {
        "model": {
            "layers": 4,
            "hidden_size": 8,
            "heads": 2,
            "vocab_size": 10,
            "sequence_length": 16,
            "norm_bias": False,
        },
        "parallelism": {"tp": 2, "pp": 2, "dp": 3},
        "training": {
            "steps": 10,
            "global_batch_size": 24,
            "micro_batch_size": 2,
            "precision": "fp32",
        },
        "data": {"sources": [{"prefix": "/corpus"}]},
    }
    trainer["model"]["norm_bias"] = False
    for section, values in changes.items():
        trainer[section] = {**trainer.get(section, {}), **values}
    return parse_job({"name": "a", "trainer": trainer, "recovery": {"spare_nodes": 1}})


def test_the_plan_agrees_with_figures_computed_by_hand() -> None:
    plan = plan_job(spec(parallelism={"overlap": {"tp": False, "pp": False}}), 5, 0)
    assert plan["refused"] == []
    # Per layer: attention 4 h h, feed-forward 2 h 4h, one norm (the parallel block). Outside the
    # layers: both tables and a norm.
    assert plan["parameters"] == 4 * (4 * 64 + 8 * 64 + 8) + 2 * 80 + 8
    assert plan["parameters_outside_layers"] == 168
    assert plan["checkpoint_bytes"] == plan["parameters"] * 12
    assert (plan["tokens_per_step"], plan["micro_batches"], plan["tokens_of_the_run"]) == (
        384,
        4,
        3840,
    )
    # (pp - 1) / (micro-batches + pp - 1)
    assert plan["pipeline_bubble"] == pytest.approx(1 / 5)
    split = {"overlap": {"tp": False}, "pipeline_schedule": "zero_bubble"}
    # A third of (pp - 1) micro-batches, beside 4.
    shorter = plan_job(spec(parallelism=split), 5, 0)["pipeline_bubble"]
    assert shorter == pytest.approx(1 / 3 / (4 + 1 / 3))
    # Five devices hold two tensor-parallel groups: four ranks.
    assert (plan["world_size"], plan["nodes"], plan["spare_nodes"], plan["nodes_wanted"]) == (
        12,
        3,
        1,
        4,
    )
    assert len(plan["memory_of_a_rank"]) == 2
    for need in plan["memory_of_a_rank"]:
        assert need["total_bytes"] == sum(
            size for name, size in need.items() if name != "total_bytes"
        )
        assert need["peer_memory_bytes"] == 0
    assert plan["staging_bytes_of_a_rank"] == plan["replica_bytes_of_a_rank"] == 0
    overlapped = plan_job(spec(), 5, 0)
    # Two slots of 16 tokens, 2 sequences, 8 columns, 4 bytes; the rest stays.
    for need, plain in zip(overlapped["memory_of_a_rank"], plan["memory_of_a_rank"], strict=True):
        assert need == {
            **plain,
            "peer_memory_bytes": 2048,
            "total_bytes": plain["total_bytes"] + 2048,
        }


def test_replicas_take_two_slots_on_each_of_two_nodes() -> None:
    """At the other node, and here for as long as it takes to copy what stands there."""
    job = spec()
    job.checkpoint.uri, job.checkpoint.interval_steps = "/checkpoints", 5
    without = plan_job(job, 5, 0)
    job.checkpoint.replicas = 1
    plan = plan_job(job, 5, 0)
    state_bytes = max(need["optimizer_bytes"] for need in plan["memory_of_a_rank"])
    assert plan["replica_bytes_of_a_rank"] == 2 * state_bytes
    assert plan["staging_bytes_of_a_rank"] == without["staging_bytes_of_a_rank"] + 4 * state_bytes


@pytest.mark.parametrize(
    ("changes", "devices_per_node", "memory_bytes", "field", "message"),
    [
        ({}, 1, 0, "trainer.parallelism.tp", "does not fit on a node of 1"),
        ({}, 8, 1000, "trainer.parallelism", "GiB, the device has"),
        (
            {"model": {"heads": 3}},
            8,
            0,
            "trainer.model.hidden_size",
            "not a multiple of trainer.model.heads = 3",
        ),
        ({"parallelism": {"pp": 0}}, 8, 0, "trainer.parallelism.pp", "0 is not positive"),
        (
            {"training": {"global_batch_size": 1}},
            8,
            0,
            "trainer.training.global_batch_size",
            "not a multiple",
        ),
    ],
)
def test_what_is_refused_has_its_field_and_remedy(
    changes: dict[str, Any], devices_per_node: int, memory_bytes: int, field: str, message: str
) -> None:
    problems = plan_job(spec(**changes), devices_per_node, memory_bytes)["refused"]
    found = next(problem for problem in problems if problem["field"] == field)
    assert message in found["problem"]
    assert found["remedy"]


def test_a_job_without_a_workload_is_refused_too() -> None:
    refused = plan_job(parse_job({"name": "a"}), 8, 0)["refused"]
    assert "trainer.model.layers" in {problem["field"] for problem in refused}


def test_the_page_of_the_job_specification_is_fresh() -> None:
    assert pages.run(generate_job_spec.PAGE, generate_job_spec.text, ["--check"]) == 0
