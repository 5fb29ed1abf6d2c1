"""Flows in a fat tree: fair rates, routes, and the published effects of order, ports and QPs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.harness.properties import examples

from megascale_planner.network.ecmp import (
    LINKS,
    NO_LINK,
    BadFabric,
    BadJob,
    Fabric,
    conflict_probability,
    hosts_in_order,
    max_min_rates,
    pairs,
    simulate,
)

PAPER = {split: Fabric(1536, split=split) for split in (True, False)}  # 12,288 GPUs


def one_after_another(ways: np.ndarray, capacities: np.ndarray) -> np.ndarray:
    """Water-filling by its definition: the tightest link of all is filled first."""
    rates, left = np.zeros(len(ways)), capacities.astype(float).copy()
    waiting = set(range(len(ways)))
    while waiting:
        users = {link: [f for f in waiting if link in ways[f]] for link in range(len(capacities))}
        shares = {link: left[link] / len(found) for link, found in users.items() if found}
        tightest = min(shares, key=lambda link: (shares[link], link))
        for flow in users[tightest]:
            rates[flow] = shares[tightest]
            for link in set(ways[flow]):
                left[link] -= shares[tightest]
            waiting.remove(flow)
    return rates


@given(
    flows=st.lists(
        st.lists(st.integers(0, 5), min_size=2, max_size=2, unique=True), min_size=1, max_size=12
    ),
    capacities=st.lists(st.integers(1, 9), min_size=6, max_size=6),
)
@examples(150)
def test_rates_are_those_of_one_link_after_another(
    flows: list[list[int]], capacities: list[int]
) -> None:
    ways, room = np.array(flows, np.int64), np.array(capacities, np.float64)
    rates = max_min_rates(ways, room)
    assert rates == pytest.approx(one_after_another(ways, room))
    for link in range(6):
        used = sum(rate for rate, way in zip(rates, flows, strict=True) if link in way)
        assert used <= room[link] * (1 + 1e-9)


def test_a_flow_stays_below_the_lowest_switch_that_joins_its_ends() -> None:
    fabric = PAPER[True]
    assert (fabric.hosts_per_tor, fabric.tors, fabric.blocks) == (64, 192, 6)
    hosts = np.array([1, 64, 1535])  # under the same ToR as host 0, in its block, and far away
    rail = np.zeros(3, np.int64)
    ways = fabric.ways(np.zeros(3, np.int64), hosts, rail, np.arange(3))
    assert [(way != NO_LINK).sum() for way in ways] == [2, 4, LINKS]
    assert ways.max() < len(fabric.capacities())
    assert len({tuple(way) for way in ways}) == 3


def test_no_two_kinds_of_links_share_a_number() -> None:
    fabric = Fabric(200, rails=2, ports=3, block=4, cores=2)
    source = np.arange(199).repeat(2)
    rail = np.tile([0, 1], 199)
    ways = fabric.ways(source, source[::-1] + 1, rail, np.arange(398))
    columns = [set(ways[:, column]) - {NO_LINK} for column in range(LINKS)]
    for one in range(LINKS):
        for other in range(one):
            assert not columns[one] & columns[other], (one, other)


@pytest.mark.parametrize(
    ("order", "phase", "split", "qps", "mean", "worst", "cross"),
    [
        ("pp-inner", "dp", True, 1, 0.999, 0.50, 0.125),
        ("pp-inner", "dp", False, 1, 0.973, 0.25, 0.25),
        ("pp-inner", "pp", True, 1, 1.0, 1.0, 0.0),
        ("dp-inner", "dp", True, 1, 1.0, 1.0, 0.016),
        ("dp-inner", "pp", True, 1, 0.684, 0.22, 1.0),
        ("dp-inner", "pp", True, 16, 0.931, 0.80, 1.0),
        ("dp-inner", "pp", False, 1, 0.458, 0.17, 1.0),
        ("random", "dp", True, 1, 0.595, 0.22, 0.96),
        ("random", "dp", False, 1, 0.422, 0.125, 0.98),
    ],
)
def test_orders_of_ranks_cost_what_another_simulation_found(
    order: str, phase: str, split: bool, qps: int, mean: float, worst: float, cross: float
) -> None:
    """12,288 GPUs; the other one draws its hashes otherwise, so the worst of all flows differs."""
    found = simulate(PAPER[split], 8, order, phase, qps, seed=0)
    assert found.mean_rate == pytest.approx(mean, abs=0.01)
    assert found.worst_rate == pytest.approx(worst, abs=0.05)
    assert found.cross_tor == pytest.approx(cross, abs=0.01)


@pytest.mark.parametrize(("qps", "slowest"), [(1, 0.252), (2, 0.409), (4, 0.575)])
def test_more_queue_pairs_lift_the_slowest_hop_of_a_ring(qps: int, slowest: float) -> None:
    found = simulate(PAPER[True], 8, "random", "dp", qps, seed=0)
    assert found.slowest_hop == pytest.approx(slowest, abs=0.02)


def test_the_hashes_follow_from_the_seed() -> None:
    fabric = Fabric(256)
    rates = [simulate(fabric, 8, "dp-inner", "pp", 1, seed).mean_rate for seed in (0, 0, 1)]
    assert rates[0] == rates[1] != rates[2]


@pytest.mark.parametrize(
    ("flows", "room", "chance"),
    [(64, 2, 0.590), (32, 2, 0.253), (16, 2, 0.078), (32, 1, 0.626), (16, 1, 0.379), (8, 1, 0.199)],
)
def test_split_ports_help_most_at_part_of_the_load(flows: int, room: int, chance: float) -> None:
    assert conflict_probability(flows, 32, room) == pytest.approx(chance, abs=0.001)


@pytest.mark.parametrize("order", ["pp-inner", "dp-inner", "block", "random"])
def test_every_order_uses_every_host_once(order: str) -> None:
    places = hosts_in_order(order, 24, 8, 64)
    assert places.shape == (24, 8) and sorted(places.ravel()) == list(range(192))


def test_a_block_keeps_part_of_both_dimensions_below_a_tor() -> None:
    places = hosts_in_order("block", 16, 16, 64)
    assert len(set(places[:8, :8].ravel() // 64)) == 1
    assert pairs("dp", places, 2).source.shape == (2 * 16, 16)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: Fabric(0), "hosts is 0: give a number"),
        (lambda: simulate(Fabric(10), 3, "pp-inner", "dp", 1, 0), "pp 3 does not divide 10 hosts"),
        (lambda: simulate(Fabric(16), 1, "pp-inner", "pp", 1, 0), "give a pp above 1"),
        (lambda: simulate(Fabric(16), 2, "best", "dp", 1, 0), "give one of pp-inner"),
        (lambda: simulate(Fabric(16), 2, "block", "tp", 1, 0), "give one of dp, pp"),
        (lambda: simulate(Fabric(100_000), 1, "block", "dp", 16, 0), "give fewer hosts"),
    ],
)
def test_what_does_not_fit_is_refused(make: object, problem: str) -> None:
    assert callable(make)
    with pytest.raises((BadFabric, BadJob), match=problem):
        make()
