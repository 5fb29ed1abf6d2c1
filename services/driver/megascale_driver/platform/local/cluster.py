"""A whole cluster on one machine: etcd, one driver and N nodes, for `megascale up`.

All are child processes. Each leads a process group of its own, so that a node can be killed as a
whole, and arms its parent-death signal, so that killing `megascale up` leaves no process. A driver
or etcd that ends is restarted, within a budget. A node that ends is reported and not restarted, as
a lost machine would be: recovering from that is the driver's work.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import json
import os
import stat
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megascale.v1 import driver_pb2_grpc
from megascale_common.etcd.errors import EtcdError
from megascale_common.etcd.server import EtcdServer
from megascale_common.node.addresses import is_loopback, joined
from megascale_common.node.process import start_ticks
from megascale_common.service.channel import open_channel, present
from megascale_common.service.errors import ClusterError, ServiceError
from megascale_common.service.identity import authority, certificates
from megascale_common.service.identity.peers import Role, read_or_create_token
from megascale_common.service.start import UNAVAILABLE
from megascale_driver.platform.etcd_check import require_etcd
from megascale_driver.platform.local.node import (
    ADDRESS_FILE,
    DRIVER_FILE,
    DRIVER_NAME,
    OPERATOR_NAME,
    START_TIMEOUT_S,
    STOP_NODE_TIMEOUT_S,
    TARGETS_FILE,
    TOKEN_FILE,
    DeviceKind,
    LocalNode,
    driver_address,
    is_ready,
    nodes_of,
    running_nodes,
    start_node,
    write_metrics_targets,
)
from megascale_driver.platform.local.processes import Child
from megascale_driver.telemetry import opening

POLL_INTERVAL_S = 0.1
TARGETS_INTERVAL_S = 5.0
ETCD_POLL_S = 1.0
STOP_DRIVER_TIMEOUT_S = 10.0
# Restarts of the driver, and of etcd, during one `megascale up`; more would not help. The nodes are
# kept then, because training continues without both, until `megascale up` is started again.
MAX_RESTARTS = 20
# Before the first, second, ... restart; the last delay is that of all further ones.
RESTART_DELAYS_S = (0.5, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)

# Whoever asks whether a run folder is in use holds its lock for an instant.
LOCK_TRIES = 5
LOCK_RETRY_S = 0.05

Report = Callable[[str, dict[str, Any]], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalOptions:
    """What to start. ``etcd_endpoints`` empty: an etcd in the run folder is started too.

    ``host``: where the driver serves; beyond loopback it needs ``tls``. ``nodes`` may be 0, where
    others start them. ``tls``: make an authority in the run folder, unless it has one, which is
    used in any case. ``calibrations``: files by which running jobs are compared with their plans.
    ``words``: the options of `megascale up`, to start the same cluster again; None: it is not one.
    """

    run_folder: Path
    cluster: str = "local"
    nodes: int = 3
    devices_per_node: int = 4
    device: DeviceKind = "cpu"
    nodes_per_switch: int = 4
    etcd_endpoints: tuple[str, ...] = ()
    heartbeat_interval_s: float = 5.0
    hang_floor_s: float = 60.0
    tls: bool = False
    host: str = "127.0.0.1"
    calibrations: tuple[Path, ...] = ()
    words: tuple[str, ...] | None = None

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
        self._token = ""
        self._etcd: EtcdServer | None = None
        self._driver: Child | None = None
        self._nodes: dict[str, Child] = {}
        self._lost: set[str] = set()
        self._restarts = {"etcd": 0, "driver": 0}

    @property
    def begun(self) -> bool:
        """Whether the run folder is this cluster's, so that there may be something to stop."""
        return self._lock is not None

    async def start(self) -> None:
        """Start everything; returns when all nodes are alive and their checkpoint daemons serve.

        Raises:
            ClusterError: the run folder cannot be used, or a process did not start; the message
                has the last line of its log.
            UnavailableError: the etcd that was named does not answer.
        """
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self.folder.stat().st_mode & stat.S_IWOTH:
                raise ClusterError(
                    f"--run-folder: every user may write to {self.folder}, and so put their own "
                    f"token or address there: chmod o-w {self.folder}, or give another folder"
                )
            self._take_lock()
            self._token = read_or_create_token(self.folder / TOKEN_FILE)
            self._prepare_tls()
            await self._start_etcd()
            self._report_ready("etcd")
            await self._start_driver()
            self._report_ready("driver")
            for index, name in enumerate(self.options.node_names):
                self._nodes[name] = start_node(
                    self.folder, self.options.cluster, self._node(index, name)
                )
            self._write_up_file()
        except ValueError as error:
            raise ClusterError(f"{self.folder / TOKEN_FILE}: {error}") from None
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            remedy = "make room there" if full else "give a folder that you may write to"
            raise ClusterError(
                f"--run-folder: {error.filename or self.folder}: {error.strerror or error}: "
                f"{remedy}"
            ) from None
        await self._wait_alive()
        self._point_current_here()
        found = self._write_targets()
        targets_file = str(self.folder / TARGETS_FILE)
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
            if self._driver is not None and await self._driver_needs_a_start(self._driver):
                await self._restart("driver", self._start_driver)
            for name, child in self._nodes.items():
                if name not in self._lost and child.exit_status is not None:
                    self._lost.add(name)
                    self._report("node_exited", {"node": name, "exit_status": child.exit_status})
            await asyncio.sleep(POLL_INTERVAL_S)

    async def _driver_needs_a_start(self, driver: Child) -> bool:
        """Whether the driver has ended and could start: without etcd each start would count."""
        if driver.exit_status != UNAVAILABLE:
            return driver.exit_status is not None
        try:
            await require_etcd("--etcd-endpoints", self._etcd_endpoints(), ETCD_POLL_S)
        except ServiceError:
            return False
        return True

    def _etcd_endpoints(self) -> list[str]:
        if self._etcd is not None:
            return [self._etcd.endpoint]
        return list(self.options.etcd_endpoints)

    async def stop(self) -> None:
        """Stop everything: the driver first, so that it does not see the nodes' end as faults."""
        if self._driver is not None:
            await self._driver.stop(STOP_DRIVER_TIMEOUT_S)
        await asyncio.gather(*(child.stop(STOP_NODE_TIMEOUT_S) for child in self._nodes.values()))
        if self._etcd is not None:
            await self._etcd.stop()
        if self._lock is None:
            return
        for name in (ADDRESS_FILE, "up.json", DRIVER_FILE, TARGETS_FILE):
            (self.folder / name).unlink(missing_ok=True)
        os.close(self._lock)
        self._lock = None

    def state(self) -> dict[str, Any]:
        """The content of `up.json`: pids and addresses."""
        return {
            "pid": os.getpid(),
            "start_ticks": start_ticks(os.getpid()),
            "cluster": self.options.cluster,
            "run_folder": str(self.folder),
            "device": self.options.device,
            "devices_per_node": self.options.devices_per_node,
            "nodes_per_switch": self.options.nodes_per_switch,
            "etcd": {
                "pid": self._etcd.pid if self._etcd is not None else None,
                "endpoints": self._etcd_endpoints(),
            },
            "driver": {
                "pid": self._driver.pid if self._driver is not None else None,
                "address": driver_address(self.folder),
            },
            "nodes": {name: {"pid": child.pid} for name, child in self._nodes.items()},
        }

    def _take_lock(self) -> None:
        # The kernel releases the lock when the process ends, however it ends; that the file exists
        # means nothing.
        descriptor = os.open(self.folder / "up.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        for left in reversed(range(LOCK_TRIES)):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if not left:
                    os.close(descriptor)
                    raise ClusterError(
                        f"{self.folder} is in use by another `megascale up`: "
                        "stop that one, or choose another --run-folder"
                    ) from None
            time.sleep(LOCK_RETRY_S)  # a command that asks whether it is held, holds it meanwhile
        self._lock = descriptor
        # For those who find the cluster down: how to start it again.
        os.truncate(descriptor, 0)
        if self.options.words is not None:
            os.write(descriptor, json.dumps({"options": self.options.words}).encode())

    def _prepare_tls(self) -> None:
        """Make the authority that was asked for, and the certificates of driver and operator."""
        folder, cluster = self.folder / certificates.FOLDER, self.options.cluster
        if self.options.tls and not (folder / certificates.CA_FILE).exists():
            authority.create(folder, cluster)
        for role, name in ((Role.DRIVER, DRIVER_NAME), (Role.OPERATOR, OPERATOR_NAME)):
            files = certificates.of_cluster(self.folder, role, name)
            beyond = role is Role.DRIVER and not is_loopback(self.options.host)
            if files is not None and (beyond or not files.certificate.exists()):
                authority.issue(folder, cluster, role, name, [self.options.host] if beyond else [])
        present(certificates.of_cluster(self.folder, Role.OPERATOR, OPERATOR_NAME))

    async def _start_etcd(self) -> None:
        if self.options.etcd_endpoints:
            await require_etcd("--etcd-endpoints", self.options.etcd_endpoints)
            return
        if self._etcd is None:
            self._etcd = EtcdServer(self.folder / "etcd")
        try:
            await self._etcd.start()
        except EtcdError as error:
            raise ClusterError(
                f"etcd did not start: {error}; if its log does not help, use another --run-folder"
            ) from None

    async def _start_driver(self) -> None:
        options, address_file = self.options, self.folder / ADDRESS_FILE
        address_file.unlink(missing_ok=True)
        endpoints = self._etcd_endpoints()
        command = [
            sys.executable,
            "-m",
            "megascale_driver",
            "--cluster",
            options.cluster,
            "--bind",
            joined(options.host, 0),
        ]
        command += ["--etcd", ",".join(endpoints), "--prefix", f"/megascale/{options.cluster}/v1"]
        command += [
            "--token-file",
            str(self.folder / TOKEN_FILE),
            "--address-file",
            str(address_file),
        ]
        command += ["--heartbeat-interval-s", f"{options.heartbeat_interval_s:g}"]
        command += ["--hang-floor-s", f"{options.hang_floor_s:g}"]
        command += ["--audit-export", str(self.folder / "audit")]
        if opening.available():
            command += ["--telemetry-folder", str(self.folder / "telemetry")]
            for path in options.calibrations:
                command += ["--calibration", str(path.resolve())]
        command += ["--metrics-bind", "127.0.0.1:0"]
        command += ["--metrics-address-file", str(self.folder / DRIVER_FILE)]
        if (files := certificates.of_cluster(self.folder, Role.DRIVER, DRIVER_NAME)) is not None:
            command += files.options()
        self._driver = Child("driver", command, self.folder / "driver.log")
        deadline = asyncio.get_running_loop().time() + START_TIMEOUT_S
        while not driver_address(self.folder):
            self._require_up(self._driver, deadline)
            await asyncio.sleep(POLL_INTERVAL_S)

    def _node(self, index: int, name: str) -> LocalNode:
        options = self.options
        first = index * options.devices_per_node if options.device == "cuda" else 0
        return LocalNode(
            name=name,
            device=options.device,
            devices=tuple(range(first, first + options.devices_per_node)),
            switch=f"s{index // options.nodes_per_switch}",
        )

    async def _wait_alive(self) -> None:
        deadline = asyncio.get_running_loop().time() + START_TIMEOUT_S
        waited_for = set(self._nodes)
        async with open_channel(driver_address(self.folder), self._token) as channel:
            stub = driver_pb2_grpc.DriverServiceStub(channel)
            while waited_for:
                for child in [*self._nodes.values(), *([self._driver] if self._driver else [])]:
                    self._require_up(child, deadline)
                for node in await nodes_of(stub):
                    if node.name in waited_for and is_ready(self.folder, node):
                        waited_for.discard(node.name)
                        self._report("node_alive", {"node": node.name})
                await asyncio.sleep(POLL_INTERVAL_S)

    def _require_up(self, child: Child, deadline: float) -> None:
        if child.exit_status is not None:
            what = f"{child.name} ended with status {child.exit_status} during its start"
        elif asyncio.get_running_loop().time() >= deadline:
            what = f"{child.name} was not ready after {START_TIMEOUT_S:g} s"
        else:
            return
        raise ClusterError(f"{what}; {child.last_words()}")

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
        failure: ClusterError | None = None
        try:
            await start()
        except ClusterError as error:
            failure = error
        with contextlib.suppress(OSError):
            self._write_up_file()  # before the report: who waits for that reads the file next
        if failure is not None:
            self._report(f"{name}_failed", {"error": str(failure)})
        else:
            self._report_ready(name)

    def _report_ready(self, name: str) -> None:
        if name == "driver":
            self._report("driver_ready", {"address": driver_address(self.folder)})
        elif self._etcd is not None:  # one of its own
            self._report("etcd_ready", {"endpoint": self._etcd.endpoint})

    def _write_targets(self) -> dict[str, str]:
        # Nodes that `megascale node start` added are no children of this process.
        names = sorted({*self._nodes, *running_nodes(self.folder)})
        return write_metrics_targets(self.folder, self.options.cluster, names)

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
