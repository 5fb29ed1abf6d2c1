"""Nodes and files of a run folder: configuration, start and readiness of a node; devices; metrics.

`megascale up` and `megascale node start` start a node in the same way. Its configuration stays in
its folder, from which `megascale node start` starts a node that has ended again.

The devices of this machine are detected without torch, for `megascale up --device auto`. The
metrics endpoints of the cluster are written as a file for Prometheus (file_sd_configs).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import grpc
import grpc.aio

from megascale.v1 import driver_pb2, types_pb2
from megascale_common.node.files import replace_file
from megascale_common.service.errors import ClusterError
from megascale_common.service.identity import authority, certificates
from megascale_common.service.identity.certificates import Certificates
from megascale_common.service.identity.peers import Role
from megascale_driver.platform.interface import MAX_NODES
from megascale_driver.platform.local.processes import Child

DeviceKind = Literal["cpu", "cuda"]
_QUERY_TIMEOUT_S = 10.0


def count_gpus() -> int:
    """Number of GPUs that nvidia-smi or /dev lists, at most those of $CUDA_VISIBLE_DEVICES."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    present = _listed_by_tool()
    if present is None:
        present = sum(
            1 for entry in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", entry.name)
        )
    if visible is None:
        return present
    return min(present, len([word for word in visible.split(",") if word.strip()]))


def choose_device(wanted: Literal["auto", "cpu", "cuda"], needed: int) -> DeviceKind:
    """The kind of device to use for ``needed`` devices; auto: GPUs if there are enough.

    Raises:
        ValueError: cuda is required and there are fewer GPUs than needed.
    """
    if wanted == "cpu":
        return "cpu"
    present = count_gpus()
    if present >= needed:
        return "cuda"
    if wanted == "cuda":
        raise ValueError(
            f"--device cuda: {needed} GPUs are needed (nodes times devices per node) and this "
            f"machine has {present}; use fewer with --nodes or --devices-per-node, "
            "or use --device cpu"
        )
    return "cpu"


def _listed_by_tool() -> int | None:
    """GPUs by nvidia-smi; None if it is absent or fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        listing = subprocess.run(
            [program, "-L"], capture_output=True, text=True, timeout=_QUERY_TIMEOUT_S, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return sum(1 for line in listing.splitlines() if line.startswith("GPU "))


DRIVER_FILE = "metrics.address"
NODE_FILES = {"executor": "metrics.address", "checkpoint": "checkpoint.metrics.address"}
TARGETS_FILE = "prometheus.json"


def metrics_targets(folder: Path, nodes: Iterable[str]) -> dict[str, str]:
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


def write_metrics_targets(folder: Path, cluster: str, nodes: Iterable[str]) -> dict[str, str]:
    """Write the result of :func:`find` to TARGETS_FILE, if it has changed, and return it."""
    found = metrics_targets(folder, nodes)
    groups = []
    for service, address in found.items():
        name, _, node = service.partition("/")
        labels = {"cluster": cluster, "service": name} | ({"node": node} if node else {})
        groups.append({"targets": [address], "labels": labels})
    text, path = json.dumps(groups, indent=2) + "\n", folder / TARGETS_FILE
    if not path.exists() or path.read_text() != text:
        replace_file(path, text)
    return found


START_TIMEOUT_S = 90.0
STOP_NODE_TIMEOUT_S = 10.0
MAX_PAGE = 1000
RUN_FOLDER_VARIABLE = "MEGASCALE_RUN_FOLDER"
ADDRESS_FILE, TOKEN_FILE = "driver.address", "token"  # of the driver, in the run folder
# Whose certificates a cluster of one machine has, beside those of its nodes.
DRIVER_NAME, OPERATOR_NAME = "driver", "operator"
_AGENT = "megascale_executor.agent"


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalNode:
    """A node's name, the devices that it owns (indices on its machine), and its switch.

    ``host``: its address for its peers, beyond loopback with TLS; empty: what the agent finds.
    """

    name: str
    device: DeviceKind
    devices: tuple[int, ...]
    switch: str
    host: str = ""


def driver_address(run_folder: Path) -> str:
    """Where the driver of a run folder serves; "" while it starts, or where there is none."""
    try:
        return (run_folder / ADDRESS_FILE).read_text().strip()
    except OSError:
        return ""


def cluster_token(run_folder: Path) -> str:
    """The token of a run folder; raises OSError."""
    return (run_folder / TOKEN_FILE).read_text().strip()


def node_folder(run_folder: Path, name: str) -> Path:
    """Where a node keeps its logs and addresses."""
    return run_folder / "nodes" / name


def stored_node(run_folder: Path, name: str) -> LocalNode | None:
    """The node as it was last started in this run folder; None if it never was."""
    try:
        values = json.loads((node_folder(run_folder, name) / "node.json").read_text())
        return LocalNode(
            name=name,
            device=values["device"],
            devices=tuple(values["devices"]),
            switch=values["switch"],
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def running_nodes(run_folder: Path) -> dict[str, int]:
    """The nodes of this run folder whose agents run, with the agents' process ids."""
    found = {}
    for lock in sorted((run_folder / "nodes").glob("*/agent.lock")):
        name = lock.parent.name
        # The agent writes its id when it takes the lock, and the file stays when it ends: another
        # process may have the id now.
        pid = lock.read_text().strip()
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if pid and _AGENT in command and name in command:
            found[name] = int(pid)
    return found


