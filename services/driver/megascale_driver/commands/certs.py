"""The command `megascale certs`: a private authority and certificates for a cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from megascale_common.service.identity import authority, people
from megascale_common.service.identity.certificates import CA_FILE
from megascale_common.service.identity.peers import Role
from megascale_driver.commands.shared import require_name
from megascale_job.visible import counted, visible

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Make a private certificate authority, and certificates for drivers, nodes and people.",
)
_console = Console(stderr=True, highlight=False)

Folder = Annotated[
    Path, typer.Option(help="Folder of the authority; with ca.key in it, keep it to yourself.")
]
Cluster = Annotated[str, typer.Option(help="Name of the cluster.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object with the files.")]


@app.command("init")
def make_authority(
    folder: Folder = Path("tls"),
    cluster: Cluster = "local",
    days: Annotated[int, typer.Option(min=1, help="How long it is valid.")] = authority.CA_DAYS,
    as_json: Json = False,
) -> None:
    """Make the authority of a cluster.

    Example: [bold]megascale certs init --folder tls --cluster prod[/bold]
    """
    require_name(cluster, "--cluster")
    authority.create(folder, cluster, days)
    if as_json:
        print(json.dumps({"ca": str(folder / CA_FILE), "ca_key": str(folder / authority.CA_KEY)}))
        return
    _note(f"authority in {folder}: give every host {folder}/ca.pem, and nobody {folder}/ca.key")


@app.command("issue")
def issue_certificate(
    role: Annotated[Role, typer.Option(help="What its holder is, and so what it may do.")],
    name: Annotated[str, typer.Option(help="Of a node: its --node; else of driver or person.")],
    host: Annotated[
        list[str] | None, typer.Option(help="Name or address at which it serves; repeat it.")
    ] = None,
    folder: Folder = Path("tls"),
    cluster: Cluster = "local",
    days: Annotated[int, typer.Option(min=1, help="How long it is valid.")] = authority.DAYS,
    trust_domain: Annotated[
        str, typer.Option(help="Trust domain of its SPIFFE ID.")
    ] = "megascale.internal",
    as_json: Json = False,
) -> None:
    """Issue a certificate, or renew one: processes read their files again when these change.

    Example: [bold]megascale certs issue --role executor --name n7 --host 10.0.0.7[/bold]
    """
    require_name(cluster, "--cluster")
    found = authority.issue(
        folder, cluster, role, name, host or (), days=days, trust_domain=trust_domain
    )
    if as_json:
        files = {"certificate": found.certificate, "key": found.key, "ca": found.ca}
        print(json.dumps({name: str(path) for name, path in files.items()} | {"days": days}))
        return
    _note(f"{found.certificate} and {found.key}, valid for {counted(days, 'day')}")


@app.command("person")
def add_person(
    role: Annotated[Role, typer.Option(help="viewer or operator.")],
    name: Annotated[str, typer.Option(help="The name in the audit log.")],
    file: Annotated[Path, typer.Option(help="The driver's --people-tokens.")] = Path("people"),
    as_json: Json = False,
) -> None:
    """Give a person a token, in place of the one before; it is printed once and stored nowhere.

    Example: [bold]megascale certs person --role operator --name ada[/bold]
    """
    token = people.add_person(file, name, role)
    if as_json:
        print(json.dumps({"name": name, "role": role, "token": token, "file": str(file)}))
        return
    print(token)
    _note(f"{file} has the digest of this token: drivers read it when it changes")


def _note(text: str) -> None:
    _console.print(visible(text), markup=False, soft_wrap=True)
