"""The metrics endpoints of a local cluster, as a file for Prometheus (file_sd_configs)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from megascale_common.node.files import replace_file

DRIVER_FILE = "metrics.address"
NODE_FILES = {"executor": "metrics.address", "checkpoint": "checkpoint.metrics.address"}
TARGETS_FILE = "prometheus.json"


def find(folder: Path, nodes: Iterable[str]) -> dict[str, str]:
    """Addresses of services that are up, by ``driver``, ``executor/NODE``, ``checkpoint/NODE``."""
    files = {"driver": folder / DRIVER_FILE}
    for node in nodes:
        files |= {
            f"{service}/{node}": folder / "nodes" / node / name
            for service, name in NODE_FILES.items()
        }
    found = {}
    for service, path in files.items():
        try:
            found[service] = path.read_text().strip()
        except FileNotFoundError:
            continue
    return found


def write(folder: Path, cluster: str, nodes: Iterable[str]) -> dict[str, str]:
    """Write the result of :func:`find` to TARGETS_FILE, if it has changed, and return it."""
    found = find(folder, nodes)
    groups = []
    for service, address in found.items():
        name, _, node = service.partition("/")
        labels = {"cluster": cluster, "service": name} | ({"node": node} if node else {})
        groups.append({"targets": [address], "labels": labels})
    text, path = json.dumps(groups, indent=2) + "\n", folder / TARGETS_FILE
    if not path.exists() or path.read_text() != text:
        replace_file(path, text)
    return found
