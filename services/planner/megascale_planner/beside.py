"""Measured steps beside planned ones, and when a job is slower than its plan; pure.

One slow step says nothing, nor does one slow window: steps of a running job vary. A job is slower
than planned when the median of each of several windows in a row lies above the prediction's
interval, and as planned again when that of each lies clearly inside, by more than chance. In
between the verdict stays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megascale_planner.job_plan import JobPlan

Floats = npt.NDArray[np.float64]
_MAD_TO_DEVIATION, _MEDIAN_ERROR = 1.4826, 1.2533  # of a normal distribution


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRule:
    """When a verdict changes.

    ``windows`` windows of ``window_steps`` steps have to agree, and their common median has to be
    ``least_z`` robust standard errors beyond the limit. ``inside``: how far into the upper half of
    the interval, 0 to 1, steps have to come back. The term that was named stays named while its
    excess is at least ``keep_share`` of the largest.
    """

    window_steps: int = 10
    windows: int = 3
    inside: float = 0.75
    keep_share: float = 0.7
    least_z: float = 3.0


@dataclass(frozen=True, slots=True)
class Term:
    """A part of a step, in seconds."""

    name: str
    planned_s: float
    measured_s: float

    @property
    def excess_s(self) -> float:
        """How much longer it takes than planned."""
        return self.measured_s - self.planned_s


@dataclass(frozen=True, slots=True)
class Comparison:
    """Steps ``first`` to ``last`` beside their plan.

    ``slower_by``: the term with the largest excess while the job is slower than planned, "step"
    where terms were not measured; "" otherwise. ``terms`` add up to the step on both sides; empty
    where they were not measured.
    """

    first: int
    last: int
    step_s: float
    plan: JobPlan
    terms: tuple[Term, ...]
    slower_by: str
    sentence: str


def beside(
    steps: Sequence[int] | npt.NDArray[np.int64],
    step_s: Floats,
    terms: Mapping[str, Floats],
    plan: JobPlan,
    before: str = "",
    rule: PlanRule | None = None,
) -> Comparison | None:
    """Compare the newest steps with their plan; None while there is not a window of them.

    Args:
        steps: their numbers, in order. ``step_s`` and each of ``terms``: seconds, as many.
        terms: empty where they were not measured.
        before: ``slower_by`` of the comparison before.
    """
    rule = rule or PlanRule()
    count = min(len(steps), rule.windows * rule.window_steps)
    if count < rule.window_steps:
        return None
    newest = slice(len(steps) - count, None)
    measured = float(np.median(step_s[newest]))
    found = tuple(
        Term(name, plan.terms[name], float(np.median(values[newest])))
        for name, values in terms.items()
    )
    slower = _slower(step_s[newest], plan, bool(before), rule)
    slower_by = _largest(found, before, rule) if slower else ""
    sentence = sentence_of(measured, plan, found, slower_by)
    return Comparison(
        int(steps[newest][0]), int(steps[-1]), measured, plan, found, slower_by, sentence
    )


def sentence_of(step_s: float, plan: JobPlan, terms: Sequence[Term], slower_by: str) -> str:
    """``step 7.4 s, plan 6.5 s (6.1 to 6.9 s): data-parallel term +0.7 s (1.0 s, plan 0.3 s)``."""
    text = (
        f"step {_text(step_s)}, plan {_text(plan.step_s)} ({_text(plan.low_s)} to "
        f"{_text(plan.high_s)})"
    )
    term = next((term for term in terms if term.name == slower_by), None)
    if term is None:
        return text
    return (
        f"{text}: {term.name.replace('_', '-')} term +{_text(term.excess_s)} "
        f"({_text(term.measured_s)}, plan {_text(term.planned_s)})"
    )


def _slower(step_s: Floats, plan: JobPlan, before: bool, rule: PlanRule) -> bool:
    if len(step_s) < rule.windows * rule.window_steps:
        return before
    medians = np.median(step_s.reshape(rule.windows, rule.window_steps), axis=1)
    median = float(np.median(step_s))
    deviation = _MAD_TO_DEVIATION * float(np.median(np.abs(step_s - median)))
    margin = rule.least_z * _MEDIAN_ERROR * deviation / len(step_s) ** 0.5
    if not before:
        return bool(np.all(medians > plan.high_s)) and median - margin > plan.high_s
    within = plan.step_s + rule.inside * (plan.high_s - plan.step_s)
    return not (bool(np.all(medians <= within)) and median + margin <= within)


def _largest(terms: Sequence[Term], before: str, rule: PlanRule) -> str:
    if not terms:
        return "step"
    most = max(terms, key=lambda term: term.excess_s)
    kept = next((term for term in terms if term.name == before), most)
    return kept.name if kept.excess_s >= rule.keep_share * most.excess_s else most.name


def _text(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
