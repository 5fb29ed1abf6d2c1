"""Progress of an export or import: a bar on stderr for people, nothing for programs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from megascale_job.visible import visible

Report = Callable[[int, int], None]  # bytes done, bytes in all


@contextmanager
def bar(what: str, *, quiet: bool, unit: str = "") -> Iterator[Report]:
    """Yield what reports progress to a bar, which is removed in the end.

    Args:
        unit: of what is counted, where that is not bytes.
    """
    counted = (
        (TextColumn(f"{{task.completed}}/{{task.total}} {unit}"),)
        if unit
        else (DownloadColumn(), TransferSpeedColumn())
    )
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        *counted,
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    hidden = quiet or not console.is_terminal  # a bar would leave an empty line in a log
    with Progress(*columns, console=console, disable=hidden, transient=True) as progress:
        task = progress.add_task(escape(visible(what)), total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
