"""`megascale net render` and `verify`: NCCL's and the network cards' settings for a cluster.

The tables are :mod:`megascale_planner.network.profile`; here are options, forms of output and what
an environment has.

For `megascale net verify NODE` the driver is asked what the node found about the site's network
profile before its last attempt; it has the findings from the node's heartbeats.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megascale.v1 import driver_pb2, driver_pb2_grpc, types_pb2
from megascale_common.service.channel import open_channel, present
from megascale_common.service.errors import NotFoundError, UnavailableError
from megascale_common.service.identity import certificates
from megascale_common.service.identity.peers import Role
from megascale_common.service.wire_text import enum_name
from megascale_driver.commands.shared import Cluster, run_folder
from megascale_driver.platform.local.node import ADDRESS_FILE, OPERATOR_NAME, cluster_token
from megascale_job.names import is_dns_label
from megascale_job.visible import visible
from megascale_planner.network.profile import (
    FABRICS,
    BadProfile,
    Setting,
    Site,
    card_settings,
    differences,
    fabric_named,
    parse,
    render,
    version,
)

CHECK = "network_profile"
CALL_TIMEOUT_S = 10.0


async def findings(run_folder: Path, node: str) -> list[dict[str, str]]:
    """``target``, ``verdict`` and ``detail`` of each; empty before the node's first attempt.

    Raises:
        UnavailableError: no cluster runs in that folder.
        NotFoundError: it has no such node.
    """
    try:
        address = (run_folder / ADDRESS_FILE).read_text().strip()
        token = cluster_token(run_folder)
    except OSError as error:
        raise UnavailableError(
            f"there is no running cluster at {run_folder} ({error.strerror}): give its run folder "
            "with --cluster, or run `megascale net verify FILE` on the node itself",
            reason="CLUSTER_DOWN",
        ) from None
    present(certificates.of_cluster(run_folder, Role.OPERATOR, OPERATOR_NAME))
    async with open_channel(address, token) as channel:
        stub = driver_pb2_grpc.DriverServiceStub(channel)
        page = ""
        while True:
            request = driver_pb2.ListNodesRequest(page_token=page)
            answer = await stub.ListNodes(request, timeout=CALL_TIMEOUT_S)
            for found in answer.nodes:
                if found.name == node:
                    return [_row(check) for check in found.checks if check.name == CHECK]
            page = answer.next_page_token
            if not page:
                break
    raise NotFoundError(f"there is no node {node} (`megascale nodes` lists them)")


def _row(check: types_pb2.CheckResult) -> dict[str, str]:
    verdict = enum_name(types_pb2.CheckVerdict, check.verdict, "CHECK_VERDICT_")
    return {"target": check.target, "verdict": verdict, "detail": check.detail}


DIFFERS_EXIT_CODE, USER_MISTAKE_EXIT_CODE = 1, 2
INFINIBAND = Path("/sys/class/infiniband")

T = TypeVar("T")

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Settings of NCCL and network cards for a cluster, each with its reason.",
)
_console = Console(highlight=False)

Nccl = Annotated[str, typer.Option(help="NCCL's release, as in 2.27.")]
Nics = Annotated[
    str, typer.Option(help="RDMA cards of a node, by commas; default: those of this machine.")
]
Kind = Annotated[str, typer.Option(help=f"{' or '.join(FABRICS)}.")]
Qps = Annotated[int, typer.Option(help="Queue pairs of a connection.")]
Split = Annotated[bool, typer.Option("--split-ports", help="A card's port is half a switch's.")]
Class = Annotated[
    int | None, typer.Option(help="Traffic class that the switches keep lossless; default: one.")
]
Gid = Annotated[int | None, typer.Option(help="GID index; default: NCCL chooses.")]
Flap = Annotated[float, typer.Option("--flap-s", help="Longest time for which a link flaps.")]
Watchdog = Annotated[
    float, typer.Option("--watchdog-s", help="recovery.collective_timeout_s of the job.")
]
Floor = Annotated[
    float, typer.Option("--hang-floor-s", help="The driver's: when a step counts as hung.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command("render")
def render_command(
    nccl: Nccl = "2.27",
    nics: Nics = "",
    fabric: Kind = "roce",
    qps: Qps = 4,
    split_ports: Split = False,
    traffic_class: Class = None,
    gid_index: Gid = None,
    flap_s: Flap = 10.0,
    watchdog_s: Watchdog = 300.0,
    hang_floor_s: Floor = 60.0,
    env: Annotated[bool, typer.Option("--env", help="Print NAME=VALUE lines, for a file.")] = False,
    site_file: Annotated[
        Path | None,
        typer.Option(
            "--site",
            metavar="FILE",
            help="JSON as for the driver's --network-profile: it says all "
            "of the network, and only the last two options count beside it.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print the environment for a cluster, with the reason of each value.

    Example: [bold]megascale net render --nccl 2.27 --nics mlx5_0,mlx5_1 --traffic-class 106[/bold]
    """
    if site_file is not None:
        site = _site_of(site_file, watchdog_s, hang_floor_s)
    else:
        site = Site(
            nccl=_of_option(version, nccl),
            cards=tuple(nics.split(",") if nics else _cards_here()),
            fabric=_of_option(fabric_named, fabric),
            queue_pairs=qps,
            split_ports=split_ports,
            traffic_class=traffic_class,
            gid_index=gid_index,
            flap_s=flap_s,
            watchdog_s=watchdog_s,
            hang_floor_s=hang_floor_s,
        )
    found = _rendered(site)
    if as_json:
        cards = [asdict(each) for each in card_settings(site)]
        print(json.dumps({"settings": [asdict(each) for each in found], "cards": cards}))
        return
    if env:
        print("\n".join(visible(f"{each.name}={each.value}") for each in found))
        return
    table = Table("VARIABLE", "VALUE", "DEFAULT", "WHY", box=None, pad_edge=False)
    for each in found:
        history = f" ({each.history})" if each.history else ""
        cells = (each.name, each.value, each.default, f"{each.reason}{history}")
        table.add_row(*(escape(visible(cell)) for cell in cells))
    _console.print(table)
    for card in card_settings(site):
        shown = f"card: {card.name} = {card.value}; {card.reason}; ask: {card.query}"
        _console.print(visible(shown), markup=False)


