"""The cost of equal-cost multi-path routing (ECMP) for a training job: a simulation of flows.

Switches choose links by hashes, so flows that could each have their own link share one, and a ring
is as fast as its slowest hop. The cost depends on the order of ranks over hosts, on the ports of
the ToRs (MegaScale section 3.6), and on the number of queue pairs (QPs) that share the bytes of a
connection, each with its own hash.

All figures are simulated: rates are max-min fair; there are no packets and there is no time.
Capacities and rates are in units of a NIC's line rate.

**Fabric**: a fat tree of top-of-rack, aggregation and core switches, in MegaScale's shape (section
3.6; ``docs/network.md`` has the assumptions where the paper says nothing). Each network card (NIC)
of a host is connected to the top-of-rack switch (ToR) of its rail, and each ToR has one link up to
each aggregation switch of its block. Aggregation switch ``i`` of any block reaches the core
switches of plane ``i``, and each core switch has one link to each block. Each level has the
capacity of the level below. ToR and aggregation switches choose a link up by a hash of the flow.
The way down follows from that, because a plane has one aggregation switch per block.

**Rates** are max-min fair, which is the aim of congestion control where flows share links. They are
computed by water-filling, many links at a time: a link is a bottleneck when none of its flows has
a smaller share elsewhere. The flows of all bottlenecks get their share in one pass, with the same
rates as one link after another (Bertsekas and Gallager, Data Networks, section 6.5.2).

**Transfers**: senders and receivers of a training job, for an order of its ranks over the hosts.
Tensor-parallel groups stay on a host, so a host has one place in the data-parallel and one in the
pipeline dimension. Each of its NICs carries what its own GPU sends to the same NIC of another host.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from megascale_job.visible import counted

Integers: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]

LINKS = 6  # of a flow at most: NIC, ToR up, aggregation up, core down, aggregation down, NIC
NO_LINK = 0  # fills the rows of shorter ways; a link of its own, which nothing fills


class BadFabric(ValueError):
    """The sizes of a fabric do not fit; the message has the option and the remedy."""


@dataclass(frozen=True, slots=True)
class Fabric:
    """The sizes of a cluster's network.

    Attributes:
        hosts: servers, each with ``rails`` NICs and as many GPUs.
        rails: NICs of a host; NIC ``r`` goes to the ToR of rail ``r``.
        ports: of a ToR, down as well as up.
        split: each port down is split in two, so that a link up has the capacity of two NICs and
            twice as many hosts share a ToR (section 3.6). Without it a NIC has the whole port.
        block: ToRs of a block, and aggregation switches in it.
        cores: links up of an aggregation switch.
    """

    hosts: int
    rails: int = 8
    ports: int = 32
    split: bool = True
    block: int = 32
    cores: int = 32

    def __post_init__(self) -> None:
        for name in ("hosts", "rails", "ports", "block", "cores"):
            if not 1 <= getattr(self, name) <= 1_000_000:
                value = getattr(self, name)
                raise BadFabric(f"{name} is {value}: give a number from 1 to 1,000,000")

    @property
    def hosts_per_tor(self) -> int:
        """Servers that share a set of ToRs, one ToR for each rail."""
        return self.ports * (2 if self.split else 1)

    @property
    def tors(self) -> int:
        """How many ToRs there are."""
        return -(-self.hosts // self.hosts_per_tor) * self.rails

    @property
    def blocks(self) -> int:
        """How many blocks of ToRs there are."""
        return -(-self.tors // self.block)

    def tor_of(self, host: Integers, rail: Integers) -> Integers:
        """The ToR of a host's NIC; all of shape ``[flows]``."""
        return host // self.hosts_per_tor * self.rails + rail

    def capacities(self) -> Floats:
        """What each link carries, in line rates of a NIC: shape ``[links]``, infinite for none."""
        up = 2.0 if self.split else 1.0
        counts = self._counts()
        nic, fabric = np.ones(2 * counts[0]), np.full(sum(counts[1:]), up)
        return np.concatenate([[np.inf], nic, fabric])

    def _counts(self) -> tuple[int, int, int, int, int]:
        """NICs; links from ToRs up, from aggregation up, from cores down, from aggregation down."""
        plane = self.blocks * self.ports * self.cores
        return self.hosts * self.rails, self.tors * self.ports, plane, plane, self.tors * self.ports

    def ways(
        self, source: Integers, target: Integers, rail: Integers, entropy: Integers
    ) -> Integers:
        """The links of each flow: shape ``[flows, LINKS]``, filled up with ``NO_LINK``.

        Args:
            source: host of each flow's sender, shape ``[flows]``.
            target: host of its receiver.
            rail: NIC of both.
            entropy: what the switches hash of the flow, such as a port: any whole numbers.
        """
        nics, tor_up, plane_up, plane_down, _ = self._counts()
        # Where each kind of link begins; 0 is NO_LINK.
        sent, received, up, across, back, down = np.cumsum(
            [1, nics, nics, tor_up, plane_up, plane_down]
        )
        here, there = self.tor_of(source, rail), self.tor_of(target, rail)
        block_here, block_there = here // self.block, there // self.block
        first = _choice(entropy, here, self.ports)  # ToR to aggregation: the plane of the flow
        second = _choice(entropy, block_here * self.ports + first + (1 << 32), self.cores)
        links = np.full((len(source), LINKS), NO_LINK, np.int64)
        links[:, 0] = sent + source * self.rails + rail
        links[:, 5] = received + target * self.rails + rail
        far, farther = here != there, block_here != block_there
        links[:, 1] = np.where(far, up + here * self.ports + first, NO_LINK)
        links[:, 4] = np.where(far, down + there * self.ports + first, NO_LINK)
        column, plane = first * self.cores + second, self.ports * self.cores
        links[:, 2] = np.where(farther, across + block_here * plane + column, NO_LINK)
        links[:, 3] = np.where(farther, back + block_there * plane + column, NO_LINK)
        return links


