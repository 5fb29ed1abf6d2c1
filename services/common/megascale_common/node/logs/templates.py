"""Clusters of unknown fatal lines: lines of one template differ only in variable parts.

After Drain (He et al., ICWS 2017): lines of equal length in words and equal first word are
compared word by word, and join the template that agrees in most words. Bounded: past the limit
of templates, lines are counted under one last template.
"""

from __future__ import annotations

import re

MAX_TEMPLATES = 64
MAX_WORDS = 24
_AGREEING = 0.6  # share of words
_ANY = "<*>"
_OTHER = "unknown: further templates"
_PREFIX = re.compile(r"^(?:\[[^\]]*\]:?\s*)+|^\S+ kernel: (?:\[[^\]]*\] )?")
_VARIABLE = re.compile(
    r"0x[0-9a-fA-F]+|\b[0-9a-f]{8,}\b|\d+(?:[.:]\d+)*|'[^']*'|\"[^\"]*\"|(?:\.{0,2}/)\S+"
)


class Templates:
    """Templates seen so far; ``of`` returns the one that a line belongs to."""

    def __init__(self, limit: int = MAX_TEMPLATES) -> None:
        self._limit = limit
        self._count = 0
        self._groups: dict[tuple[int, str], list[list[str]]] = {}

    def of(self, line: str) -> str:
        """The template of a line, with ``<*>`` for what varies."""
        words = _VARIABLE.sub(_ANY, _PREFIX.sub("", line, count=1)).split()[:MAX_WORDS]
        if not words:
            return _OTHER
        key = (len(words), words[0])
        group = self._groups.get(key)
        best = max(group, key=lambda known: _agreement(known, words)) if group else None
        if best is not None and _agreement(best, words) >= _AGREEING:
            for index, word in enumerate(words):
                if best[index] != word:
                    best[index] = _ANY
            return " ".join(best)
        if self._count >= self._limit:
            return _OTHER
        self._count += 1
        self._groups.setdefault(key, []).append(words)
        return " ".join(words)


def _agreement(known: list[str], words: list[str]) -> float:
    """Share of words that agree; a wildcard agrees with any word, a variable only with itself."""
    same = sum(a in (b, _ANY) for a, b in zip(known, words, strict=True))
    return same / len(words)
