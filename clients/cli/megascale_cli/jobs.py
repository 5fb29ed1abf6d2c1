"""Commands about jobs: submit, job, jobs, watch, cancel, explain, events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.live import Live
from rich.markup import escape

from megascale.v1 import types_pb2
from megascale_cli.exits import (
    RETRY_FOR_S,
    fail,
    print_answer,
    print_note,
    print_warning,
    with_client,
)
from megascale_cli.options import MAX_NUMBER, Check, Cluster, JobName, Json, Reason
from megascale_cli.output import (
    age,
    clipped,
    console,
    duration,
    event_text,
    explanation_lines,
    job_lines,
    on_a_terminal,
    order_text,
    percent,
    phase_text,
    print_items,
    print_json,
    print_table,
    table,
)
from megascale_cli.watch import WATCH_RETRY_FOR_S, watch_job
from megascale_client import (
    AsyncClient,
    InvalidJob,
    Job,
    NotFound,
    load_job,
)
from megascale_client.messages import remaining_s


def submit(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="JOB.YAML", help="The job file; paths in it are relative to its folder."
        ),
    ],
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Watch the job until it ends.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Have the driver check the job; submit nothing.")
    ] = False,
    cluster: Cluster = None,
    as_json: Json = False,
) -> None:
    """Submit a job.

    `megascale init` writes a job file with every field and its meaning.

    Example: [bold]megascale submit job.yaml --watch[/bold]
    """
    try:
        spec = load_job(file)
    except InvalidJob as error:
        raise fail(error, as_json) from None

    async def action(client: AsyncClient) -> int | None:
        job = await client.submit(spec, validate_only=check, warn=print_warning)
        if as_json:
            print_json(job)
        elif check:
            console.print(f"{file}: job {spec.name} is accepted; nothing was submitted")
        else:
            phase = f"{phase_text(job.phase)} {escape(job.phase_reason)}"
            console.print(f"job [bold]{job.spec.name}[/bold] is submitted: {phase}")
        return await watch_job(client, spec.name, as_json) if watch and not check else None

    with_client(action, cluster, as_json, retry_for_s=WATCH_RETRY_FOR_S if watch else RETRY_FOR_S)


def job(name: JobName, cluster: Cluster = None, as_json: Json = False) -> None:
    """Show one job in full.

    Example: [bold]megascale job demo[/bold]
    """
    print_answer(
        lambda client: client.get(name), lambda job: "\n".join(job_lines(job)), cluster, as_json
    )


def watch(
    name: JobName,
    tail: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_NUMBER,
            help="Begin so many steps before the newest one; default: with all that is known.",
        ),
    ] = None,
    cluster: Cluster = None,
    as_json: Json = False,
) -> None:
    """Watch a job until it ends: progress, loss, tokens/s, both MFUs, attempt and events.

    Continues across a restart of the driver. The status is 0 only if the job succeeded and saved
    its last step.

    Example: [bold]megascale watch demo[/bold]
    """

    async def action(client: AsyncClient) -> int:
        return await watch_job(client, name, as_json, tail)

    with_client(action, cluster, as_json, retry_for_s=WATCH_RETRY_FOR_S)


def cancel(name: JobName, reason: Reason, cluster: Cluster = None, as_json: Json = False) -> None:
    """Stop a job's workers at once; committed checkpoints stay.

    Example: [bold]megascale cancel demo --reason "wrong data"[/bold]
    """
    print_answer(
        lambda client: client.cancel(name, reason=reason),
        lambda job: f"job [bold]{name}[/bold]: {phase_text(job.phase)} {escape(job.phase_reason)}",
        cluster,
        as_json,
    )


def suspend(
    name: JobName,
    reason: Reason,
    check: Check = False,
    cluster: Cluster = None,
    as_json: Json = False,
) -> None:
    """Save a job's state after its next steps, then stop it and free its nodes until `resume`.

    It trains on if it cannot save. A job without checkpoints (checkpoint.uri) is refused.

    Example: [bold]megascale suspend demo --reason "maintenance of the switch"[/bold]
    """
    print_answer(
        lambda client: client.suspend(name, reason=reason, validate_only=check),
        lambda answer: order_text(name, answer.job, answer.consequence, check),
        cluster,
        as_json,
    )


def resume(
    name: JobName,
    reason: Reason,
    check: Check = False,
    cluster: Cluster = None,
    as_json: Json = False,
) -> None:
    """Let a suspended job have nodes again: it waits for them, and goes on where it was saved.

    Example: [bold]megascale resume demo --reason "the switch is back"[/bold]
    """
    print_answer(
        lambda client: client.resume(name, reason=reason, validate_only=check),
        lambda answer: order_text(name, answer.job, answer.consequence, check),
        cluster,
        as_json,
    )


def delete(
    name: JobName,
    reason: Reason,
    check: Check = False,
    cluster: Cluster = None,
    as_json: Json = False,
) -> None:
    """Forget a job that has ended: its record and log. Its checkpoints stay.

    Example: [bold]megascale delete demo --reason "no longer needed"[/bold]
    """
    verb = "would be deleted" if check else "is deleted"
    print_answer(
        lambda client: client.delete(name, reason=reason, validate_only=check),
        lambda answer: f"job [bold]{name}[/bold] {verb}: {escape(answer.consequence)}",
        cluster,
        as_json,
    )


def explain(name: JobName, cluster: Cluster = None, as_json: Json = False) -> None:
    """Explain why a job is where it is: what happened, what was done, what you may do.

    Example: [bold]megascale explain demo[/bold]
    """
    print_answer(
        lambda client: client.explain(name),
        lambda answer: "\n".join(explanation_lines(answer)),
        cluster,
        as_json,
    )


def events(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="Name of a job, or jobs/NAME, or nodes/NAME; default: the whole cluster.",
        ),
    ] = "",
    older: Annotated[
        bool,
        typer.Option(
            "--all",
            help="Also lines that only etcd and the driver's export have.",
        ),
    ] = False,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Continue with new events until Ctrl-C.")
    ] = False,
    cluster: Cluster = None,
    as_json: Json = False,
) -> None:
    """Print the audit log of a job, a node or the cluster.

    Each event has what happened, who decided it, and on what evidence (--json has all of it).

    Example: [bold]megascale events nodes/n2 --follow[/bold]
    """
    subject = f"jobs/{name}" if name and "/" not in name else name
    if older and follow:
        raise typer.BadParameter("it lists what was, without --follow", param_hint="--all")

    async def action(client: AsyncClient) -> None:
        any_event = False
        async for event in _events(client, subject, follow=follow, older=older):
            any_event = True
            if as_json:
                print_json(event)
            else:
                console.print(event_text(event), soft_wrap=True)
        if not any_event:
            await _require(client, subject)
            if not as_json:
                console.print(f"no events about {subject or 'the cluster'}")

    with_client(action, cluster, as_json, retry_for_s=WATCH_RETRY_FOR_S if follow else RETRY_FOR_S)


async def _require(client: AsyncClient, subject: str) -> None:
    """Raise NotFound if there is no job or node of the name in ``subject``."""
    kind, _, name = subject.partition("/")
    if kind == "jobs":
        await client.get(name)
    elif kind == "nodes" and name not in [node.name async for node in client.nodes()]:
        raise NotFound(f"no node {name}; see `megascale nodes`", reason="NODE_NOT_FOUND")


async def _events(
    client: AsyncClient, subject: str, *, follow: bool, older: bool
) -> AsyncIterator[types_pb2.Event]:
    """The events so far, then with ``follow`` the new ones."""
    if not follow:
        async for event in client.events(subject, older=older):
            yield event
        return
    # The stream starts before the list is read, so no event is lost in between; an event that is in
    # both is shown once.
    stream = client.watch_events(subject)
    coming = asyncio.ensure_future(anext(stream))
    try:
        await asyncio.sleep(0)
        shown = set()
        async for event in client.events(subject):
            shown.add(event.SerializeToString(deterministic=True))
            yield event
        while True:
            update = await coming
            coming = asyncio.ensure_future(anext(stream))
            event = update.event
            if update.note:
                print_note(update.note)
            elif event.SerializeToString(deterministic=True) not in shown:
                yield event
    finally:
        coming.cancel()


REFRESH_S = 2.0
COLUMNS = (
    *("NAME", "PHASE", "STEP", "DONE", "ETA", "ATTEMPT", "CHECKPOINT"),
    *("NODES", "AGE", "WHY"),
)
EMPTY = "no jobs yet; submit one with: megascale submit job.yaml"
NO_MATCH = "no job is in that phase"

_KEYS: dict[str, Callable[[Job], Any]] = {
    "name": lambda job: job.spec.name,
    "phase": lambda job: (job.phase, job.spec.name),
    "created": lambda job: -job.created_at.ToNanoseconds(),
    "progress": lambda job: -percent(job),
    "eta": lambda job: remaining_s(job) if remaining_s(job) is not None else float("inf"),
}


def jobs(
    phase: Annotated[
        list[str] | None,
        typer.Option(metavar="PHASE", help="Only jobs in this phase; can be repeated."),
    ] = None,
    sort: Annotated[
        Literal["name", "phase", "created", "progress", "eta"],
        typer.Option(help="created: newest first; progress: furthest first; eta: soonest first."),
    ] = "name",
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Show it again on every change, until Ctrl-C.")
    ] = False,
    cluster: Cluster = None,
    as_json: Json = False,
) -> None:
    """List all jobs, with progress and the time left.

    Example: [bold]megascale jobs --phase running --sort eta --watch[/bold]
    """

    async def read(client: AsyncClient) -> list[Job]:
        return sorted([job async for job in client.jobs(phase=phase or ())], key=_KEYS[sort])

    empty = NO_MATCH if phase else EMPTY

    async def action(client: AsyncClient) -> None:
        if watch:
            await _refresh(lambda: read(client), as_json, empty)
            return
        print_items(await read(client), COLUMNS, _row, empty=empty, as_json=as_json)

    with_client(action, cluster, as_json, retry_for_s=WATCH_RETRY_FOR_S if watch else RETRY_FOR_S)


async def _refresh(read: Callable[[], Any], as_json: bool, empty: str) -> None:
    """Show the jobs until Ctrl-C: in place on a terminal, else again after every change."""
    if on_a_terminal() and not as_json:
        with Live(console=console, screen=False, auto_refresh=False) as live:
            while True:
                listed = await read()
                live.update(table(COLUMNS, map(_row, listed)) if listed else empty, refresh=True)
                await asyncio.sleep(REFRESH_S)
    shown: dict[str, Job] = {}
    first = True
    while True:
        listed = await read()
        changed = [job for job in listed if shown.get(job.spec.name) != job]
        if as_json:
            for job in changed:
                print_json(job)
        elif changed or len(shown) != len(listed) or first:
            print_table(COLUMNS, map(_row, listed), empty=empty)
            print(flush=True)
        first, shown = False, {job.spec.name: job for job in listed}
        await asyncio.sleep(REFRESH_S)


def _row(job: Job) -> tuple[str, ...]:
    left_s = remaining_s(job)
    return (
        job.spec.name,
        phase_text(job.phase),
        f"{job.step}/{job.spec.trainer.training.steps}",
        f"{percent(job):.0f}%",
        "-" if left_s is None else duration(left_s),
        str(job.attempt),
        str(job.committed_step or "-"),
        ",".join(job.nodes) or "-",
        age(job.created_at),
        escape(clipped(job.phase_reason)),
    )
