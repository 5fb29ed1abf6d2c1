"""Pages of nodes: the fleet by switch, and one node; one word sums up a node's three states."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from megascale.v1 import types_pb2
from megascale_client import (
    CheckVerdict,
    Node,
    NodeAssignment,
    NodeDisposition,
    NodeLiveness,
)
from megascale_dashboard import page_values
from megascale_dashboard.page_values import Page

SWITCH_LABEL = "switch"
# Worst first: the first word that applies is the node's state.
STATES = (
    *("dead", "suspect", "unknown", "quarantined", "draining", "cordoned"),
    *("active", "spare", "idle"),
)
_LIVENESS: dict[int, str] = {
    NodeLiveness.DEAD: "dead",
    NodeLiveness.SUSPECT: "suspect",
    NodeLiveness.UNKNOWN: "unknown",
}
_DISPOSITION: dict[int, str] = {
    NodeDisposition.QUARANTINED: "quarantined",
    NodeDisposition.DRAINING: "draining",
    NodeDisposition.CORDONED: "cordoned",
}
_ASSIGNMENT: dict[int, str] = {NodeAssignment.ACTIVE: "active", NodeAssignment.SPARE: "spare"}


def state(node: Node) -> str:
    """One word of STATES: the worst of liveness, disposition and assignment, in this order."""
    axes = node.proto  # its plain numbers: a fleet has thousands of nodes
    return (
        _LIVENESS.get(axes.liveness)
        or _DISPOSITION.get(axes.disposition)
        or _ASSIGNMENT.get(axes.assignment, "idle")
    )


def health(node: Node) -> str:
    """The worst verdict of the node's newest checks: fail, degraded, pass, or "" without any."""
    verdicts: set[int] = {check.verdict for check in node.proto.checks}
    for verdict in (CheckVerdict.FAIL, CheckVerdict.DEGRADED, CheckVerdict.PASS):
        if verdict in verdicts:
            return verdict.name.lower()
    return ""


def switch(node: Node) -> str:
    """The node's switch; "" where its labels name none."""
    return node.proto.topology.get(SWITCH_LABEL, "")


def in_order(name: str) -> tuple[object, ...]:
    """Sorting key that puts n2 before n10."""
    digits = name[len(name.rstrip("0123456789")) :]
    return (name[: len(name) - len(digits)], int(digits or 0), name)


def fleet(nodes: Iterable[Node]) -> Page:
    """The fleet: counts by state and health, nodes by switch, and those that need attention."""
    listed = sorted(nodes, key=lambda node: in_order(node.proto.name))
    by_switch: dict[str, list[Page]] = {}
    unhealthy = []
    for node in listed:
        cell, below = _cell(node), switch(node)
        by_switch.setdefault(below, []).append(cell)
        if why := _why(node, cell["state"], cell["health"]):
            unhealthy.append({**cell, "switch": below, "why": why})
    cells = [cell for each in by_switch.values() for cell in each]
    devices = sum(len(node.proto.devices) for node in listed)
    return {
        "nodes": len(listed),
        "devices": devices,
        "states": _counted((cell["state"] for cell in cells), STATES),
        "health": _counted((cell["health"] for cell in cells), ("fail", "degraded", "pass")),
        "switches": [
            {"name": name, "nodes": inside}
            for name, inside in sorted(by_switch.items(), key=lambda item: in_order(item[0]))
        ],
        "unhealthy": unhealthy,
        "command": "megascale nodes",
    }


def one(node: Node, events: Sequence[types_pb2.Event]) -> Page:
    """One node: its states, devices, newest checks with their baselines, and its events."""
    return {
        **_cell(node),
        "ranks": list(node.ranks),
        "switch": switch(node),
        "why": _why(node, state(node), health(node)),
        "liveness": str(node.liveness).lower(),
        "disposition": str(node.disposition).lower(),
        "assignment": str(node.assignment).lower(),
        "topology": dict(sorted(node.topology.items())),
        "last_heartbeat_s": page_values.time_s(node.last_heartbeat_at),
        "executor": node.executor_endpoint,
        "checkpoint": node.checkpoint_endpoint,
        "devices": [
            {"index": device.index, "model": device.model, "memory_bytes": device.memory_bytes}
            for device in node.devices
        ],
        "checks": [
            {
                "name": check.name,
                "target": check.target,
                "verdict": check.verdict.name.lower(),
                "detail": check.detail,
                "value": check.value if check.HasField("value") else None,
                "unit": check.unit,
                "baseline": check.baseline if check.HasField("baseline") else None,
                "z": check.z if check.HasField("z") else None,
                "baseline_source": check.baseline_source,
            }
            for check in node.checks
        ],
        "events": [page_values.event(line) for line in reversed(events)],
        "commands": _commands(node),
    }


def _cell(node: Node) -> Page:
    return {
        "name": node.proto.name,
        "state": state(node),
        # The last checks of a node that is gone tell nothing about it now.
        "health": "" if state(node) in _LIVENESS.values() else health(node),
        "job": node.proto.job,
    }


def _why(node: Node, found: str, worst: str) -> str:
    """Why a node of this state and health needs attention; "" where it does not."""
    if found in STATES[: STATES.index("active")]:
        return node.disposition_reason or node.liveness_reason or f"the node is {found}"
    if worst not in ("fail", "degraded"):
        return ""
    check = next(each for each in node.checks if each.verdict.name.lower() == worst)
    return f"{check.name} {check.target}".strip() + f": {check.detail}"


def _commands(node: Node) -> list[Page]:
    """Commands that help with the node."""
    off = node.disposition in _DISPOSITION
    listed = [("look at its checks", f"megascale diagnose {node.name} --set quick")]
    if off:
        listed.append(("let it have work again", f"megascale uncordon {node.name} --reason REASON"))
    else:
        listed += [
            ("keep new work off it", f"megascale cordon {node.name} --reason REASON"),
            ("save, then move its work away", f"megascale drain {node.name} --reason REASON"),
            ("move its work to a spare", f"megascale evict {node.name} --reason REASON"),
        ]
    return [{"text": text, "command": command} for text, command in listed]


def _counted(words: Iterable[str], order: Sequence[str]) -> Page:
    counts = Counter(words)
    return {word: counts[word] for word in order if counts[word]}
