"""Fill the slot of one rank from storage, whatever layout wrote the checkpoint.

This is the restore of a job of one rank, and of tools that read a checkpoint without ranks. A job
of several ranks reads together, so that each byte is read once
(:mod:`megascale_job.sizes.read_plan`); here one reader reads all that one layout needs. Memory
beyond the slot is one window.

The committer has checked the sizes of all files when it opened the attempt, so ten thousand ranks
need not each stat ten thousand files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from megascale_checkpoint.concurrency import Cancellation
from megascale_checkpoint.restore.stored_checkpoint import StoredCheckpoint
from megascale_common.service.errors import RequestError
from megascale_job.restore import RestorePlan, RestoreSource
from megascale_job.sizes.checkpoint_layout import ShardLayout
from megascale_job.sizes.piece_runs import (
    PARAMETER,
    START,
    STOP,
    Parameter,
    Runs,
    join,
    runs_of,
)
from megascale_job.sizes.read_plan import DoesNotFit, check_placed, plan_reads
from megascale_job.sizes.read_rounds import Rounds

WINDOW_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Filled:
    """What :func:`fill` read: the rank's small state, and how many bytes of tensors."""

    small_state: dict[str, Any]
    bytes_read: int


def fill(
    manifest_uri: str,
    job_step: int,
    rank: int,
    layout: ShardLayout,
    image: memoryview,
    cancelled: Cancellation | None = None,
    manifest_xxh3: str = "",
    *,
    checked: bool = True,
    alone: bool = False,
) -> Filled:
    """Read a checkpoint into ``image``, a slot of ``layout``. Blocking.

    Bytes between the pieces are set to 0. With ``alone`` the rank is the only one of its job, so
    what its layout has no place for would be lost.

    Raises:
        DamagedError: a file is missing, cut short or changed.
        RequestError: the checkpoint is of another model, the uri is not supported, or there is no
            manifest.
        SupersededError: cancelled.
        OSError: the storage does not answer.
    """
    plan = RestorePlan(
        RestoreSource.STORAGE, job_step, 0, manifest_uri, manifest_xxh3, checked=checked
    )
    stored = StoredCheckpoint.open(plan, cancelled or Cancellation())
    # A piece may be shorter than its place in the slot; the trainer relies on zeros in the padding.
    np.frombuffer(image, np.uint8)[:] = 0
    try:
        wanted = runs_of(layout.pieces, 0)
        if alone:
            found = join([stored.index(number) for number in range(len(stored.manifest.files))])
            check_placed(found, wanted, weights_alone=job_step == 0)
        else:
            found = _index(stored, rank, wanted)
        reads = plan_reads(found, wanted, [False])
    except DoesNotFit as error:
        raise RequestError(error.refusal(stored.uri)) from error
    window = memoryview(bytearray(min(WINDOW_BYTES, int(reads.stream_bytes[0]))))
    for part in Rounds(reads, max(1, len(window))).of_rank(0):
        for read in part.reads:
            stored.read(read, window[read.at : read.at + read.stop - read.start])
        for at, target, size in part.kept.tolist():
            image[target : target + size] = window[at : at + size]
    small_state = stored.manifest.small_state_of(rank, layout.digest())
    return Filled(small_state, stored.bytes_read)


def _index(stored: StoredCheckpoint, rank: int, wanted: Runs) -> Runs:
    """The index of the files up to the one that completes what the rank needs, or of all.

    In the same layout the own file has every piece except those replicated over tensor parallelism,
    which the nearest lower rank with tp 0 wrote (tp is the innermost axis).
    """
    files = stored.manifest.files
    missing, tables = _cuts(wanted), []
    for number in sorted(
        range(len(files)), key=lambda n: (rank - files[n].rank) % stored.manifest.world_size
    ):
        if not missing:
            break
        tables.append(stored.index(number))
        missing -= _cuts(tables[-1])
    return join(tables)


def _cuts(runs: Runs) -> set[tuple[Parameter, int, int]]:
    return {
        (runs.parameters[parameter], start, stop)
        for parameter, start, stop in runs.rows[:, [PARAMETER, START, STOP]].tolist()
    }
