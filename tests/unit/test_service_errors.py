"""The tree of errors on the wire and back."""

from __future__ import annotations

from urllib.parse import quote

import pytest
from google.rpc import error_details_pb2

from megascale.v1 import types_pb2
from megascale_common.service.errors import (
    LimitError,
    NotLeaderError,
    RequestError,
    ServiceError,
    UnavailableError,
    invalid,
    on_the_wire,
)
from megascale_common.service.status import of_code, to_status
from megascale_common.service.wire_text import enum_name
from megascale_job.problems import JobError, JobProblem


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


@pytest.mark.parametrize("char", ["x", "é", "%", "\n", "\U0001f600"])
def test_an_error_fits_the_metadata_of_a_call_however_long_it_is(char: str) -> None:
    fields = [(char * 900, f"{number} {char * 900}") for number in range(50)]
    found = to_status(RequestError(char * 100_000, fields=fields))
    # The message in the header as gRPC escapes it, and again in the details, in base 64.
    escaped = len(quote(found.message, safe=" !\"#$&'()*+,-./:;<=>?@[]^_`{|}~\\"))
    assert escaped + found.ByteSize() * 4 / 3 < 8000
    refused = error_details_pb2.BadRequest()
    found.details[1].Unpack(refused)
    assert refused.field_violations[0].description.startswith("0 ")
    assert found.message.endswith("...")


def test_an_error_of_ordinary_size_is_whole() -> None:
    found = to_status(RequestError("a sentence", fields=[("spec.name", "missing")]))
    assert found.message == "a sentence"
    refused = error_details_pb2.BadRequest()
    found.details[1].Unpack(refused)
    assert refused.field_violations[0].field == "spec.name"


def test_a_value_of_a_newer_build_is_unspecified() -> None:
    assert enum_name(types_pb2.DeviceKind, 77, "DEVICE_KIND_") == "UNSPECIFIED"
    assert enum_name(types_pb2.DeviceKind, types_pb2.DEVICE_KIND_CPU, "DEVICE_KIND_") == "CPU"
