"""A whole cluster on one machine: etcd, one driver and N nodes, for `megascale up`.

All are child processes. Each leads a process group of its own, so that a node can be killed as a
whole, and arms its parent-death signal, so that killing `megascale up` leaves no process. A driver
or etcd that ends is restarted, within a budget. A node that ends is reported and not restarted, as
a lost machine would be: recovering from that is the driver's work.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from megascale.v1 import driver_pb2, driver_pb2_grpc, types_pb2
from megascale_common.etcd.errors import EtcdError
from megascale_common.etcd.server import EtcdServer
from megascale_common.service.channel import open_channel
from megascale_common.service.errors import ClusterError
from megascale_common.service.token import read_or_create_token
from megascale_driver.platform import metrics_targets
from megascale_driver.platform.child import Child
from megascale_driver.platform.devices import DeviceKind

POLL_INTERVAL_S = 0.1
TARGETS_INTERVAL_S = 5.0
START_TIMEOUT_S = 90.0
STOP_DRIVER_TIMEOUT_S = 10.0
STOP_NODE_TIMEOUT_S = 10.0
# Restarts of the driver, and of etcd, during one `megascale up`; more would not help. The nodes are
# kept then, because training continues without both, until `megascale up` is started again.
MAX_RESTARTS = 20
# Before the first, second, ... restart; the last delay is that of all further ones.
RESTART_DELAYS_S = (0.5, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
MAX_PAGE = 1000

Report = Callable[[str, dict[str, Any]], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalOptions:
    """What to start. ``etcd_endpoints`` empty: an etcd in the run folder is started too."""

    run_folder: Path
    cluster: str = "local"
    nodes: int = 3
    devices_per_node: int = 4
    device: DeviceKind = "cpu"
    nodes_per_switch: int = 4
    etcd_endpoints: tuple[str, ...] = ()
    heartbeat_interval_s: float = 5.0
    hang_floor_s: float = 60.0

    @property
    def node_names(self) -> list[str]:
        """n1 to nN."""
        return [f"n{index + 1}" for index in range(self.nodes)]


class LocalCluster:
    """The processes of one local cluster; ``start()``, then ``supervise()``, then ``stop()``."""

    def __init__(self, options: LocalOptions, report: Report) -> None:
        self.options = options
        self.folder = options.run_folder.resolve()
        self._report = report
        self._lock: int | None = None
        self._etcd: EtcdServer | None = None
        self._driver: Child | None = None
        self._nodes: dict[str, Child] = {}
        self._lost: set[str] = set()
        self._restarts = {"etcd": 0, "driver": 0}

    async def start(self) -> None:
        """Start everything; returns when all nodes are alive and their checkpoint daemons serve.

        Raises:
            ClusterError: the run folder is in use, or a process did not start; the message has the
                end of its log.
        """
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._take_lock()
        try:
            read_or_create_token(self.folder / "token")
        except (OSError, ValueError) as error:
            raise ClusterError(f"{self.folder / 'token'}: {error}") from None
        await self._start_etcd()
        await self._start_driver()
        for index, name in enumerate(self.options.node_names):
            self._nodes[name] = self._spawn_node(index, name)
        self._write_up_file()
        await self._wait_alive()
        self._point_current_here()
        found = self._write_targets()
        targets_file = str(self.folder / metrics_targets.TARGETS_FILE)
        self._report(
            "metrics_ready",
            {"url": f"http://{found['driver']}/metrics", "targets_file": targets_file},
        )

    async def supervise(self) -> None:
        """Until cancelled, restart driver and etcd within their budgets and report lost nodes."""
        loop = asyncio.get_running_loop()
        targets_due_s = 0.0
        while True:
            if loop.time() >= targets_due_s:  # a daemon that its agent restarted has a new port
                with contextlib.suppress(OSError):  # a full disk must not end the cluster
                    self._write_targets()
                targets_due_s = loop.time() + TARGETS_INTERVAL_S
            if self._etcd is not None and self._etcd.pid is None:
                await self._restart("etcd", self._start_etcd)
            if self._driver is not None and self._driver.exit_status is not None:
                await self._restart("driver", self._start_driver)
            for name, child in self._nodes.items():
                if name not in self._lost and child.exit_status is not None:
                    self._lost.add(name)
                    self._report("node_exited", {"node": name, "exit_status": child.exit_status})
            await asyncio.sleep(POLL_INTERVAL_S)

    async def stop(self) -> None:
        """Stop everything: the driver first, so that it does not see the nodes' end as faults."""
        if self._driver is not None:
            await self._driver.stop(STOP_DRIVER_TIMEOUT_S)
        await asyncio.gather(*(child.stop(STOP_NODE_TIMEOUT_S) for child in self._nodes.values()))
        if self._etcd is not None:
            await self._etcd.stop()
        if self._lock is None:
            return
        for name in (
            "driver.address",
            "up.json",
            metrics_targets.DRIVER_FILE,
            metrics_targets.TARGETS_FILE,
        ):
            (self.folder / name).unlink(missing_ok=True)
        os.close(self._lock)
        self._lock = None

    def state(self) -> dict[str, Any]:
        """The content of `up.json`: pids and addresses."""
        endpoints = (
            [self._etcd.endpoint] if self._etcd is not None else list(self.options.etcd_endpoints)
        )
        return {
            "pid": os.getpid(),
            "cluster": self.options.cluster,
            "run_folder": str(self.folder),
            "device": self.options.device,
            "devices_per_node": self.options.devices_per_node,
            "etcd": {
                "pid": self._etcd.pid if self._etcd is not None else None,
                "endpoints": endpoints,
            },
            "driver": {
                "pid": self._driver.pid if self._driver is not None else None,
                "address": self._address(),
            },
            "nodes": {name: {"pid": child.pid} for name, child in self._nodes.items()},
        }

    def _take_lock(self) -> None:
        # The kernel releases the lock when the process ends, however it ends; that the file exists
        # means nothing.
        descriptor = os.open(self.folder / "up.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise ClusterError(
                f"{self.folder} is in use by another `megascale up`: "
                "stop that one, or choose another --run-folder"
            ) from None
        self._lock = descriptor

    async def _start_etcd(self) -> None:
        if self.options.etcd_endpoints:
            return
        if self._etcd is None:
            self._etcd = EtcdServer(self.folder / "etcd")
        try:
            await self._etcd.start()
        except EtcdError as error:
            raise ClusterError(f"etcd did not start: {error}") from None
        self._report("etcd_ready", {"endpoint": self._etcd.endpoint})

    async def _start_driver(self) -> None:
        options, address_file = self.options, self.folder / "driver.address"
        address_file.unlink(missing_ok=True)
        endpoints = [self._etcd.endpoint] if self._etcd is not None else options.etcd_endpoints
        command = [
            sys.executable,
            "-m",
            "megascale_driver",
            "--cluster",
            options.cluster,
            "--bind",
            "127.0.0.1:0",
        ]
        command += ["--etcd", ",".join(endpoints), "--prefix", f"/megascale/{options.cluster}/v1"]
        command += ["--token-file", str(self.folder / "token"), "--address-file", str(address_file)]
        command += ["--heartbeat-interval-s", f"{options.heartbeat_interval_s:g}"]
        command += ["--hang-floor-s", f"{options.hang_floor_s:g}"]
        command += ["--metrics-bind", "127.0.0.1:0"]
        command += ["--metrics-address-file", str(self.folder / metrics_targets.DRIVER_FILE)]
        self._driver = Child("driver", command, self.folder / "driver.log")
        deadline = asyncio.get_running_loop().time() + START_TIMEOUT_S
        while not self._address():
            self._require_up(self._driver, deadline)
            await asyncio.sleep(POLL_INTERVAL_S)
        self._report("driver_ready", {"address": self._address()})

    def _spawn_node(self, index: int, name: str) -> Child:
        options, folder = self.options, self.folder / "nodes" / name
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        first = index * options.devices_per_node if options.device == "cuda" else 0
        devices = range(first, first + options.devices_per_node)
        command = [
            sys.executable,
            "-m",
            "megascale_executor.agent",
            "--cluster",
            options.cluster,
            "--node",
            name,
        ]
        command += [
            "--driver-file",
            str(self.folder / "driver.address"),
            "--token-file",
            str(self.folder / "token"),
        ]
        command += ["--device", options.device, "--devices", ",".join(map(str, devices))]
        command += [
            "--run-folder",
            str(self.folder),
            "--topology",
            f"switch=s{index // options.nodes_per_switch}",
        ]
        command += [
            "--address-file",
            str(folder / "executor.address"),
            "--metrics-bind",
            "127.0.0.1:0",
        ]
        return Child(name, command, folder / "agent.log")

    async def _wait_alive(self) -> None:
        deadline = asyncio.get_running_loop().time() + START_TIMEOUT_S
        token = read_or_create_token(self.folder / "token")
        waited_for = set(self._nodes)
        async with open_channel(self._address(), token) as channel:
            stub = driver_pb2_grpc.DriverServiceStub(channel)
            while waited_for:
                for child in [*self._nodes.values(), *([self._driver] if self._driver else [])]:
                    self._require_up(child, deadline)
                for name in sorted(waited_for & await _ready_nodes(stub)):
                    waited_for.discard(name)
                    self._report("node_alive", {"node": name})
                await asyncio.sleep(POLL_INTERVAL_S)

    def _require_up(self, child: Child, deadline: float) -> None:
        if child.exit_status is not None:
            what = f"{child.name} ended with status {child.exit_status} during its start"
        elif asyncio.get_running_loop().time() >= deadline:
            what = f"{child.name} was not ready after {START_TIMEOUT_S:g} s"
        else:
            return
        raise ClusterError(f"{what}; the end of {child.log_path}:\n{child.log_tail()}")

    async def _restart(self, name: str, start: Callable[[], Any]) -> None:
        """Restart after a growing delay; a start that fails counts and is repeated as a restart."""
        if self._restarts[name] > MAX_RESTARTS:
            return  # given up, and reported
        self._restarts[name] += 1
        number = self._restarts[name]
        if number > MAX_RESTARTS:
            self._report(
                f"{name}_given_up", {"restarts": MAX_RESTARTS, "log": f"{self.folder / name}.log"}
            )
            return
        self._report(f"{name}_exited", {"restart": number, "restarts_allowed": MAX_RESTARTS})
        await asyncio.sleep(RESTART_DELAYS_S[min(number, len(RESTART_DELAYS_S)) - 1])
        try:
            await start()
        except ClusterError as error:
            self._report(f"{name}_failed", {"error": str(error)})
        with contextlib.suppress(OSError):
            self._write_up_file()

    def _write_targets(self) -> dict[str, str]:
        return metrics_targets.write(self.folder, self.options.cluster, self._nodes)

    def _address(self) -> str:
        try:
            return (self.folder / "driver.address").read_text().strip()
        except FileNotFoundError:
            return ""

    def _write_up_file(self) -> None:
        temporary = self.folder / ".up.json"
        temporary.write_text(json.dumps(self.state(), indent=2) + "\n")
        temporary.replace(self.folder / "up.json")

    def _point_current_here(self) -> None:
        """Point the link `current`, beside the run folder, to it: the clients' default cluster."""
        link, temporary = (
            self.folder.parent / "current",
            self.folder.parent / f".current.{os.getpid()}",
        )
        if link.exists() and not link.is_symlink():
            return
        temporary.symlink_to(self.folder.name)
        temporary.replace(link)


async def _ready_nodes(stub: Any) -> set[str]:
    try:
        answer = await stub.ListNodes(driver_pb2.ListNodesRequest(page_size=MAX_PAGE), timeout=5.0)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNAVAILABLE:  # still starting, or not the leader yet
            return set()
        raise ClusterError(f"the driver refuses to list its nodes: {error.details()}") from None
    # An agent whose daemon is slow to start links without it; its node could not save or restore
    # anything yet.
    alive = [node for node in answer.nodes if node.liveness == types_pb2.NODE_LIVENESS_ALIVE]
    return {node.name for node in alive if node.checkpoint_endpoint}
