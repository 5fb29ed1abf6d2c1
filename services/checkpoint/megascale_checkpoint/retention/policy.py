"""Which checkpoints a job keeps: pure rules over the commits of its log.

Without a rule all are kept, because a checkpoint that is gone cannot be brought back: to remove
some is for whoever owns them to ask for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megascale_checkpoint.commit.commit_record import Checkpoint
from megascale_job.visible import counted

HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class Commit:
    """A checkpoint that exists; ``time_s`` is when it was committed, in seconds since 1970."""

    attempt: int
    step: int
    time_s: float

    @property
    def key(self) -> Checkpoint:
        """What names it."""
        return self.attempt, self.step


@dataclass(frozen=True, slots=True)
class Retention:
    """The rules; a checkpoint is kept that any of them keeps. 0 is no rule.

    Attributes:
        keep_latest: keep the newest so many.
        keep_every_steps: keep the first at or after every multiple of so many steps.
        keep_every_hours: keep the first of every so many hours, counted from 1970.
    """

    keep_latest: int = 0
    keep_every_steps: int = 0
    keep_every_hours: float = 0.0

    @property
    def keeps_all(self) -> bool:
        """Whether there is no rule."""
        return not (self.keep_latest or self.keep_every_steps or self.keep_every_hours)

    def to_record(self) -> dict[str, Any]:
        """Plain values for an OPEN record, whose names never change."""
        return asdict(self)

    @classmethod
    def from_record(cls, values: Mapping[str, Any]) -> Retention:
        """The inverse of :meth:`to_record`; records of older builds have no rule."""
        return cls(
            int(values.get("keep_latest", 0)),
            int(values.get("keep_every_steps", 0)),
            float(values.get("keep_every_hours", 0.0)),
        )

    def __str__(self) -> str:
        rules = {
            f"the newest {self.keep_latest}": self.keep_latest,
            f"one of every {counted(self.keep_every_steps, 'step')}": self.keep_every_steps,
            f"one of every {counted(self.keep_every_hours, 'hour')}": self.keep_every_hours,
        }
        return " and ".join(text for text, given in rules.items() if given) or "all"


def expendable(
    commits: Sequence[Commit], retention: Retention, protected: Collection[Checkpoint]
) -> list[Commit]:
    """The commits that no rule keeps, oldest first.

    Args:
        commits: those that exist, oldest first in the order of the log.
        protected: kept in any case: pinned, being loaded, the newest that is whole.
    """
    if retention.keeps_all or not commits:
        return []
    kept = {commits[-1].key, *protected}
    if retention.keep_latest:
        kept |= {each.key for each in commits[-retention.keep_latest :]}
    if retention.keep_every_steps:
        spans = _spans(commits, lambda each: each.step // retention.keep_every_steps)
        kept |= {each.key for span, each in spans.items() if span}  # 0 is before the first multiple
    if retention.keep_every_hours:
        length_s = retention.keep_every_hours * HOUR_S
        kept |= {each.key for each in _spans(commits, lambda c: c.time_s // length_s).values()}
    return [each for each in commits if each.key not in kept]


def _spans(commits: Sequence[Commit], span_of: Callable[[Commit], float]) -> dict[float, Commit]:
    """The first commit of each span: of the newest attempt that has one there.

    What an earlier attempt committed beyond the step that a later one restored was given up.
    """
    first: dict[float, Commit] = {}
    for each in commits:
        found = first.get(span_of(each))
        if found is None or each.attempt > found.attempt:
            first[span_of(each)] = each
    return first
