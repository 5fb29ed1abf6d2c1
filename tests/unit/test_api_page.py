"""docs/api.md and the comments in the protos agree with the code: errors, callers, examples."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from docs import api_examples, generate_api, pages
from docs.api_services import FILES, Call, Service, field_comments, parse, services
from google.protobuf import json_format, message_factory

REPOSITORY = Path(__file__).resolve().parents[2]
PARTIES = {"client", "operator", "node agent", "driver", "checkpoint daemon"}
# Who calls, by the package whose code does.
CALLERS = {
    "megascale_driver": "driver",
    "megascale_executor": "node agent",
    "megascale_checkpoint": "checkpoint daemon",
}
SERVICES = services()
CALLS = [(service, call) for service in SERVICES for call in service.calls]
MODULES = {
    path: ast.parse(path.read_text())
    for package in CALLERS
    for path in sorted((REPOSITORY / "services").glob(f"*/{package}/**/*.py"))
}
each_call = pytest.mark.parametrize(
    ("service", "call"), CALLS, ids=lambda item: item.name if isinstance(item, Call) else ""
)


def status_code(node: ast.AST) -> str:
    """X of an expression ``grpc.StatusCode.X``, else empty."""
    is_code = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute)
    return node.attr if is_code and node.value.attr == "StatusCode" else ""


def codes_by_name(tree: ast.AST) -> dict[str, str]:
    """Names that a module gives to status codes."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
            tuples = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
            pairs = zip(target.elts, value.elts, strict=True) if tuples else [(target, value)]
            for name, code in pairs:
                if isinstance(name, ast.Name) and status_code(code):
                    found[name.id] = status_code(code)
    return found


def reasons(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST | None]]:
    """Expressions of reason and code in a node: a call of RpcError, a refusal of the core
    (``refuse(REASON)``, ``refusal = REASON``), or a table of refusals (REASON: (code, message)).
    """
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
        if node.func.id == "RpcError":
            yield node.args[1], node.args[0]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
        if node.func.attr == "refuse":
            yield node.args[0], None
    elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
        if node.targets[0].attr == "refusal":
            choice = node.value
            values = [choice.body, choice.orelse] if isinstance(choice, ast.IfExp) else [choice]
            yield from ((value, None) for value in values)
    elif isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            if key is not None and isinstance(value, ast.Tuple) and len(value.elts) == 2:
                yield key, value.elts[0]


def raised() -> dict[str, set[str]]:
    """Every reason of an ErrorInfo that the services raise, with the codes that the code shows."""
    found: dict[str, set[str]] = defaultdict(set)
    for tree in MODULES.values():
        names = codes_by_name(tree)
        for node in ast.walk(tree):
            for reason, code in reasons(node):
                known = names.get(code.id, "") if isinstance(code, ast.Name) else ""
                known = known or (status_code(code) if code is not None else "")
                of_a_table = isinstance(node, ast.Dict)
                if isinstance(reason, ast.Constant) and (known or not of_a_table):
                    found[reason.value] |= {known} - {""}
    return {reason: codes for reason, codes in found.items() if reason}


RAISED = raised()


def named() -> dict[str, set[str]]:
    """Every reason that the protos name, with its codes."""
    found: dict[str, set[str]] = defaultdict(set)
    for service in SERVICES:
        for comment in (service.comment, *(call.comment for call in service.calls)):
            for error in comment.errors:
                if error.reason:
                    found[error.reason] |= set(error.codes)
    return found


def test_the_protos_name_every_reason_that_handlers_raise_and_no_other() -> None:
    assert set(named()) == set(RAISED)


@pytest.mark.parametrize("reason", sorted(RAISED))
def test_a_reason_is_named_with_the_code_that_it_is_raised_with(reason: str) -> None:
    codes = RAISED[reason]
    assert codes <= named()[reason]
    if codes and reason != "REFUSED_BY_NODE":  # which keeps the code of the node
        assert codes == named()[reason]


@pytest.mark.parametrize("name", ["ExecutorService", "CheckpointService"])
def test_errors_without_a_reason_are_named_with_the_codes_that_the_handlers_use(name: str) -> None:
    (module,) = (
        tree
        for tree in MODULES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.name == name
    )
    used = {code for node in ast.walk(module) if (code := status_code(node))}
    (service,) = (service for service in SERVICES if service.name == name)
    told = {code for call in service.calls for error in call.comment.errors for code in error.codes}
    assert told == used


@each_call
def test_a_call_says_what_it_does_and_who_calls_it(service: Service, call: Call) -> None:
    assert call.comment.text.endswith(".")
    assert call.comment.callers and set(call.comment.callers) <= PARTIES
    assert all(error.when.endswith(".") for error in call.comment.errors)
    for path, tree in MODULES.items():
        for node in ast.walk(tree):
            is_call = isinstance(node, ast.Attribute) and node.attr == call.name
            if is_call and isinstance(node.value, ast.Name) and node.value.id == "stub":
                package = next(part for part in path.parts if part in CALLERS)
                # A platform starts clusters, from the outside.
                party = "client" if "platform" in path.parts else CALLERS[package]
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
            # Requests and responses stand beside the comment of their call.
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


def test_a_generated_page_is_fresh_or_says_what_to_do(
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
