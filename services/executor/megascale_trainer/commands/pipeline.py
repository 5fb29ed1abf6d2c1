"""`megascale pipeline`: draw pipeline schedules before any device runs them."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import typer

from megascale_job.visible import counted, visible
from megascale_trainer.parallel.pipeline.drawing import (
    Durations,
    Timeline,
    as_svg,
    as_text,
    simulate,
)
from megascale_trainer.parallel.pipeline.schedule import SCHEDULES, Kind, PipelineShape

USER_MISTAKE_EXIT_CODE = 2

Stages = Annotated[
    int, typer.Option(help="Pipeline stages: trainer.parallelism.pp.", min=1, max=64)
]
MicroBatches = Annotated[
    int,
    typer.Option(
        help="Micro-batches of a replica in a step: global batch / (micro-batch x dp).",
        min=1,
        max=256,
    ),
]
VirtualStages = Annotated[
    int,
    typer.Option(
        help="Model chunks of each stage, `virtual_stages` in a job; above 1 it is interleaved.",
        min=1,
        max=16,
    ),
]
Overlap = Annotated[
    bool,
    typer.Option("--overlap", help="Post receives one computation ahead, `overlap.pp` in a job."),
]
Forward = Annotated[int, typer.Option(help="Time units of a chunk's forward.", min=1, max=100)]
Backward = Annotated[int, typer.Option(help="Time units of a chunk's backward.", min=1, max=100)]
BackwardWeight = Annotated[
    int,
    typer.Option(help="Time units of the weight gradients in a chunk's backward.", min=0, max=100),
]
Name = Literal["1f1b", "zero_bubble"]
Schedule = Annotated[
    Name,
    typer.Option("--schedule", help="`pipeline_schedule` in a job."),
]
Transfer = Annotated[
    int, typer.Option(help="Time units of a message between stages.", min=0, max=100)
]
Svg = Annotated[Path | None, typer.Option(help="Also write a picture to this file.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the timeline as one JSON object.")]

app = typer.Typer(help="Pipeline schedules: see them before you run them.", no_args_is_help=True)


@dataclass(frozen=True, slots=True)
class _Schedule:
    """The schedule to draw."""

    stages: int
    micro_batches: int
    virtual_stages: int
    overlap: bool
    name: Name

    @property
    def title(self) -> str:
        chunks = self.virtual_stages
        name = f"interleaved 1F1B, {chunks} chunks per stage" if chunks > 1 else "1F1B"
        name = f"zero bubble on {name}" if self.name == "zero_bubble" else name
        receives = "receives posted ahead" if self.overlap else "plain receives"
        sizes = f"{counted(self.stages, 'stage')}, {counted(self.micro_batches, 'micro-batch')}"
        return f"{name}: {sizes}, {receives}"

    def timeline(self, durations: Durations) -> Timeline:
        """ValueError where the sizes do not make a schedule."""
        schedule = SCHEDULES[self.name]
        programs = [
            schedule(
                PipelineShape(stage, self.stages, self.micro_batches, self.virtual_stages),
                overlap=self.overlap,
            )
            for stage in range(self.stages)
        ]
        return simulate(programs, durations)


@app.callback()
def pipeline() -> None:
    """Pipeline schedules: see them before you run them. Needs no cluster and no device."""


@app.command()
def draw(
    stages: Stages = 4,
    micro_batches: MicroBatches = 8,
    virtual_stages: VirtualStages = 1,
    overlap: Overlap = False,
    forward: Forward = 1,
    backward: Backward = 2,
    backward_weight: BackwardWeight = 1,
    transfer: Transfer = 0,
    schedule: Schedule = "1f1b",
    svg: Svg = None,
    as_json: AsJson = False,
) -> None:
    """Draw what every stage of a pipeline computes when, and how much of its time it idles.

    Numbers are micro-batches, backwards are in brackets, and a letter names the chunk. More
    micro-batches and more virtual stages shrink the idle time (the bubble), and so does --schedule
    zero_bubble, with weight gradients in angle brackets. --transfer shows what sending between
    stages costs, and --overlap how much of that is hidden. The times are the ones you give; nothing
    is measured.

    Example: megascale pipeline draw --stages 4 --micro-batches 8 --virtual-stages 2 --overlap --svg
    schedule.svg
    """
    drawn = _Schedule(stages, micro_batches, virtual_stages, overlap, schedule)
    durations = Durations(forward, backward, transfer, backward_weight)
    if schedule == "zero_bubble" and backward_weight >= backward:
        _refuse(f"--backward-weight {backward_weight} leaves nothing of --backward {backward}")
    try:
        timeline = drawn.timeline(durations)
        if svg is not None:
            svg.write_text(as_svg(timeline, drawn.title))
    except ValueError as error:
        _refuse(str(error))
    except OSError as error:
        _refuse(f"{error.filename}: {error.strerror}")
    if as_json:
        typer.echo(json.dumps(_summary(timeline, durations, overlap)))
    else:
        typer.echo(_text(timeline, durations, drawn.title))


def _summary(timeline: Timeline, durations: Durations, overlap: bool) -> dict[str, object]:
    return {
        "makespan": timeline.makespan,
        "bubble_share": timeline.bubble_share,
        "overlap": overlap,
        **asdict(durations),
        "stages": _rows(timeline),
    }


def _text(timeline: Timeline, durations: Durations, title: str) -> str:
    apart = any(span.action.kind is Kind.BACKWARD_WEIGHT for row in timeline.stages for span in row)
    split = f" ({durations.backward_weight} for weights)" if apart else ""
    return (
        f"{as_text(timeline, shutil.get_terminal_size((120, 24)).columns)}\n\n"
        f"{title}; times in units: {durations.forward} forward, "
        f"{durations.backward} backward{split}, {durations.transfer} transfer\n"
        f"makespan {timeline.makespan} units; "
        f"bubble: {timeline.bubble_share:.1%} of the stages' time"
    )


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
    typer.secho(f"error: {visible(problem)}", fg="red", err=True)
    raise typer.Exit(USER_MISTAKE_EXIT_CODE)
