"""The command `megascale node`, which the CLI finds through its entry point.

It also runs as ``python -m megascale_driver.commands.node``: that is how `--detach` starts the
process that supervises the node.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from typing import Annotated, Any

import typer

from megascale_common.node.output import steady_streams
from megascale_common.node.process import PARENT_PID_VARIABLE, arm_parent_death
from megascale_common.service.errors import ClusterError, UnavailableError
from megascale_driver.commands.shared import (
    Cluster,
    JsonLines,
    Report,
    reporter,
    require_name,
    run_alone,
    run_folder,
)
from megascale_driver.platform.local.joining import JoiningNode, RunningCluster, stop_node
from megascale_driver.platform.local.node import node_folder
from megascale_driver.platform.local.processes import stop_event

app = typer.Typer(
    add_completion=False,
    rich_markup_mode="rich",
    no_args_is_help=True,
    help="Start a node of a running cluster again, or one more; stop a node.",
)

POLL_INTERVAL_S = 0.1
_SENTENCES = {
    "node_ready": "[green]node {node} is alive[/green]: {device} devices {devices} in {run_folder}",
    "node_detached": "node {node} runs in the background; stop it with "
    "`megascale node stop {node}`, its log is {log}",
    "node_not_schedulable": "[yellow]node {node} is {disposition}[/yellow]: it gets no work until "
    "`megascale uncordon {node} --reason ...`",
    "node_exited": "[red]node {node} ended[/red] (status {exit_status})",
    "node_stopped": "node {node} is stopped",
    "cluster_ended": "the cluster in {run_folder} has ended",
    "stopping": "stopping",
}

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the node.")]


@app.command()
def start(
    name: Name,
    cluster: Cluster = None,
    devices: Annotated[
        int | None,
        typer.Option(min=1, max=64, help="Devices of the node; default: as before, or as others."),
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Return once the node is alive; it runs on.")
    ] = False,
    as_json: JsonLines = False,
) -> None:
    """Start a node that has ended, or a new one, in the running cluster of a run folder.

    It runs in the foreground until Ctrl-C, `megascale node stop`, or the end of `megascale up`.
    With --detach it runs in the background until one of the latter two.

    Example: [bold]megascale node start n2[/bold]
    """
    if PARENT_PID_VARIABLE in os.environ:  # started by a program and not by a shell: end with it
        arm_parent_death()
    require_name(name, "NAME")
    found = RunningCluster.find(run_folder(cluster))
    report = node_reporter(as_json)
    if detach:
        _detach(found, name, devices, report)
        return
    raise typer.Exit(asyncio.run(run_node(found, name, devices, report)))


@app.command()
def stop(name: Name, cluster: Cluster = None, as_json: JsonLines = False) -> None:
    """Stop a node of this machine, with its workers; its job resumes on a spare.

    Example: [bold]megascale node stop n4[/bold]
    """
    asyncio.run(stop_node(run_folder(cluster), name))
    node_reporter(as_json)("node_stopped", {"node": name})


def node_reporter(as_json: bool) -> Report:
    """Prints the events of one node."""

    def words(fields: dict[str, Any]) -> dict[str, str]:
        devices = fields.get("devices")
        return {"devices": ",".join(map(str, devices))} if isinstance(devices, list) else {}

    return reporter(as_json, _SENTENCES, words)


async def run_node(cluster: RunningCluster, name: str, devices: int | None, report: Report) -> int:
    """Start node ``name`` and supervise it until a signal or its end; returns the exit status."""
    steady_streams()  # a full disk under its own output must not end the node
    asked_to_stop = stop_event()
    node = JoiningNode(cluster, cluster.node(name, devices), report)

    async def live() -> int:
        await node.start()
        return await node.supervise()

    living = asyncio.create_task(live())
    stopping = asyncio.create_task(asked_to_stop.wait())
    try:
        await asyncio.wait([living, stopping], return_when=asyncio.FIRST_COMPLETED)
        if living.done():
            return living.result()
        report("stopping", {})
        return 0
    finally:
        for task in (living, stopping):
            task.cancel()
        await asyncio.gather(living, stopping, return_exceptions=True)
        await node.stop()


def _detach(cluster: RunningCluster, name: str, devices: int | None, report: Report) -> None:
    """Start this command again in the background; return once it reports the node as alive."""
    folder = node_folder(cluster.folder, name)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    command = [sys.executable, "-m", "megascale_driver.commands.node", "start", name, "--json"]
    command += ["--cluster", str(cluster.folder)]
    command += [] if devices is None else ["--devices", str(devices)]
    log_path = folder / "start.log"
    with log_path.open("wb") as log:
        # A session of its own and no parent-death signal: it outlives this shell.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    while '"node_ready"' not in log_path.read_text():
        try:
            status = process.wait(POLL_INTERVAL_S)
        except subprocess.TimeoutExpired:
            continue  # the child gives up after START_TIMEOUT_S
        lines = [line for line in log_path.read_text().splitlines() if line.startswith("error: ")]
        text = "\n".join(lines).removeprefix("error: ") or f"see {log_path}"
        kind = UnavailableError if status == 3 else ClusterError
        raise kind(f"node {name} did not start: {text}")
    report("node_detached", {"node": name, "pid": process.pid, "log": str(log_path)})


if __name__ == "__main__":
    run_alone(app)
