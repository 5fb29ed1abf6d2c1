"""docs/api.md and the comments in the protos agree with the code: errors, callers, examples."""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from docs import api_examples, generate_api, pages
from docs.api_services import FILES, Call, Service, field_comments, parse, services
from google.protobuf import json_format, message_factory

from megascale_common.service import errors
from megascale_common.service.errors import RequestError, ServiceError

pytestmark = pytest.mark.check

REPOSITORY = Path(__file__).resolve().parents[2]
PARTIES = {"client", "operator", "node agent", "driver", "checkpoint daemon"}
# The caller, by the package whose code calls.
CALLERS = {
    "megascale_driver": "driver",
    "megascale_executor": "node agent",
    "megascale_checkpoint": "checkpoint daemon",
}
SERVICES = services()
CALLS = [(service, call) for service in SERVICES for call in service.calls]
# Errors of these end on a command line or inside a process, never in the response to a call.
INNER = (
    "/platform/",
    "/commands",
    "/command_target",
    "/retention/retire",
    "megascale_driver/journal/",
    "__main__.py",
    "/telemetry/setup.py",
    "/megascale_checkpoint/serve/sidecar.py",
    "/people_port.py",
    "/executor/",
    "/reshard",
    "/megascale_checkpoint/export/",
)
ANSWERS = ("/agent/link/service.py", "/agent/checks/diagnosis.py", "/agent/checks/group_checks.py")
# Sent to workers over the node's own socket, or caught where a damaged checkpoint is skipped.
LOCAL = {"LIMIT", "MISSING_FILE"}
each_call = pytest.mark.parametrize(
    ("service", "call"), CALLS, ids=lambda item: item.name if isinstance(item, Call) else ""
)


@functools.cache
def modules() -> dict[Path, ast.Module]:
    """Every module of the services that call or answer."""
    return {
        path: ast.parse(path.read_text())
        for package in CALLERS
        for path in sorted((REPOSITORY / "services").glob(f"*/{package}/**/*.py"))
    }


@functools.cache
def callers() -> dict[str, set[tuple[Path, str]]]:
    """Where each method of a stub is called: the module and its party."""
    found: dict[str, set[tuple[Path, str]]] = defaultdict(set)
    for path, tree in modules().items():
        package = next(part for part in path.parts if part in CALLERS)
        # A platform starts clusters from outside, as a client.
        party = "client" if "platform" in path.parts else CALLERS[package]
        for node in ast.walk(tree):
            is_call = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
            if is_call and node.value.id == "stub":
                found[node.attr].add((path, party))
    return found


def kinds() -> dict[str, type[ServiceError]]:
    """Every class of the tree of errors, by name."""
    found, waiting = {}, [ServiceError]
    while waiting:
        kind = waiting.pop()
        found[kind.__name__] = kind
        waiting += kind.__subclasses__()
    return found


KINDS = kinds()


def reasons(node: ast.AST) -> Iterator[tuple[ast.AST | str, str]]:
    """(reason, class name or "") of each error in a node.

    A node is a call of a class of the tree, a refusal of the driver's core (``refuse(REASON)``,
    ``refusal = REASON``), or a table of refusals (REASON: (class, message)).
    """
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in KINDS:
        given = next((word.value for word in node.keywords if word.arg == "reason"), None)
        yield given or KINDS[node.func.id].default_reason, node.func.id
    elif (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "invalid"
    ):
        yield RequestError.default_reason, "RequestError"
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
        if node.func.attr == "refuse":
            yield node.args[0], ""
        elif node.func.attr == "of_code":
            yield node.args[1], ""
    elif (
        isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Attribute)
        and node.targets[0].attr == "refusal"
    ):
        choice = node.value
        values = [choice.body, choice.orelse] if isinstance(choice, ast.IfExp) else [choice]
        yield from ((value, "") for value in values)
    elif isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            kind = value.elts[0] if isinstance(value, ast.Tuple) else None
            if key is not None and isinstance(kind, ast.Name) and kind.id in KINDS:
                yield key, kind.id


@functools.cache
def raised() -> dict[str, set[str]]:
    """Every reason of an ErrorInfo in the services' responses, with its codes."""
    found: dict[str, set[str]] = defaultdict(set)
    for path, tree in modules().items():
        answers = path.as_posix().endswith(ANSWERS)
        if not answers and any(part in path.as_posix() for part in INNER):
            continue
        for node in ast.walk(tree):
            for reason, kind in reasons(node):
                word = reason.value if isinstance(reason, ast.Constant) else reason
                if isinstance(word, str) and word and word not in LOCAL:
                    found[word] |= {KINDS[kind].code} if kind else set()
    return found


