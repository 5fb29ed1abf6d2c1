"""``megascale checkpoint``: the commands that read and write storage, without a cluster."""

from __future__ import annotations

from typing import Annotated

import typer

from megascale_checkpoint.commands.listing import list_checkpoints, show, verify
from megascale_checkpoint.commands.retention import gc, pin_checkpoint, unpin_checkpoint
from megascale_checkpoint.commands.target import AsJson, Cluster, Target, print_json, root_of
from megascale_checkpoint.commit import commit_repair
from megascale_checkpoint.commit.commit_record import FOLDER
from megascale_checkpoint.export.commands import export_checkpoint, import_checkpoint
from megascale_checkpoint.storage import open_storage
from megascale_common.service.errors import RequestError, ServiceError
from megascale_job.visible import counted, visible

app = typer.Typer(
    name="checkpoint",
    help="List, verify, keep, remove, repair, export and import checkpoints.",
    no_args_is_help=True,
)


app.command("list")(list_checkpoints)
app.command("show")(show)
app.command("verify")(verify)
app.command("gc")(gc)
app.command("pin")(pin_checkpoint)
app.command("unpin")(unpin_checkpoint)
app.command("export")(export_checkpoint)
app.command("import")(import_checkpoint)


@app.command("repair")
def repair(
    context: typer.Context,
    target: Target,
    yes: Annotated[bool, typer.Option("--yes", help="Do it; else only show it")] = False,
    cluster: Cluster = None,
    as_json: AsJson = False,
) -> None:
    """Repair the commit log of a job or folder where a record is damaged or missing.

    Such a record may have been the one that fences an earlier attempt, so nothing is appended
    behind it. A record of which one bit has flipped is restored; any other is replaced, and its
    checkpoint, if it was one, is lost. The damaged bytes are kept in the folder damaged/. Without
    --yes it only shows what it would do, and the exit status is 1 when there is something to do.

    Example: megascale checkpoint repair /data/checkpoints/example
    """
    uri = root_of(context, target, cluster)
    try:
        if not open_storage(uri).names(FOLDER):
            raise RequestError("it holds no commit log: give the folder that checkpoint.uri names")
        repairs = commit_repair.plan(open_storage(uri))
        for planned in repairs:
            if as_json:
                facts = {"seq": planned.seq, "problem": planned.problem}
                print_json({**facts, "remedy": _remedy(planned), "done": yes})
            else:
                typer.echo(visible(f"record {planned.seq}: {planned.problem}: {_remedy(planned)}"))
        if yes:
            commit_repair.carry_out(open_storage(uri), repairs)
    except (ServiceError, OSError) as error:
        raise RequestError(f"{uri} cannot be repaired: {error}") from error
    if as_json:
        if repairs and not yes:
            raise typer.Exit(1)
    elif not repairs:
        typer.echo("the commit log is whole: nothing to repair")
    elif yes:
        typer.echo(f"{counted(len(repairs), 'record')} repaired")
    else:
        typer.echo("nothing was changed: repeat with --yes to do it")
        raise typer.Exit(1)


def _remedy(planned: commit_repair.Repair) -> str:
    if planned.restored:
        return "it is restored as it was"
    closed = ", and the attempts so far may append no more" if planned.fence else ""
    kept = f"; its bytes are kept as {planned.kept}" if planned.kept else ""
    return f"a REPAIR record takes its place{closed}{kept}"
