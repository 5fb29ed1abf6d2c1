"""The JSON Schema of a job file agrees with the reader and the check of a job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.harness.bad_jobs import (
    RANGES,
    UNKNOWN,
    WRONG_TYPES,
    BadJob,
    changed,
    good_job,
)
from typer.testing import CliRunner

from megascale_cli.app import build_app
from megascale_cli.job_template import job_template
from megascale_job.presets import MODELS
from megascale_job.wire.schema import job_schema

jsonschema = pytest.importorskip("jsonschema")
REPOSITORY = Path(__file__).parents[2]
# What a schema cannot say: relations between fields, and what only the text of a value shows.
_RELATIONS = {
    "no multiple of heads",
    "heads by kv heads",
    "one window of two",
    "heads of odd width",
    "biases of a third of a matrix",
    "what a missing norm covers",
    "scaling below one",
    "low frequencies above high ones",
    "yarn without a first length",
    "odd head size",
}


@pytest.fixture(scope="module")
def schema() -> Any:
    found = job_schema()
    jsonschema.Draft202012Validator.check_schema(found)
    return jsonschema.Draft202012Validator(found)


def problems(schema: Any, values: Any) -> list[str]:
    return [f"{list(error.path)}: {error.message}" for error in schema.iter_errors(values)]


@pytest.mark.parametrize("model", MODELS)
def test_what_init_writes_fits_the_schema(schema: Any, model: str) -> None:
    assert problems(schema, yaml.safe_load(job_template(model, "a-job"))) == []


def test_the_example_of_the_documentation_fits_the_schema(schema: Any) -> None:
    text = (REPOSITORY / "docs" / "examples" / "job.yaml").read_text()
    assert problems(schema, yaml.safe_load(text)) == []


def test_init_prints_the_schema() -> None:
    printed = CliRunner().invoke(build_app(), ["init", "--schema"])
    assert printed.exit_code == 0 and json.loads(printed.stdout) == job_schema()


def test_a_number_without_a_point_fits(schema: Any) -> None:
    job = changed(good_job("good"), {"trainer.optimizer.learning_rate": "3e-4"})
    assert problems(schema, job) == []


@pytest.mark.parametrize(
    "bad",
    [bad for group in (WRONG_TYPES, UNKNOWN) for bad in group],
    ids=lambda bad: bad.case.replace(" ", "-"),
)
def test_a_wrong_type_and_an_unknown_field_are_found(schema: Any, bad: BadJob) -> None:
    assert problems(schema, changed(good_job("good"), bad.changes))


def test_numbers_out_of_bounds_are_found(schema: Any) -> None:
    missed = set()
    for bad in RANGES:
        declared = bad.problem in ("out of range", "negative", "not positive", "missing or 0")
        if declared and not problems(schema, changed(good_job("good"), bad.changes)):
            missed.add(bad.case)
    assert missed <= _RELATIONS
