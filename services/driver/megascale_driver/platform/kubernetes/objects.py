"""Machines and pods as values for the decisions, and the marks of evictions.

Kubernetes calls a machine a node. Here a node is what the driver calls so: one pod with an agent,
under the pod's name. The machine is where that pod runs.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

Json = dict[str, Any]
# Defaults: the pods and the StatefulSet of deploy/kubernetes, and a label that clouds set.
SELECTOR = "app.kubernetes.io/name=megascale-node"
SWITCH_LABEL = "topology.kubernetes.io/zone"
STATEFUL_SET = "megascale-node"
# Our labels, taints and annotations begin with "megascale/".
TAINT = "megascale/evicted"
MARK = "megascale/eviction"  # annotation of a machine
TOPOLOGY = "megascale/topology"  # annotation of a pod, which its agent reads
CONDITION = "MegascaleEvicted"  # of a machine
MAX_REASON_CHARS = 200  # Kubernetes shows reasons in tables
# Conditions of a machine in which it should get no work; other conditions are only for people.
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
    """The record on a machine that was taken out of service.

    Attributes:
        node: the evicted node; ``pod`` is the uid of its pod at that time.
        cordoned: True if the machine was cordoned for this, False if it already was before.
        state: ``evicting``; ``moved`` once the driver has the node back on another machine;
            ``drained`` if the machine was not evicted and only gets no further work.
    """

    node: str
    pod: str
    reason: str
    cordoned: bool = True
    state: Literal["evicting", "moved", "drained"] = "evicting"

    def text(self) -> str:
        """The text of the annotation."""
        return json.dumps(asdict(self), sort_keys=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """A machine of the cluster.

    Attributes:
        switch: the value of the topology label; empty without one.
        reached: True if its kubelet reports.
        conditions: ``Ready``, or why it is not ready, in words of Kubernetes.
        trouble: why it should get no work, apart from our evictions; empty: no reason.
        condition: True if it shows our condition as true.
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
    """Read a machine from a node object of Kubernetes."""
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
    # Our own cordon is no trouble of the machine; the quarantine in the driver covers it.
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
    """The mark in an annotation; None if it is absent or was edited to something else."""
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
    """The labels that an agent must report: the machine as its host, and its switch if known."""
    labels = {"switch": machine.switch, "host": machine.name}
    return ",".join(f"{key}={value}" for key, value in labels.items() if value)


def marking(found: Json, mark: Mark) -> Json:
    """The patch that cordons, taints and marks the machine in the version ``found``."""
    spec = found.get("spec") or {}
    ours = {"key": TAINT, "value": mark.node, "effect": "NoSchedule"}
    return {
        "metadata": _of_version(found, {MARK: mark.text()}),
        "spec": {"unschedulable": True, "taints": [*_foreign_taints(spec), ours]},
    }


def changing_mark(found: Json, mark: Mark) -> Json:
    """The patch that changes only the mark."""
    return {"metadata": _of_version(found, {MARK: mark.text()})}


def unmarking(found: Json, mark: Mark) -> Json:
    """The patch that reverts :func:`marking`; a cordon from before the mark stays."""
    spec: Json = {"taints": _foreign_taints(found.get("spec") or {}) or None}
    if mark.cordoned:
        spec["unschedulable"] = None
    return {"metadata": _of_version(found, {MARK: None}), "spec": spec}


def condition_patch(found: Json, mark: Mark | None, now: str) -> Json:
    """The patch of the machine's status that shows others whether it is evicted."""
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
    """Metadata that makes the server refuse the patch if the object has changed or is another."""
    meta = found["metadata"]
    same = {"uid": meta["uid"], "resourceVersion": meta["resourceVersion"]}
    return {**same, **({"annotations": annotations} if annotations else {})}
