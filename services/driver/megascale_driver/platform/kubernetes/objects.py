"""Kubernetes' nodes and our pods as the decisions see them, and the marks that evictions leave.

Kubernetes calls a machine a node. Here a node is what the driver knows: one pod with an agent, by
the pod's name, and the machine is where that pod runs.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

Json = dict[str, Any]
# Unless a site says otherwise: the pods and their set of deploy/kubernetes, and a label that clouds
# set.
SELECTOR = "app.kubernetes.io/name=megascale-node"
SWITCH_LABEL = "topology.kubernetes.io/zone"
STATEFUL_SET = "megascale-node"
# "megascale/..." marks what is ours among labels, taints and annotations.
TAINT = "megascale/evicted"
MARK = "megascale/eviction"  # annotation of a machine
TOPOLOGY = "megascale/topology"  # annotation of a pod, which its agent reads
CONDITION = "MegascaleEvicted"  # of a machine
MAX_REASON_CHARS = 200  # tables of Kubernetes show it
# Conditions of a machine in which it should get no work; others are for people to look at.
_BAD = (
    "NetworkUnavailable",
    "MemoryPressure",
    "DiskPressure",
    "PIDPressure",
    "KernelDeadlock",
    "ReadonlyFilesystem",  # of node-problem-detector
)
_UNREACHABLE = ("node.kubernetes.io/out-of-service", "node.kubernetes.io/unreachable")


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """Why a machine was taken out.

    Attributes:
        node: the evicted node, and ``pod`` the uid of its pod then.
        cordoned: it was cordoned for this, and not by somebody before.
        state: ``moved`` once the driver has the node back, on another machine; ``drained`` where
            nobody evicted it and it only gets no further work.
    """

    node: str
    pod: str
    reason: str
    cordoned: bool = True
    state: Literal["evicting", "moved", "drained"] = "evicting"

    def text(self) -> str:
        """As the annotation has it."""
        return json.dumps(asdict(self), sort_keys=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """A machine of the cluster.

    Attributes:
        switch: the value of the topology label; empty without one.
        reached: its kubelet reports.
        conditions: ``Ready``, or what keeps it from being that, in words of Kubernetes.
        trouble: why it should get no work, but for our evictions; empty for nothing.
        condition: whether it shows our condition as true.
    """

    name: str
    version: str
    switch: str
    reached: bool
    cordoned: bool
    conditions: tuple[str, ...]
    trouble: str
    mark: Mark | None
    condition: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Pod:
    """A pod with an agent; ``machine`` is empty until it is scheduled."""

    name: str
    uid: str
    version: str
    machine: str
    running: bool
    ending: bool
    topology: str


def machine_of(found: Json, switch_label: str) -> Machine:
    """Read a node of Kubernetes."""
    meta, spec = found["metadata"], found.get("spec") or {}
    conditions = {
        each["type"]: each for each in (found.get("status") or {}).get("conditions") or ()
    }
    mark = _mark((meta.get("annotations") or {}).get(MARK, ""))
    taints = [each["key"] for each in spec.get("taints") or ()]
    reached = conditions.get("Ready", {}).get("status") == "True"
    cordoned = bool(spec.get("unschedulable"))
    bad = _bad(conditions, taints)
    trouble = list(bad)
    if cordoned and (mark is None or not mark.cordoned):
        trouble.append("cordoned")
    if mark is not None and mark.state == "drained":
        trouble.append(f"drained ({mark.reason})")
    return Machine(
        name=meta["name"],
        version=meta["resourceVersion"],
        switch=str((meta.get("labels") or {}).get(switch_label, "")),
        reached=reached and not any(key in _UNREACHABLE for key in taints),
        cordoned=cordoned,
        conditions=tuple(bad) or ("Ready",),
        trouble=", ".join(trouble),
        mark=mark,
        condition=conditions.get(CONDITION, {}).get("status") == "True",
    )


def _bad(conditions: dict[str, Json], taints: list[str]) -> list[str]:
    words = []
    ready = conditions.get("Ready", {})
    if ready.get("status") != "True":
        words.append(f"NotReady ({ready.get('reason') or 'no condition'})")
    for name in _BAD:
        if (found := conditions.get(name, {})).get("status") == "True":
            words.append(f"{name} ({found.get('reason') or 'True'})")
    return words + [f"taint {key}" for key in taints if key in _UNREACHABLE]


def _mark(text: str) -> Mark | None:
    """None for an annotation that is absent, or that somebody has edited to something else."""
    try:
        values = json.loads(text)
        found = Mark(**values)
    except (ValueError, TypeError):
        return None
    return found if found.state in ("evicting", "moved", "drained") else None


def pod_of(found: Json) -> Pod:
    """Read one of our pods."""
    meta, status = found["metadata"], found.get("status") or {}
    return Pod(
        name=meta["name"],
        uid=meta["uid"],
        version=meta["resourceVersion"],
        machine=(found.get("spec") or {}).get("nodeName", ""),
        running=status.get("phase") == "Running",
        ending="deletionTimestamp" in meta,
        topology=(meta.get("annotations") or {}).get(TOPOLOGY, ""),
    )


def topology_of(machine: Machine) -> str:
    """What an agent is to report: the machine as its host, and the switch if it is known."""
    labels = {"switch": machine.switch, "host": machine.name}
    return ",".join(f"{key}={value}" for key, value in labels.items() if value)


def marking(found: Json, mark: Mark) -> Json:
    """The patch that cordons and taints the machine as it was read in ``found``."""
    spec = found.get("spec") or {}
    ours = {"key": TAINT, "value": mark.node, "effect": "NoSchedule"}
    return {
        "metadata": _of_version(found, {MARK: mark.text()}),
        "spec": {"unschedulable": True, "taints": [*_foreign_taints(spec), ours]},
    }


def changing_mark(found: Json, mark: Mark) -> Json:
    """The patch that changes the mark alone."""
    return {"metadata": _of_version(found, {MARK: mark.text()})}


def unmarking(found: Json, mark: Mark) -> Json:
    """The patch that removes what :func:`marking` has set, but for the cordon of somebody else."""
    spec: Json = {"taints": _foreign_taints(found.get("spec") or {}) or None}
    if mark.cordoned:
        spec["unschedulable"] = None
    return {"metadata": _of_version(found, {MARK: None}), "spec": spec}


def condition_patch(found: Json, mark: Mark | None, now: str) -> Json:
    """The patch of the machine's status by which others see whether it is evicted."""
    conditions = (found.get("status") or {}).get("conditions") or []
    ours = {
        "type": CONDITION,
        "status": "True" if mark is not None else "False",
        "reason": "EvictedByDriver" if mark is not None else "Returned",
        "message": mark.reason if mark is not None else "this machine may get work",
        "lastHeartbeatTime": now,
        "lastTransitionTime": now,
    }
    others = [each for each in conditions if each["type"] != CONDITION]
    return {"metadata": _of_version(found, {}), "status": {"conditions": [*others, ours]}}


def _foreign_taints(spec: Json) -> list[Json]:
    return [each for each in spec.get("taints") or [] if each["key"] != TAINT]


def _of_version(found: Json, annotations: dict[str, Any]) -> Json:
    """Metadata of a patch that is refused if the object is another one, or has changed."""
    meta = found["metadata"]
    same = {"uid": meta["uid"], "resourceVersion": meta["resourceVersion"]}
    return {**same, **({"annotations": annotations} if annotations else {})}
