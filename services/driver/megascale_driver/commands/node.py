"""The command `megascale node`, which the CLI finds through its entry point.

It also runs as ``python -m megascale_driver.commands.node``: that is how `--detach` starts the
process that supervises the node.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from megascale_common.node.output import steady_streams
from megascale_common.node.process import PARENT_PID_VARIABLE, arm_parent_death
from megascale_common.service.errors import ClusterError, ServiceError, UnavailableError
from megascale_driver.platform.local.joining import JoiningNode, RunningCluster, stop_node
from megascale_driver.platform.local.node import RUN_FOLDER_VARIABLE, node_folder
from megascale_job.names import is_dns_label
from megascale_job.visible import visible

app = typer.Typer(
    add_completion=False,
    rich_markup_mode="rich",
    no_args_is_help=True,
    help="Start a node of a running cluster again, or one more; stop a node.",
)
_console = Console(stderr=True, highlight=False)

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
Cluster = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help=f"Run folder of the cluster; default ${RUN_FOLDER_VARIABLE}, else runs/current.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object per line.")]
Report = Callable[[str, dict[str, Any]], None]


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
    as_json: Json = False,
) -> None:
    """Start a node that has ended, or a new one, in the running cluster of a run folder.

    It runs in the foreground until Ctrl-C, `megascale node stop`, or the end of `megascale up`.
    With --detach it runs in the background until one of the latter two.

    Example: [bold]megascale node start n2[/bold]
    """
    if PARENT_PID_VARIABLE in os.environ:  # started by a program and not by a shell: end with it
        arm_parent_death()
    if not is_dns_label(name):
        raise typer.BadParameter(
            f"{name!r} is not a valid name: use 1 to 63 of a-z, 0-9 and '-'", param_hint="NAME"
        )
    found = RunningCluster.find(run_folder(cluster))
    report = reporter(as_json)
    if detach:
        _detach(found, name, devices, report)
        return
    raise typer.Exit(asyncio.run(run_node(found, name, devices, report)))


@app.command()
def stop(name: Name, cluster: Cluster = None, as_json: Json = False) -> None:
    """Stop a node of this machine, with its workers; its job resumes on a spare.

    Example: [bold]megascale node stop n4[/bold]
    """
    asyncio.run(stop_node(run_folder(cluster), name))
    reporter(as_json)("node_stopped", {"node": name})


def run_folder(given: Path | None) -> Path:
    """The run folder to use: ``given``, else that of the environment, else runs/current."""
    return given or Path(os.environ.get(RUN_FOLDER_VARIABLE) or "runs/current")


def reporter(as_json: bool) -> Report:
    """Prints an event: as a JSON object on stdout, or as a sentence on stderr."""

    def report(kind: str, fields: dict[str, Any]) -> None:
        if as_json:
            print(json.dumps({"event": kind, **fields}), flush=True)
            return
        plain = {
            key: escape(visible(value)) if isinstance(value, str) else value
            for key, value in fields.items()
        }
        if isinstance(fields.get("devices"), list):
            plain["devices"] = ",".join(map(str, fields["devices"]))
        _console.print(_SENTENCES[kind].format(**plain), soft_wrap=True)

    return report


async def run_node(cluster: RunningCluster, name: str, devices: int | None, report: Report) -> int:
    """Start node ``name`` and supervise it until a signal or its end; returns the exit status."""
    steady_streams()  # a full disk under its own output must not end the node
    asked_to_stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, asked_to_stop.set)
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


def main() -> None:
    """Run the command by itself, without the CLI."""
    try:
        app()
    except ServiceError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(3 if isinstance(error, UnavailableError) else 2) from None


if __name__ == "__main__":
    main()
