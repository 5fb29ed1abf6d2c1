"""Gang placement: all ranks of a job at once, on the fewest switches.

A tensor-parallel group never spans nodes, and an expert-parallel one only if the job allows it: a
node takes whole groups of ``ParallelismConfig.node_group`` ranks. Ranks are contiguous on each
node, so that neighbouring ranks (tensor, then data parallel) share nodes and switches (MegaScale
section 3.6); :mod:`megascale_driver.placement.cost` compares other orders of the nodes. After a
fault the surviving nodes keep their ranks, so that the snapshots in their memory can be restored.

At submit, :func:`fit_refusals` and :func:`fit_warnings` check a job against the known nodes. More
nodes can join later, so a lack of nodes is only a warning. A job is refused if no number of the
known nodes could run it: such a group or the memory of one rank is too large for them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from megascale_job.config import JobConfig
from megascale_job.problems import JobProblem
from megascale_job.sections.parallelism import ep_node_problem
from megascale_job.sizes.failures import wanted_spares
from megascale_job.visible import counted
from megascale_planner.placement_cost import Path, Traffic, added


@dataclass(frozen=True, slots=True)
class Capacity:
    """A node that joined at some time. ``memory_bytes``: its largest device's; 0: not reported.

    The slots of a CPU node share the host's memory; each reports all of it.
    """

    node: Candidate
    memory_bytes: int

    @property
    def devices(self) -> int:
        """Number of devices."""
        return len(self.node.devices)


def fit_refusals(config: JobConfig, rank_bytes: int, known: Sequence[Capacity]) -> list[JobProblem]:
    """Requirements that no known node meets; empty while no node is known.

    Args:
        rank_bytes: memory that the largest rank needs
            (:func:`megascale_job.sizes.memory.largest_rank_memory`).
    """
    problems: list[JobProblem] = []
    if not known:
        return problems
    tp, largest = config.layout.tp, max(each.devices for each in known)
    if tp > largest:
        problems.append(
            JobProblem(
                "trainer.parallelism.tp",
                f"a tensor-parallel group of {tp} stays within a node, and no known node has more "
                f"than {counted(largest, 'device')}",
                f"use a tp of at most {largest}, or add larger nodes first",
            )
        )
    elif too_wide := ep_node_problem(
        config.parallelism, largest, "no known node has more than", "add larger nodes first"
    ):
        problems.append(too_wide)
    memory = max(each.memory_bytes for each in known)
    # A node that did not report its memory could be large enough.
    if all(each.memory_bytes for each in known) and rank_bytes > memory:
        problems.append(
            JobProblem(
                "trainer.parallelism",
                f"the largest rank needs about {_gib(rank_bytes)}, and no device of a known node "
                f"has more than {_gib(memory)}",
                "raise tp or pp, lower trainer.training.micro_batch_size, or use recompute: full",
            )
        )
    return problems


def fit_warnings(config: JobConfig, known: Sequence[Capacity]) -> list[str]:
    """Nodes and spares that are missing for this job, one sentence each."""
    found = []
    if lack := _lack(config, [each.node for each in known]):
        found.append(f"the job will wait: {lack}")
    nodes = _fewest(config, known)
    spares = wanted_spares(config, nodes, max((each.devices for each in known), default=1))
    left = max(len(known) - nodes, 0)
    if spares > left:
        auto = config.recovery.spares == "auto"
        what = f"spares: auto asks for {spares}" if auto else f"spare_nodes: {spares} are asked for"
        nodes_known = f"{counted(len(known), 'node')} known so far"
        found.append(f"recovery.{what}, and of {nodes_known} {left} can be spared")
    return found


def _lack(config: JobConfig, known: Sequence[Candidate]) -> str:
    """The devices that the job needs and all known nodes lack; empty if they suffice."""
    world_size, group = config.layout.world_size, config.parallelism.node_group
    if not known:
        return f"it needs {counted(world_size, 'device')}, and no node has joined yet"
    if place(world_size, group, known) is not None:
        return ""
    if group > (largest := max(len(node.devices) for node in known)):
        return (
            f"it needs nodes of at least {counted(group, 'device')}, and the largest known one has "
            f"{largest}"
        )
    groups = f" in groups of {group} on one node" if group > 1 else ""
    return (
        f"it needs {counted(world_size, 'device')} of one kind{groups}, and "
        f"{counted(len(known), 'node')} known so far can give "
        f"{sum(ranks_on(node, group) for node in known)}"
    )


def _fewest(config: JobConfig, known: Sequence[Capacity]) -> int:
    """Number of known nodes that the job would take; all of them if they do not suffice."""
    parts = place(
        config.layout.world_size, config.parallelism.node_group, [each.node for each in known]
    )
    return len(known) if parts is None else len(parts)


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f} GiB"


KINDS = ("cuda", "cpu")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A node that can be used: its devices (indices, all of one kind) and switch ("": unknown).

    ``above``: the known switches above that one, the nearest first.
    """

    name: str
    kind: str
    devices: tuple[int, ...]
    switch: str = ""
    above: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        """The node's switches, leaf first."""
        return (self.switch, *self.above)


@dataclass(frozen=True, slots=True)
class Part:
    """A node's part of a placement: ``ranks[i]`` runs on ``devices[i]``."""

    node: str
    ranks: tuple[int, ...]
    devices: tuple[int, ...]


def ranks_on(candidate: Candidate, group: int) -> int:
    """Number of ranks that the node takes in whole groups of ``group``."""
    return len(candidate.devices) // group * group


