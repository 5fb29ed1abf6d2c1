"""`megascale silence`: keep the alerts of a node, a job or a reason quiet for a time."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Annotated

import typer
from rich.markup import escape

from megascale_cli.exits import with_client
from megascale_cli.options import Check, Cluster, Json
from megascale_cli.output import console, print_items, print_json
from megascale_client import AsyncClient

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def duration_s(text: str) -> float:
    """Seconds of a text such as 90s, 30m, 2h or 1d.

    Raises:
        BadParameter: it is no such text.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text.strip())
    if found is None:
        raise typer.BadParameter("give a time such as 30m, 2h or 1d", param_hint="--for")
    return float(found[1]) * _UNITS[found[2]]


def silence(
    subject: Annotated[
        str | None,
        typer.Argument(
            metavar="SUBJECT",
            help="nodes/NAME, jobs/NAME or a reason such as STRAGGLER; without it, list all.",
        ),
    ] = None,
    length: Annotated[
        str | None, typer.Option("--for", metavar="TIME", help="30m, 2h or 1d; at most 30d.")
    ] = None,
    end: Annotated[bool, typer.Option("--end", help="Alert of it again.")] = False,
    reason: Annotated[str, typer.Option(help="The reason, for the audit log.")] = "",
    check: Check = False,
    cluster: Cluster = None,
    as_json: Json = False,
) -> None:
    """List the silences, or keep the alerts of a node, a job or a reason quiet for a time.

    What the driver decides, and the audit log, go on as before.

    Example: [bold]megascale silence nodes/n3 --for 2h --reason "its fan is replaced"[/bold]
    """
    if subject is not None and (length is None) != end:
        raise typer.BadParameter("give --for TIME, or --end, and not both", param_hint="--for")
    seconds = 0.0 if length is None else duration_s(length)
    if length is not None and not seconds:
        raise typer.BadParameter("give more than 0, or --end", param_hint="--for")

    async def action(client: AsyncClient) -> None:
        if subject is None:
            await _list(client, as_json)
            return
        answer = await client.silence_alerts(subject, seconds, reason=reason, validate_only=check)
        if as_json:
            print_json(answer)
            return
        word = "would be" if check else "are"
        state = "silent" if seconds else "sent again"
        text = f"alerts of [bold]{escape(subject)}[/bold] {word} {state}; "
        console.print(text + escape(answer.consequence), soft_wrap=True)

    with_client(action, cluster, as_json)


async def _list(client: AsyncClient, as_json: bool) -> None:
    print_items(
        (await client.cluster_info()).silences,
        ("SUBJECT", "UNTIL", "BY", "REASON"),
        lambda one: (
            one.subject, _when(one.until.ToNanoseconds() / 1e9), one.actor, escape(one.reason)
        ),
        empty="no alerts are silenced",
        as_json=as_json,
    )  # fmt: skip


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
