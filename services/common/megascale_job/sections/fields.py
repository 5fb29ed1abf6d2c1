"""Declarations in the metadata of a job's fields: bounds, and how earlier builds know the field.

The check of values (:func:`bound_problems`), docs/job-spec.md, `megascale init` and the JSON Schema
read the bounds. Names, types and defaults are those of the dataclass's field.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megascale_job.problems import JobProblem

MAX_PATH = 4096  # the kernel's own limit
# Marks a field that earlier builds do not know. It is stored only if it is not at its default. A
# stored job without it takes the default of the build that reads it, so that default may change
# only if the numbers of a run do not depend on it.
ADDED: Mapping[str, Any] = {"added": True}
# Marks a field that was removed; the value is the remedy. A submitted job that sets it is refused.
# The field stays in the tree, but not in the message, so that jobs of earlier builds can be read
# and none of them runs without what it asked for.
REMOVED = "removed"
WIDE: Mapping[str, Any] = {"bits": 64}  # marks a whole number of 64 bits; others have 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Numbers that a field takes: from ``least`` to ``most``, above ``above``, below ``below``.

    ``or_zero``: 0 is allowed too. ``remedy`` says what to give instead, ``low`` only for numbers
    that are too small. ``words`` describes a number outside of the bounds.
    """

    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    or_zero: bool = False
    remedy: str = ""
    low: str = ""
    words: str = ""

    def problem(self, value: float) -> tuple[str, str] | None:
        """Problem and remedy of a number outside of the bounds; None for one inside."""
        shown = f"{value:g}" if isinstance(value, float) else f"{value}"
        if self._too_small(value):
            words = "out of range"
            if isinstance(value, int) and not self.remedy:
                words = "negative" if self.least == 0 else "not positive"
            remedy = self.remedy or self.low or f"give at least {self.least:g}"
            return f"{shown} is {self.words or words}", remedy
        if math.isfinite(value) and not self._too_large(value):
            return None
        remedy = self.remedy or (self.low if self.most is None else f"give at most {self.most}")
        return f"{shown} is {self.words or 'out of range'}", remedy

    def __str__(self) -> str:
        """The numbers, such as "1 to 4096", "above 1" or "0, or 2 to 8"."""
        ends = {
            "above": self.above,
            "below": self.below,
            "at least": self.least,
            "up to": self.most,
        }
        if self.least is not None and self.most is not None:
            text = f"{self.least:.16g} to {self.most:.16g}"
        else:
            ends = {
                "above": self.above,
                "at least": self.least,
                "below": self.below,
                "up to": self.most,
            }
            text = ", ".join(f"{word} {end:.16g}" for word, end in ends.items() if end is not None)
        return f"0, or {text}" if self.or_zero else text

    def _too_small(self, value: float) -> bool:
        if self.or_zero and value == 0:
            return False
        if self.above is not None and value <= self.above:
            return True
        return self.least is not None and value < self.least

    def _too_large(self, value: float) -> bool:
        if self.below is not None and value >= self.below:
            return True
        return self.most is not None and value > self.most


def bounds(
    least: float | None = None,
    most: float | None = None,
    *,
    added: bool = False,
    bits: int = 32,
    **more: Any,
) -> Mapping[str, Any]:
    """Metadata of a number: ``added`` and ``bits`` as ADDED and WIDE, ``more`` as in Bounds."""
    return {"bounds": Bounds(least=least, most=most, **more), "added": added, "bits": bits}


def removed(remedy: str) -> Mapping[str, Any]:
    """Metadata of a removed field, which only stored jobs can have."""
    return {**ADDED, REMOVED: remedy}


def bounds_of(field: dataclasses.Field[Any]) -> Bounds | None:
    """The bounds that a field declares."""
    found: Bounds | None = field.metadata.get("bounds")
    return found


def bound_problems(section: Any, path: str) -> Iterator[JobProblem]:
    """Numbers of a section, and of those in it, that are outside the bounds of their fields."""
    for field in dataclasses.fields(section):
        value, where = getattr(section, field.name), f"{path}.{field.name}" if path else field.name
        if dataclasses.is_dataclass(value):
            yield from bound_problems(value, where)
            continue
        if isinstance(value, tuple):
            for number, item in enumerate(value):
                if dataclasses.is_dataclass(item):
                    yield from bound_problems(item, f"{where}[{number}]")
            continue
        limits = bounds_of(field)
        found = limits.problem(value) if limits is not None else None
        if found is not None:
            yield JobProblem(where, *found)
