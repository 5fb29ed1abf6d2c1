"""What is to be done so that Kubernetes and the driver agree on machines and nodes.

Pure: what both show now in, orders out, called again and again. All that has to outlive a crash
stands on the machines (their marks) and in the driver's journal, never in this process.

An eviction has four steps, each of which finds by itself what the one before has done: the driver
quarantines a node (its intent); the node's machine is cordoned, tainted and marked; the pod is
deleted, and its StatefulSet makes it again elsewhere; the driver gets the node back.
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

# Of the reasons for which this cordons nodes in the driver: only those cordons does it lift.
PREFIX = "kubernetes: "
Disposition = Literal["schedulable", "cordoned", "draining", "quarantined"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DriverNode:
    """A node as the driver lists it; ``host`` is the machine that its agent has reported."""

    name: str
    disposition: Disposition
    reason: str
    alive: bool
    dead: bool
    host: str


@dataclass(frozen=True, slots=True)
class MarkMachine:
    """Cordon, taint and mark it, or only change its mark if it has one."""

    machine: Machine
    mark: Mark


@dataclass(frozen=True, slots=True)
class UnmarkMachine:
    """Remove the mark, the taint, and our cordon."""

    machine: Machine
    mark: Mark


@dataclass(frozen=True, slots=True)
class ShowCondition:
    """Have its status say whether it is evicted."""

    machine: Machine


@dataclass(frozen=True, slots=True)
class DeletePod:
    """Delete it, so that it is made again; ``force``: without its kubelet, which is gone."""

    pod: Pod
    why: str
    force: bool = False


@dataclass(frozen=True, slots=True)
class SetTopology:
    """Tell the pod's agent where it runs."""

    pod: Pod
    topology: str


@dataclass(frozen=True, slots=True)
class Cordon:
    """In the driver."""

    node: str
    why: str


@dataclass(frozen=True, slots=True)
class Uncordon:
    """In the driver: lift a cordon of ours."""

    node: str
    why: str


@dataclass(frozen=True, slots=True)
class GiveBack:
    """In the driver: lift the quarantine that led to a mark; then change the mark, or remove it.

    ``once`` names this eviction: repeated after a crash, it lifts no later quarantine of the node.
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
    """The orders for what stands now, those for machines first.

    ``nodes`` may be empty when the driver does not answer: then nothing is evicted or given back.
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
        if node.dead and pod_now is not None and at is not None and not at.reached:
            why = f"node {node.name} is dead and machine {at.name} does not answer"
            orders.append(DeletePod(pod_now, why, force=pod_now.ending))
    for machine in machines.values():
        mark = machine.mark
        if mark is not None and mark.state != "evicting" and not machine.cordoned:
            orders.append(UnmarkMachine(machine, mark))  # somebody has repaired it
    return orders


def unreachable(
    nodes: Sequence[DriverNode], pods: Mapping[str, Pod], machines: Mapping[str, Machine]
) -> dict[str, str]:
    """The driver's nodes on machines whose kubelet does not report, with what Kubernetes says."""
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
            cordoned = not at.cordoned or (at.mark is not None and at.mark.cordoned)
            mark = Mark(node=node.name, pod=pod.uid, reason=reason, cordoned=cordoned)
            yield MarkMachine(at, mark)
        return
    for machine in evicting:
        marked = machine.mark
        assert marked is not None
        if not machine.cordoned:
            # Somebody has uncordoned it, which says that it is repaired.
            why = f"machine {machine.name} was uncordoned"
            once = f"repaired {marked.pod}"
            yield GiveBack(node.name, why, once, machine, marked, repaired=True)
        elif pod is not None and pod.uid == marked.pod:
            if not pod.ending:
                yield DeletePod(pod, marked.reason)
            elif not machine.reached:
                yield DeletePod(pod, marked.reason, force=True)
        elif pod is not None and pod.running and node.alive and node.host == pod.machine:
            why = f"moved from machine {machine.name} to {pod.machine}"
            once = f"moved {marked.pod} to {pod.uid}"
            yield GiveBack(node.name, why, once, machine, marked)


def _settled(node: DriverNode, pod: Pod | None, evicting: Sequence[Machine]) -> Iterator[Order]:
    """The driver has the node back: its pod has moved, or an operator has changed their mind."""
    for machine in evicting:
        mark = machine.mark
        assert mark is not None
        if machine.cordoned and (pod is None or pod.uid != mark.pod):
            yield MarkMachine(machine, replace(mark, state="moved"))
        else:
            yield UnmarkMachine(machine, mark)


def _conditions(node: DriverNode, at: Machine | None) -> Iterator[Order]:
    """What Kubernetes says of a machine keeps new work off its node, and no longer than that."""
    if at is None:
        return
    ours = node.disposition == "cordoned" and node.reason.startswith(PREFIX)
    if at.trouble and node.disposition == "schedulable":
        yield Cordon(node.name, f"machine {at.name}: {at.trouble}")
    elif not at.trouble and ours and at.mark is None:
        yield Uncordon(node.name, f"machine {at.name} is well again")
