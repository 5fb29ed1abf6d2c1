"""Network cost of a placement: bytes of a step times the distance they travel. Pure, no numpy.

Traffic between nodes is the data-parallel ring (reduce-scatter of gradients, all-gather of
parameters: arXiv 1910.02054, section 7) and the pipeline's hidden states in both directions
(Narayanan et al., arXiv 2104.04473). Experts have a ring of their own, over the ranks with the same
ones. Groups of tp and ep stay within a node; with ``ep_across_nodes`` the tokens that travel to
experts on other nodes are not counted. Distances count tiers of switches: 0 within a node, 1 below
one leaf switch, one more per tier above.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megascale_job.config import JobConfig, ModelConfig
from megascale_job.layout import RankLayout
from megascale_job.sizes.flops import flops_per_token

GRADIENT_BYTES, PARAMETER_BYTES, HIDDEN_BYTES = 4, 2, 2  # of a value on the wire
_FLOPS_PER_WEIGHT = 6  # forward and backward

Path = tuple[str, ...]  # a node's switches, leaf first


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that a job's ranks send per step.

    Attributes:
        layout: the grid of ranks.
        ring_bytes: from a rank to the next in its data-parallel ring.
        stage_bytes: between a rank and its peer in the next stage, both directions together.
        wrap_bytes: the same between the last stage and the first, with interleaved chunks.
        expert_ring_bytes: from a tensor-parallel group to the next in the ring of its experts'
            gradients, per rank.
    """

    layout: RankLayout
    ring_bytes: float
    stage_bytes: float
    wrap_bytes: float = 0.0
    expert_ring_bytes: float = 0.0

    @property
    def expert_stride(self) -> int:
        """Tensor-parallel groups from one to the next in the ring of experts."""
        return max(1, self.layout.ep // self.layout.tp)


def traffic_of(config: JobConfig) -> Traffic:
    """The traffic of a job's step; the first stage's embedding is left out."""
    sizes, training, model = config.parallelism, config.training, config.model
    multiplied = flops_per_token(model).gemm / _FLOPS_PER_WEIGHT
    active, experts = _expert_weights(model)
    weights = (multiplied - active) / (sizes.tp * sizes.pp)
    ring = (GRADIENT_BYTES + PARAMETER_BYTES) * weights * (sizes.dp - 1) / sizes.dp
    tokens = training.micro_batch_size * model.sequence_length * config.micro_batches
    hidden = HIDDEN_BYTES * tokens * model.hidden_size / sizes.tp
    chunks = sizes.virtual_stages
    return Traffic(
        sizes.layout,
        ring,
        2 * hidden * chunks,
        2 * hidden * (chunks - 1),
        _expert_ring_bytes(config, experts / (sizes.ep * sizes.pp)),
    )


def _expert_weights(model: ModelConfig) -> tuple[float, float]:
    """Weights of experts: those that a token is multiplied by, and all."""
    experts = model.experts
    if not experts.count:
        return 0.0, 0.0
    layers = model.layers - experts.dense_layers
    each = 3 * model.hidden_size * model.expert_width * layers
    return float(experts.top_k * each), float(experts.count * each)


def _expert_ring_bytes(config: JobConfig, weights: float) -> float:
    """Bytes of ``weights`` of experts on a rank that leave its group of tp, per rank of the group.

    With ep below tp a ring passes several ranks of a group, and leaves it once.
    """
    layout = config.layout
    replicas = len(layout.members(0, "expert_gradient"))
    moved = (GRADIENT_BYTES + PARAMETER_BYTES) * weights * (replicas - 1) / replicas
    return moved * min(1.0, layout.ep / layout.tp)


@dataclass(frozen=True, slots=True)
class Score:
    """The cost of a placement.

    Attributes:
        cost: bytes x tiers per step.
        between_bytes: bytes per step between nodes.
        crossing_bytes: part of these between leaf switches.
        crossing_edges: connections that carry this part: hops of rings, links between stages.
    """

    cost: float
    between_bytes: float
    crossing_bytes: float
    crossing_edges: int

    @property
    def cross_share(self) -> float:
        """Share of the bytes between nodes that leave their leaf switch."""
        return self.crossing_bytes / self.between_bytes if self.between_bytes else 0.0


def distance(one: Path, other: Path) -> int:
    """Tiers between two nodes: 1 below one leaf switch."""
    for tier, (mine, its) in enumerate(zip(one, other, strict=False), start=1):
        if mine == its:
            return tier
    return max(len(one), len(other)) + 1


def score(traffic: Traffic, node_of: Sequence[str], paths: Mapping[str, Path]) -> Score:
    """The cost of a placement.

    Args:
        node_of: the node of each tensor-parallel group, in rank order.
        paths: the switches of each node, leaf first.
    """
    cost = between = crossing = 0.0
    edges = 0
    tp = traffic.layout.tp
    # Thousands of groups share few pairs of nodes: compute each distance once.
    known: dict[tuple[str, str], int] = {}
    for at, node in enumerate(node_of):
        for peer, size in peers(traffic, at):
            other = node_of[peer]
            if other == node:
                continue
            far = known.get((node, other))
            if far is None:
                far = known[node, other] = distance(paths[node], paths[other])
            between += tp * size
            cost += tp * size * far
            if far > 1:
                crossing += tp * size
                edges += tp
    return Score(cost, between, crossing, edges)


def added(
    traffic: Traffic,
    groups: Sequence[int],
    node_of: Mapping[int, str],
    path: Path,
    paths: Mapping[str, Path],
) -> tuple[int, float]:
    """Edges between switches, and cost, that a node with ``path`` adds if it takes ``groups``.

    ``node_of``: the nodes of groups that are placed; edges to other groups are not counted.
    """
    edges, cost, mine, tp = 0, 0.0, set(groups), traffic.layout.tp
    for at in groups:
        for peer, size in (*peers(traffic, at), *_before(traffic, at)):
            other = node_of.get(peer)
            if peer in mine or other is None:
                continue
            far = distance(path, paths[other])
            cost += tp * size * far
            edges += tp * (far > 1)
    return edges, cost


def peers(traffic: Traffic, group: int) -> list[tuple[int, float]]:
    """Receivers of a tensor-parallel group: the group's number, and bytes per rank."""
    return _neighbours(traffic, group, 1)


def _before(traffic: Traffic, group: int) -> list[tuple[int, float]]:
    """Senders to a tensor-parallel group, likewise."""
    return _neighbours(traffic, group, -1)


def _neighbours(traffic: Traffic, group: int, step: int) -> list[tuple[int, float]]:
    dp, pp = traffic.layout.dp * traffic.layout.cp, traffic.layout.pp
    stage, replica = divmod(group, dp)
    found = []
    if dp > 1:
        found.append((stage * dp + (replica + step) % dp, traffic.ring_bytes))
        if traffic.expert_ring_bytes:
            peer = (replica + step * traffic.expert_stride) % dp
            found.append((stage * dp + peer, traffic.expert_ring_bytes))
    if 0 <= stage + step < pp:
        found.append(((stage + step) * dp + replica, traffic.stage_bytes))
    elif pp > 1 and traffic.wrap_bytes:
        found.append(((stage + step) % pp * dp + replica, traffic.wrap_bytes))
    return found