def _choice(entropy: Integers, switch: Integers, ways: int) -> Integers:
    """Which of ``ways`` links a switch takes for each flow: each switch hashes with its own key."""
    mixed = mixed_bits(entropy.astype(np.uint64) ^ mixed_bits(switch.astype(np.uint64)))
    return (mixed % np.uint64(ways)).astype(np.int64)


def mixed_bits(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A well mixed function of each value (the finaliser of splitmix64, Steele et al. 2014)."""
    with np.errstate(over="ignore"):
        values = values + np.uint64(0x9E3779B97F4A7C15)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


_EPSILON = 1e-9  # shares that differ by less are the same


def max_min_rates(ways: Integers, capacities: Floats) -> Floats:
    """The rate of each flow, in the unit of the capacities.

    Args:
        ways: the links of each flow, shape ``[flows, links of a flow]``; a link with an infinite
            capacity limits nothing.
        capacities: of each link, shape ``[links]``.

    Returns:
        Shape ``[flows]``.
    """
    rates = np.zeros(len(ways))
    left = capacities.astype(np.float64).copy()
    open_flows = np.arange(len(ways))
    while len(open_flows):
        links = ways[open_flows]
        used, places = np.unique(links, return_inverse=True)
        places = places.reshape(links.shape)
        counts = np.bincount(places.ravel(), minlength=len(used))
        shares = left[used] / counts
        least = shares[places].min(axis=1)
        # The least of what the flows of each link get: it is its own share where it is bottleneck.
        lowest = np.full(len(used), np.inf)
        np.minimum.at(lowest, places, least[:, None])
        bottleneck = lowest >= shares * (1.0 - _EPSILON)
        fixed = bottleneck[places].any(axis=1)
        rates[open_flows[fixed]] = least[fixed]
        taken = np.bincount(
            places[fixed].ravel(),
            weights=np.repeat(least[fixed], links.shape[1]),
            minlength=len(used),
        )
        left[used] = np.maximum(left[used] - taken, 0.0)
        open_flows = open_flows[~fixed]
    return rates


ORDERS = ("pp-inner", "dp-inner", "block", "random")
PHASES = ("dp", "pp")


class BadJob(ValueError):
    """The job does not fit the fabric; the message has the option and the remedy."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """Transfers of a phase, one for each NIC of each host.

    Attributes:
        source: the sender's host, shape ``[groups, members]``: a group is the ring of a
            data-parallel group, or the line of a pipeline.
        target: the receiver's host, of the same shape.
        rail: NIC of both, of the same shape.
    """

    source: Integers
    target: Integers
    rail: Integers


def hosts_in_order(order: str, dp: int, pp: int, hosts_per_tor: int, seed: int = 0) -> Integers:
    """The host of each place: shape ``[dp, pp]``.

    ``pp-inner`` and ``dp-inner`` count the stages, or the replicas, within a ToR first; ``block``
    gives each set of ToRs as square a part of both as divides them; ``random`` is what a placement
    without knowledge of the network gives.
    """
    hosts = np.arange(dp * pp, dtype=np.int64)
    if order == "pp-inner":
        return hosts.reshape(dp, pp)
    if order == "dp-inner":
        return np.ascontiguousarray(hosts.reshape(pp, dp).T)
    if order == "random":
        keys = mixed_bits(hosts.astype(np.uint64) ^ mixed_bits(np.array([seed], np.uint64)))
        return np.argsort(keys, kind="stable").reshape(dp, pp).astype(np.int64)
    if order != "block":
        raise BadJob(f"order {order!r} is unknown: give one of {', '.join(ORDERS)}")
    rows, columns = _block_of(dp, pp, hosts_per_tor)
    blocks = hosts.reshape(dp // rows, pp // columns, rows, columns)
    return np.ascontiguousarray(blocks.transpose(0, 2, 1, 3).reshape(dp, pp))


def _block_of(dp: int, pp: int, hosts_per_tor: int) -> tuple[int, int]:
    """Replicas and stages of a block: as many hosts as fit a ToR, then as square as possible."""
    sizes = [
        (rows, columns)
        for rows in range(1, min(dp, hosts_per_tor) + 1)
        for columns in range(1, min(pp, hosts_per_tor // rows) + 1)
        if not dp % rows and not pp % columns
    ]
    return max(sizes, key=lambda size: (size[0] * size[1], -abs(math.log(size[0] / size[1]))))


def pairs(phase: str, places: Integers, rails: int, *, interleaved: bool = True) -> Pairs:
    """Transfers of a phase.

    Args:
        phase: ``dp``: each replica sends to the next of its ring (gradients and parameters);
            ``pp``: each stage sends to the next (activations).
        places: the host of each place, shape ``[dp, pp]``.
        rails: NICs of a host.
        interleaved: the last stage sends to the first, too (several chunks a stage).
    """
    if phase == "dp":
        source, target = places.T, np.roll(places, -1, axis=0).T
    elif phase == "pp":
        source, target = places, np.roll(places, -1, axis=1)
        if not interleaved:
            source, target = source[:, :-1], target[:, :-1]
    else:
        raise BadJob(f"phase {phase!r} is unknown: give one of {', '.join(PHASES)}")
    if not source.size or (source == target).all():
        raise BadJob(f"no host sends to another in phase {phase}: give a {phase} above 1")
    rail = np.broadcast_to(np.arange(rails)[:, None, None], (rails, *source.shape))
    shape = (rails * source.shape[0], source.shape[1])
    return Pairs(
        np.broadcast_to(source, rail.shape).reshape(shape),
        np.broadcast_to(target, rail.shape).reshape(shape),
        rail.reshape(shape),
    )


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
