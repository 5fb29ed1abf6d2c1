"""``megascale spans``: heat, why and timeline of a run by hand, from the files in its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="Read the spans of a run by hand: who is slow, why the MFU fell, one trace of all ranks.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
Source = Annotated[
    Path,
    typer.Argument(
        metavar="FOLDER",
        help="The run's job folder (its newest attempt), an attempt's, or a file of recorded "
        "spans. Of several hosts copy the spans-* files into one.",
    ),
]


@app.command()
def heat(
    source: Source,
    steps: Annotated[int, typer.Option(min=1, help="How many of the newest steps.")] = 50,
) -> None:
    """Show what each rank takes for each operation of a step, and the nodes that are slow.

    Example: [bold]megascale spans heat runs/by-hand/jobs/demo[/bold]
    """
    _run("heat", source, "--steps", str(steps))


@app.command()
def why(
    source: Source,
    split: Annotated[
        int, typer.Option(min=0, help="First step of the slower window; 0: where it got slower.")
    ] = 0,
) -> None:
    """Say in one sentence with numbers why steps take longer than before.

    Example: [bold]megascale spans why runs/by-hand/jobs/demo[/bold]
    """
    _run("why", source, "--split", str(split))


@app.command()
def timeline(
    source: Source,
    out: Annotated[Path, typer.Option(metavar="FILE", help="trace.json, or trace.json.gz.")] = Path(
        "timeline.json.gz"
    ),
) -> None:
    """Write one trace of all ranks for ui.perfetto.dev, and the critical path of each step.

    Example: [bold]megascale spans timeline runs/by-hand/jobs/demo[/bold]
    """
    _run("timeline", source, "--out", str(out))


def attempt_folder(source: Path) -> Path:
    """The newest attempt of a job's folder; anything else as it is."""
    attempts = sorted(source.glob("attempt-*")) if source.is_dir() else []
    return attempts[-1] if attempts else source


def _run(verb: str, source: Path, *options: str) -> None:
    from megascale_driver.analysis.spans.__main__ import main  # numpy, which a driver may lack

    raise typer.Exit(main([verb, str(attempt_folder(source)), *options]))
