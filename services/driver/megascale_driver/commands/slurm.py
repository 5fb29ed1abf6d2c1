"""The command `megascale slurm`: a job with its own cluster inside an allocation of SLURM.

It also runs as ``python -m megascale_driver.commands.slurm``: that is how a batch script starts the
driver's side (`run`) or the agents of more nodes (`further`), and `srun` each node's (`node`).
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from megascale_driver.commands.shared import reporter, require_name, run_alone
from megascale_driver.platform.following import AFTER_S
from megascale_driver.platform.interface import MAX_NODES
from megascale_driver.platform.slurm.allocation import Allocation, AllocationOptions, run_node
from megascale_driver.platform.slurm.further import (
    AllocatedCluster,
    of_every_allocation,
    queue,
    run_further,
    script,
)
from megascale_driver.platform.slurm.platform import SlurmPlatform, own_address
from megascale_job.visible import agreed, counted

app = typer.Typer(
    add_completion=False,
    rich_markup_mode="rich",
    no_args_is_help=True,
    help="Train inside an allocation of SLURM, with spares, and go on in the next one.",
)
_console = Console(stderr=True, highlight=False)
_report = reporter(True, {})

JobFile = Annotated[Path, typer.Argument(metavar="JOB.yaml", help="The job's file.")]
Nodes = Annotated[int, typer.Option(min=1, metavar="N", help="Nodes that the job trains on.")]
Spares = Annotated[int, typer.Option(min=0, metavar="N", help="Further nodes, which stand by.")]
DevicesPerNode = Annotated[
    int, typer.Option(min=1, max=64, metavar="N", help="Devices of each node.")
]
Device = Annotated[Literal["cpu", "cuda"], typer.Option(help="What a rank runs on.")]
RunFolder = Annotated[
    Path, typer.Option(help="For state, logs and certificates; all nodes see it.")
]
ClusterName = Annotated[str, typer.Option(help="Name of the cluster of ours.")]
TimeLimit = Annotated[
    str, typer.Option("--time", help="Time limit, as in sbatch; default: the partition's.")
]
SaveBefore = Annotated[
    int,
    typer.Option(
        "--save-before-s",
        min=30,
        metavar="S",
        help="So long before the limit the job saves and is queued.",
    ),
]
Host = Annotated[
    str,
    typer.Option(help="Address of the driver as nodes reach it, with TLS; default: the first's."),
]
Sbatch = Annotated[
    list[str] | None,
    typer.Option("--sbatch", help="A further option of sbatch, as in --sbatch=--qos=high."),
]
Heartbeat = Annotated[
    float,
    typer.Option(min=0.1, max=60, metavar="S", help="Between heartbeats of a node."),
]
Drain = Annotated[bool, typer.Option(help="Drain nodes in SLURM that the driver has evicted.")]
ProvideUpTo = Annotated[
    int,
    typer.Option(
        min=0,
        max=MAX_NODES,
        metavar="N",
        help="Ask SLURM for more nodes where the job lacks some, so many in all; 0: for none.",
    ),
]
ProvideAfter = Annotated[
    float,
    typer.Option(
        min=0, metavar="S", help="How long the job lacks nodes before more are asked for."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command()
def submit(
    job_file: JobFile,
    nodes: Nodes,
    spares: Spares = 1,
    devices_per_node: DevicesPerNode = 8,
    device: Device = "cuda",
    run_folder: RunFolder = Path("runs/slurm"),
    cluster: ClusterName = "slurm",
    time_limit: TimeLimit = "",
    save_before_s: SaveBefore = 300,
    host: Host = "",
    heartbeat_interval_s: Heartbeat = 5.0,
    drain: Drain = True,
    provide_up_to: ProvideUpTo = 0,
    provide_after_s: ProvideAfter = AFTER_S,
    sbatch: Sbatch = None,
    print_only: Annotated[
        bool, typer.Option("--print", help="Print the batch script, submit nothing.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Queue a job: its nodes and spares are one allocation, which is queued again at its limit.

    Submitting again with the same --run-folder goes on with the job that is there.

    Example: [bold]megascale slurm submit job.yaml --nodes 16 --spares 1 --time 24:00:00[/bold]
    """
    require_name(cluster, "--cluster")
    if not job_file.is_file():
        raise typer.BadParameter(f"{job_file} is no file", param_hint="JOB.yaml")
    folder = run_folder.resolve()
    count = nodes + spares
    command = [sys.executable, "-m", "megascale_driver.commands.slurm", "run"]
    command += [str(job_file.resolve()), "--nodes", str(count), "--device", device]
    command += ["--devices-per-node", str(devices_per_node), "--cluster", cluster]
    command += ["--run-folder", str(folder), "--save-before-s", str(save_before_s)]
    command += ["--heartbeat-interval-s", f"{heartbeat_interval_s:g}"]
    command += [*(["--host", host] if host else []), *([] if drain else ["--no-drain"])]
    given = [*([f"--time={time_limit}"] if time_limit else []), *(sbatch or [])]
    if provide_up_to:
        command += ["--provide-up-to", str(provide_up_to)]
        command += ["--provide-after-s", f"{provide_after_s:g}"]
        command += [f"--sbatch={option}" for option in given]
    options = [f"--job-name={cluster}", f"--nodes={count}"]
    options += of_every_allocation(device, devices_per_node)
    options += [f"--signal=B:USR1@{save_before_s}", "--requeue"]
    options += [f"--output={folder}/slurm-%j.log", *given]
    text = script(options, command)
    if print_only:
        print(text, end="")
        return
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    number = asyncio.run(queue(text))
    if as_json:
        print(json.dumps({"slurm_job": number, "run_folder": str(folder)}))
        return
    _console.print(
        f"SLURM's job {number} is queued; its log is {folder}/slurm-{number}.log. Once it runs: "
        f"megascale jobs --cluster {folder}",
        soft_wrap=True,
    )


