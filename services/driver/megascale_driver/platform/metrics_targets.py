"""Where a local cluster's services show their metrics, as a file that Prometheus reads
(file_sd_configs).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from megascale_common.node.files import replace_file

DRIVER_FILE = "metrics.address"
NODE_FILES = {"executor": "metrics.address", "checkpoint": "checkpoint.metrics.address"}
TARGETS_FILE = "prometheus.json"


def find(folder: Path, nodes: Iterable[str]) -> dict[str, str]:
    """Addresses by ``driver``, ``executor/NODE`` and ``checkpoint/NODE``; a service that is not up
    is left out.
    """
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
    """Write what :func:`find` finds to TARGETS_FILE, if it has changed, and return it."""
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
