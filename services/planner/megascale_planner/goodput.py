"""Cost of failures: the effective training time ratio of a run, and what the rest is lost to. Pure.

The best interval between saves is :func:`megascale_job.sizes.failures.best_interval_s`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megascale_job.sizes.failures import best_interval_s


@dataclass(frozen=True, slots=True)
class Goodput:
    """Shares of wall-clock time, 0 to 1: useful training (ETTR), and what the rest is lost to."""

    interval_s: float
    ettr: float
    saving: float
    repeated_work: float
    restarting: float


def goodput(
    mtbf_s: float, restart_s: float, save_cost_s: float, interval_s: float | None = None
) -> Goodput:
    """ETTR of a run that saves every ``interval_s`` of work (None: Daly's estimate).

    Failures come independently every ``mtbf_s``; each costs ``restart_s`` and the work since the
    newest save. Daly's complete model (Future Generation Computer Systems 22(3), 2006, equation
    20): W = M exp(R / M) (exp((t + C) / M) - 1) wall-clock seconds for t seconds of work.

    Raises:
        ValueError: ``mtbf_s`` or ``interval_s`` is not above 0, or a cost is negative.
    """
    if mtbf_s <= 0 or restart_s < 0 or save_cost_s < 0:
        raise ValueError(
            f"mtbf_s {mtbf_s} must be above 0, restart_s {restart_s} and save_cost_s "
            f"{save_cost_s} 0 or more"
        )
    work_s = best_interval_s(save_cost_s, mtbf_s) if interval_s is None else interval_s
    if work_s <= 0:  # saving costs nothing, so no work is ever repeated
        return Goodput(
            0.0, 1 / (1 + restart_s / mtbf_s), 0.0, 0.0, restart_s / (mtbf_s + restart_s)
        )
    exponent = (work_s + save_cost_s) / mtbf_s
    if exponent + restart_s / mtbf_s > _LARGEST_EXPONENT:
        return Goodput(work_s, 0.0, 0.0, 0.0, 1.0)
    wall_s = mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1(exponent)
    # Expected number of failures before one interval and its save succeed.
    failures = math.expm1(exponent)
    restarting_s = min(failures * restart_s, wall_s - work_s - save_cost_s)
    repeated_s = max(0.0, wall_s - work_s - save_cost_s - restarting_s)
    return Goodput(
        work_s, work_s / wall_s, save_cost_s / wall_s, repeated_s / wall_s, restarting_s / wall_s
    )


_LARGEST_EXPONENT = 500.0  # beyond this no interval is ever completed
