"""The communication groups that a rank creates, in their order. Pure.

A rank creates only its own groups, so a start costs O(n) in the whole job: creating every group on
every rank took 1,047 s for 2,048 devices (MegaScale, section 3.5).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from megascale_job.layout import GroupName, RankLayout

# Note [Equal numbers of groups]
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
# torch names a group after its ranks and *the number of groups that the rank has*, and members meet
# in the store under that name. So a group must be the n-th one, for the same n, on all its members.
# Pipeline edges are made in rounds: from even stages, from odd ones, the ring's closing edge. A
# rank without a partner in a round creates a group of its own. The rounds also keep chains of ranks
# from waiting for each other.

Kind = Literal["axis", "edge", "ends", "alone"]
Payload = Literal["activation", "gradient"]
DENSE_GROUPS: tuple[GroupName, ...] = ("tp", "cp", "gradient")
EXPERT_GROUPS: tuple[GroupName, ...] = ("ep", "expert_gradient")
PAYLOADS: tuple[Payload, ...] = ("activation", "gradient")


@dataclass(frozen=True, slots=True)
class PlannedGroup:
    """One group that a rank creates with ``ranks`` (ascending, itself included).

    Args:
        name: as on the status page; empty for a group of one, which only keeps numbers equal.
        sends: for an edge: this rank sends on it and the other one receives; else the reverse.
    """

    kind: Kind
    name: str
    ranks: tuple[int, ...]
    sends: bool = False


def group_plan(
    layout: RankLayout, rank: int, *, ring: bool = False, tied: bool = False, experts: bool = False
) -> list[PlannedGroup]:
    """The groups of ``rank`` besides the world, in the order of their creation.

    ``ring`` adds the pipeline edge from the last stage to the first (interleaving). ``tied`` adds
    the group in which these two sum the gradients of tied embeddings. ``experts`` adds the groups
    of a model with experts. A group of one rank is not created, and neither is a second one of the
    same ranks: :func:`group_with_ranks_of`.
    """
    planned: dict[GroupName, tuple[int, ...]] = {}
    for group in (*DENSE_GROUPS, *(EXPERT_GROUPS if experts else ())):
        ranks = tuple(layout.members(rank, group))
        if len(ranks) > 1:
            planned.setdefault(group_with_ranks_of(layout, group), ranks)
    found = [PlannedGroup("axis", name, ranks) for name, ranks in planned.items()]
    if layout.pp == 1:
        return found
    line = layout.members(rank, "pp")
    found += _edges(line, line.index(rank), ring)
    if tied:
        outer = rank in (line[0], line[-1])
        name = f"pp0-{len(line) - 1}.tied"
        found.append(PlannedGroup("ends", name, (line[0], line[-1])) if outer else _alone(rank))
    return found


def group_with_ranks_of(layout: RankLayout, name: GroupName) -> GroupName:
    """The group that stands for ``name``: dp for gradients that are summed over dp alone."""
    if name == "expert_gradient" and layout.span(name) == layout.span("gradient"):
        name = "gradient"
    return "dp" if name == "gradient" and layout.cp == 1 else name


def edge_name(low: int, high: int, payload: Payload) -> str:
    """Name of the edge from stage ``low`` to ``high``, which is 0 on the ring's closing edge."""
    return f"pp{low}-{high}.{payload}"


def _edges(line: Sequence[int], stage: int, ring: bool) -> Iterator[PlannedGroup]:
    last = len(line) - 1
    rounds = [{low: low + 1 for low in range(last) if low % 2 == parity} for parity in (0, 1)]
    if ring:
        rounds.append({last: 0})
    for edges in rounds:
        if not edges:
            continue
        mine = next((edge for edge in edges.items() if stage in edge), None)
        for payload in PAYLOADS:
            if mine is None:
                yield _alone(line[stage])
                continue
            low, high = mine
            ends = (line[low], line[high])
            yield PlannedGroup(
                "edge",
                edge_name(low, high, payload),
                (min(ends), max(ends)),
                sends=(stage == low) == (payload == "activation"),
            )


def _alone(rank: int) -> PlannedGroup:
    return PlannedGroup("alone", "", (rank,))