def place(world_size: int, group: int, candidates: Iterable[Candidate]) -> tuple[Part, ...] | None:
    """A new placement of ``world_size`` ranks, or None if the candidates do not suffice.

    All devices are of one kind, cuda if possible. A node takes only whole groups of
    ``group`` ranks.
    """
    usable = [c for c in candidates if ranks_on(c, group)]
    for kind in KINDS:
        chosen = _choose(world_size, group, [c for c in usable if c.kind == kind])
        if chosen is not None:
            return _number(world_size, group, chosen)
    return None


def replace_lost(
    parts: Sequence[Part],
    survivors: Mapping[str, Candidate],
    named_spares: Sequence[Candidate],
    others: Sequence[Candidate],
    traffic: Traffic | None = None,
) -> tuple[Part, ...] | None:
    """The old placement with lost nodes replaced and survivors at their ranks; None if impossible.

    Named spares are used first, then other nodes. Among these, the node is chosen that adds the
    fewest edges between switches to the ``traffic``, then the one that adds the least cost.
    """
    # A survivor that lost one of its devices cannot keep all its ranks, and is replaced.
    kept = {
        part.node: part
        for part in parts
        if part.node in survivors and set(part.devices) <= set(survivors[part.node].devices)
    }
    near = _Neighbourhood(traffic, {survivors[name]: part.ranks for name, part in kept.items()})
    kinds = {c.kind for c in survivors.values()}
    pools = [list(named_spares), list(others)]
    placed: list[Part] = []
    for part in parts:
        if part.node in kept:
            placed.append(part)
            continue
        need = len(part.ranks)
        for pool in pools:
            fitting = [c for c in pool if len(c.devices) >= need and (not kinds or c.kind in kinds)]
            if fitting:
                break
        else:
            return None
        rank_key = near.key(part.ranks)
        found = min(fitting, key=lambda c: (*rank_key(c.path), c.name))
        pool.remove(found)
        kinds.add(found.kind)
        near.take(found, part.ranks)
        placed.append(Part(found.name, part.ranks, found.devices[:need]))
    return tuple(placed)


class _Neighbourhood:
    """Nodes of the ranks around a lost node, to compare candidates for its place."""

    def __init__(self, traffic: Traffic | None, known: Mapping[Candidate, tuple[int, ...]]) -> None:
        self._traffic = traffic
        self._node_of: dict[int, str] = {}
        self._paths: dict[str, Path] = {}
        self._switches = {node.switch for node in known}
        for node, ranks in known.items():
            self.take(node, ranks)

    def take(self, node: Candidate, ranks: Sequence[int]) -> None:
        """Record that the node has these ranks."""
        self._paths[node.name] = node.path
        self._node_of.update(dict.fromkeys(self._groups(ranks), node.name))

    def key(self, ranks: Sequence[int]) -> Callable[[Path], tuple[int, float]]:
        """A function of a node's path: edges between switches, and cost, that it would add."""
        traffic, groups = self._traffic, self._groups(ranks)
        if traffic is None:
            return lambda path: (path[0] not in self._switches, 0.0)
        return cache(lambda path: added(traffic, groups, self._node_of, path, self._paths))

    def _groups(self, ranks: Sequence[int]) -> list[int]:
        tp = self._traffic.layout.tp if self._traffic is not None else 1
        return sorted({rank // tp for rank in ranks})


def spares(
    wanted: int,
    parts: Sequence[Part],
    candidates: Iterable[Candidate],
    switches: Collection[str] = (),
) -> tuple[str, ...]:
    """Names of up to ``wanted`` nodes that can replace any node of the placement, by name.

    Nodes on the placement's ``switches`` come first, because they add no edge between switches.
    """
    used = {part.node for part in parts}
    # As large as the largest node of the placement, so that a spare can replace any of them.
    need = max((len(part.ranks) for part in parts), default=0)
    fitting = [c for c in candidates if c.name not in used and len(c.devices) >= need]
    return tuple(
        c.name for c in sorted(fitting, key=lambda c: (c.switch not in switches, c.name))[:wanted]
    )


def _choose(world_size: int, group: int, candidates: Sequence[Candidate]) -> list[Candidate] | None:
    """Nodes for the job in rank order: on the fewest switches, and then the fewest nodes."""
    by_switch: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        by_switch.setdefault(candidate.switch, []).append(candidate)
    room = {switch: sum(ranks_on(c, group) for c in nodes) for switch, nodes in by_switch.items()}
    if sum(room.values()) < world_size:
        return None
    # The smallest switch that suffices alone; else the largest switches first, which are fewest.
    enough = sorted((size, switch) for switch, size in room.items() if size >= world_size)
    order = [enough[0][1]] if enough else sorted(room, key=lambda switch: (-room[switch], switch))
    chosen: list[Candidate] = []
    left = world_size
    for switch in order:
        nodes = sorted(by_switch[switch], key=lambda c: (-ranks_on(c, group), c.name))
        while nodes and left > 0:
            # The largest nodes first; for the last node, the smallest that holds the rest.
            fitting = [c for c in nodes if ranks_on(c, group) >= left]
            node = min(fitting, key=lambda c: (ranks_on(c, group), c.name)) if fitting else nodes[0]
            nodes.remove(node)
            chosen.append(node)
            left -= ranks_on(node, group)
    return chosen


def _number(world_size: int, group: int, nodes: Sequence[Candidate]) -> tuple[Part, ...]:
    parts: list[Part] = []
    first = 0
    for node in nodes:
        count = min(ranks_on(node, group), world_size - first)
        parts.append(Part(node.name, tuple(range(first, first + count)), node.devices[:count]))
        first += count
    return tuple(parts)
