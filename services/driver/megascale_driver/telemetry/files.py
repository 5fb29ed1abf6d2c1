"""Parquet files of one attempt: their folder and names, written whole, small ones merged."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
from pyarrow import parquet

MERGE_FILES = 64
SMALL_BYTES = 1 << 20


def attempt_folder(folder: Path, job: str, attempt: int) -> Path:
    """Where the files of an attempt lie."""
    return folder / job / f"attempt-{attempt:06d}"


def bounds_of(path: Path) -> tuple[int, int] | None:
    """First and last step, or second, of a file KIND-FIRST-LAST-N.parquet; None: none of ours."""
    parts = path.name.split("-")
    if len(parts) != 4 or not (parts[1].isdecimal() and parts[2].isdecimal()):
        return None
    return int(parts[1]), int(parts[2])


def write_table(table: pa.Table, path: Path) -> None:
    """Write it whole under another name first, so that a query never reads half of a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".part")
    parquet.write_table(table, temporary, compression="zstd")
    os.replace(temporary, path)


def read_table(path: Path) -> pa.Table:
    """The whole of one file.

    pyarrow's function of this name first imports what reads folders: 0.06 s, which the event loop's
    process pays for nothing.

    Raises:
        OSError, pyarrow.ArrowException: there is none, or it is damaged.
    """
    with parquet.ParquetFile(path) as file:
        return file.read()


def merge_small(folder: Path, pattern: str, name: Callable[[int, int], str]) -> None:
    """One file in place of many small ones; ``name`` gives it one by its bounds."""
    small = sorted(p for p in folder.glob(pattern) if p.stat().st_size < SMALL_BYTES)
    if len(small) < MERGE_FILES:
        return
    table = pa.concat_tables([read_table(path) for path in small]).unify_dictionaries()
    bounds = [found for path in small if (found := bounds_of(path))]
    first, last = min(one for one, _ in bounds), max(one for _, one in bounds)
    write_table(table, folder / name(first, last))
    for path in small:
        path.unlink(missing_ok=True)
