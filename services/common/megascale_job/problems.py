"""Problems of a job, each with field and remedy, and the error that carries them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the sections' checks make these problems
    from megascale_job.config import JobConfig


@dataclass(frozen=True, slots=True)
class JobProblem:
    """``field`` is the dotted path in the job; ``remedy`` says what to do."""

    field: str
    problem: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.field}: {self.problem}; {self.remedy}"


class JobError(ValueError):
    """A job is refused, with every problem that was found.

    ``config`` is the job if its fields could be read and only their values are refused, else None;
    `megascale plan` computes from it what such a job would need. ``source`` is the file of a job
    that could not be read; the field of its problems is then a line, or "file".
    """

    def __init__(
        self,
        problems: Iterable[JobProblem],
        config: JobConfig | None = None,
        *,
        source: str = "",
    ) -> None:
        self.problems = tuple(problems)
        self.config = config
        self.source = source
        head = f"{source}: " if source else ""
        super().__init__(head + "; ".join(map(str, self.problems)))
