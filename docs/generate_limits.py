"""Write the table of all bounds in docs/limits.md, from the constants in the code.

python -m docs.generate_limits [--check]
"""

from __future__ import annotations

import sys

from docs import pages
from docs.bound_reasons import REASONS
from docs.bounds import Bound, bounds

PAGE = pages.DOCS / "limits.md"
MOST_CHARS = 110  # of a reason in the table


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
    for package in dict.fromkeys(each.module.partition("/")[0] for each in found):
        lines += [f"### {package}", ""]
        own = [each for each in found if each.module.partition("/")[0] == package]
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
            (unit, size) for unit, size in (("GiB", 30), ("MiB", 20), ("KiB", 10))
            if value >= 1 << size
        )  # fmt: skip
        return f"{value / (1 << size):g} {unit}"
    whole = f"{value:,.0f}" if value == int(value) else f"{value:g}"
    return f"{whole} s" if name.endswith("_S") and name != "CALLS_PER_S" else whole


if __name__ == "__main__":
    sys.exit(pages.run(PAGE, text))
