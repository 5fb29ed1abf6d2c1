"""Further allocations of SLURM: more nodes for a driver inside or outside of an allocation.

SLURM cannot add a node to an allocation. So more nodes are further allocations: batch jobs that
start agents, which dial the driver. All they need is in the run folder. Their job name is derived
from the cluster, so that the next caller finds them again. They end with the first allocation, or
with the driver.

Each command of SLURM has a time limit, and one error type for all failures.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megascale_common.node.files import replace_file
from megascale_common.service.errors import OptionError, UnavailableError
from megascale_driver.platform.local.node import ADDRESS_FILE, DeviceKind
from megascale_driver.platform.local.processes import Child

COMMAND_TIMEOUT_S = 30.0


async def queue(script: str) -> str:
    """Hand a batch script to SLURM; returns the number of its job.

    Raises:
        UnavailableError: `sbatch` is absent, refuses or does not answer.
    """
    return (await output("sbatch", "--parsable", text=script)).split(";")[0].strip()


async def requeue(job: str) -> None:
    """End the allocation ``job``, and have its script run again when there is room.

    Raises:
        UnavailableError: `scontrol` is absent, refuses or does not answer.
    """
    await output("scontrol", "requeue", job)


async def output(*command: str, text: str = "") -> str:
    """What a command prints; ``text`` is its input.

    Raises:
        UnavailableError: it is absent, fails, or does not answer in time.
    """
    program = command[0]
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
    except FileNotFoundError:
        raise UnavailableError(f"{program} is not installed: run this on a host of SLURM") from None
    try:
        answer = await asyncio.wait_for(process.communicate(text.encode()), COMMAND_TIMEOUT_S)
    except TimeoutError:
        process.kill()
        await process.wait()
        raise UnavailableError(f"{program}: no answer in {COMMAND_TIMEOUT_S:.0f} s") from None
    output, errors = (words.decode(errors="replace") for words in answer)
    if process.returncode:
        raise UnavailableError(f"{program} failed: {(errors or output).strip()[:500]}")
    return output


FILE = "allocation.json"  # in the run folder
POLL_INTERVAL_S = 5.0
STOP_TIMEOUT_S = 20.0
GONE_AFTER_S = 120.0  # without an address of a driver, which has one again soon after its restart
_COLUMNS = "%T %D %N"  # state, number of nodes, their names
_STATES = "PENDING,CONFIGURING,RUNNING,COMPLETING"


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocatedCluster:
    """A cluster whose nodes SLURM gives: where its driver runs, and what further nodes are given.

    Attributes:
        number: of the batch job with etcd, the driver and the first nodes, which a requeue keeps;
            empty: they run outside of SLURM.
        sbatch: options of `sbatch` for further allocations, such as ``--account=lab``.
    """

    number: str
    run_folder: str
    cluster: str
    device: DeviceKind
    devices_per_node: int
    sbatch: tuple[str, ...] = ()

    @property
    def further_name(self) -> str:
        """The name of the batch jobs with its further nodes."""
        folder = hashlib.sha256(self.run_folder.encode()).hexdigest()[:8]
        return f"{self.cluster}-further-{self.number or folder}"

    def require_alone(self) -> None:
        """Check that this folder's driver does not run inside an allocation.

        Raises:
            OptionError: it does.
        """
        with contextlib.suppress(UnavailableError):
            number = AllocatedCluster.find(Path(self.run_folder)).number
            if number:
                raise OptionError(
                    f"--run-folder: the cluster in {self.run_folder} is SLURM's job {number}; "
                    "`megascale platform provide COUNT --platform slurm` asks for more nodes of it"
                )

    def record(self) -> None:
        """Write it down for :meth:`find`."""
        replace_file(Path(self.run_folder) / FILE, json.dumps(asdict(self)) + "\n")

    @classmethod
    def find(cls, run_folder: Path) -> AllocatedCluster:
        """The one of a run folder.

        Raises:
            UnavailableError: there is none.
        """
        try:
            values = json.loads((run_folder / FILE).read_text())
            return cls(**values | {"sbatch": tuple(values["sbatch"])})
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise UnavailableError(
                f"{run_folder} has no cluster with nodes of SLURM ({error}): only one of "
                "`megascale slurm submit` or `megascale slurm nodes` can be given more"
            ) from None

    def agents(self, nodes: int) -> list[str]:
        """The step that runs an agent on each node; a lost node ends no other's task."""
        return [
            "srun",
            f"--nodes={nodes}",
            f"--ntasks={nodes}",
            "--ntasks-per-node=1",
            "--no-kill",
            "--kill-on-bad-exit=0",
            "--wait=0",
            sys.executable,
            "-m",
            "megascale_driver.commands.slurm",
            "node",
            "--run-folder",
            self.run_folder,
            "--cluster",
            self.cluster,
            "--device",
            self.device,
            "--devices-per-node",
            str(self.devices_per_node),
        ]

    def script(self, nodes: int) -> str:
        """The batch script of a further allocation."""
        command = [sys.executable, "-m", "megascale_driver.commands.slurm", "further"]
        command += [self.run_folder, "--nodes", str(nodes)]
        options = [f"--job-name={self.further_name}", f"--nodes={nodes}", "--no-requeue"]
        options += [f"--output={self.run_folder}/slurm-%j.log", *self.sbatch]
        return script([*options, *of_every_allocation(self.device, self.devices_per_node)], command)