def record_node(run_folder: Path, node: LocalNode) -> Path:
    """Store what starts the node again, which gives it its name; returns its folder."""
    folder = node_folder(run_folder, node.name)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    replace_file(folder / "node.json", json.dumps(asdict(node)) + "\n")
    return folder


def start_node(run_folder: Path, cluster: str, node: LocalNode) -> Child:
    """Start the node's agent as a child process, and store what starts it again."""
    folder = record_node(run_folder, node)
    (folder / "executor.address").unlink(missing_ok=True)
    command = [
        sys.executable,
        "-m",
        _AGENT,
        "--cluster",
        cluster,
        "--node",
        node.name,
        "--driver-file",
        str(run_folder / ADDRESS_FILE),
        "--token-file",
        str(run_folder / TOKEN_FILE),
        "--device",
        node.device,
        "--devices",
        ",".join(map(str, node.devices)),
        "--run-folder",
        str(run_folder),
        "--topology",
        f"switch={node.switch}",
        "--address-file",
        str(folder / "executor.address"),
        "--metrics-bind",
        "127.0.0.1:0",
    ]
    command += ["--host", node.host] if node.host else []
    agent = certificates.of_cluster(run_folder, Role.EXECUTOR, node.name)
    daemon = certificates.of_cluster(run_folder, Role.CHECKPOINT, node.name)
    if agent is not None and daemon is not None:
        _issue_if_absent(run_folder, cluster, agent, daemon, node)
        command += [*agent.options(), "--daemon-tls-key", str(daemon.key)]
        command += ["--daemon-tls-certificate", str(daemon.certificate)]
    return Child(node.name, command, folder / "agent.log")


def _issue_if_absent(
    run_folder: Path, cluster: str, agent: Certificates, daemon: Certificates, node: LocalNode
) -> None:
    """Give a node its certificates, if its cluster's authority is here; new ones for a host."""
    folder = run_folder / certificates.FOLDER
    hosts = [node.host] if node.host else []
    for role, found in ((Role.EXECUTOR, agent), (Role.CHECKPOINT, daemon)):
        if hosts or not found.certificate.exists():
            authority.issue(folder, cluster, role, node.name, hosts)


async def nodes_of(stub: Any) -> list[driver_pb2.Node]:
    """All nodes that the driver lists; none while it starts or does not lead yet.

    Raises:
        ClusterError: the driver refuses to list them.
    """
    found: list[driver_pb2.Node] = []
    request = driver_pb2.ListNodesRequest(page_size=MAX_PAGE)
    try:
        while len(found) < MAX_NODES:
            page = await stub.ListNodes(request, timeout=5.0)
            found += page.nodes
            request.page_token = page.next_page_token
            if not request.page_token:
                break
    except grpc.aio.AioRpcError as error:
        if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            return []
        raise ClusterError(f"the driver refuses to list its nodes: {error.details()}") from None
    return found


def is_ready(run_folder: Path, node: driver_pb2.Node) -> bool:
    """Whether the agent that serves now is alive for the driver, and can save and restore."""
    if node.liveness != types_pb2.NODE_LIVENESS_ALIVE or not node.checkpoint_endpoint:
        # An agent whose daemon is slow to start links without it.
        return False
    try:
        address = (node_folder(run_folder, node.name) / "executor.address").read_text().strip()
    except OSError:
        return False
    return node.executor_endpoint == address  # and not the agent before it
