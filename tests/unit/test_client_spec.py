"""job.yaml to JobSpec: what is accepted, and the message of each mistake."""

from __future__ import annotations

import typing
from pathlib import Path
from typing import Any

import pytest
import yaml

from megascale.v1 import job_pb2
from megascale_client import InvalidJob, load_job, parse_job
from megascale_job import config as job_config
from megascale_job.config import validate
from megascale_job.wire.spec import from_proto, short_names


def good() -> dict[str, Any]:
    """A job with every kind of field."""
    return {
        "name": "a-job",
        "priority": 3,
        "labels": {"team": "red", "run": 7},
        "trainer": {
            "model": {
                "layers": 4,
                "hidden_size": 64,
                "heads": 4,
                "vocab_size": 257,
                "sequence_length": 64,
                "mlp": "swiglu",
            },
            "parallelism": {"tp": 2, "stage_layers": [3, 1], "recompute": "none"},
            "training": {
                "steps": 10,
                "global_batch_size": 4,
                "precision": "bf16",
                "deterministic": True,
            },
            "optimizer": {
                "name": "momentum",
                "options": {"momentum": 0.9, "warmup": "1e-3", "nesterov": 1},
                "learning_rate": 3e-4,
                "clip_norm": 0,
            },
            "data": {
                "sources": [{"prefix": "corpus", "weight": 2}],
                "tokenizer": {"kind": "bytes"},
            },
        },
        "checkpoint": {"uri": "checkpoints", "interval_steps": 5},
        "recovery": {"spare_nodes": 1},
    }


def test_every_kind_of_field_is_read() -> None:
    spec = parse_job(good())
    assert (spec.name, spec.priority, dict(spec.labels)) == (
        "a-job",
        3,
        {"team": "red", "run": "7"},
    )
    assert spec.trainer.model.mlp == job_pb2.MLP_SWIGLU
    assert list(spec.trainer.parallelism.stage_layers) == [3, 1]
    assert spec.trainer.training.precision == job_pb2.PRECISION_BF16
    assert spec.trainer.training.deterministic is True
    assert spec.trainer.optimizer.clip_norm == 0.0
    assert dict(spec.trainer.optimizer.options) == {"momentum": 0.9, "warmup": 1e-3, "nesterov": 1}
    assert spec.trainer.data.sources[0].weight == 2.0


def test_a_field_given_at_its_zero_is_set_and_one_not_given_is_not() -> None:
    optimizer = parse_job(good()).trainer.optimizer
    assert optimizer.HasField("clip_norm")
    assert not optimizer.HasField("weight_decay")


def test_short_names_leave_out_the_unspecified_value() -> None:
    assert set(short_names(job_pb2.TokenizerKind.DESCRIPTOR)) == {"bytes", "bpe"}
    assert short_names(job_pb2.Precision.DESCRIPTOR)["bf16"] == job_pb2.PRECISION_BF16


@pytest.mark.parametrize(
    ("path", "value", "field", "message"),
    [
        (["nmae"], "x", "nmae", "did you mean 'name'?"),
        (
            ["trainer", "model", "hiden_size"],
            64,
            "trainer.model.hiden_size",
            "did you mean 'hidden_size'?",
        ),
        (["trainer", "zzz"], 1, "trainer.zzz", "known here: model, parallelism"),
        (["trainer", "model", "layers"], "four", "trainer.model.layers", "expected a whole number"),
        (["trainer", "model", "layers"], 2.5, "trainer.model.layers", "expected a whole number"),
        (["trainer", "model", "layers"], True, "trainer.model.layers", "expected a whole number"),
        (
            ["trainer", "model", "layers"],
            2**31,
            "trainer.model.layers",
            "2147483648 is out of range; give -2147483648 to 2147483647",
        ),
        (
            ["trainer", "training", "precision"],
            "fp16",
            "trainer.training.precision",
            "not one of bf16, fp32",
        ),
        (
            ["trainer", "training", "precision"],
            "PRECISION_BF16",
            "trainer.training.precision",
            "did you mean 'bf16'?",
        ),
        (
            ["trainer", "training", "deterministic"],
            "yes",
            "trainer.training.deterministic",
            "expected true or false",
        ),
        (
            ["trainer", "optimizer", "learning_rate"],
            "fast",
            "trainer.optimizer.learning_rate",
            "expected a number",
        ),
        (
            ["trainer", "optimizer", "learning_rate"],
            float("nan"),
            "trainer.optimizer.learning_rate",
            "nan is not finite",
        ),
        (
            ["trainer", "parallelism", "stage_layers"],
            4,
            "trainer.parallelism.stage_layers",
            "expected a list",
        ),
        (
            ["trainer", "parallelism", "stage_layers"],
            [2, "x"],
            "trainer.parallelism.stage_layers[1]",
            "whole number",
        ),
        (
            ["trainer", "data", "sources"],
            ["corpus"],
            "trainer.data.sources[0]",
            "expected a mapping; got 'corpus'; known here: prefix, weight",
        ),
        (
            ["trainer", "data", "sources"],
            [{"perfix": "c"}],
            "trainer.data.sources[0].perfix",
            "did you mean 'prefix'?",
        ),
        (["labels"], ["a"], "labels", "expected a mapping"),
        (["name"], 7, "name", "put it in quotes"),
        (["checkpoint"], "here", "checkpoint", "expected a mapping; got 'here'; known here: uri"),
    ],
)
def test_a_mistake_is_reported_with_its_dotted_path(
    path: list[str], value: Any, field: str, message: str
) -> None:
    values = good()
    place = values
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(InvalidJob) as caught:
        parse_job(values)
    (problem,) = caught.value.problems
    assert problem.field == field
    assert message in str(problem)
    assert field in str(caught.value)


