"""Find sentences that one would not say aloud, in Markdown, protos, docstrings and comments.

python -m docs.check_prose [PATH ...]

A place that is right has its words in ALLOWED; the tree has at most KNOWN others, a number that
only gets smaller. Beyond it, and for given paths, every place is printed with what to write.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

KNOWN = 7
_OF = r"Of (?:a|an|the|all|its|such|those|each|every|two)\b"
PATTERNS = {
    rf"^{_OF}|[.:;] {_OF}": "begin with the subject",
    r"(?i)\bbeside\b": "next to, compared with, during",
    r"(?i)\b(?:go|goes|went|going) on\b": "continue",
    r"(?i)\b(?:say|says|said|hears?) so\b": "report",
    r"(?i)\bno more\b(?! than)": "no longer",
    r"(?i)\bbut for\b": "except for",
    r"(?i)\b(?:nobody|somebody|whoever|whom)\b": "name them: an operator, no node, another process",
    r"(?i)\bis (?:next )?(?:looked|asked|waited) for\b": "name who looks, asks or waits",
    r"(?i)\bmend(?:s|ed|ing)?\b": "fix",
    r"(?i)\b(?:is|are|was|were) told\b": "gets, is passed",
    r"(?i)\b(?:lest|in vain|as it were)\b": "a plain sentence",
}
ALLOWED = ("?beside=STEP", "beside the point")
# Generated pages and code, dated results, and the tests, which are read with the code.
SKIPPED = re.compile(r"CHANGELOG|/results/|^tests/|_pb2|docs/(api|job-spec)\.md|check_prose")
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Lines of prose with their numbers, without code and what is quoted as code."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, _DOCUMENTED) and (text := ast.get_docstring(node)):
                yield from enumerate(text.splitlines(), node.body[0].lineno)
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string.lstrip("# ")
        return
    code = False
    for number, line in enumerate(source.splitlines(), 1):
        code ^= line.lstrip().startswith("```")
        if not code:
            yield number, re.sub(r"`[^`]*`", "``", line.strip().removeprefix("// "))


def places(paths: list[Path]) -> Iterator[str]:
    """One line for each place."""
    for path in paths:
        for number, line in texts(path):
            shown = re.sub("|".join(map(re.escape, ALLOWED)), "", line)
            for pattern, advice in PATTERNS.items():
                if match := re.search(pattern, shown):
                    yield f"{path}:{number}: {match[0].strip('.:; ')!r} ({advice})"


def main(arguments: list[str]) -> int:
    """Print the places; exit status 1 if there are more than are known."""
    listed = ["git", "ls-files", "*.md", "*.py", "*.proto"]
    names = arguments or subprocess.check_output(listed, text=True).split()
    paths = [Path(name) for name in names if not SKIPPED.search(name)]
    found = list(places([path for path in paths if path.exists()]))
    too_many = len(found) > (0 if arguments else KNOWN)
    print(*(found if too_many else ()), f"{len(found)} places, {KNOWN} known", sep="\n")
    return int(too_many)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