@app.command()
def nodes(
    count: Annotated[int, typer.Argument(metavar="COUNT", min=1, max=MAX_NODES)],
    devices_per_node: DevicesPerNode = 8,
    device: Device = "cuda",
    run_folder: RunFolder = Path("runs/current"),
    cluster: ClusterName = "",
    time_limit: TimeLimit = "",
    sbatch: Sbatch = None,
    as_json: Json = False,
) -> None:
    """Have SLURM give COUNT nodes in all to a driver that runs outside of its allocations.

    The run folder, which all nodes see, has the driver's address, the token and, beyond loopback,
    the authority for certificates.

    Example: [bold]megascale slurm nodes 4 --run-folder /shared/runs/main --time 24:00:00[/bold]
    """
    folder = run_folder.resolve()
    found = AllocatedCluster(
        number="",
        run_folder=str(folder),
        cluster=cluster or _cluster_of(folder),
        device=device,
        devices_per_node=devices_per_node,
        sbatch=(*([f"--time={time_limit}"] if time_limit else []), *(sbatch or ())),
    )
    found.require_alone()
    found.record()
    there = asyncio.run(SlurmPlatform(folder).provide(count))
    if as_json:
        print(json.dumps({"count": count, "there": there, "slurm_name": found.further_name}))
        return
    _console.print(
        f"{counted(there, 'node')} of SLURM {agreed(there, 'are')} there or queued for. "
        f"They end with the driver, or by `scancel --name={found.further_name}`",
        soft_wrap=True,
    )


def _cluster_of(folder: Path) -> str:
    """The name of the cluster that `megascale up` runs in a folder."""
    try:
        return str(json.loads((folder / "up.json").read_text())["cluster"])
    except (OSError, ValueError, KeyError, TypeError):
        raise typer.BadParameter(
            f"{folder} is no run folder of `megascale up`: give the cluster's name",
            param_hint="--cluster",
        ) from None


@app.command(hidden=True)
def run(
    job_file: JobFile,
    nodes: Nodes,
    device: Device,
    devices_per_node: DevicesPerNode,
    run_folder: RunFolder,
    cluster: ClusterName,
    save_before_s: SaveBefore = 300,
    host: Host = "",
    heartbeat_interval_s: Heartbeat = 5.0,
    drain: Drain = True,
    provide_up_to: ProvideUpTo = 0,
    provide_after_s: ProvideAfter = AFTER_S,
    sbatch: Sbatch = None,
) -> None:
    """Run etcd, the driver, the nodes' agents and the job (what the batch script does)."""
    options = AllocationOptions(
        job_file=job_file,
        run_folder=run_folder,
        cluster=cluster,
        nodes=nodes,
        device=device,
        devices_per_node=devices_per_node,
        host=host or asyncio.run(own_address()),
        save_before_s=float(save_before_s),
        drain=drain,
        heartbeat_interval_s=heartbeat_interval_s,
        provide_up_to=provide_up_to,
        provide_after_s=provide_after_s,
        sbatch=tuple(sbatch or ()),
    )

    async def live() -> int:
        return await Allocation(options, _report).run()

    raise typer.Exit(asyncio.run(live()))


@app.command(hidden=True)
def node(
    run_folder: RunFolder, cluster: ClusterName, device: Device, devices_per_node: DevicesPerNode
) -> None:
    """Run this node's agent (what srun starts)."""
    raise typer.Exit(asyncio.run(run_node(run_folder, cluster, device, devices_per_node, _report)))


@app.command(hidden=True)
def further(run_folder: Annotated[Path, typer.Argument()], nodes: Nodes) -> None:
    """Run the agents of a further allocation (what its batch script does)."""
    raise typer.Exit(asyncio.run(run_further(run_folder, nodes)))


if __name__ == "__main__":
    run_alone(app)