def test_tree_and_message_list_the_values_of_every_choice_in_the_same_order() -> None:
    config = vars(job_config)
    for enum in job_pb2.DESCRIPTOR.enum_types_by_name.values():
        assert tuple(short_names(enum)) == typing.get_args(config[enum.name]), enum.name


def test_all_mistakes_are_reported_at_once() -> None:
    values = good()
    values["nmae"] = 1
    values["trainer"]["model"]["layers"] = "four"
    values["trainer"]["training"]["precision"] = "fp16"
    with pytest.raises(InvalidJob) as caught:
        parse_job(values)
    assert {problem.field for problem in caught.value.problems} == {
        "nmae",
        "trainer.model.layers",
        "trainer.training.precision",
    }


def test_paths_start_at_the_folder_of_the_file_and_uris_stay(tmp_path: Path) -> None:
    values = good()
    values["trainer"]["data"]["sources"].append({"prefix": "/absolute/corpus"})
    values["trainer"]["evaluation"] = {"sources": [{"prefix": "held-out"}], "interval_steps": 5}
    values["checkpoint"]["load_uri"] = "../other/checkpoints"
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(values))
    spec = load_job(file)
    assert [source.prefix for source in spec.trainer.data.sources] == [
        str(tmp_path / "corpus"),
        "/absolute/corpus",
    ]
    assert [source.prefix for source in spec.trainer.evaluation.sources] == [
        str(tmp_path / "held-out")
    ]
    assert spec.checkpoint.uri == str(tmp_path / "checkpoints")
    assert Path(spec.checkpoint.load_uri).resolve() == tmp_path.parent / "other" / "checkpoints"
    values["checkpoint"]["uri"] = "file:///somewhere"
    file.write_text(yaml.safe_dump(values))
    assert load_job(file).checkpoint.uri == "file:///somewhere"


def test_a_number_in_scientific_notation_without_a_point_is_a_number(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("name: a\ntrainer: {optimizer: {learning_rate: 3e-4, epsilon: 1E-9}}\n")
    optimizer = load_job(file).trainer.optimizer
    assert (optimizer.learning_rate, optimizer.epsilon) == (3e-4, 1e-9)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: [", "is not valid YAML"),
        ("name: a\nname: b\n", "'name' is given twice"),
        ("- 1\n", "job: expected a mapping; got"),
        ("", "file: is empty; write a job"),
        ("\x00\x01", "is not valid YAML"),
        ("name: !!python/object:os.system {}\n", "is not valid YAML"),
    ],
)
def test_the_message_about_a_bad_file_has_its_path(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(text)
    with pytest.raises(InvalidJob, match=str(file)) as caught:
        load_job(file)
    assert message in str(caught.value)


def test_the_message_about_an_absent_or_oversized_file_has_its_path(tmp_path: Path) -> None:
    with pytest.raises(InvalidJob, match=r"absent\.yaml.*\n.*No such file"):
        load_job(tmp_path / "absent.yaml")
    big = tmp_path / "big.yaml"
    big.write_bytes(b"#" * ((1 << 20) + 1))
    with pytest.raises(InvalidJob, match="larger than"):
        load_job(big)


def test_the_example_in_the_documentation_is_a_good_job() -> None:
    spec = load_job(Path(__file__).parents[2] / "docs" / "examples" / "job.yaml")
    assert validate(from_proto(spec)) == []
    assert spec.recovery.spare_nodes == 1
