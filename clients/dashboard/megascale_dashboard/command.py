"""The command `megascale dashboard`, which the CLI finds through its entry point."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from megascale_dashboard.serving import Options, serve

app = typer.Typer(add_completion=False, rich_markup_mode="rich")
_console = Console(stderr=True, highlight=False)


@app.command()
def dashboard(
    cluster: Annotated[
        Path | None,
        typer.Option(
            "--cluster",
            help="Run folder of the cluster; default $MEGASCALE_RUN_FOLDER, then ./runs/current.",
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="IP address to serve on; beyond loopback only with TLS.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: a free one.")] = 0,
    certificate: Annotated[
        Path | None, typer.Option(help="PEM file of the certificate that browsers are shown.")
    ] = None,
    key: Annotated[Path | None, typer.Option(help="PEM file of its key.")] = None,
    end_with_stdin: Annotated[
        bool, typer.Option("--end-with-stdin", help="End when standard input ends.", hidden=True)
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the address as a JSON object.")
    ] = False,
) -> None:
    """Serve pages on the cluster for a browser: what is wrong, the fleet, jobs, nodes, events.

    The pages change nothing. The printed link opens them; without its key a browser asks for the
    cluster's token. Ctrl-C stops the pages; the cluster continues.

    Example: [bold]megascale dashboard --port 8080[/bold]
    """

    def report(url: str) -> None:
        if as_json:
            print(json.dumps({"event": "dashboard_ready", "url": url}), flush=True)
        else:
            _console.print(f"dashboard at {url}", soft_wrap=True)

    options = Options(
        run_folder=cluster,
        host=host,
        port=port,
        certificate=certificate,
        key=key,
        end_with_stdin=end_with_stdin,
    )
    asyncio.run(serve(options, report))