@app.command("verify")
def verify(
    what: Annotated[
        str,
        typer.Argument(
            metavar="NODE|FILE",
            help="A node of the cluster, or a file of NAME=VALUE lines, as from render --env.",
            show_default=False,
        ),
    ],
    pid: Annotated[
        int | None, typer.Option(help="Of a running worker; default: this environment.")
    ] = None,
    cluster: Cluster = None,
    as_json: AsJson = False,
) -> None:
    """Compare an environment with a rendered one, or show what a node has found before its attempt.

    The status is 1 where something differs. A node compares with the driver's --network-profile.

    Example: [bold]megascale net verify n3[/bold]
    """
    file = Path(what)
    if is_dns_label(what) and not file.exists():
        _show_node(what, run_folder(cluster), as_json)
        return
    wanted = [Setting(name, value, "", "") for name, value in _lines(file).items()]
    found = dict(os.environ) if pid is None else _environment_of(pid)
    # What is not set here may be set in NCCL's own file.
    found = {**_lines(Path(found.get("NCCL_CONF_FILE", "/etc/nccl.conf")), missing=True), **found}
    apart = differences(wanted, found)
    for setting, value in apart:
        shown = value or "not set"
        print(visible(f"{setting.name}: {shown}, wanted {setting.value}"), file=sys.stderr)
    if as_json or not apart:
        rows = [{"name": s.name, "wanted": s.value, "found": value} for s, value in apart]
        print(json.dumps({"holds": not apart, "compared": len(wanted), "differences": rows}))
    if apart:
        raise typer.Exit(DIFFERS_EXIT_CODE)


def _show_node(node: str, folder: Path, as_json: bool) -> None:
    found = asyncio.run(findings(folder, node))
    holds = all(each["verdict"] in ("PASS", "SKIPPED") for each in found)
    if as_json:
        print(json.dumps({"node": node, "holds": holds, "findings": found}))
    else:
        table = Table("WHAT", "VERDICT", "DETAIL", box=None, pad_edge=False)
        for each in found:
            table.add_row(
                escape(visible(each["target"])), each["verdict"], escape(visible(each["detail"]))
            )
        _console.print(table if found else f"{node} has prepared no attempt yet")
    if not holds:
        raise typer.Exit(DIFFERS_EXIT_CODE)


def _site_of(file: Path, watchdog_s: float, hang_floor_s: float) -> Site:
    try:
        text = file.read_text()
        return parse(text, watchdog_s=watchdog_s, hang_floor_s=hang_floor_s)
    except (OSError, ValueError) as error:
        raise _mistake(f"--site {file}: {error}") from None


def _of_option(read: Callable[[str], T], text: str) -> T:
    """What the text of an option means; its error begins with the option's name."""
    try:
        return read(text)
    except BadProfile as error:
        raise _mistake(f"--{error}") from None


def _cards_here() -> list[str]:
    return sorted(path.name for path in INFINIBAND.glob("*")) if INFINIBAND.is_dir() else []


def _rendered(site: Site) -> list[Setting]:
    try:
        return render(site)
    except BadProfile as error:
        raise _mistake(str(error)) from None


def _lines(path: Path, *, missing: bool = False) -> dict[str, str]:
    """NAME=VALUE lines of a file; ``missing``: a file that is not there has none."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        if missing:
            return {}
        raise _mistake(f"{path}: there is no such file; write it by net render --env") from None
    except OSError as error:
        raise _mistake(f"{path}: {error.strerror}; give a file that can be read") from None
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        name, equals, value = line.strip().partition("=")
        if not name or name.startswith("#"):
            continue
        if not equals or not name.replace("_", "").isalnum():
            raise _mistake(f"{path}, line {number}: {line!r} is not NAME=VALUE")
        found[name] = value
    return found


def _environment_of(pid: int) -> dict[str, str]:
    try:
        data = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError as error:
        raise _mistake(f"--pid {pid}: {error.strerror}; give a process that you may read") from None
    pairs: list[Any] = [item.partition("=") for item in data.decode(errors="replace").split("\0")]
    return {name: value for name, equals, value in pairs if equals}


def _mistake(text: str) -> typer.Exit:
    print(f"error: {visible(text)}", file=sys.stderr)
    return typer.Exit(USER_MISTAKE_EXIT_CODE)
