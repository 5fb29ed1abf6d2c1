"""``megascale checkpoint``: the commands that read and write storage, without a cluster.

list, show and verify read; gc, pin and unpin decide which checkpoints stay; repair writes the
commit log alone. export and import are in :mod:`megascale_checkpoint.export.commands`.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megascale_checkpoint.commands.target import (
    AsJson,
    Attempt,
    Cluster,
    Target,
    find,
    print_json,
    read_log,
    root_of,
    row,
    size_text,
    storage_errors,
)
from megascale_checkpoint.commit import commit_repair
from megascale_checkpoint.commit import manifest as manifests
from megascale_checkpoint.commit.commit_log import CommitLog, Record
from megascale_checkpoint.commit.commit_record import FOLDER
from megascale_checkpoint.commit.verify import verify_commit
from megascale_checkpoint.export.commands import export_checkpoint, import_checkpoint
from megascale_checkpoint.export.output import bar
from megascale_checkpoint.retention.collect import Leftover, collect, is_link, leftovers
from megascale_checkpoint.retention.retire import (
    Retention,
    newest_whole,
    pin,
    retention_of,
    retire,
    to_retire,
    unpin,
)
from megascale_checkpoint.storage import Storage, join, open_storage, split
from megascale_common.service.errors import RequestError, ServiceError
from megascale_job.visible import counted, visible

Step = Annotated[int | None, typer.Option(min=0, help="Its step; default: the newest one.")]
OneStep = Annotated[int | None, typer.Option(min=0, help="Only this step; default: all.")]


def list_checkpoints(
    context: typer.Context, target: Target, cluster: Cluster = None, as_json: AsJson = False
) -> None:
    """List the complete checkpoints in a folder, newest first.

    Example: megascale checkpoint list /data/checkpoints/example
    """
    uri = root_of(context, target, cluster)
    log = read_log(uri)
    pins = log.pins()
    rows = [row(uri, record, pins) for record in log.commits()]
    if as_json:
        for each in rows:
            print_json(each)
        return
    table = Table("step", "attempt", "ranks", "size", "committed", "pin", "manifest")
    for each in rows:
        table.add_row(
            str(each["step"]),
            str(each["attempt"]),
            str(each["world_size"]),
            size_text(each["size_bytes"]),
            each["committed_at"],
            escape(visible(each["pin"])),
            escape(visible(each["manifest_uri"])),
        )
    Console().print(table)


def show(
    context: typer.Context,
    target: Target,
    step: Step = None,
    attempt: Attempt = None,
    cluster: Cluster = None,
    as_json: AsJson = False,
) -> None:
    """Show one complete checkpoint: its layout, its files, and whether it stays.

    Example: megascale checkpoint show example --step 200
    """
    uri = root_of(context, target, cluster)
    log = read_log(uri)
    if step is None:
        step = log.commits()[0].step if log.commits() else 0
    record = find(log, step, attempt)
    with storage_errors(uri):
        manifest = manifests.load(join(uri, record.values["manifest"]), _xxh3(record))[1]
    rules = retention_of(log)
    newest = log.commits()[0].checkpoint
    goes = any(each.key == record.checkpoint for each in to_retire(log, rules, newest))
    facts = {
        **row(uri, record, log.pins()),
        "layout": manifest.layout,
        "files": [
            {"path": each.path, "rank": each.rank, "size_bytes": each.size_bytes, "xxh3": each.xxh3}
            for each in manifest.files
        ],
        "rules": rules.to_record(),
        "kept": not goes,
    }
    if as_json:
        print_json(facts)
        return
    _print_facts(facts, str(rules))


def _print_facts(facts: dict[str, Any], rules: str) -> None:
    layout = ", ".join(f"{axis} {size}" for axis, size in facts["layout"].items()) or "unknown"
    typer.echo(f"step {facts['step']} of job {visible(facts['job'])}, attempt {facts['attempt']}")
    typer.echo(f"  committed  {facts['committed_at']}")
    typer.echo(f"  layout     {counted(facts['world_size'], 'rank')}: {layout}")
    typer.echo(
        f"  size       {size_text(facts['size_bytes'])} in {counted(len(facts['files']), 'file')}"
    )
    typer.echo(f"  manifest   {visible(facts['manifest_uri'])}")
    goes = "goes at the next commit, or with `megascale checkpoint gc`"
    stays = "stays" if facts["kept"] else goes
    pin = f"pinned: {facts['pin']}" if facts["pin"] else f"{stays} (the job keeps {rules})"
    typer.echo(f"  retention  {visible(pin)}")


def verify(
    context: typer.Context,
    target: Target,
    step: OneStep = None,
    attempt: Attempt = None,
    cluster: Cluster = None,
    as_json: AsJson = False,
) -> None:
    """Check every byte of the complete checkpoints of a job or folder.

    Each byte is compared with its checksum, and the manifests with the files'
    own descriptions.

    The exit status is 1 if a checkpoint is damaged.

    Example: megascale checkpoint verify /data/checkpoints/example
    """
    uri = root_of(context, target, cluster)
    log = read_log(uri)
    records = log.commits() if step is None else [find(log, step, attempt)]
    pins, damaged, done_bytes = log.pins(), False, 0
    total_bytes = sum(record.values.get("size_bytes", 0) for record in records)
    with bar(f"verify {target}", quiet=as_json) as progress:
        for record in records:
            before = done_bytes

            def beat(count: int, before: int = before) -> None:
                progress(before + count, total_bytes)

            problems = verify_commit(record, join(uri, record.values["manifest"]), beat)
            damaged = damaged or bool(problems)
            done_bytes += record.values.get("size_bytes", 0)
            if as_json:
                print_json({**row(uri, record, pins), "problems": problems})
                continue
            state = "damaged" if problems else "whole"
            typer.echo(f"step {record.step} of attempt {record.attempt}: {state}")
            for problem in problems:
                typer.echo(f"  {visible(str(problem))}")
    if damaged:
        raise typer.Exit(1)


def _xxh3(record: Record) -> str:
    return str(record.values["manifest_xxh3"])


Yes = Annotated[
    bool, typer.Option("--yes/--dry-run", help="Do it; default: only show what would be removed.")
]
Latest = Annotated[
    int | None,
    typer.Option(min=1, help="Keep this many of the newest, instead of the job's rules."),
]
Steps = Annotated[
    int | None, typer.Option(min=1, help="Keep the first at or after every so many steps.")
]
Hours = Annotated[
    float | None, typer.Option(min=0.02, help="Keep the first in every period of so many hours.")
]
OfStep = Annotated[int, typer.Option(min=0, help="Step of the checkpoint.")]
Why = Annotated[str, typer.Option(help="Why it stays; `megascale checkpoint list` shows it.")]

# For a symbolic link in the place of a checkpoint's folder or file.
_ONLY_LINK = "a symbolic link: only the link, and nothing behind it"


def gc(
    context: typer.Context,
    target: Target,
    yes: Yes = False,
    keep_latest: Latest = None,
    keep_every_steps: Steps = None,
    keep_every_hours: Hours = None,
    cluster: Cluster = None,
    as_json: AsJson = False,
) -> None:
    """Remove checkpoints that no rule keeps, and files that belong to none.

    The rules are those of the job (checkpoint.keep_latest, keep_every_steps,
    keep_every_hours), or those given here. The newest whole checkpoint, pinned
    ones and one from which the job is starting stay in any case. If a symbolic
    link is in the way, the link is removed, and never its target. Without --yes, the
    command only shows what it would remove.

    Example: megascale checkpoint gc example --keep-latest 3
    """
    uri = root_of(context, target, cluster)
    # The whole log, because a snapshot has no RETIRE records, and retired files may still be there.
    log = read_log(uri, whole=True)
    given = Retention(keep_latest or 0, keep_every_steps or 0, keep_every_hours or 0.0)
    rules = retention_of(log) if given.keeps_all else given
    with storage_errors(uri):
        storage = open_storage(uri)
        whole = newest_whole(log, uri)
        wanted = {each.key for each in to_retire(log, rules, whole)}
        going = [each for each in reversed(log.commits()) if each.checkpoint in wanted]
        left = list(leftovers(log, storage, _report_link))
        rows = [_of_commit(uri, each, log, storage) for each in going] + [
            _of_leftover(uri, each, storage) for each in left
        ]
        if yes:
            # Records first, files second. Another writer may have pinned some of the checkpoints
            # meanwhile, which retire() then leaves.
            gone = retire(log, rules, whole)
            folders = [split(each.values["manifest"])[0] for each in gone]
            _remove(storage, [*folders, *(each.folder for each in left)], target, quiet=as_json)
            stayed = {each.checkpoint for each in going} - {each.checkpoint for each in gone}
            rows = [each for each in rows if (each["attempt"], each["step"]) not in stayed]
    _print(rows, rules, yes=yes, as_json=as_json)


def pin_checkpoint(
    context: typer.Context,
    target: Target,
    step: OfStep,
    reason: Why,
    attempt: Attempt = None,
    cluster: Cluster = None,
    as_json: AsJson = False,
) -> None:
    """Keep a checkpoint, whatever the job's rules are.

    Example: megascale checkpoint pin example --step 200 --reason "the paper's table 2"
    """
    uri = root_of(context, target, cluster)
    log = read_log(uri)
    record = find(log, step, attempt)
    with storage_errors(uri):
        pin(log, record.checkpoint, reason)
    _print_pin(uri, log, record, "is pinned", as_json=as_json)


def unpin_checkpoint(
    context: typer.Context,
    target: Target,
    step: OfStep,
    attempt: Attempt = None,
    cluster: Cluster = None,
    as_json: AsJson = False,
) -> None:
    """Apply the job's rules to a pinned checkpoint again.

    Example: megascale checkpoint unpin example --step 200
    """
    uri = root_of(context, target, cluster)
    log = read_log(uri)
    record = find(log, step, attempt)
    with storage_errors(uri):
        unpin(log, record.checkpoint)
    _print_pin(uri, log, record, "is no longer pinned", as_json=as_json)


def _report_link(error: OSError) -> None:
    typer.echo(f"left as it is: {visible(str(error))}", err=True)


def _print_pin(uri: str, log: CommitLog, record: Record, done: str, *, as_json: bool) -> None:
    if as_json:
        print_json(row(uri, record, log.pins()))
    else:
        typer.echo(f"step {record.step} of attempt {record.attempt} {done}")


def _remove(storage: Storage, folders: list[str], target: str, *, quiet: bool) -> None:
    with bar(f"remove files of {target}", quiet=quiet, unit="folders") as progress:
        for number, folder in enumerate(folders):
            progress(number, len(folders))
            collect(storage, folder)


def _of_commit(uri: str, record: Record, log: CommitLog, storage: Storage) -> dict[str, Any]:
    what, size_bytes = "checkpoint", record.values.get("size_bytes", 0)
    if is_link(storage, split(record.values["manifest"])[0]):
        what, size_bytes = f"checkpoint ({_ONLY_LINK})", 0
    return {**row(uri, record, log.pins()), "size_bytes": size_bytes, "what": what}


def _of_leftover(uri: str, found: Leftover, storage: Storage) -> dict[str, Any]:
    what = "files of a removed checkpoint" if found.retired else "files of no checkpoint"
    paths = [] if found.link else [f"{found.folder}/{n}" for n in storage.names(found.folder)]
    links = [path for path in paths if is_link(storage, path)]
    if found.link or links:
        what += f" ({_ONLY_LINK})"
    attempt, step = found.checkpoint
    return {
        "step": step,
        "attempt": attempt,
        "size_bytes": sum(storage.size(path) or 0 for path in paths if path not in links),
        "what": what,
    }


def _print(rows: list[dict[str, Any]], rules: Retention, *, yes: bool, as_json: bool) -> None:
    if as_json:
        for each in rows:
            print_json({**each, "removed": yes})
        return
    for each in rows:
        what = "removed" if yes else "would be removed"
        size = size_text(each["size_bytes"])
        name = f"step {each['step']} of attempt {each['attempt']}"
        typer.echo(f"{name}, {each['what']}, {size}: {what}")
    total = size_text(sum(each["size_bytes"] for each in rows))
    if not rows:
        typer.echo(f"nothing to remove: the job keeps {rules}")
    elif yes:
        typer.echo(f"{total} freed; the job keeps {rules}")
    else:
        typer.echo(f"{total} would be freed; the job keeps {rules}")
        typer.echo("nothing was changed: repeat with --yes to do it")


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
    yes: Annotated[bool, typer.Option("--yes", help="Do it; default: only show it")] = False,
    cluster: Cluster = None,
    as_json: AsJson = False,
) -> None:
    """Repair the commit log of a job or folder in which a record is damaged or missing.

    Such a record may have fenced an earlier attempt, so nothing is appended after it. A record in
    which one bit has flipped is restored; any other is replaced, and its checkpoint, if it was one,
    is lost. The damaged bytes are kept in the folder damaged/. Without --yes, the command only
    shows what it would do, and the exit status is 1 if there is something to do.

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
        return "its original bytes are restored"
    closed = ", and the attempts so far can no longer append" if planned.fence else ""
    kept = f"; its bytes are kept as {planned.kept}" if planned.kept else ""
    return f"a REPAIR record takes its place{closed}{kept}"
