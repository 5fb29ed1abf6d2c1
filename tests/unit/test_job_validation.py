"""Bad jobs are refused by field, with a remedy; all forms of a job are read to the same tree."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale.v1 import job_pb2
from megascale_job import loading
from megascale_job.config import TRAINER_SECTIONS, JobConfig
from megascale_job.problems import JobError, JobProblem
from megascale_job.wire import spec as job_spec

GOOD: dict[str, Any] = {
    "name": "demo",
    "model": {
        "layers": 4,
        "hidden_size": 64,
        "heads": 4,
        "vocab_size": 257,
        "sequence_length": 128,
    },
    "parallelism": {"tp": 2, "pp": 2, "dp": 2},
    "training": {"steps": 60, "global_batch_size": 16, "micro_batch_size": 2},
    "data": {"sources": [{"prefix": "/data/corpus", "weight": 1.0}]},
    "checkpoint": {"uri": "/checkpoints/demo", "interval_steps": 10},
}


# A job as version 0.1.0.dev0 stored it in etcd.
STORED_BY_0_1 = (
    '{"checkpoint":{"interval_steps":10,"load_uri":"","slots":0,"uri":"/checkpoints/demo"},'
    '"data":{"document_attention":true,"seed":1234,"sources":[{"prefix":"/data/corpus","wei'
    'ght":1.0}],"tokenizer":{"kind":"bytes","path":"","sha256":""}},"evaluation":{"batches"'
    ':1,"interval_steps":0,"sources":[]},"labels":{"team":"a"},"loss":{"z_loss":0.0},"model'
    '":{"bias":false,"block":"parallel","ffn_size":0,"heads":4,"hidden_size":64,"initialize'
    'r_std":0.02,"kv_heads":0,"layer_windows":[],"layers":4,"mlp":"gelu","norm":"layernorm"'
    ',"norm_bias":true,"norm_epsilon":1e-05,"positions":"rope","rope_theta":10000.0,"sequen'
    'ce_length":128,"tie_embeddings":false,"vocab_size":257,"window":0},"name":"demo","opti'
    'mizer":{"beta1":0.9,"beta2":0.95,"clip_norm":1.0,"epsilon":1e-08,"learning_rate":0.000'
    '3,"weight_decay":0.1},"owner":"","parallelism":{"cp":1,"dp":2,"ep":1,"overlap":{"dp":f'
    'alse,"pp":false,"tp":false},"pp":2,"recompute":"none","stage_layers":[1,3],"tp":2,"vir'
    'tual_stages":1},"priority":0,"recovery":{"collective_timeout_s":300.0,"max_restarts":2'
    '0,"max_restarts_without_progress":3,"spare_nodes":0},"schedule":{"decay":"cosine","min'
    '_ratio":0.1,"warmup_steps":0},"telemetry":{"tensorboard":false},"tenant":"default","tr'
    'aining":{"bucket_mib":64,"deterministic":false,"global_batch_size":16,"kernels":"auto"'
    ',"micro_batch_size":2,"precision":"bf16","seed":1234,"steps":60}}'
)


def values_of(**changes: Any) -> dict[str, Any]:
    """The good job with some fields changed; ``a__b`` is field b of section a."""
    values = {key: dict(value) if isinstance(value, dict) else value for key, value in GOOD.items()}
    for path, value in changes.items():
        section, _, name = path.partition("__")
        if name:
            values.setdefault(section, {})[name] = value
        else:
            values[section] = value
    return values


def job(**changes: Any) -> JobConfig:
    """The tree of such a job, whether it can run or not."""
    return loading.from_accepted(values_of(**changes))


def refusals(values: Any) -> tuple[JobProblem, ...]:
    """Why the job in ``values`` is refused; empty when it is accepted."""
    try:
        loading.from_mapping(values)
    except JobError as error:
        return error.problems
    return ()


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("trainer.parallelism.tp", {"model__kv_heads": 1}, "divides 1"),
    ("trainer.parallelism.tp", {"parallelism__tp": 0}, "at least 1"),
    ("trainer.parallelism.virtual_stages", {"parallelism__virtual_stages": 3}, "fewer stages"),
    (
        "trainer.model.hidden_size",
        {"training__precision": "fp8", "model__hidden_size": 80},
        "use 96",
    ),
    ("trainer.model.ffn_size", {"training__precision": "fp8", "model__ffn_size": 100}, "use 128"),
    (
        "trainer.model.kv_heads",
        {"training__precision": "fp8", "model__hidden_size": 32, "model__kv_heads": 2},
        "wider heads",
    ),
    (
        "trainer.training.micro_batch_size",
        {
            "training__precision": "fp8",
            "model__sequence_length": 8,
            "training__micro_batch_size": 1,
        },
        "sequence_length: 32",
    ),
    (
        "trainer.training.fp8.layers_at_end_in_bf16",
        {"training__precision": "fp8", "training__fp8": {"layers_at_end_in_bf16": 5}},
        "number of layers",
    ),
    (
        "trainer.training.fp8",
        {
            "training__precision": "fp8",
            "training__fp8": {"layers_at_start_in_bf16": 2, "layers_at_end_in_bf16": 2},
        },
        "fewer layers",
    ),
    (
        "trainer.parallelism.pipeline_schedule",
        {
            "parallelism__pipeline_schedule": "zero_bubble",
            "parallelism__pp": 1,
            "parallelism__virtual_stages": 1,
        },
        "use 1f1b",
    ),
    (
        "trainer.parallelism.stage_layers",
        {"parallelism__stage_layers": [4]},
        "one per virtual stage",
    ),
    ("trainer.parallelism.stage_layers", {"parallelism__stage_layers": [1, 2]}, "add up"),
    ("trainer.parallelism.stage_layers", {"parallelism__stage_layers": [4, 0]}, "positive"),
    ("trainer.optimizer.skip_norm", {"optimizer__skip_norm": 1.0}, "several times clip_norm"),
    ("recovery.max_roll_backs", {"recovery__max_roll_backs": 9}, "1 to 8"),
    (
        "recovery.on_loss_rise",
        {"recovery__on_loss_rise": "roll_back", "checkpoint__uri": ""},
        "folder for checkpoints",
    ),
    ("trainer.data.skips[0].steps", {"data__skips": [{"after_step": 5, "steps": -1}]}, "give 1"),
    (
        "trainer.data.skips[0].after_step",
        {"data__skips": [{"after_step": -1, "steps": 1}]},
        "give 0",
    ),
    ("trainer.data.skips", {"data__skips": [{"after_step": 1, "steps": 1}] * 1025}, "at most"),
    ("trainer.optimizer.lamb", {"optimizer__lamb": {"max_weight_norm": 10}}, "name to lamb"),
    (
        "trainer.optimizer.lamb.min_weight_norm",
        {"optimizer__name": "lamb", "optimizer__lamb": {"min_weight_norm": -1}},
        "0",
    ),
    (
        "trainer.optimizer.lamb.max_weight_norm",
        {"optimizer__name": "lamb", "optimizer__lamb": {"max_weight_norm": float("nan")}},
        "no bound",
    ),
    (
        "trainer.optimizer.lamb.max_weight_norm",
        {
            "optimizer__name": "lamb",
            "optimizer__lamb": {"min_weight_norm": 2, "max_weight_norm": 1},
        },
        "more than that",
    ),
    (
        "trainer.optimizer.options",
        {"optimizer__name": "lamb", "optimizer__options": {"momentum": 0.9}},
        "optimizer.name",
    ),
    (
        "trainer.optimizer.options",
        {"optimizer__name": "momentum", "optimizer__options": {"a b": 1.0}},
        "letters",
    ),
    (
        "trainer.optimizer.options.momentum",
        {"optimizer__name": "momentum", "optimizer__options": {"momentum": float("nan")}},
        "give a number",
    ),
    ("checkpoint.uri", {"checkpoint__uri": "a b://c"}, "file:///path"),
    ("checkpoint.uri", {"checkpoint__uri": "relative/path"}, "absolute"),
    ("checkpoint.interval_steps", {"checkpoint__interval_steps": -1}, "0"),
    ("checkpoint.load_uri", {"checkpoint__load_uri": "https://bucket/a"}, "file://"),
    ("checkpoint.load", {"checkpoint__load": "weights"}, "load_uri"),
    ("checkpoint.keep_latest", {"checkpoint__keep_latest": -1}, "0 to"),
    ("checkpoint.keep_every_steps", {"checkpoint__keep_every_steps": -5}, "0 to"),
    ("checkpoint.keep_every_hours", {"checkpoint__keep_every_hours": 0.001}, "no rule"),
    ("checkpoint.keep_every_hours", {"checkpoint__keep_every_hours": math.nan}, "0 to"),
    ("checkpoint.max_write_mib_per_s", {"checkpoint__max_write_mib_per_s": 0.5}, "no limit"),
    ("checkpoint.max_write_mib_per_s", {"checkpoint__max_write_mib_per_s": math.inf}, "0 to"),
    (
        "trainer.evaluation.sources[0].prefix",
        {"evaluation__sources": [{"prefix": "held-out"}]},
        "absolute",
    ),
    ("checkpoint.replicas", {"checkpoint__uri": "/c", "checkpoint__replicas": 2}, "give 1"),
    ("checkpoint.uri", {"checkpoint__uri": "", "checkpoint__replicas": 1}, "a folder"),
    (
        "checkpoint.max_replicate_mib_per_s",
        {"checkpoint__uri": "/c", "checkpoint__max_replicate_mib_per_s": float("nan")},
        "no limit",
    ),
    ("checkpoint.verify_d2h", {"checkpoint__verify_d2h": 1.5}, "0 to 1"),
    (
        "checkpoint.snapshot_interval_steps",
        {"checkpoint__uri": "/c", "checkpoint__snapshot_interval_steps": -1},
        "give 1",
    ),
    (
        "checkpoint.snapshot_interval_steps",
        {
            "checkpoint__uri": "/c",
            "checkpoint__interval_steps": 10,
            "checkpoint__snapshot_interval_steps": 4,
        },
        "a divisor",
    ),
    ("recovery.spare_nodes", {"recovery__spare_nodes": 2, "recovery__spares": "auto"}, "one of"),
    ("recovery.repair_hours", {"recovery__repair_hours": 0.0}, "more than 0"),
    ("recovery.spare_probability", {"recovery__spare_probability": 1.0}, "0.5 to"),
    ("code.path", {"code": {"path": "src"}}, "absolute"),
    ("code.path", {"code": {"path": "/a:/b"}}, "one folder"),
    ("code.sha256", {"code": {"path": "/a", "sha256": "abc"}}, "64 digits"),
    ("code.path", {"code": {"sha256": "0" * 64}}, "folder that has"),
    ("code.uri", {"code": {"uri": "s3://b/x.zip", "sha256": "0" * 64}}, ".whl"),
    ("code.uri", {"code": {"uri": "https://b/x.whl", "sha256": "0" * 64}}, "code push"),
    ("code.uri", {"code": {"uri": "x.whl", "sha256": "0" * 64}}, "absolute"),
    ("code.uri", {"code": {"uri": "/x.whl", "path": "/a", "sha256": "0" * 64}}, "one of them"),
    ("code.sha256", {"code": {"uri": "s3://b/x.whl"}}, "SHA-256"),
    ("environment.python", {"environment": {"python": "python3"}}, "absolute"),
    ("environment.secrets", {"environment": {"secrets": {"LD_PRELOAD": "env:X"}}}, "LD_"),
    (
        "environment.secrets.KEY",
        {"environment": {"secrets": {"KEY": "hunter2"}}},
        "never the value",
    ),
    (
        "environment.secrets.KEY",
        {"environment": {"secrets": {"KEY": "file:../shadow"}}},
        "never the value",
    ),
    (
        "environment.secrets",
        {"environment": {"secrets": {f"K{n}": "env:X" for n in range(33)}}},
        "at most 32",
    ),
    ("environment.run_as", {"environment": {"run_as": "Root!"}}, "--run-as"),
    ("recovery.divergence_steps", {"recovery__divergence_steps": -1}, "0"),
    ("recovery.divergence_steps", {"recovery__divergence_steps": 10**7}, "1000000"),
    ("recovery.loss_rise_factor", {"recovery__loss_rise_factor": 0.5}, "more than 1"),
    ("recovery.loss_rise_factor", {"recovery__loss_rise_factor": float("nan")}, "0 (off)"),
    ("recovery.loss_rise_factor", {"recovery__loss_rise_factor": float("inf")}, "1000000"),
    ("trainer.model.vocab_size", {"model__vocab_size": 2**31}, "16777216"),
    ("recovery.spare_nodes", {"recovery__spare_nodes": 10**6}, "10000"),
    ("trainer.data.sources", {"data__sources": [{"prefix": "/c", "weight": 1.0}] * 1025}, "1024"),
]


@pytest.mark.parametrize(
    ("field", "changes", "remedy"), BAD, ids=[f"{f}-{i}" for i, (f, _, _) in enumerate(BAD)]
)
def test_a_bad_job_is_refused_by_field_with_a_remedy(
    field: str, changes: dict[str, Any], remedy: str
) -> None:
    problems = refusals(values_of(**changes))
    found = [problem for problem in problems if problem.field == field]
    assert found, [str(problem) for problem in problems]
    assert any(remedy in problem.remedy for problem in found), [problem.remedy for problem in found]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"parallelism__stage_layers": [1, 3], "model__positions": "learned", "model__kv_heads": 2},
        {"parallelism__pp": 3, "parallelism__recompute": "full", "checkpoint__load_uri": "/other"},
        {
            "parallelism__virtual_stages": 2,
            "evaluation": {"sources": [{"prefix": "/held-out"}], "interval_steps": 5, "batches": 2},
            "telemetry__tensorboard": True,
        },
    ],
)
def test_a_good_job_has_no_problem(changes: dict[str, Any]) -> None:
    assert refusals(values_of(**changes)) == ()


def test_every_problem_is_reported_at_once() -> None:
    bad = values_of(name="?", parallelism__pp=99, data__sources=[], optimizer__beta1=2.0)
    assert [p.field for p in refusals(bad)] == [
        "name",
        "trainer.parallelism.pp",
        "trainer.optimizer.beta1",
        "trainer.data.sources",
    ]


def test_one_cause_is_refused_once() -> None:
    """Unset key/value heads are as many as heads, which are named already."""
    sizes = {"model__heads": 3, "model__hidden_size": 96, "parallelism__tp": 2}
    found = [problem.problem for problem in refusals(values_of(**sizes))]
    assert sum("multiple of tp" in text for text in found) == 1
    assert not [text for text in found if "kv_heads" in text]
    grouped = refusals(values_of(**sizes | {"model__kv_heads": 1}))
    assert any("trainer.model.kv_heads = 1 is" in problem.problem for problem in grouped)


def test_every_field_that_cannot_be_read_is_reported_at_once() -> None:
    values: dict[str, Any] = {
        "name": 7,
        "modle": {},
        "model": {"layers": "four", "heads": 4.5, "hidden_size": True, "mlp": "relu", "biass": 1},
        "training": [],
        "data": {"sources": [{"prefix": "/c", "weight": "much"}, 3]},
        "labels": "a",
        "parallelism": {"stage_layers": 2},
        "optimizer": {"learning_rate": "3e-4", "beta1": None},
    }
    problems = {problem.field: str(problem) for problem in refusals(values)}
    assert set(problems) == {
        *("name", "modle", "labels", "trainer.training", "trainer.parallelism.stage_layers"),
        *(f"trainer.model.{name}" for name in ("layers", "heads", "hidden_size", "mlp", "biass")),
        *("trainer.model.vocab_size", "trainer.model.sequence_length"),
        *("trainer.data.sources[0].weight", "trainer.data.sources[1]"),
    }
    assert (
        "did you mean 'model'" in problems["modle"] and "'bias'" in problems["trainer.model.biass"]
    )
    assert (
        "gelu, swiglu" in problems["trainer.model.mlp"]
        and "whole number" in problems["trainer.model.layers"]
    )


def test_a_job_file_and_a_stored_job_are_read_to_the_same_tree() -> None:
    stored = values_of(optimizer={"learning_rate": 3e-4})
    nested = {"name", "checkpoint", "recovery"}
    file = {key: value for key, value in stored.items() if key in nested}
    file["trainer"] = {key: value for key, value in stored.items() if key not in nested}
    file["trainer"]["optimizer"] = {"learning_rate": "3e-4"}  # what YAML 1.1 makes of 3e-4
    assert loading.from_mapping(file) == loading.from_mapping(stored)


def test_a_job_that_was_accepted_is_read_even_if_it_would_be_refused_now() -> None:
    text = loading.to_json(job(parallelism__cp=2))
    assert loading.from_json(text).parallelism.cp == 2
    for broken in ("{", '{"name": "demo"}', "[]"):
        with pytest.raises(JobError):
            loading.from_json(broken)


def test_a_section_given_twice_is_refused() -> None:
    values = values_of()
    model = values.pop("model")
    twice = {**values, "trainer": {"model": model, "name": "another", "training": {"steps": 1}}}
    assert [problem.field for problem in refusals(twice)] == ["trainer.name", "trainer.training"]


def test_a_job_that_an_earlier_version_stored_is_read() -> None:
    """It keeps the defaults that it was stored with, such as no overlap."""
    stored = loading.from_json(STORED_BY_0_1)
    plain = {"tp": False, "pp": False, "dp": False}
    assert stored == job(
        labels={"team": "a"}, parallelism__stage_layers=[1, 3], parallelism__overlap=plain
    )


def test_a_job_stored_with_the_field_of_locked_requirements_is_read() -> None:
    """The build before stored the field with every job that has an environment."""
    before = '"environment":{"python":"","requirements":"","run_as":"train","secrets":{}}'
    text = json.dumps(values_of())[:-1] + f", {before}}}"
    stored = loading.from_json(text)
    assert stored == job(environment={"run_as": "train"})
    assert "requirements" not in loading.to_json(stored)
    # One that names a file is read too, so that it can be shown, updated and cancelled.
    named = loading.from_json(text.replace('"requirements":""', '"requirements":"/lock.txt"'))
    assert named.environment.requirements == "/lock.txt"
    assert loading.from_json(loading.to_json(named)) == named
    assert not job_spec.to_proto(named).environment.python


def test_a_job_file_with_locked_requirements_is_refused_with_the_remedy() -> None:
    values = values_of(environment={"requirements": "lock.txt"})
    (problem,) = refusals(values)
    assert problem.field == "environment.requirements"
    assert problem.problem == "no longer supported"
    assert "container image" in problem.remedy and "code.path" in problem.remedy
    workload = {name: values.pop(name) for name in TRAINER_SECTIONS if name in values}
    with pytest.raises(JobError, match=r"environment\.requirements: no longer supported"):
        loading.given({**values, "trainer": workload})
    with pytest.raises(JobError, match="known here: python, secrets, run_as"):
        job(environment={"interpreter_name": "x"})


def test_the_wire_form_of_a_config_is_read_back_equal() -> None:
    config = job(
        labels={"team": "a"},
        parallelism__stage_layers=[1, 3],
        owner="me",
        priority=-3,
        model__bias=True,
        optimizer={"name": "momentum", "options": {"momentum": 0.9, "nesterov": 1}},
    )
    assert job_spec.from_proto(job_spec.to_proto(config)) == config
    assert config.optimizer.options == {"momentum": 0.9, "nesterov": 1.0}


def test_an_option_that_is_no_number_is_reported_with_its_field() -> None:
    with pytest.raises(JobError, match=r"optimizer\.options\.momentum: expected a number; got 'a'"):
        job(optimizer={"name": "momentum", "options": {"momentum": "a"}})


@given(
    positions=st.sampled_from(["rope", "learned"]),
    precision=st.sampled_from(["fp32", "bf16"]),
    decay=st.sampled_from(["constant", "linear", "cosine"]),
    bias=st.booleans(),
    norm_bias=st.booleans(),
    beta1=st.floats(0, 1),
    labels=st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3),
    weights=st.lists(st.floats(0, 10), max_size=3),
)
def test_any_config_is_the_same_after_the_wire(
    positions: str,
    precision: str,
    decay: str,
    bias: bool,
    norm_bias: bool,
    beta1: float,
    labels: dict[str, str],
    weights: list[float],
) -> None:
    sources = [{"prefix": f"/{i}", "weight": weight} for i, weight in enumerate(weights)]
    config = job(
        model__positions=positions,
        model__bias=bias,
        model__norm_bias=norm_bias,
        training__precision=precision,
        schedule__decay=decay,
        optimizer__beta1=beta1,
        labels=labels,
        data__sources=sources,
    )
    wire = job_pb2.JobSpec.FromString(job_spec.to_proto(config).SerializeToString())
    assert job_spec.from_accepted_proto(wire) == config


def test_unset_fields_take_the_defaults_of_the_tree() -> None:
    spec = job_pb2.JobSpec(name="demo")
    spec.trainer.model.MergeFrom(
        job_pb2.ModelSpec(layers=4, hidden_size=64, heads=4, vocab_size=257, sequence_length=128)
    )
    spec.trainer.training.MergeFrom(job_pb2.TrainingSpec(steps=1, global_batch_size=1))
    config = job_spec.from_accepted_proto(spec)
    assert config == JobConfig(name="demo", model=config.model, training=config.training)
    assert (config.training.precision, config.recovery.max_restarts, config.model.norm_bias) == (
        "bf16",
        20,
        True,
    )


def test_an_explicit_zero_is_not_the_default() -> None:
    spec = job_spec.to_proto(job())
    spec.recovery.max_restarts = 0
    spec.trainer.optimizer.clip_norm = 0.0
    config = job_spec.from_proto(spec)
    assert (config.recovery.max_restarts, config.optimizer.clip_norm) == (0, 0.0)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda spec: spec.ClearField("name"), "name"),
        (lambda spec: spec.trainer.training.ClearField("steps"), "trainer.training.steps"),
    ],
)
def test_a_missing_field_is_reported(change: Any, field: str) -> None:
    spec = job_spec.to_proto(job())
    change(spec)
    with pytest.raises(JobError) as caught:
        job_spec.from_proto(spec)
    [problem] = caught.value.problems
    assert problem.field == field and problem.problem.startswith("missing") and problem.remedy


def test_every_missing_field_is_reported_at_once() -> None:
    model = ("layers", "hidden_size", "heads", "vocab_size", "sequence_length")
    workload = {
        *(f"trainer.model.{name}" for name in model),
        *("trainer.training.steps", "trainer.training.global_batch_size", "trainer.data.sources"),
    }
    for values in ({}, {"trainer": {}}, {"trainer": {"model": None, "data": {"sources": []}}}):
        assert {problem.field for problem in refusals(values)} == {"name", *workload}
    without_model: dict[str, Any] = {key: GOOD[key] for key in GOOD if key != "model"}
    assert {problem.field for problem in refusals(without_model)} == {
        f"trainer.model.{name}" for name in model
    }


def test_a_field_has_the_same_path_in_every_form_of_a_job() -> None:
    flat = values_of(model__layers="four", model__biass=1)
    nested = {key: flat[key] for key in ("name", "checkpoint")}
    nested["trainer"] = {key: value for key, value in flat.items() if key not in nested}
    expected = ["trainer.model.layers", "trainer.model.biass"]
    assert [problem.field for problem in refusals(flat)] == expected
    assert [problem.field for problem in refusals(nested)] == expected
    unknown = {**nested, "trainer": {**nested["trainer"], "modle": {}}}
    assert "trainer.modle" in [problem.field for problem in refusals(unknown)]
    assert [p.field for p in refusals({**nested, "trainer": []})] == ["trainer"]


def exists(path: str) -> bool:
    """Whether ``path`` names a field of the JobSpec, or an entry of one of its mappings."""
    message: Any = job_pb2.JobSpec.DESCRIPTOR
    for name in re.sub(r"\[\d+\]", "", path).split("."):
        if message is None or name not in message.fields_by_name:
            return False
        field = message.fields_by_name[name]
        message = field.message_type
        if message is not None and message.GetOptions().map_entry:
            return True  # the rest is a key
    return True


def test_every_problem_names_a_field_of_the_job_and_a_remedy() -> None:
    found = {problem for _, changes, _ in BAD for problem in refusals(values_of(**changes))}
    wrong: list[Any] = [{}, [], {"trainer": 3}, {"labels": 3, "name": 7}, values_of(model=1)]
    found |= {problem for values in wrong for problem in refusals(values)}
    assert len({problem.field for problem in found}) > 40
    for problem in found:
        assert exists(problem.field) or problem.field == "job", problem
        assert problem.problem and problem.remedy, problem


def test_the_sections_under_trainer_are_those_of_the_wire_form() -> None:
    wire = [field.name for field in job_pb2.TrainerSpec.DESCRIPTOR.fields]
    assert list(TRAINER_SECTIONS) == wire


def test_an_unknown_enum_value_is_reported_with_the_known_ones() -> None:
    spec = job_spec.to_proto(job())
    spec.trainer.training.precision = 99  # type: ignore[assignment]
    with pytest.raises(JobError, match=r"precision.*99.*bf16, fp32, fp8"):
        job_spec.from_proto(spec)


def test_the_wire_form_has_a_place_for_every_field_of_the_tree() -> None:
    spec = job_spec.to_proto(job())
    sections = {field.name for field in dataclasses.fields(JobConfig)}
    wire = {f.name for f in spec.DESCRIPTOR.fields} | {
        f.name for f in spec.trainer.DESCRIPTOR.fields
    }
    assert sections <= wire
