"""Gang placement: all ranks of a job at once, on the fewest switches.

A tensor-parallel group never spans nodes. Ranks are contiguous by node, so that neighbouring ranks
(tensor, then data parallel) share nodes and switches (MegaScale section 3.6). After a fault the
surviving nodes keep their ranks, so that the snapshots in their memory can be restored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

KINDS = ("cuda", "cpu")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A node that may be used: its devices (indices, all of one kind) and switch ("": unknown)."""

    name: str
    kind: str
    devices: tuple[int, ...]
    switch: str = ""


@dataclass(frozen=True, slots=True)
class Part:
    """A node's part of a placement: ``ranks[i]`` runs on ``devices[i]``."""

    node: str
    ranks: tuple[int, ...]
    devices: tuple[int, ...]


def place(world_size: int, tp: int, candidates: Iterable[Candidate]) -> tuple[Part, ...] | None:
    """A new placement of ``world_size`` ranks, or None if the candidates do not suffice.

    All devices are of one kind, cuda if possible. A node takes whole tensor-parallel groups only.
    """
    usable = [c for c in candidates if _capacity(c, tp)]
    for kind in KINDS:
        chosen = _choose(world_size, tp, [c for c in usable if c.kind == kind])
        if chosen is not None:
            return _number(world_size, tp, chosen)
    return None


def replace_lost(
    parts: Sequence[Part],
    survivors: Mapping[str, Candidate],
    named_spares: Sequence[Candidate],
    others: Sequence[Candidate],
) -> tuple[Part, ...] | None:
    """The old placement with lost nodes replaced and survivors at their ranks; None if impossible.

    Named spares are used first, then other nodes; of each, first those on a survivor's switch.
    """
    kinds = {c.kind for c in survivors.values()}
    near = {c.switch for c in survivors.values()}
    pool = [
        *sorted(named_spares, key=lambda c: (c.switch not in near, c.name)),
        *sorted(others, key=lambda c: (c.switch not in near, c.name)),
    ]
    placed: list[Part] = []
    for part in parts:
        survivor = survivors.get(part.node)
        if survivor is not None and set(part.devices) <= set(survivor.devices):
            placed.append(part)
            continue
        found = next(
            (
                c
                for c in pool
                if len(c.devices) >= len(part.ranks) and (not kinds or c.kind in kinds)
            ),
            None,
        )
        if found is None:
            return None
        pool.remove(found)
        kinds.add(found.kind)
        placed.append(Part(found.name, part.ranks, found.devices[: len(part.ranks)]))
    return tuple(placed)


def spares(wanted: int, parts: Sequence[Part], candidates: Iterable[Candidate]) -> tuple[str, ...]:
    """Names of up to ``wanted`` nodes that can replace any node of the placement, by name."""
    used = {part.node for part in parts}
    need = max((len(part.ranks) for part in parts), default=0)
    fitting = [c for c in candidates if c.name not in used and len(c.devices) >= need]
    return tuple(c.name for c in sorted(fitting, key=lambda c: c.name)[:wanted])


def _capacity(candidate: Candidate, tp: int) -> int:
    return len(candidate.devices) // tp * tp


def _choose(world_size: int, tp: int, candidates: Sequence[Candidate]) -> list[Candidate] | None:
    """Nodes for the job in rank order: on the fewest switches, and then the fewest nodes."""
    by_switch: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        by_switch.setdefault(candidate.switch, []).append(candidate)
    room = {switch: sum(_capacity(c, tp) for c in nodes) for switch, nodes in by_switch.items()}
    if sum(room.values()) < world_size:
        return None
    # The smallest switch that suffices alone; else the largest first, which takes the fewest.
    enough = sorted((size, switch) for switch, size in room.items() if size >= world_size)
    order = [enough[0][1]] if enough else sorted(room, key=lambda switch: (-room[switch], switch))
    chosen: list[Candidate] = []
    left = world_size
    for switch in order:
        nodes = sorted(by_switch[switch], key=lambda c: (-_capacity(c, tp), c.name))
        while nodes and left > 0:
            # The largest nodes first; for the last node, the smallest that holds the rest.
            fitting = [c for c in nodes if _capacity(c, tp) >= left]
            node = min(fitting, key=lambda c: (_capacity(c, tp), c.name)) if fitting else nodes[0]
            nodes.remove(node)
            chosen.append(node)
            left -= _capacity(node, tp)
    return chosen


def _number(world_size: int, tp: int, nodes: Sequence[Candidate]) -> tuple[Part, ...]:
    parts: list[Part] = []
    first = 0
    for node in nodes:
        count = min(_capacity(node, tp), world_size - first)
        parts.append(Part(node.name, tuple(range(first, first + count)), node.devices[:count]))
        first += count
    return tuple(parts)
