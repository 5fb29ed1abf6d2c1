"""Text of jobs, people and machines, on its way into a record or to a terminal.

It is shown and never obeyed: a worker's error may have what clears an operator's screen.
"""

from __future__ import annotations

import re

# What a terminal or a reader obeys: controls but tab and new line, DEL, those of eight bits, and
# the marks that turn the direction of text.
_OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]"
)


def visible(text: str) -> str:
    """The text with each such character as Python writes it in a string, ESC as ``\\x1b``."""
    return _OBEYED.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def counted(number: float, thing: str) -> str:
    """A number and what it counts, in the plural unless it is one."""
    if number == 1:
        return f"1 {thing}"
    shown = f"{number:,}" if isinstance(number, int) else f"{number:,g}"
    if thing.endswith("ry"):
        return f"{shown} {thing[:-1]}ies"
    return f"{shown} {thing}{'es' if thing.endswith(('ch', 's')) else 's'}"


def agreed(number: int, verb: str) -> str:
    """The verb of what is counted, given in the plural, such as ``are`` and ``wait``."""
    if number != 1:
        return verb
    return {"are": "is", "have": "has", "were": "was"}.get(verb, f"{verb}s")
