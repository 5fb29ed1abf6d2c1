"""``megascale checkpoint gc``, ``pin`` and ``unpin``: what of a job's checkpoints stays."""

from __future__ import annotations

from typing import Annotated, Any

import typer

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
from megascale_checkpoint.commit.commit_log import CommitLog, Record
from megascale_checkpoint.export.progress import bar
from megascale_checkpoint.retention.collect import Leftover, collect, is_link, leftovers
from megascale_checkpoint.retention.policy import Retention
from megascale_checkpoint.retention.retire import (
    newest_whole,
    pin,
    retention_of,
    retire,
    to_retire,
    unpin,
)
from megascale_checkpoint.storage import Storage, open_storage, split
from megascale_job.visible import visible

Yes = Annotated[
    bool, typer.Option("--yes/--dry-run", help="Do it; else only show what would be removed.")
]
Latest = Annotated[
    int | None, typer.Option(min=1, help="Keep the newest so many, instead of the job's rules.")
]
Steps = Annotated[
    int | None, typer.Option(min=1, help="Keep the first at or after every so many steps.")
]
Hours = Annotated[float | None, typer.Option(min=0.02, help="Keep the first of so many hours.")]
OfStep = Annotated[int, typer.Option(min=0, help="Step of the checkpoint.")]
Why = Annotated[str, typer.Option(help="Why it stays; `megascale checkpoint list` shows it.")]

# For a symbolic link in place of a checkpoint's folder or file.
_ONLY_LINK = "a symbolic link: the link alone, and nothing behind it"


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
    ones and one that the job is starting from stay in any case. A symbolic
    link is removed itself, and never what is behind it. Without --yes it only
    shows what it would remove.

    Example: megascale checkpoint gc example --keep-latest 3
    """
    uri = root_of(context, target, cluster)
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
    """Keep a checkpoint whatever the job's rules are.

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
    """Let the job's rules hold for a pinned checkpoint again.

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
