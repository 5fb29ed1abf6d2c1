"""``python -m megascale_driver.analysis.spans``: what a file of recorded spans says.

``why FILE`` says why the MFU fell; ``timeline FILE --out trace.json`` writes one trace of all ranks
for Perfetto. The last line of stdout is one JSON object. Exit status 0: an answer (of ``why`` also
that the MFU did not fall); 1: it fell and nothing decides; 2: no such file, or not of this format.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from megascale_driver.analysis.spans import recorded
from megascale_driver.analysis.spans.decline import DeclineRule, split_step, why
from megascale_driver.analysis.spans.recorded import Recorded

Window = tuple[int, int]
# Windows that were chosen where steps differ most would often differ by chance.
SEARCHED = DeclineRule(least_z=5.0)


def main(arguments: list[str] | None = None) -> int:
    """Run a verb; returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        found = recorded.load(Path(options.file).read_bytes())
        if options.verb == "why":
            return _why(found, options.before, options.after)
        raise AssertionError(options.verb)
    except OSError as error:
        print(f"{error.filename}: {error.strerror}; give a file that can be used", file=sys.stderr)
    except ValueError as error:
        print(f"FILE {options.file}: {error}", file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m megascale_driver.analysis.spans")
    verbs = parser.add_subparsers(dest="verb", required=True)
    one = verbs.add_parser("why", help="why the MFU fell, in one sentence with numbers")
    for name in ("--before", "--after"):
        one.add_argument(
            name, type=_window, metavar="A:B", help="steps A to B; default: split where they grow"
        )
    one.add_argument("file", help="recorded spans (docs/spans.md)")
    return parser


def _window(text: str) -> Window:
    first, _, last = text.partition(":")
    if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
        raise argparse.ArgumentTypeError(f"{text!r}: give steps as 10:59, the first one first")
    return int(first), int(last)


def _why(found: Recorded, before: Window | None, after: Window | None) -> int:
    if (before is None) != (after is None):
        raise ValueError("give both --before and --after, or neither")
    table, rule = found.table, DeclineRule()
    if before is None or after is None:
        at, rule = split_step(table, rule), SEARCHED
        before, after = (int(table.step.min()), at - 1), (at, int(table.step.max()))
    answer = why(table.of_steps(*before), table.of_steps(*after), found.counters, rule)
    print(answer.sentence, file=sys.stderr)
    print(json.dumps({**asdict(answer), "before": before, "after": after}))
    return 1 if answer.cause == "unknown" else 0


if __name__ == "__main__":
    sys.exit(main())
