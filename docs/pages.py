"""Shared by the generators: replaces the generated part of a page by text from the code."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

DOCS = Path(__file__).resolve().parent
REPOSITORY = DOCS.parent
BEGIN = "<!-- Begin of the generated part: change its source, then run `make docs`. -->"
END = "<!-- End of the generated part. -->"
MARKERS = (BEGIN, END)


def run(
    page: Path,
    text: Callable[[], str],
    arguments: Sequence[str] | None = None,
    markers: tuple[str, str] = MARKERS,
) -> int:
    """The main function of a generator: write ``text()`` between the markers of ``page``.

    With --check it only compares. Returns the exit status: 1 if --check finds a stale page.
    """
    parser = argparse.ArgumentParser(description=f"Write the generated part of {page.name}.")
    parser.add_argument(
        "--check", action="store_true", help="only report whether the page is fresh"
    )
    check = parser.parse_args(arguments).check
    old = page.read_text(encoding="utf-8")
    fresh = merged(old, text(), markers)
    if not check:
        page.write_text(fresh, encoding="utf-8")
    elif old != fresh:
        print(f"{page} is stale: run `make docs`", file=sys.stderr)
        return 1
    return 0


def merged(page: str, text: str, markers: tuple[str, str] = MARKERS) -> str:
    """``page`` with ``text`` between its markers.

    Raises:
        ValueError: a marker is missing.
    """
    first, last = markers
    head, begin, rest = page.partition(first)
    _, end, tail = rest.partition(last)
    if not begin or not end:
        raise ValueError(f"the page has no {last if begin else first}")
    return "{}{}\n\n{}\n\n{}{}".format(head, first, text.strip("\n"), last, tail)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Lines of a Markdown table, and an empty line after it."""
    yield f"| {' | '.join(head)} |"
    yield "|---" * len(head) + "|"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"
    yield ""
