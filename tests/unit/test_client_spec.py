"""job.yaml to JobSpec: what is accepted, and the message of each mistake."""

from __future__ import annotations

import typing
from pathlib import Path
from typing import Any

import yaml

from megascale.v1 import job_pb2
from megascale_client import load_job, parse_job
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


def test_tree_and_message_list_the_values_of_every_choice_in_the_same_order() -> None:
    config = vars(job_config)
    for enum in job_pb2.DESCRIPTOR.enum_types_by_name.values():
        assert tuple(short_names(enum)) == typing.get_args(config[enum.name]), enum.name


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


def test_the_example_in_the_documentation_is_a_good_job() -> None:
    spec = load_job(Path(__file__).parents[2] / "docs" / "examples" / "job.yaml")
    assert validate(from_proto(spec)) == []
    assert spec.recovery.spare_nodes == 1
