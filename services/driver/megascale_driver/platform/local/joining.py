"""A node that joins the running cluster of a run folder, for `megascale node start`.

It is a child of the process that starts it, as the nodes of `megascale up` are children of that,
and it ends with the cluster: when `megascale up` ends, whoever started the node stops it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megascale.v1 import driver_pb2, driver_pb2_grpc, types_pb2
from megascale_common.node.process import start_ticks
from megascale_common.service.channel import open_channel, present
from megascale_common.service.errors import (
    ClusterError,
    NotFoundError,
    StateError,
    UnavailableError,
)
from megascale_common.service.identity import certificates
from megascale_common.service.identity.peers import Role
from megascale_driver.nodes.probes import refuses
from megascale_driver.platform.local.node import (
    OPERATOR_NAME,
    START_TIMEOUT_S,
    STOP_NODE_TIMEOUT_S,
    DeviceKind,
    LocalNode,
    cluster_token,
    count_gpus,
    driver_address,
    is_ready,
    node_folder,
    nodes_of,
    running_nodes,
    start_node,
    stored_node,
)
from megascale_driver.platform.local.processes import Child

POLL_INTERVAL_S = 0.1

Report = Callable[[str, dict[str, Any]], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningCluster:
    """What `megascale up` wrote about itself to up.json."""

    folder: Path
    name: str
    device: DeviceKind
    devices_per_node: int
    nodes_per_switch: int
    nodes: tuple[str, ...]
    pid: int
    start_ticks: int | None

    @classmethod
    def find(cls, folder: Path) -> RunningCluster:
        """The cluster that runs in ``folder``.

        Raises:
            UnavailableError: none does.
            ClusterError: its files cannot be read.
        """
        folder = folder.resolve()
        remedy = f"start it with `megascale up --run-folder {folder}`"
        down = UnavailableError(f"the cluster in {folder} is down: {remedy}", reason="CLUSTER_DOWN")
        if not folder.is_dir():
            raise UnavailableError(
                f"there is no cluster at {folder}: start one with `megascale up`, or give the run "
                "folder of a running one",
                reason="CLUSTER_DOWN",
            )
        try:
            values = json.loads((folder / "up.json").read_text())
            found = cls(
                folder=folder,
                name=values["cluster"],
                device=values["device"],
                devices_per_node=values["devices_per_node"],
                nodes_per_switch=values["nodes_per_switch"],
                nodes=tuple(values["nodes"]),
                pid=values["pid"],
                start_ticks=values["start_ticks"],
            )
        except FileNotFoundError:
            raise down from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ClusterError(f"{folder / 'up.json'} cannot be read ({error}): {remedy}") from None
        if not found.runs:
            raise down
        return found

    @property
    def runs(self) -> bool:
        """Whether the `megascale up` of this cluster still runs."""
        return self.start_ticks is not None and start_ticks(self.pid) == self.start_ticks

    def next_name(self) -> str:
        """The first of n1, n2, ... that no node of the run folder has had."""
        number = 1
        while node_folder(self.folder, f"n{number}").exists():
            number += 1
        return f"n{number}"

    def node(self, name: str, devices: int | None) -> LocalNode:
        """Node ``name`` as it was last started here, or a new one like those of `megascale up`.

        ``devices`` None: as many devices as it had, or as the other nodes have.

        Raises:
            ClusterError: there are too few free GPUs.
        """
        before = stored_node(self.folder, name)
        if before is not None and devices in (None, len(before.devices)):
            return before
        wanted = devices or self.devices_per_node
        others = [
            node
            for other in {*self.nodes, *running_nodes(self.folder)} - {name}
            if (node := stored_node(self.folder, other)) is not None
        ]
        chosen: Sequence[int] = range(wanted)
        if self.device == "cuda":
            used = {index for node in others for index in node.devices}
            free = [index for index in range(count_gpus()) if index not in used]
            if len(free) < wanted:
                raise ClusterError(
                    f"node {name} needs {wanted} GPUs, and {len(free)} of this machine are free: "
                    "give fewer with --devices, or stop a node with `megascale node stop`"
                )
            chosen = free[:wanted]
        switch = f"s{len(others) // self.nodes_per_switch}" if before is None else before.switch
        return LocalNode(name=name, device=self.device, devices=tuple(chosen), switch=switch)


class JoiningNode:
    """One node; ``start()``, then ``supervise()``, then ``stop()``."""

    def __init__(self, cluster: RunningCluster, node: LocalNode, report: Report) -> None:
        self._cluster = cluster
        self._node = node
        self._report = report
        self._child: Child | None = None

    async def start(self) -> None:
        """Start the node; returns when it is alive for the driver and its daemon serves.

        Raises:
            StateError: a node of this name is alive.
            ClusterError: it did not start; the message has the end of its log.
            UnavailableError: the cluster ended meanwhile.
        """
        cluster, name = self._cluster, self._node.name
        present(certificates.of_cluster(cluster.folder, Role.OPERATOR, OPERATOR_NAME))
        token = cluster_token(cluster.folder)
        deadline = asyncio.get_running_loop().time() + START_TIMEOUT_S
        while not (address := driver_address(cluster.folder)):  # the driver restarts
            self._require_time(deadline, "no driver answers")
            await asyncio.sleep(POLL_INTERVAL_S)
        async with open_channel(address, token) as channel:
            stub = driver_pb2_grpc.DriverServiceStub(channel)
            await self._refuse_if_alive(stub)
            self._child = child = start_node(cluster.folder, cluster.name, self._node)
            while True:
                for node in await nodes_of(stub):
                    if node.name == name and is_ready(cluster.folder, node):
                        self._report_ready(node)
                        return
                if child.exit_status is not None:
                    raise ClusterError(
                        f"node {name} ended with status {child.exit_status} during its start; "
                        f"{child.last_words()}"
                    )
                self._require_time(deadline, f"node {name} is not ready; see {child.log_path}")
                await asyncio.sleep(POLL_INTERVAL_S)

    async def supervise(self) -> int:
        """Wait for the end of the node, or of the cluster; returns the exit status for it."""
        assert self._child is not None
        while self._cluster.runs:
            status = self._child.exit_status
            if status is not None:
                self._report("node_exited", {"node": self._node.name, "exit_status": status})
                return 0 if status == 0 else 1
            await asyncio.sleep(POLL_INTERVAL_S)
        self._report("cluster_ended", {"run_folder": str(self._cluster.folder)})
        return 0

    async def stop(self) -> None:
        """End the node and all its processes."""
        if self._child is not None:
            await self._child.stop(STOP_NODE_TIMEOUT_S)

    async def _refuse_if_alive(self, stub: Any) -> None:
        name = self._node.name
        pid = running_nodes(self._cluster.folder).get(name)
        where = f"pid {pid} on this machine" if pid is not None else ""
        for node in [] if where else await nodes_of(stub):
            # An agent that ended a moment ago may still count as alive: its port decides.
            if node.name == name and not await refuses(node.executor_endpoint):
                where = node.executor_endpoint
        if where:
            raise StateError(
                f"node {name} is alive already ({where}): end it first with "
                f"`megascale node stop {name}`, or choose another name",
                reason="NODE_NAME_IN_USE",
            )

    def _require_time(self, deadline: float, problem: str) -> None:
        if not self._cluster.runs:
            raise UnavailableError(
                f"the cluster in {self._cluster.folder} is down: `megascale up` has ended",
                reason="CLUSTER_DOWN",
            )
        if asyncio.get_running_loop().time() >= deadline:
            raise ClusterError(f"{problem} (after {START_TIMEOUT_S:g} s)")

    def _report_ready(self, listed: driver_pb2.Node) -> None:
        name, node = self._node.name, self._node
        self._report(
            "node_ready",
            {
                "node": name,
                "pid": self._child.pid if self._child is not None else 0,
                "device": node.device,
                "devices": list(node.devices),
                "run_folder": str(self._cluster.folder),
            },
        )
        if listed.disposition != types_pb2.NODE_DISPOSITION_SCHEDULABLE:
            full = types_pb2.NodeDisposition.Name(listed.disposition)
            word = full.removeprefix("NODE_DISPOSITION_").lower()
            self._report("node_not_schedulable", {"node": name, "disposition": word})


async def stop_node(folder: Path, name: str) -> None:
    """End a node of this run folder, whoever started it: SIGTERM, and SIGKILL if that fails.

    Raises:
        NotFoundError: no such node runs here.
    """
    pid = running_nodes(folder).get(name)
    if pid is None:
        raise NotFoundError(
            f"no node {name} runs in {folder.resolve()}: `megascale nodes` lists the nodes",
            reason="NODE_NOT_FOUND",
        )
    ticks = start_ticks(pid)
    os.kill(pid, signal.SIGTERM)
    deadline = asyncio.get_running_loop().time() + STOP_NODE_TIMEOUT_S
    while ticks is not None and start_ticks(pid) == ticks:
        if asyncio.get_running_loop().time() >= deadline:
            os.kill(pid, signal.SIGKILL)
            return
        await asyncio.sleep(POLL_INTERVAL_S)
