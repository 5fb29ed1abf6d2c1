"""The modules of this repository and what they import, read from the source.

A room is a package of pyproject.toml's list, a package inside one, or a single module next to such
packages. Generated code counts as one room, ``megascale.v1``.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from docs.pages import REPOSITORY

Graph = dict[str, set[str]]  # room -> rooms that it imports
CONTRACT = "megascale.v1"
# Nodes that can contain an import: expressions, which are most of a source, cannot.
_BLOCKS = (ast.stmt, ast.excepthandler, ast.match_case)


def project() -> dict[str, Any]:
    """pyproject.toml."""
    return tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))


def modules() -> dict[str, Path]:
    """Every module by its full name; a package stands for its ``__init__``."""
    found = {}
    for package in project()["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]:
        root = (REPOSITORY / package).parent
        for path in sorted((REPOSITORY / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            if not name.startswith(f"{CONTRACT}."):
                found[name] = path
    return found


def imported(path: Path) -> set[str]:
    """Full names that a module imports when it runs, anywhere in its source.

    ``from a import b`` counts as ``a.b``, as b may be a module. Imports for type checkers only
    (``if TYPE_CHECKING:``) do not count, as in import-linter's settings.
    """
    found = set()
    waiting: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting += node.orelse
            continue
        waiting += [inner for inner in ast.iter_child_nodes(node) if isinstance(inner, _BLOCKS)]
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def imports() -> Graph:
    """Every module and the modules of this repository that it imports."""
    known = modules()
    return {
        name: {_module(target, known) for target in imported(path)} - {"", name}
        for name, path in known.items()
    }


def children(parent: str, graph: Mapping[str, set[str]]) -> Graph:
    """The rooms directly inside ``parent`` ("" holds the packages) and their arrows."""
    found: Graph = {}
    for source, targets in graph.items():
        if (room := _child(parent, source)) is not None:
            rooms = {inner for target in targets if (inner := _child(parent, target)) is not None}
            found.setdefault(room, set()).update(rooms - {room})
    return found


def packages(graph: Iterable[str]) -> list[str]:
    """Every package that has a package inside, outermost first."""
    names = sorted(graph)
    above = {
        ".".join(parts[:n])
        for parts in (name.split(".") for name in names)
        for n in range(1, len(parts))
    }
    inner = above & {*names}
    outer = {name.rpartition(".")[0] for name in inner} & inner
    return sorted(outer, key=lambda name: (name.count("."), name))


def cycles(graph: Mapping[str, set[str]]) -> list[set[str]]:
    """Rooms that import each other, directly or through others."""
    found: list[set[str]] = []
    for room in sorted(graph):
        group = {other for other in reachable(room, graph) if room in reachable(other, graph)}
        if group and group not in found:
            found.append(group)
    return found


def reachable(room: str, graph: Mapping[str, set[str]]) -> set[str]:
    """Every room that ``room`` imports, directly or through others."""
    found: set[str] = set()
    waiting = [room]
    while waiting:
        new = graph.get(waiting.pop(), set()) - found
        found |= new
        waiting += new
    return found


def reduced(graph: Mapping[str, set[str]]) -> Graph:
    """The same graph without the arrows that follow from others."""
    left = {room: set(targets) for room, targets in graph.items()}
    for room in sorted(left):
        for target in sorted(left[room]):
            left[room].remove(target)
            if target not in reachable(room, left):
                left[room].add(target)
    return left


def upward(graph: Graph) -> list[str]:
    """Imports that run against the ``layers`` contracts of pyproject.toml, from lower to higher."""
    found = []
    for contract in project()["tool"]["importlinter"]["contracts"]:
        if contract["type"] != "layers":
            continue
        for container in contract.get("containers", [""]):
            rank = {
                f"{container}.{room.strip(' ()')}".lstrip("."): number
                for number, layer in enumerate(contract["layers"])
                for room in layer.replace(":", "|").split("|")
            }
            for source, targets in graph.items():
                below = _number(source, rank)
                found += [
                    f"{source} -> {target}"
                    for target in sorted(targets)
                    if _number(target, rank) < below
                ]
    return found


def _number(module: str, rank: Mapping[str, int]) -> float:
    """Number of the layer that a module belongs to, 0 the highest; NaN if it has none."""
    numbers = (n for room, n in rank.items() if f"{module}.".startswith(f"{room}."))
    return next(numbers, float("nan"))


def _module(target: str, known: Iterable[str]) -> str:
    """The module that an imported name belongs to; empty when it is not of this repository."""
    if f"{target}.".startswith(f"{CONTRACT}."):
        return CONTRACT
    parent = target.rpartition(".")[0]
    return target if target in known else parent if parent in known else ""


def _child(parent: str, module: str) -> str | None:
    """The room directly inside ``parent`` that is or contains ``module``; None if there is none."""
    if not parent:
        return CONTRACT if module == CONTRACT else module.partition(".")[0]
    inside = module.removeprefix(f"{parent}.")
    return None if inside == module else inside.partition(".")[0]
