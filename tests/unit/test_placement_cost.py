"""Where a gang goes on the network: the cost, the orders of nodes, and which spare is taken."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale_driver.placement.cost import cheapest, compared
from megascale_driver.placement.gang import Candidate, Part, replace_lost, spares
from megascale_driver.placement.queue import decide
from megascale_driver.placement.queue_values import View, WaitingJob
from megascale_driver.placement.topology import BadTopology, expanded, parse
from megascale_job.layout import RankLayout
from megascale_job.loading import from_accepted
from megascale_planner.placement_cost import Traffic, distance, score, traffic_of

SCONTROL = """\
SwitchName=tor0 Level=0 LinkSpeed=1 Nodes=n[00-01]
SwitchName=tor1 Level=0 LinkSpeed=1 Nodes=n02,gpu[1,3]-a
SwitchName=agg0 Level=1 LinkSpeed=1 Nodes=n[00-02],gpu[1,3]-a Switches=tor[0-1]
"""


def fleet(switches: int, each: int, devices: int = 1) -> list[Candidate]:
    """Nodes whose names interleave their switches."""
    return [
        Candidate(f"n{at:03}", "cuda", tuple(range(devices)), f"s{at % switches:02}")
        for at in range(switches * each)
    ]


def gang(traffic: Traffic, last: tuple[Part, ...] = (), spares: tuple[str, ...] = ()) -> WaitingJob:
    size, tp = traffic.layout.world_size, traffic.layout.tp
    return WaitingJob(
        name="a", world_size=size, node_group=tp, traffic=traffic, last=last, spares=spares
    )


@given(
    tp=st.integers(1, 2), dp=st.integers(1, 4), pp=st.integers(1, 4), data=st.data(),
    wrap=st.sampled_from([0.0, 5.0]),
)  # fmt: skip
def test_the_score_is_the_sum_over_all_pairs_of_ranks(
    tp: int, dp: int, pp: int, data: st.DataObject, wrap: float
) -> None:
    layout = RankLayout(tp=tp, dp=dp, pp=pp)
    names = [f"n{i}" for i in range(4)]
    paths = {n: (f"s{i % 2}", "core") for i, n in enumerate(names)}
    node_of = data.draw(st.lists(st.sampled_from(names), min_size=dp * pp, max_size=dp * pp))
    found = score(Traffic(layout, 3.0, 7.0, wrap), node_of, paths)
    cost = crossing = 0.0
    for rank in range(layout.world_size):
        at = layout.coordinates(rank)
        ring = layout.members(rank, "dp")
        line = layout.members(rank, "pp")
        sends = [(ring[(at.dp + 1) % dp], 3.0)] if dp > 1 else []
        if pp > 1:
            last = at.pp == pp - 1
            sends.append((line[(at.pp + 1) % pp], wrap if last else 7.0))
        for peer, size in sends:
            one, other = node_of[rank // tp], node_of[peer // tp]
            if one != other:
                far = distance(paths[one], paths[other])
                cost += size * far
                crossing += size if far > 1 else 0
    assert found.cost == pytest.approx(cost) and found.crossing_bytes == pytest.approx(crossing)


@given(
    tp=st.sampled_from([1, 2, 4]), dp=st.sampled_from([1, 2, 4]), ep=st.sampled_from([1, 2, 4]),
    data=st.data(),
)  # fmt: skip
def test_the_ring_of_experts_joins_the_ranks_that_hold_the_same_ones(
    tp: int, dp: int, ep: int, data: st.DataObject
) -> None:
    layout = RankLayout(tp=tp, dp=dp, pp=2, ep=ep if ep <= tp * dp else 1)
    names = [f"n{i}" for i in range(4)]
    paths = {n: (f"s{i % 2}", "core") for i, n in enumerate(names)}
    groups = layout.world_size // tp
    node_of = data.draw(st.lists(st.sampled_from(names), min_size=groups, max_size=groups))
    traffic = Traffic(layout, 0.0, 0.0, expert_ring_bytes=5.0 * min(1.0, layout.ep / tp))
    cost = 0.0
    for rank in range(layout.world_size):
        ring = layout.members(rank, "expert_gradient")
        peer = ring[(ring.index(rank) + 1) % len(ring)]
        one, other = node_of[rank // tp], node_of[peer // tp]
        cost += 5.0 * distance(paths[one], paths[other]) if one != other else 0.0
    assert score(traffic, node_of, paths).cost == pytest.approx(cost)


def test_the_traffic_of_experts_counts_their_gradients_over_their_own_ranks() -> None:
    experts = {"count": 8, "top_k": 2, "ffn_size": 64, "dense_layers": 1}
    shape = {"block": "serial", "mlp": "swiglu", "bias": False, "ffn_size": 256}
    shape |= {"layers": 4, "hidden_size": 64, "heads": 4, "vocab_size": 300}
    shape["sequence_length"] = 32
    rest = {"name": "a", "training": {"steps": 1, "global_batch_size": 8}}
    sizes = {"tp": 2, "dp": 4, "pp": 2}
    dense, none, four = (
        traffic_of(
            from_accepted({**rest, "model": {**shape, **model}, "parallelism": {**sizes, **ep}})
        )
        for model, ep in (({}, {}), ({"experts": experts}, {}), ({"experts": experts}, {"ep": 4}))
    )
    assert dense.expert_ring_bytes == 0
    assert none.ring_bytes == four.ring_bytes < dense.ring_bytes  # attention, router, one layer
    weights = 3 * 8 * 3 * 64 * 64 / 2  # of a stage: three layers of four have experts
    assert four.expert_ring_bytes == pytest.approx(6 * weights / 4 * 1 / 2)
    assert none.expert_ring_bytes == pytest.approx(6 * weights * 7 / 8 * 1 / 2)  # one hop of two
    assert (none.expert_stride, four.expert_stride) == (1, 2)


@pytest.mark.parametrize(
    ("ring", "stage", "wins"),
    [(10.0, 1.0, "data-inner"), (1.0, 10.0, "pipeline-inner"), (2.0, 3.0, "blocks of 2 x 2")],
)
def test_the_order_follows_what_the_job_sends(ring: float, stage: float, wins: str) -> None:
    """16 nodes on 4 switches, dp 4 x pp 4: each of the three orders wins where it should."""
    job = gang(Traffic(RankLayout(dp=4, pp=4), ring, stage))
    found = cheapest(job, fleet(4, 4))
    assert found is not None and f"; {wins}" in found.why and "crosses switches" in found.why
    nodes = {c.name: c for c in fleet(4, 4)}
    assert job.traffic is not None
    costs = {name: each.cost for name, _, each in compared(job.traffic, found.parts, nodes)}
    assert sorted(rank for part in found.parts for rank in part.ranks) == list(range(16))
    assert costs["data-inner"] == min(costs.values()), "the chosen order cannot be bettered"


def test_the_papers_cluster_is_placed_in_blocks_which_halve_what_crosses_switches() -> None:
    """12,288 devices, 1,536 nodes on 24 switches; 175B at tp 8, pp 8, with 64 micro-batches."""
    traffic = Traffic(RankLayout(tp=8, dp=192, pp=8), 16.4e9, 4.8e9)
    nodes = fleet(24, 64, devices=8)
    found = cheapest(gang(traffic), nodes)
    assert found is not None
    by_name = {c.name: c for c in nodes}
    scores = {name: each for name, _, each in compared(traffic, found.parts, by_name)}
    blocks, lines = scores["blocks of 16 x 4 stages"], scores["pipeline-inner"]
    rings = scores["data-inner by switch"]
    assert blocks.cost < lines.cost < rings.cost
    assert blocks.cross_share < rings.cross_share / 2
    assert len(found.parts) == 1536 and "blocks of 16 x 4 stages: 8 %" in found.why


@pytest.mark.parametrize(
    ("order", "of_rings", "of_stages"), [("pipeline", 0.125, 0.0), ("data", 3 / 192, 1.0)]
)
def test_shares_between_switches_are_those_of_the_flow_simulators_table(
    order: str, of_rings: float, of_stages: float
) -> None:
    """docs/network.md: 1,536 nodes in order, 64 below each set of leaf switches."""
    layout = RankLayout(tp=8, dp=192, pp=8)
    places = [
        replica * 8 + stage if order == "pipeline" else stage * 192 + replica
        for stage in range(8)
        for replica in range(192)
    ]
    paths = {f"n{at}": (f"s{at // 64}",) for at in range(1536)}
    node_of = [f"n{at}" for at in places]
    assert score(Traffic(layout, 1.0, 0.0), node_of, paths).cross_share == pytest.approx(of_rings)
    assert score(Traffic(layout, 0.0, 1.0), node_of, paths).cross_share == pytest.approx(of_stages)


def test_a_lost_node_is_replaced_by_the_spare_that_adds_the_fewest_edges_between_switches() -> None:
    nodes = {c.name: c for c in fleet(2, 4)}
    traffic = Traffic(RankLayout(dp=4, pp=2), 1.0, 1.0)
    placed = cheapest(gang(traffic), nodes.values())
    assert placed is not None and len(placed.parts) == 8
    lost = placed.parts[5]
    near = nodes[lost.node].switch
    spares = [
        Candidate("a-far", "cuda", (0,), "s00" if near != "s00" else "s01"),
        Candidate("z-near", "cuda", (0,), near),
    ]
    left = {name: c for name, c in nodes.items() if name != lost.node}
    again = replace_lost(placed.parts, left, spares, [], traffic)
    assert again is not None
    assert [part.node for part in again if part.ranks == lost.ranks] == ["z-near"]

    job = gang(traffic, last=placed.parts, spares=("a-far", "z-near"))
    idle = {**left, **{c.name: c for c in spares}}
    (decision,) = decide(View(now_s=1.0, waiting=(job,), idle=idle, known=idle)).decisions
    assert "spare z-near joins them" in decision.why
    assert "the fewest edges between switches" in decision.why
    assert decision.score is not None and decision.score.cross_share < 0.5


def test_a_spare_on_the_jobs_switches_is_named_first() -> None:
    parts = (Part("n1", (0,), (0,)),)
    others = [Candidate(name, "cuda", (0,), switch) for name, switch in (("a", "s9"), ("z", "s1"))]
    assert spares(1, parts, others, {"s1"}) == ("z",)
    assert spares(2, parts, others, {"s1"}) == ("z", "a")


def test_a_topology_is_read_from_what_scontrol_prints_and_from_labels() -> None:
    found = parse(SCONTROL)
    assert found["n01"] == {"switch": "tor0", "block": "agg0"}
    assert found["gpu3-a"] == {"switch": "tor1", "block": "agg0"}
    assert len(found) == 5 and parse(json.dumps(found)) == found
    assert list(expanded("(null)")) == []


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("Nodes=n1", "line 1"),
        ("SwitchName=a Level=0 Nodes=n[3-1]", "no list of hosts"),
        ("SwitchName=a Level=0 Nodes=n1\nSwitchName=b Level=0 Nodes=n1", "two switches"),
        ('{"n1": {"rack": "r"}}', "node n1"),
        ('{"n1": ', "no JSON"),
    ],
)
def test_a_topology_that_cannot_be_read_names_the_place(text: str, named: str) -> None:
    with pytest.raises(BadTopology, match=named):
        parse(text)
