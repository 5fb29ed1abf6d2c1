"""Commands that move running work: restart, update, drain; the driver's rules: policy, breaker."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from megascale.v1 import driver_pb2
from megascale_cli.exits import fail, print_answer, print_warning, with_client
from megascale_cli.options import (
    MAX_NUMBER,
    Check,
    Cluster,
    JobName,
    Json,
    NodeName,
    Reason,
)
from megascale_cli.output import node_order_text, order_text, print_items, short
from megascale_client import (
    AsyncClient,
    InvalidJob,
    PolicyMode,
    SetPolicyResponse,
    UpdateJobResponse,
    load_job,
)

Now = Annotated[bool, typer.Option("--now", help="Stop at once instead of saving first.")]


def restart(
    name: JobName,
    reason: Reason,
    from_step: Annotated[
        int | None,
        typer.Option(
            metavar="STEP",
            min=0,
            max=MAX_NUMBER,
            help="Go back to this complete checkpoint; later ones are not restored any more.",
        ),
    ] = None,
    now: Now = False,
    check: Check = False,
    cluster: Cluster = None,
    as_json: Json = False,
) -> None:
    """Begin a new attempt of a job, also of one that has failed; its restart budgets start anew.

    A running job saves first, unless --now or --from-step is given.

    Example: [bold]megascale restart demo --reason "the data is repaired"[/bold]
    """
    print_answer(
        lambda client: client.restart(
            name, reason=reason, from_step=from_step, now=now, validate_only=check
        ),
        lambda answer: order_text(name, answer.job, answer.consequence, check),
        cluster,
        as_json,
    )


def update(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="JOB.YAML", help="The whole new job file; its name says which job is meant."
        ),
    ],
    reason: Reason,
    restart: Annotated[
        bool, typer.Option("--restart", help="Begin the next attempt as soon as it has saved.")
    ] = False,
    check: Check = False,
    cluster: Cluster = None,
    as_json: Json = False,
) -> None:
    """Give a job a new configuration: its next attempt uses it, and the present one goes on.

    The model, the layout and the folder of the checkpoints cannot change.

    Example: [bold]megascale update job.yaml --reason "more steps" --restart[/bold]
    """
    try:
        spec = load_job(file)
    except InvalidJob as error:
        raise fail(error, as_json) from None

    async def call(client: AsyncClient) -> UpdateJobResponse:
        answer = await client.update(spec, reason=reason, restart=restart, validate_only=check)
        for warning in answer.warnings:
            print_warning(warning)
        return answer

    def text(answer: UpdateJobResponse) -> str:
        changed = ", ".join(answer.changed_fields) or "nothing"
        consequence = f"{answer.consequence} (changed: {changed})"
        return order_text(spec.name, answer.job, consequence, check)

    print_answer(call, text, cluster, as_json)


def drain(
    node: NodeName,
    reason: Reason,
    check: Check = False,
    cluster: Cluster = None,
    as_json: Json = False,
) -> None:
    """Empty a node: its job saves, leaves it, and goes on elsewhere; no new work until `uncordon`.

    Example: [bold]megascale drain n2 --reason "new firmware"[/bold]
    """
    print_answer(
        lambda client: client.drain(node, reason=reason, validate_only=check),
        lambda answer: node_order_text(answer.node, answer.consequence, "drained", check),
        cluster,
        as_json,
    )


def policy(
    rule: Annotated[
        str | None, typer.Argument(metavar="RULE", help="Name of the rule; without it, list all.")
    ] = None,
    mode: Annotated[
        str | None, typer.Argument(metavar="MODE", help="enforce, or observe: only log.")
    ] = None,
    reason: Annotated[str, typer.Option(help="The reason, for the audit log.")] = "",
    check: Check = False,
    cluster: Cluster = None,
    as_json: Json = False,
) -> None:
    """List the driver's rules, or have one observed or enforced.

    Example: [bold]megascale policy hang observe --reason "a slow profile"[/bold]
    """
    if rule is None or mode is None:
        with_client(lambda client: _list_rules(client, as_json), cluster, as_json)
        return

    def text(answer: SetPolicyResponse) -> str:
        now = f"{'would be' if check else 'is'} in {short(answer.rule.mode)}"
        return f"rule [bold]{rule}[/bold] {now}; {escape(answer.consequence)}"

    print_answer(
        lambda client: client.set_policy(rule, mode, reason=reason, validate_only=check),
        text,
        cluster,
        as_json,
    )


async def _list_rules(client: AsyncClient, as_json: bool) -> None:
    print_items(
        (await client.cluster_info()).rules,
        ("RULE", "MODE", "WHEN ENFORCED"),
        lambda rule: (rule.name, short(PolicyMode(rule.mode)), escape(rule.effect)),
        empty="the driver has no rules",
        as_json=as_json,
    )


def quota(
    tenant: Annotated[
        str | None, typer.Argument(metavar="TENANT", help="Its name; without it, list all.")
    ] = None,
    devices: Annotated[
        int | None, typer.Argument(metavar="DEVICES", help="What its jobs may hold at once.")
    ] = None,
    default: Annotated[
        bool, typer.Option("--default", help="Go back to what the drivers were started with.")
    ] = False,
    reason: Annotated[str, typer.Option(help="The reason, for the audit log.")] = "",
    check: Check = False,
    cluster: Cluster = None,
    as_json: Json = False,
) -> None:
    """List the tenants, or bound the devices that the jobs of one hold at once; running jobs go on.

    Example: [bold]megascale quota research 64 --reason "the new cluster"[/bold]
    """
    if tenant is not None and (devices is None) != default:
        raise typer.BadParameter("give DEVICES, or --default, and not both", param_hint="DEVICES")
    if tenant is None:
        with_client(lambda client: _list_tenants(client, as_json), cluster, as_json)
        return

    def text(answer: driver_pb2.SetQuotaResponse) -> str:
        verb = "would be changed" if check else f"has a quota of {_devices(answer.tenant)}"
        return f"tenant [bold]{tenant}[/bold] {verb}; {escape(answer.consequence)}"

    print_answer(
        lambda client: client.set_quota(tenant, devices, reason=reason, validate_only=check),
        text,
        cluster,
        as_json,
    )


async def _list_tenants(client: AsyncClient, as_json: bool) -> None:
    print_items(
        (await client.cluster_info()).tenants,
        ("TENANT", "QUOTA", "HELD", "FROM"),
        lambda one: (
            one.name,
            _devices(one),
            str(one.devices_held),
            "set" if one.set else "default",
        ),
        empty="no tenant has a quota or a job",
        as_json=as_json,
    )


def _devices(tenant: driver_pb2.Tenant) -> str:
    return str(tenant.quota) if tenant.HasField("quota") else "not limited"


def reset_breaker(
    reason: Reason, check: Check = False, cluster: Cluster = None, as_json: Json = False
) -> None:
    """Have silent nodes evicted again, after the breaker has tripped; they are observed anew first.

    Example: [bold]megascale reset-breaker --reason "the switch is back"[/bold]
    """
    print_answer(
        lambda client: client.reset_breaker(reason=reason, validate_only=check),
        lambda answer: escape(answer.consequence),
        cluster,
        as_json,
    )
