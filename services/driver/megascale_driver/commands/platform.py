"""The command `megascale platform`: what gives nodes to a cluster, and who has drained which."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megascale_common.service.channel import open_channel, present
from megascale_common.service.identity import certificates
from megascale_common.service.identity.peers import Role
from megascale_driver.commands.shared import Cluster, reporter, run_folder
from megascale_driver.platform.following import AFTER_S, Follower
from megascale_driver.platform.interface import MAX_NODES, known_platforms, open_platform
from megascale_driver.platform.local.joining import RunningCluster
from megascale_driver.platform.local.node import (
    OPERATOR_NAME,
    RUN_FOLDER_VARIABLE,
    cluster_token,
    driver_address,
)
from megascale_driver.platform.local.processes import stop_event
from megascale_job.visible import agreed, counted, visible

app = typer.Typer(
    add_completion=False,
    rich_markup_mode="rich",
    no_args_is_help=True,
    help="List the nodes of SLURM or of another platform; drain there what the driver evicts, and "
    "ask for nodes that jobs lack.",
)
_console = Console(stderr=True, highlight=False)
RECORD_FILE = "drained.json"  # in the run folder
_SENTENCES = {
    "following": "what the driver of {run_folder} evicts is drained on {platform}; Ctrl-C ends it",
    "drained": "[yellow]node {node} is drained[/yellow]",
    "restored": "node {node} is no longer drained: the driver has taken it back",
    "returned": "[green]node {node} is repaired[/green]: the driver takes it back",
    "replaced": "another node is asked for in place of {node}",
    "not_replaced": "[yellow]this platform provides no node in place of {node}[/yellow]",
    "refused": "[red]node {node}[/red]: {error}",
    "provided": "{nodes} in all {are} asked for: {there} are there or on their way",
    "not_provided": "[yellow]{nodes} in all {are} asked for[/yellow]: {error}",
}

Name = Annotated[
    str,
    typer.Option(
        "--platform", help="local, slurm, kubernetes, or an installed package's (see `list`)."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("list")
def list_platforms(as_json: Json = False) -> None:
    """List the platforms that this installation knows, with the package of each.

    Example: [bold]megascale platform list[/bold]
    """
    if as_json:
        print(json.dumps(known_platforms()))
        return
    table = Table("platform", "package")
    for name, package in sorted(known_platforms().items()):
        table.add_row(name, package)
    Console(highlight=False).print(table)


@app.command()
def nodes(platform: Name = "local", cluster: Cluster = None, as_json: Json = False) -> None:
    """List a platform's nodes with their condition, its reason and their switch.

    Example: [bold]megascale platform nodes --platform slurm[/bold]
    """
    os.environ[RUN_FOLDER_VARIABLE] = str(run_folder(cluster))
    found = asyncio.run(open_platform(platform).nodes())
    if as_json:
        print(json.dumps([{key: getattr(n, key) for key in n.__slots__} for n in found]))
        return
    table = Table("node", "ready", "drained", "conditions", "switch", "reason")
    for node in found:
        words = ("yes" if node.ready else "no", "yes" if node.drained else "no")
        table.add_row(
            node.name, *words, "+".join(node.conditions), node.switch, escape(visible(node.reason))
        )
    Console(highlight=False).print(table)


@app.command()
def provide(
    count: Annotated[int, typer.Argument(metavar="COUNT", min=1, max=MAX_NODES)],
    platform: Name = "local",
    cluster: Cluster = None,
    as_json: Json = False,
) -> None:
    """Ask a platform for nodes, until the cluster has COUNT in all; it takes none away.

    Example: [bold]megascale platform provide 8 --platform kubernetes[/bold]
    """
    os.environ[RUN_FOLDER_VARIABLE] = str(run_folder(cluster))
    there = asyncio.run(open_platform(platform).provide(count))
    if as_json:
        print(json.dumps({"event": "provided", "count": count, "there": there}))
    else:
        _console.print(_SENTENCES["provided"].format(**_asked(count), there=there))


def _asked(count: int) -> dict[str, str]:
    return {"nodes": counted(count, "node"), "are": agreed(count, "are")}


@app.command()
def follow(
    platform: Name = "local",
    cluster: Cluster = None,
    replace_after_s: Annotated[
        float | None,
        typer.Option(min=0, help="Ask for another node so long after one is lost; default: never."),
    ] = None,
    provide_up_to: Annotated[
        int,
        typer.Option(min=0, max=MAX_NODES, help="Ask for nodes that jobs lack, so many in all."),
    ] = 0,
    provide_after_s: Annotated[
        float, typer.Option(min=0, help="How long jobs lack nodes before more are asked for.")
    ] = AFTER_S,
    interval_s: Annotated[float, typer.Option(min=0.5, max=600, help="Between looks.")] = 5.0,
    as_json: Json = False,
) -> None:
    """Drain on the platform what the driver evicts, and have the driver take back what is repaired.

    It runs until Ctrl-C or the end of the cluster, and may be started again at any time.

    Example: [bold]megascale platform follow --platform slurm[/bold]
    """
    found = RunningCluster.find(run_folder(cluster))
    os.environ[RUN_FOLDER_VARIABLE] = str(found.folder)  # where the platform `local` looks

    def words(fields: dict[str, Any]) -> dict[str, str]:
        return _asked(fields["count"]) if "count" in fields else {}

    report = reporter(as_json, _SENTENCES, words)
    follower = Follower(
        open_platform(platform),
        found.folder / RECORD_FILE,
        replace_after_s,
        report,
        provide_up_to=provide_up_to,
        provide_after_s=provide_after_s,
    )
    report("following", {"platform": platform, "run_folder": str(found.folder)})
    asyncio.run(_follow(found, follower, interval_s))


async def _follow(cluster: RunningCluster, follower: Follower, interval_s: float) -> None:
    stopped = stop_event()
    present(certificates.of_cluster(cluster.folder, Role.OPERATOR, OPERATOR_NAME))
    while not stopped.is_set() and cluster.runs:
        if address := driver_address(cluster.folder):  # else the driver restarts
            async with open_channel(address, cluster_token(cluster.folder)) as channel:
                await follower.look(channel)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(interval_s):
                await stopped.wait()
