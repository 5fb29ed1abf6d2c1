"""``python -m megascale_driver.analysis.logs``: classify a corpus, or score a labelled one.

``classify FILE.jsonl`` prints one verdict per line, and exits with 1 if a line was invalid.
``score FILE.jsonl`` prints the figures of all excerpts and of the held-out third.
``-`` reads standard input.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from megascale_driver.analysis.logs.corpus import answers, is_held_out, read, score


def main(arguments: list[str] | None = None) -> int:
    """Run a verb; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m megascale_driver.analysis.logs")
    verbs = parser.add_subparsers(dest="verb", required=True)
    one = verbs.add_parser("classify", help="one JSON verdict per line of the corpus")
    two = verbs.add_parser("score", help="precision, recall, wrong evictions of a labelled corpus")
    two.add_argument("--wrong", action="store_true", help="list wrong ones that are not held out")
    for verb in (one, two):
        verb.add_argument("file", help="JSON lines {id, log}; - for standard input")
    options = parser.parse_args(arguments)
    try:
        if options.verb == "classify":
            return _classify(options.file)
        return _score(options.file, options.wrong)
    except OSError as error:
        problem = f"FILE {options.file}: {error.strerror}; give a file that can be read"
        print(problem, file=sys.stderr)
        return 2
    except ValueError as error:
        print(f"FILE {options.file}: {error}", file=sys.stderr)
        return 1


def _lines(name: str) -> Iterator[str]:
    """Lines of a file, ended by \\n only; bytes that are not UTF-8 are replaced."""
    if name == "-":
        yield from (line.decode(errors="replace") for line in sys.stdin.buffer)
        return
    with Path(name).open("rb") as file:
        yield from (line.decode(errors="replace") for line in file)


def _classify(name: str) -> int:
    good = True
    for answer, was_good in answers(_lines(name)):
        print(answer, flush=True)
        good = good and was_good
    return 0 if good else 1


def _score(name: str, list_wrong: bool) -> int:
    excerpts = [read(line) for line in _lines(name) if line.strip()]
    missing = [one.id for one in excerpts if len(one.labels) < 3]
    if missing:
        raise ValueError(f"id {missing[0]}: category, role or action missing; label it")
    held = score(one for one in excerpts if is_held_out(one.id))
    if list_wrong:
        for wrong in score(one for one in excerpts if not is_held_out(one.id)).wrong:
            print(wrong, file=sys.stderr)
    print(json.dumps({**score(excerpts).as_json(), "held_out": held.as_json()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
