"""How often a run is worth saving: the interval of Young and Daly, pure.

A save costs the run ``cost_s``, and failures come every ``mtbf_s`` on average; each of them costs
the work since the newest save. Saving more often loses less and costs more; in between lies an
optimum:

    J. W. Young, "A first order approximation to the optimum checkpoint interval", Communications
    of the ACM 17(9), 1974: sqrt(2 C M).
    J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps",
    Future Generation Computer Systems 22(3), 2006, equation (37):
    sqrt(2 C M) (1 + sqrt(C / 2M) / 3 + (C / 2M) / 9) - C for C < 2M, else M.

The time that a restart takes does not change where the optimum lies.
"""

from __future__ import annotations

import math

# "The Llama 3 Herd of Models" (arXiv 2407.21783, section 3.3.4): 419 unexpected interruptions in 54
# days on 16,384 GPUs are one in 50,675 device hours.
PUBLISHED_DEVICE_HOURS = 50_000.0
HOUR_S = 3600.0
# A store that is busy at most half of the time leaves steps without it to compare with.
QUIET_SHARE = 2.0


def best_interval_s(cost_s: float, mtbf_s: float) -> float:
    """Seconds of work between two saves: Daly's estimate (see the module).

    Raises:
        ValueError: ``cost_s`` is negative, or ``mtbf_s`` not above 0.
    """
    if cost_s < 0 or mtbf_s <= 0:
        raise ValueError(f"cost_s {cost_s} must be 0 or more, and mtbf_s {mtbf_s} above 0")
    share = cost_s / (2 * mtbf_s)
    if share >= 1:
        return mtbf_s
    young_s = math.sqrt(2 * cost_s * mtbf_s)
    return young_s * (1 + math.sqrt(share) / 3 + share / 9) - cost_s


def interval_steps(
    *, cost_s: float, persist_s: float, step_s: float, mtbf_s: float, least: int, most: int
) -> int:
    """:func:`best_interval_s` in whole steps of ``step_s``, ``least`` to ``most``.

    Never so often that the storage, which takes ``persist_s`` for a save, would be busy for more
    than half of the time.
    """
    seconds = max(best_interval_s(cost_s, mtbf_s), QUIET_SHARE * persist_s)
    return max(least, min(most, math.ceil(seconds / step_s)))


def device_hours_per_failure(published: float, failures: int, device_hours: float) -> float:
    """Device hours between failures: the ``published`` figure, corrected by what the fleet counted.

    The published figure counts as one failure in its hours (the mean of a gamma distribution that
    is updated by the count), so a young fleet keeps it and an old one its own.
    """
    return (published + device_hours) / (1 + failures)


def mtbf_s(device_hours: float, devices: int) -> float:
    """Seconds between failures of a job on ``devices``, one failure in ``device_hours``."""
    return device_hours * HOUR_S / max(1, devices)
