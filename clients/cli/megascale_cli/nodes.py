"""Commands about the cluster and its nodes: nodes, diagnose, cordon, uncordon, evict, cluster."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer
from rich.markup import escape

from megascale.v1 import driver_pb2
from megascale_cli.exits import FAILED, OK, RETRY_FOR_S, print_answer, with_client
from megascale_cli.options import Check, Cluster, Json, NodeName, Reason, node_names
from megascale_cli.output import (
    age,
    console,
    local_time,
    node_order_text,
    print_items,
    print_json,
    print_table,
    short,
)
from megascale_client import AsyncClient, CheckResult, CheckVerdict, Node
from megascale_job.visible import counted


def nodes(cluster: Cluster = None, as_json: Json = False) -> None:
    """List all nodes: liveness, disposition, assignment, job, devices, and the reason.

    Example: [bold]megascale nodes[/bold]
    """

    async def action(client: AsyncClient) -> None:
        columns = (
            "NAME",
            "LIVENESS",
            "DISPOSITION",
            "ASSIGNMENT",
            "JOB",
            "RANKS",
            "DEVICES",
            "SWITCH",
            "BEAT",
            "WHY",
        )
        print_items(
            [node async for node in client.nodes()],
            columns,
            _row,
            empty="no nodes yet; each node's agent connects to the driver when it starts",
            as_json=as_json,
        )

    with_client(action, cluster, as_json)


class DiagnosticSet(StrEnum):
    """How much `diagnose` checks."""

    QUICK = "quick"
    FULL = "full"


def diagnose(
    node: Annotated[str, typer.Argument(help="Name of the node.", autocompletion=node_names)] = "",
    every: Annotated[
        bool, typer.Option("--all", help="Every node that runs no job, one after the other.")
    ] = False,
    which: Annotated[
        DiagnosticSet,
        typer.Option("--set", help="quick: as before attempts; full: measure, within 2 minutes."),
    ] = DiagnosticSet.QUICK,
    check: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Run only this check; can be repeated."),
    ] = None,
    cluster: Cluster = None,
    as_json: Json = False,
) -> None:
    """Run the self-checks of an idle or spare node now. The status is 0 only if none fails.

    Example: [bold]megascale diagnose n3 --set full[/bold]
    """
    if bool(node) == every:
        raise typer.BadParameter("give either a node or --all", param_hint="NODE")

    async def action(client: AsyncClient) -> int:
        names = [node]
        if every:
            names = [each.name async for each in client.nodes() if not each.job]
        failed = False
        for name in names:
            checks = await client.diagnose(
                name, checks=check or (), full=which is DiagnosticSet.FULL
            )
            if as_json:
                for result in checks:
                    print_json(result)
            else:
                if every:
                    console.print(f"[bold]{escape(name)}[/bold]")
                print_table(_CHECK_COLUMNS, map(_check_row, checks), empty=f"{name}: no such check")
            failed |= any(result.verdict == CheckVerdict.FAIL for result in checks)
        return FAILED if failed else OK

    with_client(action, cluster, as_json, retry_for_s=RETRY_FOR_S)


def cordon(
    node: NodeName,
    reason: Reason,
    check: Check = False,
    cluster: Cluster = None,
    as_json: Json = False,
) -> None:
    """Keep new work off a node; what runs there continues.

    Example: [bold]megascale cordon n2 --reason "new cable on Monday"[/bold]
    """
    print_answer(
        lambda client: client.cordon(node, reason=reason, validate_only=check),
        lambda answer: node_order_text(answer.node, answer.consequence, "cordoned", check),
        cluster,
        as_json,
    )


def uncordon(
    node: NodeName,
    reason: Reason,
    check: Check = False,
    cluster: Cluster = None,
    as_json: Json = False,
) -> None:
    """Make a cordoned or evicted node schedulable again.

    Example: [bold]megascale uncordon n2 --reason "cable replaced"[/bold]
    """
    print_answer(
        lambda client: client.uncordon(node, reason=reason, validate_only=check),
        lambda answer: node_order_text(answer.node, answer.consequence, "schedulable", check),
        cluster,
        as_json,
    )


def evict(
    node: NodeName,
    reason: Reason,
    now: Annotated[
        bool, typer.Option("--now", help="Stop its job at once, without a save.")
    ] = False,
    check: Check = False,
    cluster: Cluster = None,
    as_json: Json = False,
) -> None:
    """Quarantine a node: its work moves to a spare, and it gets no work until `uncordon`.

    A job that can save does so first, unless --now is given.

    Example: [bold]megascale evict n2 --reason "fan broken"[/bold]
    """
    print_answer(
        lambda client: client.evict(node, reason=reason, now=now, validate_only=check),
        lambda answer: node_order_text(answer.node, answer.consequence, "quarantined", check),
        cluster,
        as_json,
    )


def cluster(cluster: Cluster = None, as_json: Json = False) -> None:
    """Show the leading driver, since when it leads, and the counts of nodes and jobs.

    Example: [bold]megascale cluster --json[/bold]
    """
    print_answer(lambda client: client.cluster_info(), _cluster_text, cluster, as_json)


def _cluster_text(info: driver_pb2.GetClusterInfoResponse) -> str:
    epoch = f"{info.epoch.cluster_generation}.{info.epoch.create_revision}"
    missing = ""
    if info.nodes_missing:
        missing = f" ({info.nodes_missing} too few: {info.nodes_missing_reason})"
    return (
        f"cluster [bold]{info.cluster}[/bold]: "
        f"{counted(info.nodes_alive, 'node')} alive{missing}, "
        f"{counted(info.jobs_running, 'job')} running\n"
        f"driver {info.leader} (megascale {info.build}) leads since "
        f"{local_time(info.leader_since)}, epoch {epoch}"
    )


_CHECK_COLUMNS = ("CHECK", "TARGET", "VERDICT", "VALUE", "BASELINE", "Z", "SECONDS", "FOUND")


def _check_row(result: CheckResult) -> tuple[str, ...]:
    verdict = short(result.verdict)
    style = {CheckVerdict.PASS: "green", CheckVerdict.FAIL: "bold red"}.get(result.verdict)
    found = result.proto
    baseline = (
        f"{found.baseline:.4g} ({found.baseline_source})" if found.HasField("baseline") else ""
    )
    return (
        result.name,
        escape(result.target) or "-",
        f"[{style}]{verdict}[/{style}]" if style else verdict,
        f"{found.value:.4g} {found.unit}" if found.HasField("value") else "",
        baseline,
        f"{found.z:.1f}" if found.HasField("z") else "",
        f"{result.elapsed.ToTimedelta().total_seconds():.3f}",
        escape(result.detail),
    )


def _row(node: Node) -> tuple[str, ...]:
    kinds = {short(device.kind) for device in node.devices}
    failed = [f"{c.name}: {c.detail}" for c in node.checks if c.verdict == CheckVerdict.FAIL]
    return (
        node.name,
        short(node.liveness),
        short(node.disposition),
        short(node.assignment),
        node.job or "-",
        ",".join(map(str, node.ranks)) or "-",
        f"{len(node.devices)} {'/'.join(sorted(kinds))}",
        node.topology.get("switch", "-"),
        age(node.last_heartbeat_at),
        escape("; ".join(filter(None, [node.liveness_reason, node.disposition_reason, *failed]))),
    )
