"""One job of ours inside one allocation of SLURM: what its batch script runs.

The first node has etcd and the driver, and `srun` starts an agent on each node, those for spares
too. State, logs and certificates are in the run folder, on a file system that all nodes see: after
a requeue the same job goes on from there. Before the time limit SLURM sends SIGUSR1 (`#SBATCH
--signal`): the job saves and is suspended, and the allocation is queued again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from megascale.v1 import driver_pb2, driver_pb2_grpc, types_pb2
from megascale_common.node.addresses import is_loopback, on_route_to, split
from megascale_common.node.files import replace_file
from megascale_common.service.channel import open_channel
from megascale_common.service.errors import ClusterError, OptionError, UnavailableError
from megascale_driver.platform.following import AFTER_S, Follower
from megascale_driver.platform.local.cluster import LocalCluster, LocalOptions, Report
from megascale_driver.platform.local.node import (
    ADDRESS_FILE,
    DeviceKind,
    LocalNode,
    cluster_token,
    driver_address,
    start_node,
)
from megascale_driver.platform.local.processes import Child, stop_event
from megascale_driver.platform.slurm.further import AllocatedCluster, cancel, requeue
from megascale_driver.platform.slurm.platform import SlurmPlatform

POLL_INTERVAL_S = 0.5
CALL_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 20.0
SUBMIT_TIMEOUT_S = 120.0
# What is left of the time limit for the end of the processes, after the job has been saved.
ENDING_S = 15.0
FOLLOW_INTERVAL_S = 5.0
NO_DRIVER = "127.0.0.1:1"  # an address at which nothing serves
STATE_FILE, DRAINED_FILE = "slurm.json", "drained.json"
_PHASE = types_pb2.JobPhase
_ENDED = (
    _PHASE.Value("JOB_PHASE_SUCCEEDED"),
    _PHASE.Value("JOB_PHASE_FAILED"),
    _PHASE.Value("JOB_PHASE_CANCELLED"),
)
_UNANSWERED = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocationOptions:
    """What the batch script runs with.

    Attributes:
        run_folder: on a file system that all nodes see.
        host: where the driver serves, as all nodes reach it; beyond loopback with mutual TLS.
        save_before_s: how long before the time limit SIGUSR1 comes.
        drain: ask SLURM to drain the nodes that the driver has evicted.
        provide_up_to: nodes in all that SLURM is asked for where the job lacks some; 0: no more.
        provide_after_s: how long they have to be missing.
        sbatch: options of `sbatch` for the allocations of those.
    """

    job_file: Path
    run_folder: Path
    cluster: str
    nodes: int
    device: DeviceKind
    devices_per_node: int
    host: str = "127.0.0.1"
    save_before_s: float = 300.0
    drain: bool = True
    heartbeat_interval_s: float = 5.0
    provide_up_to: int = 0
    provide_after_s: float = AFTER_S
    sbatch: tuple[str, ...] = ()


class Allocation:
    """The batch step of an allocation; :meth:`run` returns its exit status."""

    def __init__(self, options: AllocationOptions, report: Report) -> None:
        self._options = options
        self._report = report
        self._folder = options.run_folder.resolve()
        self._job = os.environ.get("SLURM_JOB_ID", "")
        self._limit_near = asyncio.Event()
        self._stopped = asyncio.Event()
        self._cluster = AllocatedCluster(
            number=self._job,
            run_folder=str(self._folder),
            cluster=options.cluster,
            device=options.device,
            devices_per_node=options.devices_per_node,
            sbatch=options.sbatch,
        )
        self._follower = Follower(
            SlurmPlatform(self._folder),
            self._folder / DRAINED_FILE,
            None,
            report,
            provide_up_to=options.provide_up_to,
            provide_after_s=options.provide_after_s,
        )
        self._follow_at_s = 0.0
        self._suspending_since_s = 0.0

    async def run(self) -> int:
        """Start everything, see the job through, and stop everything.

        Returns:
            0 once the job has succeeded, or is saved and its allocation queued again; else 1.

        Raises:
            OptionError: this is no batch step of SLURM.
            ClusterError: something did not start.
        """
        if not self._job:
            raise OptionError("SLURM_JOB_ID is not set: this runs inside `megascale slurm submit`")
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, self._limit_near.set)
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stopped.set)
        cluster = LocalCluster(self._local_options(), self._report)
        supervising, agents = None, None
        try:
            await cluster.start()
            self._cluster.record()
            supervising = asyncio.create_task(cluster.supervise())
            agents = Child(
                "srun", self._cluster.agents(self._options.nodes), self._folder / "srun.log"
            )
            name = self._known_job() or await self._submit()
            return await self._see_through(name, agents)
        finally:
            if supervising is not None:
                supervising.cancel()
                await asyncio.gather(supervising, return_exceptions=True)
            await cluster.stop()
            if agents is not None:
                await agents.stop(STOP_TIMEOUT_S)
                await self._end_further()

    async def _end_further(self) -> None:
        """Give back the nodes of further allocations, also those that are still queued."""
        try:
            await cancel(self._cluster)
        except UnavailableError as error:  # they end by themselves once this one is gone
            self._report("refused", {"node": "", "error": str(error)})

    def _local_options(self) -> LocalOptions:
        options = self._options
        return LocalOptions(
            run_folder=self._folder,
            cluster=options.cluster,
            nodes=0,
            device=options.device,
            devices_per_node=options.devices_per_node,
            heartbeat_interval_s=options.heartbeat_interval_s,
            tls=not is_loopback(options.host),
            host=options.host,
        )

    def _known_job(self) -> str:
        """The name of the job that this run folder has had since an earlier allocation."""
        try:
            return str(json.loads((self._folder / STATE_FILE).read_text())["job"])
        except FileNotFoundError:
            return ""
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ClusterError(f"{self._folder / STATE_FILE} cannot be read: {error}") from None

    async def _submit(self) -> str:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "megascale_cli",
            "submit",
            str(self._options.job_file),
            "--json",
            "--cluster",
            str(self._folder),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            output, errors = await asyncio.wait_for(process.communicate(), SUBMIT_TIMEOUT_S)
        except TimeoutError:
            process.kill()
            raise UnavailableError(f"the job was not taken in {SUBMIT_TIMEOUT_S:g} s") from None
        if process.returncode:
            raise OptionError(f"{self._options.job_file}: {errors.decode().strip()}")
        name = str(json.loads(output.splitlines()[-1])["spec"]["name"])
        replace_file(self._folder / STATE_FILE, json.dumps({"job": name}) + "\n")
        self._report("submitted", {"job": name})
        return name

    async def _see_through(self, name: str, agents: Child) -> int:
        resumed = False
        while not self._stopped.is_set():
            if agents.exit_status is not None:
                raise ClusterError(f"srun ended with {agents.exit_status}; {agents.last_words()}")
            address = driver_address(self._folder) or NO_DRIVER  # while the driver restarts
            async with open_channel(address, cluster_token(self._folder)) as channel:
                stub = driver_pb2_grpc.DriverServiceStub(channel)
                job = await _answer(stub.GetJob, driver_pb2.GetJobRequest(name=name))
                if job is not None:
                    phase = _PHASE.Name(job.job.phase).removeprefix("JOB_PHASE_")
                    if job.job.phase in _ENDED:
                        self._report("ended", {"job": name, "phase": phase})
                        return int(phase != "SUCCEEDED")
                    if self._limit_near.is_set():
                        if phase == "SUSPENDED" or await self._suspend(stub, name):
                            self._report("requeued", {"job": name, "phase": phase})
                            await requeue(self._job)
                            return 0
                    elif phase == "SUSPENDED" and not resumed:
                        resumed = await self._resume(stub, name)
                    await self._follow(channel)
            await asyncio.sleep(POLL_INTERVAL_S)
        self._report("stopping", {"job": name})
        return 1

    async def _suspend(self, stub: Any, name: str) -> bool:
        """Have the job save and stop; True once there is no more time to wait for that."""
        if not self._suspending_since_s:
            reason = f"the time limit of SLURM's job {self._job} is near"
            request = driver_pb2.SuspendJobRequest(name=name, reason=reason)
            if await _answer(stub.SuspendJob, request) is not None:
                self._suspending_since_s = time.monotonic()
                self._report("suspending", {"job": name})
            return False
        waited_s = time.monotonic() - self._suspending_since_s
        return waited_s > self._options.save_before_s - ENDING_S

    async def _follow(self, channel: Any) -> None:
        if self._options.drain and time.monotonic() >= self._follow_at_s:
            self._follow_at_s = time.monotonic() + FOLLOW_INTERVAL_S
            await self._follower.look(channel)

    async def _resume(self, stub: Any, name: str) -> bool:
        request = driver_pb2.ResumeJobRequest(
            name=name, reason=f"SLURM's job {self._job} has its nodes again"
        )
        if await _answer(stub.ResumeJob, request) is None:
            return False
        self._report("resumed", {"job": name})
        return True


async def run_node(
    run_folder: Path, cluster: str, device: DeviceKind, devices: int, report: Report
) -> int:
    """The agent of this node, under `srun`, until it ends or is told to; its exit status."""
    name = os.environ.get("SLURMD_NODENAME", "")
    if not name:
        raise OptionError("SLURMD_NODENAME is not set: this runs under `srun`")
    stopped = stop_event()
    driver, _ = split((run_folder / ADDRESS_FILE).read_text())
    node = LocalNode(
        name=name,
        device=device,
        devices=tuple(range(devices)),
        switch=_switch(),
        host="" if is_loopback(driver) else on_route_to(driver),
    )
    child = start_node(run_folder.resolve(), cluster, node)
    report("agent_started", {"node": name, "pid": child.pid})
    try:
        while child.exit_status is None and not stopped.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_INTERVAL_S):
                    await stopped.wait()
        return 0 if stopped.is_set() else int(child.exit_status != 0)
    finally:
        await child.stop(STOP_TIMEOUT_S)


def _switch() -> str:
    """The lowest switch above this node; `s0` without a topology plugin."""
    above = os.environ.get("SLURM_TOPOLOGY_ADDR", "").split(".")[:-1]
    return above[-1] if above and above[-1] else "s0"


async def _answer(call: Callable[..., Awaitable[Any]], request: Any) -> Any:
    """What the driver answers; None while it cannot be reached, and the caller asks again.

    Raises:
        ClusterError: it refuses.
    """
    try:
        return await call(request, timeout=CALL_TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        if error.code() in _UNANSWERED:
            return None
        raise ClusterError(f"the driver refuses: {error.details()}") from None
