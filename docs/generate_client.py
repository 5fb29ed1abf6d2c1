"""Write the table of docs/client.md from AsyncClient.

python -m docs.generate_client [--check]
"""

from __future__ import annotations

import ast
import inspect
import re
import sys

from docs import pages
from megascale_client import client, errors, orders

PAGE = pages.DOCS / "client.md"
Method = ast.AsyncFunctionDef | ast.FunctionDef
# Written by hand in both clients.
_OWN = {"from_run_folder", "close"}
_OF_EVERY_CALL = {"MegascaleError", "Unavailable", "NotAllowed"}
_ERRORS = [
    name
    for name, value in vars(errors).items()
    if inspect.isclass(value) and issubclass(value, errors.MegascaleError)
    if name not in _OF_EVERY_CALL
]


def methods() -> list[Method]:
    """The calls of AsyncClient and then of its base, in the order of their source."""
    bodies = []
    for kind in (client.AsyncClient, orders.OrderCalls):
        (found,) = ast.parse(inspect.getsource(kind)).body
        assert isinstance(found, ast.ClassDef)
        bodies += found.body
    return [
        node
        for node in bodies
        if isinstance(node, (ast.AsyncFunctionDef, ast.FunctionDef))
        and not node.name.startswith("_")
        and node.name not in _OWN
    ]


def text() -> str:
    """One row per method: its arguments, what it does, what it returns and raises."""
    head = ("method", "what it does", "returns", "raises, besides Unavailable and NotAllowed")
    return "\n".join(pages.table(head, map(_row, methods())))


def _row(method: Method) -> tuple[str, str, str, str]:
    comment = ast.get_docstring(method) or ""
    summary = re.sub(r" *Raises [^.]*\.", "", comment.partition("\n\n")[0].replace("\n", " "))
    summary = summary.replace(":meth:", "").replace("``", "`")
    item = _plain(_item(method))
    returns = f"iterator of {item}" if item else _plain(_returns(method))
    raised = [name for name in _ERRORS if re.search(rf"\b{name}\b", comment)]
    return (f"`{method.name}({_arguments(method)})`", summary, f"`{returns}`", ", ".join(raised))


def _arguments(method: Method) -> str:
    """The arguments as in the signature, without types; those after * are given by name."""
    arguments = method.args
    shown = [each.arg for each in arguments.args[1:]]
    for index, default in enumerate(reversed(arguments.defaults), 1):
        shown[-index] += f"={ast.unparse(default)}"
    if arguments.kwonlyargs:
        shown.append("*")
    for each, given in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        shown.append(each.arg if given is None else f"{each.arg}={ast.unparse(given)}")
    return ", ".join(shown)


def _returns(method: Method) -> str:
    assert method.returns is not None
    return ast.unparse(method.returns)


def _item(method: Method) -> str:
    """The type that an asynchronous iterator yields; empty for a method that returns once."""
    found = re.fullmatch(r"AsyncIterator\[(.*)\]", _returns(method))
    return found[1] if found else ""


def _plain(annotation: str) -> str:
    return re.sub(r"\w+_pb2\.", "", annotation)


if __name__ == "__main__":
    sys.exit(pages.run(PAGE, text))
