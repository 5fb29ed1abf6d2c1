"""Decisions that bring Kubernetes and the driver to agreement on machines and nodes. Pure.

Input is the present state of both; output is a list of orders. Everything that must survive a crash
is in the marks on the machines or in the driver's journal, never in this process.

Note [Eviction on Kubernetes]. An eviction has four steps. (1) The driver quarantines a node, which
is the intent. (2) The node's machine is cordoned, tainted and marked with the uid of the pod.
(3) The pod is deleted, and its StatefulSet creates it again on another machine. (4) The driver gets
the node back, and the mark becomes "moved". Each pass finds out from the state alone which step is
next: no mark, a mark with the old pod, a mark with a new pod that runs. So a crash between two
steps, or a step that is done twice, changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from megascale_driver.platform.kubernetes.objects import (
    MAX_REASON_CHARS,
    Machine,
    Mark,
    Pod,
    topology_of,
)

# Begin of the reasons with which nodes are cordoned in the driver; only such cordons are lifted.
PREFIX = "kubernetes: "
Disposition = Literal["schedulable", "cordoned", "draining", "quarantined"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DriverNode:
    """A node in the driver's list; ``host`` is the machine that its agent reported."""

    name: str
    disposition: Disposition
    reason: str
    alive: bool
    dead: bool
    host: str


@dataclass(frozen=True, slots=True)
class MarkMachine:
    """Cordon, taint and mark the machine; if it has a mark, only change the mark."""

    machine: Machine
    mark: Mark


@dataclass(frozen=True, slots=True)
class UnmarkMachine:
    """Remove the mark, the taint and our cordon from the machine."""

    machine: Machine
    mark: Mark


@dataclass(frozen=True, slots=True)
class ShowCondition:
    """Show in the machine's status whether it is evicted."""

    machine: Machine


@dataclass(frozen=True, slots=True)
class DeletePod:
    """Delete the pod, so that it is created again; ``force``: without its unreachable kubelet."""

    pod: Pod
    why: str
    force: bool = False


@dataclass(frozen=True, slots=True)
class SetTopology:
    """Give the pod's agent the topology of its machine."""

    pod: Pod
    topology: str


@dataclass(frozen=True, slots=True)
class Cordon:
    """Cordon the node in the driver."""

    node: str
    why: str


@dataclass(frozen=True, slots=True)
class Uncordon:
    """Lift our cordon of the node in the driver."""

    node: str
    why: str


@dataclass(frozen=True, slots=True)
class GiveBack:
    """Lift the node's quarantine in the driver, then change the mark, or remove it if repaired.

    ``once`` identifies this eviction, so that a repetition after a crash cannot lift a later
    quarantine of the node.
    """

    node: str
    why: str
    once: str
    machine: Machine
    mark: Mark
    repaired: bool = False


Order = (
    MarkMachine
    | UnmarkMachine
    | ShowCondition
    | DeletePod
    | SetTopology
    | Cordon
    | Uncordon
    | GiveBack
)


def decide(
    nodes: Sequence[DriverNode], pods: Mapping[str, Pod], machines: Mapping[str, Machine]
) -> list[Order]:
    """The orders for the present state, those for machines first.

    ``nodes`` is empty while the driver does not answer; then nothing is evicted or given back.
    """
    orders: list[Order] = []
    for pod in pods.values():
        if (at := machines.get(pod.machine)) is not None and pod.topology != topology_of(at):
            orders.append(SetTopology(pod, topology_of(at)))
    for machine in machines.values():
        if machine.condition != (machine.mark is not None):
            orders.append(ShowCondition(machine))
    for node in nodes:
        pod_now = pods.get(node.name)
        at = machines.get(pod_now.machine) if pod_now is not None else None
        evicting = [
            each
            for each in machines.values()
            if each.mark is not None
            and (each.mark.node, each.mark.state) == (node.name, "evicting")
        ]
        if node.disposition == "quarantined":
            orders += _evict(node, pod_now, at, evicting)
        else:
            orders += _settled(node, pod_now, evicting)
            orders += _conditions(node, at)
        # A pod on a machine that is gone never ends by itself, and its StatefulSet waits for it: so
        # the second deletion is forced.
        if node.dead and pod_now is not None and at is not None and not at.reached:
            why = f"node {node.name} is dead and machine {at.name} does not answer"
            orders.append(DeletePod(pod_now, why, force=pod_now.ending))
    for machine in machines.values():
        mark = machine.mark
        if mark is not None and mark.state != "evicting" and not machine.cordoned:
            orders.append(UnmarkMachine(machine, mark))  # uncordoned by an operator: repaired
    return orders


def unreachable(
    nodes: Sequence[DriverNode], pods: Mapping[str, Pod], machines: Mapping[str, Machine]
) -> dict[str, str]:
    """The driver's nodes on machines whose kubelet does not report, with their conditions."""
    found = {}
    for node in nodes:
        pod = pods.get(node.name)
        at = machines.get(pod.machine) if pod is not None else None
        if at is not None and not at.reached:
            found[node.name] = f"machine {at.name}: {', '.join(at.conditions)}"
    return found


def _evict(
    node: DriverNode, pod: Pod | None, at: Machine | None, evicting: Sequence[Machine]
) -> Iterator[Order]:
    if not evicting:
        if pod is not None and at is not None:
            reason = f"megascale: {node.reason or 'evicted'}"[:MAX_REASON_CHARS]
            # Remember whether the cordon is ours: only then is it removed with the mark.
            cordoned = not at.cordoned or (at.mark is not None and at.mark.cordoned)
            mark = Mark(node=node.name, pod=pod.uid, reason=reason, cordoned=cordoned)
            yield MarkMachine(at, mark)
        return
    for machine in evicting:
        marked = machine.mark
        assert marked is not None
        if not machine.cordoned:
            # An operator has uncordoned the machine, which means that it is repaired.
            why = f"machine {machine.name} was uncordoned"
            once = f"repaired {marked.pod}"
            yield GiveBack(node.name, why, once, machine, marked, repaired=True)
        elif pod is not None and pod.uid == marked.pod:
            if not pod.ending:
                yield DeletePod(pod, marked.reason)
            elif not machine.reached:
                yield DeletePod(pod, marked.reason, force=True)
        # The new agent must have reported its machine. Until then the driver's node is still that
        # of the old pod, and giving it back would put work on the evicted machine.
        elif pod is not None and pod.running and node.alive and node.host == pod.machine:
            why = f"moved from machine {machine.name} to {pod.machine}"
            once = f"moved {marked.pod} to {pod.uid}"
            yield GiveBack(node.name, why, once, machine, marked)


def _settled(node: DriverNode, pod: Pod | None, evicting: Sequence[Machine]) -> Iterator[Order]:
    """The driver uses the node again: its pod has moved, or an operator has uncordoned it."""
    for machine in evicting:
        mark = machine.mark
        assert mark is not None
        if machine.cordoned and (pod is None or pod.uid != mark.pod):
            yield MarkMachine(machine, replace(mark, state="moved"))
        else:
            yield UnmarkMachine(machine, mark)


def _conditions(node: DriverNode, at: Machine | None) -> Iterator[Order]:
    """Cordon the node of a machine with trouble, and uncordon it when the trouble is over."""
    if at is None:
        return
    ours = node.disposition == "cordoned" and node.reason.startswith(PREFIX)
    if at.trouble and node.disposition == "schedulable":
        yield Cordon(node.name, f"machine {at.name}: {at.trouble}")
    elif not at.trouble and ours and at.mark is None:
        yield Uncordon(node.name, f"machine {at.name} is well again")
