"""A fat tree of top-of-rack, aggregation and core switches, and the links that a flow takes.

The shape is MegaScale's (section 3.6, and what ``docs/network.md`` assumes where the paper says
nothing): each of a host's network cards (NICs) goes to the top-of-rack switch (ToR) of its rail,
and each ToR has one link up to each aggregation switch of its block. Aggregation switch ``i`` of
any block reaches the core switches of plane ``i``, and each core switch has one link to each block.
All levels have the capacity of the level below.

ToR and aggregation switch choose one of their links up by a hash of the flow (ECMP). The way down
follows from that: a plane has one aggregation switch in each block.

Capacities and rates are in units of a NIC's line rate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

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
