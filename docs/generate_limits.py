"""Write the table of all bounds in docs/limits.md, from the constants in the code.

python -m docs.generate_limits [--check]

A bound is a module constant named MAX_*, MOST_* or KEPT_*, with its comment. They are read from the
source, so that the trainer's and others' modules need not be imported.
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
from docs.bound_reasons import REASONS

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

    module: str  # such as megascale_driver/core/jobs
    name: str
    value: float
    comment: str

    @property
    def key(self) -> str:
        """``package:NAME``."""
        return f"{self.package}:{self.name}"

    @property
    def package(self) -> str:
        """Such as megascale_driver."""
        return self.module.partition("/")[0]


def bounds() -> list[Bound]:
    """All bounds whose value is written as a number, by module; an alias of another is left out."""
    paths = [path for root in ROOTS for path in sorted((pages.REPOSITORY / root).rglob("*.py"))]
    return [bound for path in paths for bound in _of_module(path)]


def _of_module(path: Path) -> Iterator[Bound]:
    text = path.read_text(encoding="utf-8")
    if NAME.search(text) is None:
        return  # reading the comments of all modules takes most of the time
    comments = _comments(text)
    package = next(i for i, part in enumerate(path.parts) if part.startswith("megascale_"))
    module = "/".join(path.with_suffix("").parts[package:])
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            for name, value in _pairs(node.targets[0], node.value):
                if NAME.fullmatch(name) and (number := _number(value)) is not None:
                    yield Bound(module, name, number, _comment_of(comments, node))


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
        ValueError: a bound without a reason, or a reason without its bound.
    """
    found = bounds()
    silent = sorted(each.key for each in found if not each.comment and each.key not in REASONS)
    gone = sorted(set(REASONS) - {each.key for each in found})
    if silent or gone:
        raise ValueError(
            f"docs/bound_reasons.py: say why for {', '.join(silent) or 'none'}; "
            f"remove {', '.join(gone) or 'none'}"
        )
    lines = []
    for package in dict.fromkeys(each.package for each in found):
        lines += [f"### {package}", ""]
        own = [each for each in found if each.package == package]
        lines += pages.table(("module", "bound", "value", "why"), map(_row, own))
    return "\n".join(lines)


def _row(bound: Bound) -> tuple[str, str, str, str]:
    why = (REASONS.get(bound.key) or bound.comment).replace("|", "\\|")
    cut = why if len(why) <= MOST_CHARS else f"{why[: MOST_CHARS - 3].rpartition(' ')[0]} ..."
    return f"`{bound.module.partition('/')[2]}`", f"`{bound.name}`", _text(bound), cut


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
