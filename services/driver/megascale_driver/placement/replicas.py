"""Replica peers: for each node of an attempt, the node that keeps its replicas.

A replica helps only if it is not lost together with the node. So the peer shares no parallel group
with the node if possible: ranks of one group wait for each other, and a fault that breaks a
collective often breaks both. An ep group that crosses nodes counts, because its ranks exchange
tokens in every layer. It is on another host, rack and switch if the labels show one, and
each node keeps about one other node's replicas.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megascale_job.layout import AXES, GroupName, RankLayout

DOMAINS = ("host", "rack", "switch")  # labels of failure domains, the worst to share first
Group = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Member:
    """A node of an attempt: its ranks, and its topology labels."""

    name: str
    ranks: tuple[int, ...]
    topology: Mapping[str, str] = field(default_factory=dict)


def choose_peers(members: Sequence[Member], layout: RankLayout) -> dict[str, str]:
    """The peer of each node, by name; {} for one node. Equal attempts give equal peers.

    Criteria in this order: the peer shares the fewest parallel groups with the node, keeps the
    fewest replicas of others, shares the fewest of DOMAINS, and follows the node most closely in
    the order of ``members`` (the order of ranks, with wrap-around). So equal nodes form a ring.
    """
    count = len(members)
    if count < 2:
        return {}
    groups = [_groups(member, layout) for member in members]
    load, chosen = [0] * count, [0] * count
    # Greedy in rank order; :func:`_even_out` then repairs what the order has cost.
    for node in range(count):
        best: tuple[int, ...] | None = None
        for distance in range(1, count):
            other = (node + distance) % count
            key = (
                len(groups[node] & groups[other]),
                load[other],
                *_shared_domains(members[node], members[other]),
                distance,
            )
            if best is None or key < best:
                best = key
            if not any(key[:-1]):
                break  # no later one can be better
        assert best is not None
        chosen[node] = (node + best[-1]) % count
        load[chosen[node]] += 1
    _even_out(groups, load, chosen)
    return {members[node].name: members[peer].name for node, peer in enumerate(chosen)}


def _groups(member: Member, layout: RankLayout) -> frozenset[Group]:
    """The groups of its ranks with more than one rank, each by its name and first rank."""
    names: list[GroupName] = [axis for axis in AXES if layout.size(axis) > 1]
    if layout.ep > 1:
        names.append("ep")
    return frozenset(
        (name, layout.members(rank, name)[0]) for name in names for rank in member.ranks
    )


def _shared_domains(one: Member, other: Member) -> tuple[int, ...]:
    """For each of DOMAINS: 1 if both are known to be in the same one, else 0."""
    labels = ((one.topology.get(key, ""), other.topology.get(key, "")) for key in DOMAINS)
    return tuple(int(bool(mine) and mine == its) for mine, its in labels)


def _even_out(groups: Sequence[frozenset[Group]], load: list[int], chosen: list[int]) -> None:
    """Reassign nodes from peers that keep replicas of several nodes to peers that keep none.

    A node never gets a peer with which it shares more groups than with its present one.
    """
    for peer in range(len(load)):
        while load[peer] > 1 and _relieve(groups, load, chosen, peer):
            pass


def _relieve(
    groups: Sequence[frozenset[Group]], load: list[int], chosen: list[int], full: int
) -> bool:
    """Take one node away from ``full``, by the shortest chain of moves to an idle peer.

    A breadth-first search: to free ``full``, one of its nodes moves to a peer, from which another
    node moves on, and so on until a peer that keeps nothing.
    """
    kept: dict[int, list[int]] = {}
    for node, peer in enumerate(chosen):
        kept.setdefault(peer, []).append(node)
    moved: dict[int, int] = {}  # by peer: the node that would move to it
    waiting, unseen = deque([full]), [peer for peer in range(len(load)) if peer != full]
    while waiting:
        for node in kept[waiting.popleft()]:
            shared = len(groups[node] & groups[chosen[node]])
            fits = [p for p in unseen if p != node and len(groups[node] & groups[p]) <= shared]
            for peer in fits:
                moved[peer] = node
                if not load[peer]:
                    _move_along(chosen, moved, peer, full)
                    load[full], load[peer] = load[full] - 1, 1
                    return True
                waiting.append(peer)
            unseen = [peer for peer in unseen if peer not in moved]
    return False


def _move_along(chosen: list[int], moved: Mapping[int, int], idle: int, full: int) -> None:
    peer = idle
    while peer != full:
        node = moved[peer]
        chosen[node], peer = peer, chosen[node]
