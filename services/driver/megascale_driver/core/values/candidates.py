"""Nodes as placement takes them: which could start now, and what they have."""

from __future__ import annotations

from collections.abc import Iterable

from megascale_driver.core.values.state import AttemptPhase, Desired, Disposition, Liveness, Node
from megascale_driver.placement import fit
from megascale_driver.placement.gang import Candidate
from megascale_driver.placement.topology import SWITCH_LABELS

_IDLE = Desired()


def candidate(node: Node) -> Candidate:
    """A node as placement takes it: name, devices, their kind, switches."""
    kinds = {device.kind for device in node.identity.devices}
    kind = kinds.pop() if len(kinds) == 1 else ""
    devices = tuple(device.index for device in node.identity.devices)
    switch, *above = (node.identity.topology.get(label, "") for label in SWITCH_LABELS)
    return Candidate(node.name, kind, devices, switch, tuple(above) if any(above) else ())


def capacities(nodes: Iterable[Node]) -> list[fit.Capacity]:
    """The nodes that have ever reported devices, as placement.fit takes them."""
    return [
        fit.Capacity(candidate(node), max(each.memory_bytes for each in node.identity.devices))
        for node in nodes
        if node.identity.devices
    ]


def usable(node: Node) -> bool:
    """Whether a new attempt may use the node: alive, schedulable, and idle by its own report.

    The last two conditions are both needed: the report may be from before the node was given work,
    and a node that was given up may be IDLE by its desired state and still run workers.
    """
    return (
        node.disposition is Disposition.SCHEDULABLE
        and node.liveness is Liveness.ALIVE
        and node.connected
        and node.report is not None
        and node.report.phase is AttemptPhase.IDLE
        and node.desired == _IDLE
    )


def promising(node: Node) -> bool:
    """Whether the node is usable, or will be once its work has ended or it answers again."""
    return (
        node.disposition is Disposition.SCHEDULABLE
        and node.liveness is not Liveness.DEAD
        and bool(node.identity.devices)
    )
