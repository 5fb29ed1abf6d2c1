"""Asks ranks that stand still for NCCL's flight recorder, before they are killed.

A rank on a GPU has a named pipe in the attempt's folder (megascale_trainer.process.flight_dump).
What comes stays in that folder, for :mod:`megascale_driver.analysis.flight_recorder`. Nothing here
waits longer than WAIT_S, and nothing at all where no rank has a pipe.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Iterable
from pathlib import Path

from megascale_common.node.attempt_files import AttemptFolder

WAIT_S = 2.0  # for all ranks together; a record of 2,000 operations takes some 0.1 s
_LOOK_S = 0.05


def ask(folder: AttemptFolder, ranks: Iterable[int]) -> list[Path]:
    """Ask these ranks; returns the files that are to come."""
    asked = []
    for rank in ranks:
        try:
            descriptor = os.open(folder.flight_request(rank), os.O_WRONLY | os.O_NONBLOCK)
        except OSError:  # a rank without a recorder, or that has ended
            continue
        try:
            folder.flight_dump(rank).unlink(missing_ok=True)
            os.write(descriptor, b"1")
            asked.append(folder.flight_dump(rank))
        except OSError:  # nobody reads it, and it is full
            continue
        finally:
            os.close(descriptor)
    return asked


async def arrived(files: Iterable[Path], wait_s: float = WAIT_S) -> list[Path]:
    """Wait until the files are there, ``wait_s`` at most; returns those that are."""
    waited_for = list(files)
    for _ in range(math.ceil(wait_s / _LOOK_S)):
        if all(path.exists() for path in waited_for):
            break
        await asyncio.sleep(_LOOK_S)
    return [path for path in waited_for if path.exists()]