def of_every_allocation(device: DeviceKind, devices_per_node: int) -> list[str]:
    """Options of `sbatch` that the first and further allocations have in common."""
    gpus = [f"--gpus-per-node={devices_per_node}"] if device == "cuda" else []
    return ["--ntasks-per-node=1", *gpus, "--no-kill", "--open-mode=append"]


def script(options: Sequence[str], command: Sequence[str]) -> str:
    """A batch script: `#SBATCH` lines, and the command that replaces the shell.

    The shell is replaced so that SLURM's signal before the time limit reaches the command.
    """
    lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in options)]
    return "\n".join([*lines, f"exec {shlex.join(command)}"]) + "\n"


async def held(cluster: AllocatedCluster) -> tuple[frozenset[str], int]:
    """Names of the nodes of all allocations of a cluster, and how many more are queued for.

    Raises:
        UnavailableError: SLURM does not answer, or the first allocation has ended.
    """
    own = ""
    if cluster.number:
        own = await _first(cluster, _COLUMNS)
        if not any(line.split()[0] in ("RUNNING", "COMPLETING") for line in own.splitlines()):
            raise UnavailableError(
                f"SLURM's job {cluster.number} does not run: nobody needs its nodes"
            )
    further = await output("squeue", "-h", f"--name={cluster.further_name}", "-o", _COLUMNS)
    nodes: list[str] = []
    queued = 0
    for line in [*own.splitlines(), *further.splitlines()]:
        state, count, hosts = (*line.split(), "")[:3]
        if state not in _STATES.split(","):
            continue
        if hosts:
            nodes += (await output("scontrol", "show", "hostnames", hosts)).split()
        else:
            queued += int(count)
    return frozenset(nodes), queued


async def add(cluster: AllocatedCluster, nodes: int) -> None:
    """Queue a further allocation; raises UnavailableError as :func:`held`."""
    await output("sbatch", "--parsable", text=cluster.script(nodes))


async def cancel(cluster: AllocatedCluster) -> None:
    """End all further allocations; raises UnavailableError as :func:`held`."""
    await output("scancel", f"--name={cluster.further_name}")


async def run_further(run_folder: Path, nodes: int) -> int:
    """The agents of a further allocation, until they end or nobody needs them any more.

    Returns:
        0 once the first allocation or the driver is gone, else 1 or the status 0 of `srun`.
    """
    cluster = AllocatedCluster.find(run_folder)
    log = run_folder / f"srun-{os.environ.get('SLURM_JOB_ID', '')}.log"
    child = Child("srun", cluster.agents(nodes), log)
    driver_seen_s = time.monotonic()
    try:
        while child.exit_status is None:
            await asyncio.sleep(POLL_INTERVAL_S)
            if cluster.number:
                if await _is_gone(cluster):
                    return 0
            elif (run_folder / ADDRESS_FILE).exists():
                driver_seen_s = time.monotonic()
            elif time.monotonic() - driver_seen_s > GONE_AFTER_S:
                return 0
        return int(child.exit_status != 0)
    finally:
        await child.stop(STOP_TIMEOUT_S)


async def _is_gone(cluster: AllocatedCluster) -> bool:
    """Whether the first allocation has ended for good; a requeued one waits in the queue."""
    try:
        found = await _first(cluster, "%T")
    except UnavailableError as error:  # once SLURM has forgotten it, its number is an error
        return "Invalid job id" in str(error)
    return found.strip() not in (*_STATES.split(","), "REQUEUED", "REQUEUE_HOLD", "SUSPENDED", "")


async def _first(cluster: AllocatedCluster, columns: str) -> str:
    """What the queue says of the first allocation, ended or not."""
    return await output("squeue", "-h", f"--jobs={cluster.number}", "--states=all", "-o", columns)
