"""`megascale pipeline`: look at pipeline schedules before any device runs them."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from megascale_trainer.parallel.pipeline.drawing import as_svg, as_text
from megascale_trainer.parallel.pipeline.schedule import one_forward_one_backward
from megascale_trainer.parallel.pipeline.timing import Durations, Timeline, simulate

USER_MISTAKE_EXIT_CODE = 2

app = typer.Typer(help="Pipeline schedules: see them before you run them.", no_args_is_help=True)


@app.callback()
def pipeline() -> None:
    """Pipeline schedules: see them before you run them. Needs no cluster and no device."""


@app.command()
def draw(
    stages: Annotated[
        int, typer.Option(help="Pipeline stages: parallelism.pp.", min=1, max=64)
    ] = 4,
    micro_batches: Annotated[
        int,
        typer.Option(
            help="Micro-batches of a replica in a step: global batch / (micro-batch x dp).",
            min=1,
            max=256,
        ),
    ] = 8,
    virtual_stages: Annotated[
        int,
        typer.Option(
            help="Model chunks of each stage: parallelism.virtual_stages; above 1 it is interleaved.",
            min=1,
            max=16,
        ),
    ] = 1,
    overlap: Annotated[
        bool,
        typer.Option(
            "--overlap", help="Post receives one computation ahead: parallelism.overlap.pp."
        ),
    ] = False,
    forward: Annotated[
        int, typer.Option(help="Time units of a chunk's forward.", min=1, max=100)
    ] = 1,
    backward: Annotated[
        int, typer.Option(help="Time units of a chunk's backward.", min=1, max=100)
    ] = 2,
    transfer: Annotated[
        int, typer.Option(help="Time units of a message between stages.", min=0, max=100)
    ] = 0,
    svg: Annotated[Path | None, typer.Option(help="Write a picture to this file as well.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the timeline as one JSON object.")
    ] = False,
) -> None:
    """Draw what every stage of a pipeline computes when, and how much of its time it idles (the
    bubble).

    The numbers are micro-batches; backwards stand in brackets, a letter names the chunk. More
    micro-batches and more virtual stages shrink the bubble; --transfer shows what sending between
    stages costs, and --overlap how much of that is hidden. The times are those you give: nothing is
    measured.

    Example: megascale pipeline draw --stages 4 --micro-batches 8 --virtual-stages 2 --overlap --svg
    schedule.svg
    """
    durations = Durations(forward, backward, transfer)
    line = (stages, micro_batches, virtual_stages)
    try:
        programs = [
            one_forward_one_backward(stage, *line, overlap=overlap) for stage in range(stages)
        ]
        timeline = simulate(programs, durations)
        if svg is not None:
            svg.write_text(as_svg(timeline, _title(*line, overlap)))
    except ValueError as error:
        _refuse(str(error))
    except OSError as error:
        _refuse(f"{error.filename}: {error.strerror}")
    summary = {
        "makespan": timeline.makespan,
        "bubble_share": timeline.bubble_share,
        "overlap": overlap,
    }
    if as_json:
        typer.echo(json.dumps({**summary, **asdict(durations), "stages": _rows(timeline)}))
        return
    typer.echo(as_text(timeline, shutil.get_terminal_size((120, 24)).columns))
    typer.echo()
    typer.echo(
        f"{_title(*line, overlap)}; times in units: {forward} forward, {backward} backward, {transfer} transfer"
    )
    typer.echo(
        f"makespan {timeline.makespan} units; bubble: {timeline.bubble_share:.1%} of the stages' time"
    )


def _title(stages: int, micro_batches: int, virtual_stages: int, overlap: bool) -> str:
    name = f"interleaved 1F1B, {virtual_stages} chunks per stage" if virtual_stages > 1 else "1F1B"
    receives = "receives posted ahead" if overlap else "plain receives"
    return f"{name}: {stages} stages, {micro_batches} micro-batches, {receives}"


def _rows(timeline: Timeline) -> list[list[dict[str, object]]]:
    return [
        [
            {
                "kind": span.action.kind.value,
                "micro_batch": span.action.micro_batch,
                "chunk": span.action.chunk,
                "start": span.start,
                "end": span.end,
            }
            for span in spans
        ]
        for spans in timeline.stages
    ]


def _refuse(problem: str) -> NoReturn:
    typer.secho(f"error: {problem}", fg="red", err=True)
    raise typer.Exit(USER_MISTAKE_EXIT_CODE)
