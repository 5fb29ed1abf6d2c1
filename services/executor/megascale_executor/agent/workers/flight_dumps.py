"""Asks ranks that stand still for NCCL's flight recorder, before they are killed.

A rank on a GPU has a named pipe in the attempt's folder (megascale_trainer.process.flight_dump).
What comes stays in that folder, and what it says goes to the driver with the stacks. Nothing here
waits longer than WAIT_S, and nothing at all where no rank has a pipe.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from megascale_common.node.attempt_files import AttemptFolder
from megascale_common.node.flight_record import MAX_DUMP_BYTES, RankRecord, parse
from megascale_common.service import logs

WAIT_S = 2.0  # for all ranks together; a record of 2,000 operations takes some 0.1 s
READ_S = 2.0  # for all of a node's ranks; one has some 4 MiB, which take about 0.1 s
_LOOK_S = 0.05
_log = logs.get(__name__)


def ask(folder: AttemptFolder, ranks: Iterable[int]) -> dict[int, Path]:
    """Ask these ranks; returns the file that is to come of each that has a recorder."""
    asked = {}
    for rank in ranks:
        try:
            descriptor = os.open(folder.flight_request(rank), os.O_WRONLY | os.O_NONBLOCK)
        except OSError:  # a rank without a recorder, or that has ended
            continue
        try:
            folder.flight_dump(rank).unlink(missing_ok=True)
            os.write(descriptor, b"1")
            asked[rank] = folder.flight_dump(rank)
        except OSError:  # nobody reads it, and it is full
            continue
        finally:
            os.close(descriptor)
    return asked


async def arrived(asked: Mapping[int, Path], wait_s: float = WAIT_S) -> dict[int, Path]:
    """Wait until the files are there, ``wait_s`` at most; returns those that are."""
    for _ in range(math.ceil(wait_s / _LOOK_S)):
        if all(path.exists() for path in asked.values()):
            break
        await asyncio.sleep(_LOOK_S)
    return {rank: path for rank, path in asked.items() if path.exists()}


async def read(dumps: Mapping[int, Path], limit_s: float = READ_S) -> dict[int, RankRecord]:
    """What the records say, by rank; without those that cannot be read within ``limit_s``."""
    found: dict[int, RankRecord] = {}
    end_s = time.monotonic() + limit_s

    def read_all() -> None:
        for rank, path in dumps.items():
            if time.monotonic() >= end_s:
                break
            try:
                with path.open("rb") as file:
                    found[rank] = parse(rank, file.read(MAX_DUMP_BYTES + 1))
            except (OSError, ValueError) as error:
                _log.warning("a record of NCCL's operations cannot be read", reason=str(error))

    await asyncio.to_thread(read_all)
    return found
