"""Fingerprints and templates of lines that differ only in variable parts.

After Drain (He et al., ICWS 2017): lines with equally many words and the same first word are
compared word by word, and join the template that agrees in most words. Beyond the limit of
templates, lines are counted under one last template.
"""

from __future__ import annotations

import re

MAX_TEMPLATES = 64
MAX_WORDS = 24
MAX_FINGERPRINT = 120  # characters
_AGREEING = 0.6  # share of words
_ANY = "<*>"
_OTHER = "unknown: further templates"
_PREFIX = re.compile(r"^(?:\[[^\]]*\]:?\s*)+|^\S+ kernel: (?:\[[^\]]*\] )?")
_VARIABLE = re.compile(
    r"0x[0-9a-fA-F]+|\b[0-9a-f]{8,}\b|\d+(?:[.:]\d+)*|'[^']*'|\"[^\"]*\"|(?:\.{0,2}/)\S+"
)


def masked(text: str) -> str:
    """The text with numbers, addresses, quoted names and paths replaced by ``<*>``."""
    return _VARIABLE.sub(_ANY, text)


def fingerprint(kind: str, message: str, node: str = "") -> str:
    """Equal for failures that differ only in variable parts and in the node's own name."""
    text = message.replace(node, "NODE") if node else message
    return f"{kind}: {masked(text)}"[:MAX_FINGERPRINT]


class Templates:
    """Templates seen so far; ``of`` returns the one that a line belongs to."""

    def __init__(self, limit: int = MAX_TEMPLATES) -> None:
        self._limit = limit
        self._count = 0
        # The text that names a template, and its words; more of them can turn out to vary.
        self._groups: dict[tuple[int, str], list[tuple[str, list[str]]]] = {}

    def of(self, line: str) -> str:
        """The template of a line, named by its first line with ``<*>`` for variable parts."""
        words = masked(_PREFIX.sub("", line, count=1)).split()[:MAX_WORDS]
        if not words:
            return _OTHER
        key = (len(words), words[0])
        group = self._groups.get(key)
        best = max(group, key=lambda known: _agreement(known[1], words)) if group else None
        if best is not None and _agreement(best[1], words) >= _AGREEING:
            for index, word in enumerate(words):
                if best[1][index] != word:
                    best[1][index] = _ANY
            return best[0]
        if self._count >= self._limit:
            return _OTHER
        self._count += 1
        name = " ".join(words)
        self._groups.setdefault(key, []).append((name, words))
        return name


def _agreement(known: list[str], words: list[str]) -> float:
    """Share of words that agree; a wildcard agrees with any word, a variable only with itself."""
    same = sum(a in (b, _ANY) for a, b in zip(known, words, strict=True))
    return same / len(words)
