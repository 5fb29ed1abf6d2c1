"""Orders about replicas for the nodes of an attempt: frozen values, stored with the job."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ReplicaSource:
    """The node that keeps the replica which ``rank`` restores, and its replica server."""

    rank: int
    node: str
    endpoint: str


@dataclass(frozen=True, slots=True)
class NodeReplicaOrders:
    """One node's part: the replica server for its snapshots, and what its ranks restore."""

    target: str = ""
    sources: tuple[ReplicaSource, ...] = ()


@dataclass(frozen=True, slots=True)
class FailedCopies:
    """Step of the attempt's newest snapshot without a replica, and how many it has of them."""

    step: int = 0
    count: int = 0


@dataclass(frozen=True, slots=True)
class ReplicaOrders:
    """``peers``: the node that keeps each node's replicas; ``targets``: its replica server.

    ``sources``: the ranks that restore from a replica.
    """

    peers: Mapping[str, str] = field(default_factory=dict)
    targets: Mapping[str, str] = field(default_factory=dict)
    sources: tuple[ReplicaSource, ...] = ()

    def of(self, node: str, ranks: Collection[int]) -> NodeReplicaOrders:
        """The part of the node that has ``ranks``."""
        sources = tuple(source for source in self.sources if source.rank in ranks)
        return NodeReplicaOrders(self.targets.get(node, ""), sources)
