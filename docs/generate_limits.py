"""Write the table of all bounds in docs/limits.md, from the constants in the code.

python -m docs.generate_limits [--check]

A bound is a module constant named MAX_*, MOST_* or KEPT_*, read from the source so that the trainer
and others need not be imported. The reason is the comment of the constant. A constant without one
keeps the reason that its row on the page has: that column is then edited on the page.
"""

from __future__ import annotations

import ast
import io
import operator
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from docs import pages

PAGE = pages.DOCS / "limits.md"
MOST_CHARS = 110  # of a reason in the table
ROOTS = ("services", "clients")
NAME = re.compile(
    r"(MAX|MOST|KEPT)_[A-Z0-9_]+|CALLS_PER_S|BURST_CALLS|CAPACITY|RING_UPDATES|ACKS_HELD"
)
_OPERATORS = {
    ast.LShift: operator.lshift,
    ast.Mult: operator.mul,
    ast.Pow: operator.pow,
    ast.Sub: operator.sub,
    ast.Add: operator.add,
}


@dataclass(frozen=True, slots=True)
class Bound:
    """One constant: where it is, its value, and what its comment says ("" without one)."""

    package: str  # such as megascale_driver
    module: str  # inside it, such as core/jobs
    name: str
    value: float
    comment: str


def bounds() -> list[Bound]:
    """All bounds whose value is written as a number, by module; an alias of another is left out."""
    paths = [path for root in ROOTS for path in sorted((pages.REPOSITORY / root).rglob("*.py"))]
    return [bound for path in paths for bound in _of_module(path)]


def _of_module(path: Path) -> Iterator[Bound]:
    text = path.read_text(encoding="utf-8")
    if NAME.search(text) is None:
        return  # reading the comments of all modules takes most of the time
    comments = _comments(text)
    parts = path.with_suffix("").parts
    at = next(i for i, part in enumerate(parts) if part.startswith("megascale_"))
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            for name, value in _pairs(node.targets[0], node.value):
                if NAME.fullmatch(name) and (number := _number(value)) is not None:
                    comment = _comment_of(comments, node)
                    yield Bound(parts[at], "/".join(parts[at + 1 :]), name, number, comment)


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for one, its_value in zip(target.elts, value.elts, strict=True):
            yield from _pairs(one, its_value)


def _number(node: ast.expr) -> float | None:
    """The value of a number or of arithmetic with numbers; None for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value
    if isinstance(node, ast.BinOp) and (done := _OPERATORS.get(type(node.op))) is not None:
        left, right = _number(node.left), _number(node.right)
        if left is not None and right is not None:
            found: float = done(left, right)
            return found
    return None


def _comments(text: str) -> dict[int, tuple[bool, str]]:
    """By line: whether the comment has the line to itself, and its text."""
    found = {}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            alone = not token.line[: token.start[1]].strip()
            found[token.start[0]] = (alone, token.string.lstrip("# "))
    return found


def _comment_of(comments: dict[int, tuple[bool, str]], node: ast.stmt) -> str:
    """The comment behind the line, else the lines of comment right above it."""
    if node.lineno in comments:
        return comments[node.lineno][1]
    lines: list[str] = []
    line = node.lineno - 1
    while line in comments and comments[line][0]:
        lines.insert(0, comments[line][1])
        line -= 1
    return " ".join(lines)


def text() -> str:
    """One table for each package: bound, value, reason.

    Raises:
        ValueError: a bound has neither a comment nor a reason on the page.
    """
    found, reasons, lines = bounds(), reasons_on(PAGE.read_text(encoding="utf-8")), list[str]()
    for package in dict.fromkeys(each.package for each in found):
        own = [_row(each, reasons) for each in found if each.package == package]
        lines += [f"### {package}", "", *pages.table(("module", "bound", "value", "why"), own)]
    return "\n".join(lines)


def reasons_on(page: str) -> dict[tuple[str, ...], str]:
    """The reasons on the page, by package, module and name.

    Also by package and name alone, since a constant may have moved within its package.
    """
    found: dict[tuple[str, ...], str] = {}
    package = ""
    for line in page.partition(pages.BEGIN)[2].splitlines():
        if line.startswith("### "):
            package = line.removeprefix("### ")
        elif row := re.match(r"\| `([^`]*)` \| `(\w+)` \| [^|]* \| (.+) \|$", line):
            found[package, row[1], row[2]] = found[package, row[2]] = row[3].replace("\\|", "|")
    return found


def _row(bound: Bound, reasons: dict[tuple[str, ...], str]) -> tuple[str, str, str, str]:
    moved = reasons.get((bound.package, bound.name), "")
    why = bound.comment or reasons.get((bound.package, bound.module, bound.name), moved)
    if not why:
        raise ValueError(
            f"{bound.package}/{bound.module}: {bound.name} needs a comment that says why"
        )
    cut = why if len(why) <= MOST_CHARS else f"{why[: MOST_CHARS - 3].rpartition(' ')[0]} ..."
    return f"`{bound.module}`", f"`{bound.name}`", _text(bound), cut


def _text(bound: Bound) -> str:
    """The value as people write it."""
    value, name = bound.value, bound.name
    if "BYTES" in name and value >= 1024:
        unit, size = next(
            (unit, size)
            for unit, size in (("GiB", 30), ("MiB", 20), ("KiB", 10))
            if value >= 1 << size
        )
        return f"{value / (1 << size):g} {unit}"
    whole = f"{value:,.0f}" if value == int(value) else f"{value:g}"
    return f"{whole} s" if name.endswith("_S") and name != "CALLS_PER_S" else whole


if __name__ == "__main__":
    sys.exit(pages.run(PAGE, text))
