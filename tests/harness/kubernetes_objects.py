"""Small objects for the tests' API server."""

from __future__ import annotations

from typing import Any

from tests.harness.kubernetes_store import Object

NAMESPACE = "megascale"
LABELS = {"app.kubernetes.io/name": "megascale-node"}


def machine(name: str, *, ready: bool = True, **labels: str) -> Object:
    """A node of Kubernetes."""
    status = "True" if ready else "Unknown"
    conditions = [{"type": "Ready", "status": status, "reason": "KubeletReady"}]
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, **labels}},
        "spec": {},
        "status": {"conditions": conditions},
    }


def pod(name: str, machine_name: str = "", **spec: Any) -> Object:
    """A pod of ours, running if it has a machine."""
    where = {"nodeName": machine_name} if machine_name else {}
    owner = {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "set", "uid": "1"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "labels": dict(LABELS),
            "ownerReferences": [{**owner, "controller": True}],
        },
        "spec": {"containers": [{"name": "agent", "image": "x"}], **where, **spec},
        "status": {
            "phase": "Running" if machine_name else "Pending",
            "conditions": [{"type": "Ready", "status": "True" if machine_name else "False"}],
        },
    }
