"""The tree of errors on the wire and back."""

from __future__ import annotations

import pytest

from megascale_common.job.problems import JobError, JobProblem
from megascale_common.service.errors import (
    LimitError,
    NotLeaderError,
    RequestError,
    ServiceError,
    UnavailableError,
    invalid,
    on_the_wire,
)
from megascale_common.service.status import of_code


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("INTERNAL", ServiceError),
        ("UNKNOWN", ServiceError),
        ("INVALID_ARGUMENT", RequestError),
        ("UNAVAILABLE", UnavailableError),
        ("RESOURCE_EXHAUSTED", LimitError),
    ],
)
def test_an_error_of_another_service_is_of_the_class_that_its_code_belongs_to(
    code: str, kind: type[ServiceError]
) -> None:
    assert type(of_code(code, "SOME_REASON", "a sentence")) is kind


@pytest.mark.parametrize("defect", [KeyError("x"), TimeoutError(), ConnectionResetError("peer")])
def test_a_defect_is_internal_and_shows_no_details(defect: Exception) -> None:
    """TimeoutError and ConnectionError are OSErrors, which only a storage may let through."""
    error = on_the_wire(defect)
    assert (type(error), error.reason) == (ServiceError, "INTERNAL")
    assert "peer" not in error.message


def test_errors_of_the_tree_and_of_a_job_pass() -> None:
    error = NotLeaderError("not here")
    assert on_the_wire(error) is error and error.reason == "NOT_LEADER"
    refused = on_the_wire(JobError([JobProblem("name", "missing", "set it")]))
    assert (refused.code, refused.reason) == ("INVALID_ARGUMENT", "BAD_JOB_SPEC")
    assert refused.fields == (("name", "missing; set it"),)


def test_every_refused_field_has_a_remedy_that_a_client_can_find() -> None:
    """It follows the first "; ", so a problem has none of its own."""
    problems = [JobProblem("name", "7 is odd; it must be even", "give 8")]
    for refused in (
        on_the_wire(JobError(problems)),
        invalid("name", "7 is odd; it must be even", "give 8"),
    ):
        [(field, description)] = refused.fields
        problem, _, remedy = description.partition("; ")
        assert (field, problem, remedy) == ("name", "7 is odd, it must be even", "give 8")
