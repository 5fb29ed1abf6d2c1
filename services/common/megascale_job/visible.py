"""Makes text from jobs, people and machines safe to show, and counts things in words.

Shown text must not control the terminal: a worker's error could clear an operator's screen.
"""

from __future__ import annotations

import re

# Characters that a terminal or a reader obeys: controls except tab and new line, DEL, controls of
# eight bits, and marks that change the direction of text.
_OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]"
)


def visible(text: str) -> str:
    """The text with each such character as Python's escape, such as ``\\x1b`` for ESC."""
    return _OBEYED.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def counted(number: float, thing: str) -> str:
    """A number and the noun that it counts, in the plural unless it is 1."""
    if number == 1:
        return f"1 {thing}"
    shown = f"{number:,}" if isinstance(number, int) else f"{number:,g}"
    if thing.endswith("ry"):
        return f"{shown} {thing[:-1]}ies"
    return f"{shown} {thing}{'es' if thing.endswith(('ch', 's')) else 's'}"


def agreed(number: int, verb: str) -> str:
    """The verb for a number of things, from its plural, such as ``are`` or ``wait``."""
    if number != 1:
        return verb
    return {"are": "is", "have": "has", "were": "was"}.get(verb, f"{verb}s")
