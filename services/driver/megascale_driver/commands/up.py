"""The command `megascale up`, which the CLI finds through its entry point."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from megascale_common.node.output import steady_streams
from megascale_common.node.process import PARENT_PID_VARIABLE, arm_parent_death
from megascale_driver.commands.node import node_reporter, run_node
from megascale_driver.commands.shared import JsonLines, reporter, require_name
from megascale_driver.platform.local.cluster import LocalCluster, LocalOptions
from megascale_driver.platform.local.joining import RunningCluster
from megascale_driver.platform.local.node import choose_device, count_gpus
from megascale_driver.platform.local.processes import DashboardProcess, stop_event
from megascale_job.visible import counted

app = typer.Typer(add_completion=False, rich_markup_mode="rich")
_console = Console(stderr=True, highlight=False)

_SENTENCES = {
    "etcd_ready": "etcd serves at {endpoint}",
    "driver_ready": "driver serves at {address}",
    "node_alive": "node {node} is alive",
    "node_exited": "[red]node {node} ended[/red] (status {exit_status}) and is not restarted; "
    "its job takes a spare. Start it again with `megascale node start {node}`",
    "driver_exited": "[yellow]driver ended[/yellow]; "
    "restart {restart} of at most {restarts_allowed}",
    "etcd_exited": "[yellow]etcd ended[/yellow]; restart {restart} of at most {restarts_allowed}",
    "driver_failed": "[red]the driver did not start[/red]: {error}",
    "etcd_failed": "[red]etcd did not start[/red]: {error}",
    "driver_given_up": "[red]the driver ended {restarts} times and is not restarted again[/red]; "
    "the nodes continue. See {log}, then stop this command and start it again",
    "etcd_given_up": "[red]etcd ended {restarts} times and is not restarted again[/red]; "
    "the nodes continue. See {log}, then stop this command and start it again",
    "metrics_ready": "metrics at {url}; Prometheus reads all targets from {targets_file}",
    "ready": "[green]ready[/green]: {nodes_said} with {devices_said} each in {run_folder}; "
    "stop with Ctrl-C. Next: megascale submit job.yaml --watch",
    "dashboard_ready": "dashboard at {url}",
    "dashboard_absent": "no dashboard: {remedy}",
    "dashboard_failed": "[yellow]the dashboard has ended[/yellow], the cluster has not: see {log}; "
    "start it again with `megascale dashboard`",
    "stopping": "stopping",
    "stopped": "stopped",
}


Nodes = Annotated[
    int,
    typer.Option(
        min=0,
        max=256,
        help="Number of nodes, named n1 to nN; 0 where others start them (`megascale slurm nodes`, "
        "`megascale node start`).",
    ),
]
DevicesPerNode = Annotated[
    int, typer.Option(min=1, max=64, help="Devices of each node; on CPU, ranks.")
]
Device = Annotated[
    Literal["auto", "cpu", "cuda"], typer.Option(help="auto: GPUs if there are enough, else CPU.")
]
RunFolder = Annotated[Path, typer.Option(help="Folder for state, logs and the token.")]
ClusterName = Annotated[str, typer.Option(help="Name of the cluster.")]
NodesPerSwitch = Annotated[
    int, typer.Option(min=1, help="Nodes that share a topology label `switch`.")
]
EtcdEndpoints = Annotated[
    str, typer.Option(help="host:port[,...] of a running etcd; default: start one.")
]
HeartbeatInterval = Annotated[
    float, typer.Option(min=0.1, max=60, help="Time between the heartbeats of a node.")
]
HangFloor = Annotated[
    float, typer.Option(min=1, help="A step counts as hung after this time at the earliest.")
]
Tls = Annotated[
    bool,
    typer.Option(
        "--tls",
        help="Make a certificate authority in the run folder (tls/) and use mutual TLS between "
        "all parts, as it is done without this in a folder that has one.",
    ),
]
Calibration = Annotated[
    list[Path] | None,
    typer.Option(
        help="A file of `megascale plan calibrate`: running jobs are compared with what the "
        "planner predicts from it; may be repeated."
    ),
]
AddNode = Annotated[
    bool,
    typer.Option(
        "--add-node",
        help="Add one more node to the cluster that runs in --run-folder, under the next name, "
        "as `megascale node start` does.",
    ),
]
Dashboard = Annotated[
    bool, typer.Option(help="Also serve pages for a browser, as `megascale dashboard` does.")
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print what would be started, start nothing.")
]


_OF_ONE_START = frozenset({"run_folder", "add_node", "dry_run", "as_json"})


@app.command()
def up(
    context: typer.Context,
    nodes: Nodes = 3,
    devices_per_node: DevicesPerNode = 4,
    device: Device = "auto",
    run_folder: RunFolder = Path("runs/local"),
    cluster: ClusterName = "local",
    nodes_per_switch: NodesPerSwitch = 4,
    etcd_endpoints: EtcdEndpoints = "",
    heartbeat_interval_s: HeartbeatInterval = 5.0,
    hang_floor_s: HangFloor = 60.0,
    tls: Tls = False,
    calibration: Calibration = None,
    add_node: AddNode = False,
    dashboard: Dashboard = True,
    dry_run: DryRun = False,
    as_json: JsonLines = False,
) -> None:
    """Start a whole cluster on this machine, in the foreground.

    Starts etcd, a driver and the nodes, each node a process group of its own, and writes pids and
    addresses to up.json in the run folder. A driver or etcd that ends is restarted; a node that
    ends is reported and not restarted: `megascale node start NAME` does that. Ctrl-C (or SIGTERM)
    stops everything in order; if this process is killed, all of them end with it.

    Example: [bold]megascale up --nodes 3 --devices-per-node 4 --device cpu[/bold]
    """
    if PARENT_PID_VARIABLE in os.environ:  # started by a program and not by a shell: end with it
        arm_parent_death()
    if add_node:
        source = context.get_parameter_source("devices_per_node")
        given = source is not None and source.name != "DEFAULT"
        running = RunningCluster.find(run_folder)
        name, devices = running.next_name(), devices_per_node if given else None
        raise typer.Exit(asyncio.run(run_node(running, name, devices, node_reporter(as_json))))
    require_name(cluster, "--cluster")
    try:
        kind = choose_device(device, nodes * devices_per_node)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    options = LocalOptions(
        run_folder=run_folder,
        cluster=cluster,
        nodes=nodes,
        devices_per_node=devices_per_node,
        device=kind,
        nodes_per_switch=nodes_per_switch,
        etcd_endpoints=tuple(part.strip() for part in etcd_endpoints.split(",") if part.strip()),
        heartbeat_interval_s=heartbeat_interval_s,
        hang_floor_s=hang_floor_s,
        tls=tls,
        calibrations=tuple(calibration or ()),
        words=_words(context),
    )
    if dry_run:
        _print_plan(options, as_json)
        return
    raise typer.Exit(asyncio.run(_run(options, dashboard, as_json)))


def _words(context: typer.Context) -> tuple[str, ...]:
    """The options that make this cluster what it is, as they were given."""
    words: list[str] = []
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if name in _OF_ONE_START or source is None or source.name != "COMMANDLINE":
            continue
        value = context.params[name]
        if isinstance(value, bool):
            words.append((parameter.opts if value else parameter.secondary_opts)[0])
            continue
        for one in value if isinstance(value, list | tuple) else (value,):
            words += [parameter.opts[0], str(one.resolve() if isinstance(one, Path) else one)]
    return tuple(words)


def _print_plan(options: LocalOptions, as_json: bool) -> None:
    plan = {
        "run_folder": str(options.run_folder),
        "device": options.device,
        "gpus_present": count_gpus(),
        "nodes": options.node_names,
        "devices_per_node": options.devices_per_node,
    }
    if as_json:
        print(json.dumps(plan))
        return
    for name, value in plan.items():
        _console.print(f"{name}: {value}")


async def _run(options: LocalOptions, with_dashboard: bool, as_json: bool) -> int:
    """Start, supervise until a signal or a failure, stop; returns the exit status."""
    steady_streams()  # a full disk under its own output must not end the cluster
    counts = {
        "nodes_said": counted(options.nodes, "node"),
        "devices_said": counted(options.devices_per_node, f"{options.device} device"),
    }
    report = reporter(as_json, _SENTENCES, lambda fields: counts)
    asked_to_stop = stop_event()
    cluster = LocalCluster(options, report)
    dashboard = DashboardProcess(cluster.folder, report)
    showing: list[asyncio.Task[None]] = []

    async def live() -> None:
        await cluster.start()
        report("ready", {**cluster.state(), "nodes_count": options.nodes})
        if with_dashboard:
            showing.append(asyncio.create_task(dashboard.run()))
        await cluster.supervise()

    living = asyncio.create_task(live())
    stopping = asyncio.create_task(asked_to_stop.wait())
    try:
        await asyncio.wait([living, stopping], return_when=asyncio.FIRST_COMPLETED)
    finally:  # also where the reader of the reports has left, which ends this command
        failure = living.exception() if living.done() and not living.cancelled() else None
        tasks = (living, stopping, *showing)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        begun = cluster.begun  # a cluster that was refused has nothing to stop
        if begun:
            report("stopping", {})
        await dashboard.stop()
        await cluster.stop()
        if begun:
            report("stopped", {})
    if failure is not None:
        raise failure
    return 0
