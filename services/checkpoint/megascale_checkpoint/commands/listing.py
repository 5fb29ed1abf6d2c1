"""``megascale checkpoint list``, ``show`` and ``verify``: what is on storage, and whether whole."""

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
from megascale_checkpoint.commit import manifest as manifests
from megascale_checkpoint.commit.commit_log import Record
from megascale_checkpoint.commit.verify import verify_commit
from megascale_checkpoint.export.progress import bar
from megascale_checkpoint.retention.retire import retention_of, to_retire
from megascale_checkpoint.storage import join
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

    Each byte is compared with its checksum, and what manifests and files say
    of themselves with each other.

    The exit status is 1 when a checkpoint is damaged.

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
