"""Commands about the configuration of a job: clone, config show, config diff."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from megascale.v1 import job_pb2
from megascale_cli.exits import fail, with_client
from megascale_cli.options import Cluster, JobName, Json, job_names
from megascale_cli.output import console, phase_text, print_json, print_table
from megascale_client import (
    AsyncClient,
    FieldProblem,
    InvalidJob,
    NotFound,
    dump_job,
    job_values,
    load_job,
    parse_job,
)
from megascale_client.spec import flattened, set_value

_FILE_ENDINGS = (".yaml", ".yml", ".json")
_ABSENT = object()

Source = Annotated[
    str,
    typer.Argument(
        metavar="JOB_OR_FILE", help="A job file, or the name of a job.", autocompletion=job_names
    ),
]
Effective = Annotated[
    bool, typer.Option("--effective", help="Every field, with the defaults filled in.")
]


def clone(
    name: JobName,
    new_name: Annotated[
        str, typer.Option("--name", metavar="NEW", help="Name of the copy; default: NAME-2, ...")
    ] = "",
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="PATH=VALUE", help="Change a field; the value as in YAML. Repeatable."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write a job file; - is stdout."),
    ] = None,
    cluster: Cluster = None,
    as_json: Json = False,
) -> None:
    """Submit a job like an existing one under a new name, or write it as a job file.

    The copy starts from its first step and has a checkpoint folder of its own, next to that of the
    job, unless one is set.

    Example: [bold]megascale clone demo --set trainer.training.steps=500[/bold]
    """

    async def action(client: AsyncClient) -> None:
        spec = (await client.get(name)).spec
        copy = _copy(spec, new_name or await _free_name(client, name), settings or [])
        if output is not None:
            _write(copy, output, as_json)
            return
        job = await client.submit(copy)
        if as_json:
            print_json(job)
            return
        phase = f"{phase_text(job.phase)} {escape(job.phase_reason)}"
        console.print(f"job [bold]{copy.name}[/bold], like {name}, is submitted: {phase}")
        if copy.checkpoint.uri:
            console.print(f"its checkpoints: {escape(copy.checkpoint.uri)}")

    with_client(action, cluster, as_json)


async def _free_name(client: AsyncClient, name: str) -> str:
    taken = {job.spec.name async for job in client.jobs()}
    number = 2
    while f"{name}-{number}" in taken:
        number += 1
    return f"{name}-{number}"


def _copy(spec: job_pb2.JobSpec, name: str, settings: list[str]) -> job_pb2.JobSpec:
    """``spec`` under another name and with a checkpoint folder of its own, then ``settings``."""
    from megascale_job.job_file import anchor  # loads the tree of a job

    values = job_values(spec)
    values["name"] = name
    if uri := values.get("checkpoint", {}).get("uri"):
        folder, _, last = uri.rstrip("/").rpartition("/")
        if folder.endswith(":/"):  # a bucket or host without a folder, which is kept
            folder, last = f"{folder}/{last}", ""
        own = name if last in (spec.name, "") else f"{last}-{name}"
        values["checkpoint"]["uri"] = f"{folder}/{own}"
    for setting in settings:
        set_value(values, setting)
    anchor(values, Path.cwd())
    return parse_job(values)


def _write(spec: job_pb2.JobSpec, output: Path, as_json: bool) -> None:
    text = dump_job(spec)
    if str(output) == "-":
        print(text, end="")
        return
    try:
        with output.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        remedy = "give another --output"
        problem = FieldProblem("--output", f"{output}: {error.strerror}", remedy)
        raise fail(InvalidJob([problem]), as_json) from None
    if as_json:
        print_json({"file": str(output), "name": spec.name})
    else:
        console.print(f"{output} is written; next: megascale submit {output}", markup=False)


def show(
    source: Source,
    effective: Effective = False,
    cluster: Cluster = None,
    as_json: Json = False,
) -> None:
    """Print a job's configuration as YAML, with --json as JSON.

    Example: [bold]megascale config show job.yaml --effective[/bold]
    """
    spec = _read(source, cluster, as_json)
    if effective:
        spec = _effective(spec, source, as_json)
    if as_json:
        print_json(job_values(spec, all_fields=effective))
    else:
        print(dump_job(spec, all_fields=effective), end="")


def diff(first: Source, second: Source, cluster: Cluster = None, as_json: Json = False) -> None:
    """Print the fields in which two jobs differ, defaults filled in; nothing if there are none.

    Example: [bold]megascale config diff demo job.yaml[/bold]
    """
    one, other = (
        dict(
            flattened(
                job_values(
                    _effective(_read(each, cluster, as_json), each, as_json), all_fields=True
                )
            )
        )
        for each in (first, second)
    )
    different = [
        path
        for path in dict.fromkeys([*one, *other])
        if one.get(path, _ABSENT) != other.get(path, _ABSENT)
    ]
    if as_json:
        for path in different:
            print_json({"field": path, "first": one.get(path), "second": other.get(path)})
        return
    rows = [(path, _cell(one, path), _cell(other, path)) for path in different]
    if rows:
        print_table(("FIELD", escape(first), escape(second)), rows, empty="")
    else:
        typer.echo("no differences", err=True)


def _cell(values: dict[str, Any], path: str) -> str:
    return escape(json.dumps(values[path], ensure_ascii=False)) if path in values else "-"


def _read(source: str, cluster: Path | None, as_json: bool) -> job_pb2.JobSpec:
    """The job in a file, or the job of that name on the cluster."""
    if source.endswith(_FILE_ENDINGS) or "/" in source or Path(source).is_file():
        try:
            return load_job(source)
        except InvalidJob as error:
            raise fail(error, as_json) from None
    found: list[job_pb2.JobSpec] = []

    async def action(client: AsyncClient) -> None:
        try:
            found.append((await client.get(source)).spec)
        except NotFound as error:
            raise NotFound(f"{error}; nor is there a file {source}", reason=error.reason) from None

    with_client(action, cluster, as_json)
    return found[0]


def _effective(spec: job_pb2.JobSpec, source: str, as_json: bool) -> job_pb2.JobSpec:
    # Imported here, so that other commands start without it.
    from megascale_job.problems import JobError
    from megascale_job.wire.spec import effective

    try:
        return effective(spec)
    except JobError as error:
        problems = [FieldProblem(*dataclasses.astuple(problem)) for problem in error.problems]
        raise fail(InvalidJob(problems, source=source), as_json) from None
