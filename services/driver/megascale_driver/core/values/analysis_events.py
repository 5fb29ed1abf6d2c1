"""Events of what analyses find in the step records and spans of an attempt."""

from __future__ import annotations

from dataclasses import dataclass

from megascale_driver.analysis.divergence import Divergence


@dataclass(frozen=True, slots=True)
class LossDiverged:
    """The step records of a job show that it diverges."""

    now_s: float
    job: str
    found: Divergence


@dataclass(frozen=True, slots=True)
class StragglerFound:
    """Spans of an attempt show a slow node; ``rank`` is its slowest one."""

    now_s: float
    job: str
    attempt: int
    node: str
    rank: int
    operation: str
    ratio: float
    sentence: str


@dataclass(frozen=True, slots=True)
class PlanCompared:
    """Steps of an attempt beside their plan; ``slower_by``: a term, "" where it is as planned."""

    now_s: float
    job: str
    attempt: int
    slower_by: str
    sentence: str
    first_step: int
    last_step: int
    hardware: str
