"""``megascale spans``: heat map, cause of a falling MFU and timeline of a run by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="Read the spans of a run by hand: slow nodes, cause of a falling MFU, trace of all ranks.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
Source = Annotated[
    Path,
    typer.Argument(
        metavar="FOLDER",
        help="The run's job folder (its newest attempt is read), an attempt's folder, or a file of "
        "recorded spans. For several hosts, copy their spans-* files into one folder.",
    ),
]


@app.command()
def heat(
    source: Source,
    steps: Annotated[int, typer.Option(min=1, help="Number of newest steps.")] = 50,
) -> None:
    """Show the time of each rank for each operation of a step, and the slow nodes.

    Example: [bold]megascale spans heat runs/by-hand/jobs/demo[/bold]
    """
    _run("heat", source, "--steps", str(steps))


@app.command()
def why(
    source: Source,
    split: Annotated[
        int, typer.Option(min=0, help="First step of the slower window; 0: it is found.")
    ] = 0,
) -> None:
    """Explain in one sentence with numbers why steps take longer than before.

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
    """The folder of the newest attempt for a job's folder; any other path unchanged."""
    attempts = sorted(source.glob("attempt-*")) if source.is_dir() else []
    return attempts[-1] if attempts else source


def _run(verb: str, source: Path, *options: str) -> None:
    from megascale_driver.analysis.spans.__main__ import main  # needs numpy: imported late

    raise typer.Exit(main([verb, str(attempt_folder(source)), *options]))
