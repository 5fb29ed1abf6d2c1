"""One signature: how a kind of line is recognised."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from megascale_common.node.logs.categories import Action, Kind, Role


@dataclass(frozen=True, slots=True)
class Signature:
    """A kind of line, and how it is recognised.

    ``literals`` are in lower case: a line, in lower case, must hold one of them. ``wide`` marks a
    signature of a vocabulary rather than of a text: it does not count in lines that say of
    themselves that they are information.
    """

    kind: Kind
    literals: tuple[str, ...]
    pattern: re.Pattern[str] | None  # None: a literal suffices
    unless: re.Pattern[str] | None = None  # a line with this is of another kind
    wide: bool = False


def text(
    name: str,
    category: str,
    role: Role,
    action: Action,
    *literals: str,
    pattern: str | None = None,
    unless: str | None = None,
    kernel: bool = False,
    weak: bool = False,
    wide: bool = False,
) -> Signature:
    """A signature of a text; its patterns are compared with the line as it is.

    ``wide``: of a vocabulary; its patterns are compared without regard to case.
    """
    kind = Kind(name, category, role, action, kernel=kernel, weak=weak)
    lower = tuple(dict.fromkeys(literal.lower() for literal in literals))
    flags = re.IGNORECASE if wide else re.NOFLAG
    matches = re.compile(pattern, flags) if pattern else None
    return Signature(kind, lower, matches, re.compile(unless, flags) if unless else None, wide)


wide = functools.partial(text, wide=True)
