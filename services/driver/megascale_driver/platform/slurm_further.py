"""Further nodes of a cluster that runs inside an allocation of SLURM.

SLURM adds no node to an allocation, so more nodes are further ones: batch jobs that start agents,
which dial the driver of the first. What they need is in the run folder. Their name has the first
one's number, so they are found again by whoever asks next, and cancelled when the first one ends.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megascale_common.node.files import replace_file
from megascale_common.service.errors import UnavailableError
from megascale_driver.platform.child import Child
from megascale_driver.platform.devices import DeviceKind
from megascale_driver.platform.slurm_commands import output

FILE = "allocation.json"  # in the run folder
POLL_INTERVAL_S = 5.0
STOP_TIMEOUT_S = 20.0
_STATES = "PENDING,CONFIGURING,RUNNING,COMPLETING"


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstAllocation:
    """The allocation that has etcd, the driver and the first nodes, and what others are given.

    Attributes:
        number: of its batch job, which a requeue keeps.
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
        return f"{self.cluster}-further-{self.number}"

    def record(self) -> None:
        """Write it down for :meth:`find`."""
        replace_file(Path(self.run_folder) / FILE, json.dumps(asdict(self)) + "\n")

    @classmethod
    def find(cls, run_folder: Path) -> FirstAllocation:
        """The allocation of the cluster in a run folder.

        Raises:
            UnavailableError: there is none.
        """
        try:
            values = json.loads((run_folder / FILE).read_text())
            return cls(**values | {"sbatch": tuple(values["sbatch"])})
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise UnavailableError(
                f"{run_folder} has no cluster inside an allocation of SLURM ({error}): only one of "
                "`megascale slurm submit` can be given more nodes"
            ) from None

    def agents(self, nodes: int) -> list[str]:
        """The step that runs an agent on each node; a lost node ends no other's task."""
        return [
            *("srun", f"--nodes={nodes}", f"--ntasks={nodes}"),
            *("--ntasks-per-node=1", "--no-kill", "--kill-on-bad-exit=0", "--wait=0"),
            *(sys.executable, "-m", "megascale_driver.commands.slurm", "node"),
            *("--run-folder", self.run_folder, "--cluster", self.cluster),
            *("--device", self.device, "--devices-per-node", str(self.devices_per_node)),
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


async def held(first: FirstAllocation) -> tuple[frozenset[str], int]:
    """Names of the nodes of all allocations of a cluster, and how many more are queued for.

    Raises:
        UnavailableError: SLURM does not answer, or the first allocation has ended.
    """
    own = await output("squeue", "-h", f"--jobs={first.number}", "--states=all", "-o", _COLUMNS)
    further = await output("squeue", "-h", f"--name={first.further_name}", "-o", _COLUMNS)
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
    if not any(line.split()[0] in ("RUNNING", "COMPLETING") for line in own.splitlines()):
        raise UnavailableError(f"SLURM's job {first.number} does not run: nobody needs its nodes")
    return frozenset(nodes), queued


_COLUMNS = "%T %D %N"


async def add(first: FirstAllocation, nodes: int) -> None:
    """Queue a further allocation; raises UnavailableError as :func:`held`."""
    await output("sbatch", "--parsable", text=first.script(nodes))


async def cancel(first: FirstAllocation) -> None:
    """End all further allocations; raises UnavailableError as :func:`held`."""
    await output("scancel", f"--name={first.further_name}")


async def run_further(run_folder: Path, nodes: int) -> int:
    """The agents of a further allocation, until they end or the first one is gone.

    Returns:
        0 once the first allocation is gone, else the status with which `srun` has ended.
    """
    first = FirstAllocation.find(run_folder)
    child = Child("srun", first.agents(nodes), run_folder / "srun-further.log")
    try:
        while child.exit_status is None:
            await asyncio.sleep(POLL_INTERVAL_S)
            if await _is_gone(first):
                return 0
        return int(child.exit_status != 0)
    finally:
        await child.stop(STOP_TIMEOUT_S)


async def _is_gone(first: FirstAllocation) -> bool:
    """Whether the first allocation has ended for good; a requeued one waits in the queue."""
    try:
        found = await output("squeue", "-h", f"--jobs={first.number}", "--states=all", "-o", "%T")
    except UnavailableError as error:  # once SLURM has forgotten it, its number is an error
        return "Invalid job id" in str(error)
    return found.strip() not in (*_STATES.split(","), "REQUEUED", "REQUEUE_HOLD", "SUSPENDED", "")
