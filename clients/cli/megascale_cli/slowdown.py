"""`megascale why` and `megascale timeline`: why steps take longer, and one trace of all ranks."""

from __future__ import annotations

import gzip
import json
import sys
import threading
from pathlib import Path
from typing import Annotated

import typer

from megascale_cli.exits import OK, USAGE, with_client
from megascale_cli.options import MAX_NUMBER, Cluster, JobName, Json
from megascale_cli.output import console, print_json, size_text
from megascale_client import AsyncClient

VIEWER = "https://ui.perfetto.dev"
# The viewer's own rules let it read from this address of the user's machine alone.
VIEWER_PORT = 9001
FETCHED_WITHIN_S = 60.0
HEAD = '{"otherData":'  # how a trace begins, up to sentences and clocks
MAX_HEAD_CHARACTERS = 1 << 20  # before the events; clocks of 12,288 nodes take less


def why(
    name: JobName,
    steps: Annotated[
        int, typer.Option(min=1, max=2000, help="How many of the newest steps to compare.")
    ] = 200,
    split: Annotated[
        int,
        typer.Option(
            min=0, max=MAX_NUMBER, help="First step of the slower window; 0: where it got slower."
        ),
    ] = 0,
    cluster: Cluster = None,
    as_json: Json = False,
) -> None:
    """Say in one sentence with numbers why the steps of a job take longer than before.

    It names data, garbage collection, a slow host, the network, clock or power, or checkpoints, if
    one of them explains enough of it.

    Example: [bold]megascale why demo --steps 500[/bold]
    """

    async def action(client: AsyncClient) -> None:
        answer = await client.mfu_decline(name, steps=steps, split_step=split)
        if as_json:
            print_json(answer)
            return
        console.print(f"[bold]{answer.cause.replace('_', ' ')}[/bold]: {answer.sentence}")
        if answer.shares:
            parts = sorted(answer.shares.items(), key=lambda part: -part[1])
            shown = ", ".join(f"{cause.replace('_', ' ')} {share:.0%}" for cause, share in parts)
            windows = f"steps {answer.first_step} to {answer.split_step - 1}"
            console.print(f"{windows} beside {answer.split_step} to {answer.last_step}: {shown}")

    with_client(action, cluster, as_json)


def timeline(
    name: JobName,
    steps: Annotated[int, typer.Option(min=1, max=50, help="How many steps.")] = 3,
    first_step: Annotated[
        int, typer.Option(min=0, max=MAX_NUMBER, help="First step; 0: the newest ones.")
    ] = 0,
    rank: Annotated[
        list[int] | None,
        typer.Option(min=0, max=MAX_NUMBER, help="Only this rank; may be repeated, 64 times."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Default: JOB-timeline.json.gz.")
    ] = None,
    view: Annotated[
        bool, typer.Option("--open", help=f"Open it in the browser, at {VIEWER}.")
    ] = False,
    cluster: Cluster = None,
    as_json: Json = False,
) -> None:
    """Write one trace of all ranks, or of some, on one clock, for Perfetto.

    A process of the trace is a rank, named with the error of its clock; arrows join the last rank
    of a collective with those that waited for it, and sends with receives. The first process is
    the critical path of each step, the chain of spans that its length is made of; it is printed in
    a sentence too.

    Example: [bold]megascale timeline demo --steps 3 --open[/bold]
    """
    path = out or Path(f"{name}-timeline.json.gz")

    async def action(client: AsyncClient) -> int:
        size = 0
        try:
            with path.open("wb") as file:
                parts = client.timeline(name, steps=steps, first_step=first_step, ranks=rank or ())
                async for part in parts:
                    size += file.write(part)
        except OSError as error:
            problem = f"error: {path}: {error.strerror}; give --out a file that can be written"
            print(problem, file=sys.stderr)
            return USAGE
        finally:
            if not size:
                path.unlink(missing_ok=True)
        paths = _critical_paths(path)
        if as_json:
            print(json.dumps({"file": str(path), "bytes": size, "critical_paths": paths}))
        else:
            for sentence in paths:
                console.print(sentence, soft_wrap=True)
            console.print(f"{path} ({size_text(size)}): open it at {VIEWER}", soft_wrap=True)
        return OK

    with_client(action, cluster, as_json)
    if view:
        _show(path)


def _critical_paths(path: Path) -> list[str]:
    """The sentences of a trace, which stand before its events; none if it does not begin so."""
    try:
        with gzip.open(path, "rt") as file:
            head = file.read(MAX_HEAD_CHARACTERS)
        found, _ = json.JSONDecoder().raw_decode(head.removeprefix(HEAD))
    except (ValueError, OSError, EOFError):  # from a driver that writes no sentences
        return []
    if not head.startswith(HEAD):
        return []
    return [str(text) for name, text in found.items() if name.startswith("critical path")]


def _show(path: Path) -> None:
    """Serve the file on this machine until the viewer has fetched it, and open the viewer."""
    import http.server  # of this one option, and as slow to import as a command is to run
    import webbrowser

    fetched = threading.Event()

    class Once(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            data = path.read_bytes()
            self.send_response(200)
            self.send_header("Access-Control-Allow-Origin", VIEWER)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
            fetched.set()

        def log_message(self, format: str, *arguments: object) -> None:
            """Nothing: the command says what matters."""

    try:
        server = http.server.ThreadingHTTPServer(("127.0.0.1", VIEWER_PORT), Once)
    except OSError as error:
        reason = f"port {VIEWER_PORT}, from which the viewer reads, cannot be used"
        console.print(f"{reason}: {error.strerror}; open the file at {VIEWER}", soft_wrap=True)
        return
    with server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        webbrowser.open(f"{VIEWER}/#!/?url=http://127.0.0.1:{VIEWER_PORT}/{path.name}")
        if not fetched.wait(FETCHED_WITHIN_S):
            console.print(f"the viewer has not fetched it; open the file at {VIEWER}")
        server.shutdown()
