"""Output of exports and imports: a folder that appears complete or not at all, and progress bars.

The folder is made under another name next to its final place and renamed at the end. A process that
is killed leaves a folder whose name begins with "." and contains ".partial-", so that no reader
takes it for the result.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

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

from megascale_common.service.errors import ExistsError
from megascale_job.visible import visible


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield a folder to fill, which becomes ``target`` when the block ends without an error.

    Raises:
        ExistsError: ``target`` is there and not an empty folder.
        OSError: it cannot be made.
    """
    if target.is_symlink() or (target.exists() and (not target.is_dir() or any(target.iterdir()))):
        raise ExistsError(
            f"--to: {target} is taken: give a folder that does not exist yet, or an empty one"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.parent / f".{target.name}.partial-{uuid.uuid4().hex[:8]}"
    partial.mkdir()
    try:
        yield partial
        # Contents before the name: after a crash the folder is complete or not there.
        for path in partial.rglob("*"):
            _sync(path)
        _sync(partial)
        # rename(2) replaces an empty folder and fails on any other, so nothing is overwritten.
        partial.rename(target)
        _sync(target.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


Report = Callable[[int, int], None]  # bytes done, bytes in all


@contextmanager
def bar(what: str, *, quiet: bool, unit: str = "") -> Iterator[Report]:
    """Yield a function that reports progress to a bar on stderr, which is removed at the end.

    Without a terminal, or if ``quiet``, there is no bar.

    Args:
        unit: unit of the progress, if that is not bytes.
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