@functools.cache
def listed() -> dict[str, set[str]]:
    """Every reason that the protos list, with its codes."""
    found: dict[str, set[str]] = defaultdict(set)
    for service in SERVICES:
        for comment in (service.comment, *(call.comment for call in service.calls)):
            for error in comment.errors:
                if error.reason:
                    found[error.reason] |= set(error.codes)
    return found


def test_the_protos_list_every_reason_that_handlers_raise_and_no_other() -> None:
    # Every call may end with these: exceptions that are not of the tree, and a missing token.
    general = {"BAD_JOB_SPEC", "INTERNAL", "NO_TOKEN"}
    assert set(listed()) - general == set(raised()) - general
    assert general <= set(listed())


@pytest.mark.parametrize("reason", sorted(listed()))
def test_a_reason_is_listed_with_the_code_that_it_is_raised_with(reason: str) -> None:
    codes = raised().get(reason, set())
    assert codes <= listed()[reason]
    if codes and reason != "REFUSED_BY_NODE":  # it has the code of the node's error
        assert codes == listed()[reason]


def test_the_drawing_of_the_errors_agrees_with_the_classes() -> None:
    drawing = (errors.__doc__ or "").partition("    ServiceError")[2]
    drawn = re.findall(r"(?:├──|└──) (\w+) +(?:([A-Z_]+), )?([A-Z_]+):", drawing)
    assert {name for name, _, _ in drawn} == set(KINDS) - {"ServiceError"}
    for name, code, reason in drawn:
        kind = KINDS[name]
        assert kind.default_reason == reason, name
        own = kind.code != kind.__mro__[1].code  # type: ignore[attr-defined]
        assert (code == kind.code) if own else not code, name


@each_call
def test_a_call_has_a_description_and_its_callers(service: Service, call: Call) -> None:
    assert call.comment.text.endswith(".")
    assert call.comment.callers and set(call.comment.callers) <= PARTIES
    assert all(error.when.endswith(".") for error in call.comment.errors)
    for path, party in callers().get(call.name, set()):
        assert party in call.comment.callers, path


@each_call
def test_an_example_is_a_request_of_its_call(service: Service, call: Call) -> None:
    example = api_examples.example(service.name, call.name)
    assert example.method == f"megascale.v1.{service.name}/{call.name}"
    request = message_factory.GetMessageClass(call.method.input_type)()
    json_format.Parse(example.request, request)
    assert example.purpose.endswith(".")


def test_every_message_field_and_value_has_a_comment() -> None:
    comments = field_comments()
    for file in FILES:
        for message in file.DESCRIPTOR.message_types_by_name.values():
            # The comment of the call describes its request and response.
            assert comments[message.name] or message.name.endswith(("Request", "Response"))
            for field in message.fields:
                assert comments[f"{message.name}.{field.name}"].endswith("."), field.full_name
        for enum in file.DESCRIPTOR.enum_types_by_name.values():
            assert comments[enum.name].endswith(".")
            for value in enum.values:
                name = f"{enum.name}.{value.name}"
                assert value.number == 0 or comments[name].endswith("."), name


def test_a_malformed_error_is_refused() -> None:
    (error,) = parse("// Does it.\n//\n// Errors:\n// - NOT_FOUND (GONE): it is\n//   gone.").errors
    assert (error.codes, error.reason, error.when) == (("NOT_FOUND",), "GONE", "it is gone.")
    with pytest.raises(ValueError, match="CODE"):
        parse("// Errors:\n// - it is gone.")


def test_a_stale_page_is_reported_with_the_command_that_refreshes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pages.run(generate_api.PAGE, generate_api.text, ["--check"]) == 0
    page = tmp_path / "page.md"
    page.write_text(f"by hand\n{pages.BEGIN}\nold\n{pages.END}\nby hand too\n")
    assert pages.run(page, lambda: "new", ["--check"]) == 1
    assert "make docs" in capsys.readouterr().err
    assert pages.run(page, lambda: "new", []) == 0
    assert page.read_text() == f"by hand\n{pages.BEGIN}\n\nnew\n\n{pages.END}\nby hand too\n"
    assert pages.run(page, lambda: "new", ["--check"]) == 0
    with pytest.raises(ValueError, match="has no"):
        pages.merged("a page without markers", "new")
