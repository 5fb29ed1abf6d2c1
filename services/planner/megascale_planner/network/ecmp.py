"""What equal-cost multi-path routing (ECMP) costs a training job: simulated, at the level of flows.

Switches choose links by hashes, so flows that could each have a link of their own share one, and a
ring is as fast as its slowest hop. How much that costs depends on the order of ranks over hosts, on
the ports of the ToRs (MegaScale section 3.6) and on how many queue pairs (QPs) share the bytes of a
connection, each with a hash of its own.

Every figure is simulated: rates are max-min fair, and neither packets nor time stand behind them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megascale_job.visible import counted
from megascale_planner.network.fabric import Fabric, Floats, mixed_bits
from megascale_planner.network.max_min import max_min_rates
from megascale_planner.network.traffic import BadJob, Pairs, hosts_in_order, pairs

MOST_FLOWS = 4_000_000  # about a gigabyte of links


@dataclass(frozen=True, slots=True)
class Result:
    """One phase of a job in one order, under one seed of the hashes. Rates are in line rates.

    Attributes:
        rates: of each transfer, shape ``[groups, members]``.
        cross_tor: share of the transfers that leave their ToR.
    """

    order: str
    phase: str
    qps: int
    split: bool
    seed: int
    rates: Floats
    cross_tor: float

    @property
    def mean_rate(self) -> float:
        """Over all transfers."""
        return float(self.rates.mean())

    @property
    def worst_rate(self) -> float:
        """Of the slowest transfer: what the job waits for where all take part."""
        return float(self.rates.min())

    @property
    def slowest_hop(self) -> float:
        """The rate of a group's slowest transfer, the mean over the groups: how fast rings are."""
        return float(self.rates.min(axis=1).mean())

    def slowdowns(self) -> Floats:
        """How many times as long each group takes as alone: shape ``[groups]``."""
        return np.asarray(1.0 / self.rates.min(axis=1), np.float64)

    def row(self) -> dict[str, float | int | str | bool]:
        """As CSV and JSON have it."""
        slow = self.slowdowns()
        return {
            "order": self.order,
            "phase": self.phase,
            "qps": self.qps,
            "split": self.split,
            "seed": self.seed,
            "cross_tor": round(self.cross_tor, 4),
            "mean_rate": round(self.mean_rate, 4),
            "worst_rate": round(self.worst_rate, 4),
            "slowest_hop_mean": round(self.slowest_hop, 4),
            "slowdown_p50": round(float(np.percentile(slow, 50)), 3),
            "slowdown_p99": round(float(np.percentile(slow, 99)), 3),
            "slowdown_max": round(float(slow.max()), 3),
        }


def simulate(fabric: Fabric, pp: int, order: str, phase: str, qps: int, seed: int) -> Result:
    """One phase of a job that fills the fabric.

    Raises:
        BadJob: the hosts cannot be divided by ``pp``, or there are too many flows.
    """
    if pp < 1 or fabric.hosts % pp:
        raise BadJob(
            f"pp {pp} does not divide {counted(fabric.hosts, 'host')}: give a divisor of the hosts"
        )
    flows = fabric.hosts * fabric.rails * qps
    if not 1 <= flows <= MOST_FLOWS:
        raise BadJob(
            f"{counted(flows, 'flow')}: give fewer hosts or queue pairs, {MOST_FLOWS:,} at most"
        )
    places = hosts_in_order(order, fabric.hosts // pp, pp, fabric.hosts_per_tor, seed)
    found = pairs(phase, places, fabric.rails)
    here = fabric.tor_of(found.source, found.rail)
    there = fabric.tor_of(found.target, found.rail)
    rates = _rates(fabric, found, qps, seed)
    cross = float((here != there).mean())
    return Result(order, phase, qps, fabric.split, seed, rates, cross)


def _rates(fabric: Fabric, found: Pairs, qps: int, seed: int) -> Floats:
    shape, count = found.source.shape, found.source.size
    flow = np.arange(count * qps, dtype=np.uint64)
    key = mixed_bits(np.array([seed], np.uint64))
    entropy = (mixed_bits(flow ^ key) >> np.uint64(1)).astype(np.int64)
    ways = fabric.ways(
        np.repeat(found.source.ravel(), qps),
        np.repeat(found.target.ravel(), qps),
        np.repeat(found.rail.ravel(), qps),
        entropy,
    )
    capacities = fabric.capacities()
    if qps > 1:
        # Messages go round over the queue pairs: none gets more than its part of the bytes.
        own = len(capacities) + np.arange(count * qps)
        ways = np.concatenate([ways, own[:, None]], axis=1)
        capacities = np.concatenate([capacities, np.full(count * qps, 1.0 / qps)])
    each = max_min_rates(ways, capacities)
    return np.asarray(each.reshape(count, qps).sum(axis=1).reshape(shape), np.float64)


def conflict_probability(flows: int, links: int, flows_per_link: int) -> float:
    """How likely a flow shares its link up with more flows than the link has room for.

    Args:
        flows: that leave the ToR, each over a link that is drawn at random.
        links: up, from the ToR.
        flows_per_link: that fit: 2 where ports are split, else 1.
    """
    others = flows - 1
    fits = sum(
        math.comb(others, k) * (1 / links) ** k * (1 - 1 / links) ** (others - k)
        for k in range(min(flows_per_link, flows))
    )
    return max(0.0, 1.0 - fits)


def conflicts(ports: int, loads: tuple[float, ...]) -> Iterator[dict[str, float | bool]]:
    """The curve of :func:`conflict_probability` over the share of a ToR's NICs that send."""
    for split in (True, False):
        room = 2 if split else 1
        for load in loads:
            flows = max(1, round(load * ports * room))
            chance = conflict_probability(flows, ports, room)
            yield {"split": split, "load": load, "conflict": round(chance, 4)}
