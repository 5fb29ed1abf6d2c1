"""Whether a job fits the nodes that are known: what none of them could run, and what is missing.

A node may join later, so most of it is a warning, or the reason for which a job waits. Refused is
what no known node could run in any number: a tensor-parallel group, which never spans nodes, and
the memory of one rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megascale_driver.placement.gang import Candidate, place
from megascale_job.config import JobConfig
from megascale_job.problems import JobProblem
from megascale_job.sizes.failures import wanted_spares
from megascale_job.visible import counted


@dataclass(frozen=True, slots=True)
class Capacity:
    """A node that is or was known. ``memory_bytes`` is of its largest device; 0: not reported.

    The slots of a node of CPUs share the host's memory, and each reports all of it.
    """

    node: Candidate
    memory_bytes: int

    @property
    def devices(self) -> int:
        """How many devices it has."""
        return len(self.node.devices)


def refusals(config: JobConfig, rank_bytes: int, known: Sequence[Capacity]) -> list[JobProblem]:
    """What no known node could run; empty while none is known.

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
                f"than {_devices(largest)}",
                f"use a tp of at most {largest}, or add larger nodes first",
            )
        )
    memory = max(each.memory_bytes for each in known)
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


def warnings(config: JobConfig, known: Sequence[Capacity]) -> list[str]:
    """What the known nodes lack for this job, one sentence each."""
    found = []
    if lack := _lack(config, [each.node for each in known]):
        found.append(f"the job will wait: {lack}")
    nodes = _fewest(config, known)
    spares = wanted_spares(config, nodes, max((each.devices for each in known), default=1))
    left = max(len(known) - nodes, 0)
    if spares > left:
        auto = config.recovery.spares == "auto"
        what = f"spares: auto asks for {spares}" if auto else f"spare_nodes: {spares} are asked for"
        found.append(
            f"recovery.{what}, and of {_nodes(len(known))} known so far {left} can be spared"
        )
    return found


def _lack(config: JobConfig, known: Sequence[Candidate]) -> str:
    """What the job needs beyond all known nodes; empty if they suffice."""
    world_size, tp = config.layout.world_size, config.layout.tp
    if not known:
        return f"it needs {_devices(world_size)}, and no node has joined yet"
    if place(world_size, tp, known) is not None:
        return ""
    if tp > (largest := max(len(node.devices) for node in known)):
        return (
            f"it needs nodes of at least {counted(tp, 'device')}, and the largest known one has "
            f"{largest}"
        )
    groups = f" in groups of {tp} on one node" if tp > 1 else ""
    return (
        f"it needs {_devices(world_size)} of one kind{groups}, and {_nodes(len(known))} known so "
        f"far can give {_usable(known, tp)}"
    )


def _fewest(config: JobConfig, known: Sequence[Capacity]) -> int:
    """How many of the known nodes the job takes; all of them where they do not suffice."""
    parts = place(config.layout.world_size, config.layout.tp, [each.node for each in known])
    return len(known) if parts is None else len(parts)


def _usable(nodes: Iterable[Candidate], tp: int) -> int:
    return sum(len(node.devices) // tp * tp for node in nodes)


def _devices(count: int) -> str:
    return counted(count, "device")


def _nodes(count: int) -> str:
    return counted(count, "node")


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f} GiB"
