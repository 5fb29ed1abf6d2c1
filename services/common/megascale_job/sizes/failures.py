"""Checkpoint interval and number of spare nodes for a given failure rate. Pure.

The interval of Young and Daly: a save costs the run ``cost_s``, failures occur every ``mtbf_s`` on
average, and each costs the work since the newest save. Saving more often loses less work and costs
more time; the optimum is:

    J. W. Young, "A first order approximation to the optimum checkpoint interval", Communications
    of the ACM 17(9), 1974: sqrt(2 C M).
    J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps",
    Future Generation Computer Systems 22(3), 2006, equation (37):
    sqrt(2 C M) (1 + sqrt(C / 2M) / 3 + (C / 2M) / 9) - C for C < 2M, else M.

The duration of a restart does not change the optimum.

The binomial rule for spares: a lost node is away for ``repair_hours``, until it is repaired. If N
nodes fail independently of each other, the number that is away at once is binomial with p = 1 -
exp(-rate * repair_hours). The number of spares is the smallest that suffices with the probability
``target``:

    B. Wan et al., "Robust LLM Training Infrastructure at ByteDance" (ByteRobust, arXiv 2509.16293):
    warm standbys at the 99th percentile of simultaneous machine failures; its table has 2, 2, 3
    and 4 for 128, 256, 512 and 1,024 machines.

With one failure in 50,000 device hours and eight devices per node, repairs of 7.3 to 7.8 hours give
those four numbers, hence the default of ``recovery.repair_hours``. The rule does not cover failures
of many nodes at once (a switch).
"""

from __future__ import annotations

import functools
import math

from megascale_job.config import JobConfig

# "The Llama 3 Herd of Models" (arXiv 2407.21783, section 3.3.4): 419 unexpected interruptions in 54
# days on 16,384 GPUs are one in 50,675 device hours.
PUBLISHED_DEVICE_HOURS = 50_000.0
HOUR_S = 3600.0
# Storage may be busy at most half of the time, so that there are steps without a write to compare.
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
    """:func:`best_interval_s` in whole steps of ``step_s``, between ``least`` and ``most``.

    It is never so short that the storage, which needs ``persist_s`` per save, would be busy for
    more than half of the time.
    """
    seconds = max(best_interval_s(cost_s, mtbf_s), QUIET_SHARE * persist_s)
    return max(least, min(most, math.ceil(seconds / step_s)))


def device_hours_per_failure(published: float, failures: int, device_hours: float) -> float:
    """Device hours between failures: the ``published`` figure, corrected by the fleet's count.

    The published figure counts as one failure in its hours (the mean of a gamma distribution that
    is updated by the count), so it decides for a young fleet, and the fleet's own for an old one.
    """
    return (published + device_hours) / (1 + failures)


def mtbf_s(device_hours: float, devices: int) -> float:
    """Seconds between failures of a job on ``devices``, one failure in ``device_hours``."""
    return device_hours * HOUR_S / max(1, devices)


def away_probability(node_mtbf_hours: float, repair_hours: float) -> float:
    """Probability that a node fails within the time of a repair.

    Raises:
        ValueError: ``node_mtbf_hours`` is not above 0, or ``repair_hours`` negative.
    """
    if node_mtbf_hours <= 0 or repair_hours < 0:
        raise ValueError(
            f"node_mtbf_hours {node_mtbf_hours} must be above 0, repair_hours {repair_hours} 0 or "
            "more"
        )
    return -math.expm1(-repair_hours / node_mtbf_hours)


@functools.lru_cache(maxsize=1024)
def enough_spares(nodes: int, probability: float, target: float) -> int:
    """The smallest k for which at most k of ``nodes`` are away with a probability of ``target``.

    Raises:
        ValueError: a negative number of nodes, or no probability.
    """
    if nodes < 0 or not 0 <= probability <= 1 or not 0 < target < 1:
        raise ValueError(
            f"nodes {nodes}, probability {probability}, target {target}: give 0 or more, 0 to 1, "
            "and between 0 and 1"
        )
    if probability in (0.0, 1.0):
        return nodes if probability else 0
    log_p, log_q = math.log(probability), math.log1p(-probability)
    terms: list[float] = []
    for k in range(nodes + 1):
        ways = math.lgamma(nodes + 1) - math.lgamma(k + 1) - math.lgamma(nodes - k + 1)
        terms.append(math.exp(ways + k * log_p + (nodes - k) * log_q))
        # The exact sum of all terms so far, computed only once it can reach the target.
        if k >= nodes * probability - 1 and math.fsum(terms) >= target:
            return k
    return nodes


def wanted_spares(
    config: JobConfig, nodes: int, devices_per_node: int, device_hours: float | None = None
) -> int:
    """Spares of a job on ``nodes``: the number in its specification, or by the rule.

    Args:
        device_hours: hours of one device between two failures; None: the job's
            ``checkpoint.device_mtbf_hours``.
    """
    if config.recovery.spares != "auto":
        return config.recovery.spare_nodes
    return advised_spares(config, nodes, devices_per_node, device_hours)


def advised_spares(
    config: JobConfig, nodes: int, devices_per_node: int, device_hours: float | None = None
) -> int:
    """Spares by the rule, whether or not the job follows it; see :func:`wanted_spares`."""
    hours = config.checkpoint.device_mtbf_hours if device_hours is None else device_hours
    away = away_probability(hours / max(1, devices_per_node), config.recovery.repair_hours)
    return enough_spares(nodes, away, config.recovery.spare_probability)
