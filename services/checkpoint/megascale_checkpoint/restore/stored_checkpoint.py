"""One committed checkpoint on storage, read in parts: the index of its files, and verified bytes.

The manifest is compared with the hash of its COMMIT record before anything is read. A unit (a
stored piece, or a chunk of a large one) is verified against its checksum when its last byte is
read; it may be read in several parts, from first to last.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from megascale_checkpoint.checksums import CHUNK_BYTES
from megascale_checkpoint.commit import manifest as manifests
from megascale_checkpoint.commit.manifest import Manifest
from megascale_checkpoint.commit.shard_file import StoredPiece, located, pieces_of, read_exactly
from megascale_checkpoint.concurrency import Cancellation
from megascale_checkpoint.storage import Storage
from megascale_common.service.errors import DamagedError, MissingFileError, RequestError
from megascale_job.restore import RestorePlan
from megascale_job.sizes.checkpoint_layout import ShardLayout
from megascale_job.sizes.read_plan import (
    PARAMETER,
    START,
    STOP,
    DoesNotFit,
    Parameter,
    Read,
    Rounds,
    Runs,
    check_placed,
    join,
    plan_reads,
    runs_of,
)


class StoredCheckpoint:
    """An open checkpoint; calls block. Different units may be read by several threads at once.

    Attributes:
        manifest: as it was committed. Files are numbered in its order.
        bytes_read: of tensors so far, without headers.
    """

    def __init__(self, storage: Storage, manifest: Manifest, cancelled: Cancellation) -> None:
        self.manifest = manifest
        self.bytes_read = 0
        self._storage = storage
        self._cancelled = cancelled
        self._headers: dict[int, list[StoredPiece]] = {}
        # Units of which a part is read: the checksum so far, and how far it goes.
        self._partly: dict[tuple[int, int], tuple[Any, int]] = {}

    @classmethod
    def open(cls, plan: RestorePlan, cancelled: Cancellation) -> StoredCheckpoint:
        """Read and verify the manifest of ``plan``.

        Raises:
            DamagedError: it is not the one that was committed, or of another step; or the plan is
                not ``checked``, and there is none.
            RequestError: there is none on this node, or the uri is not supported.
            OSError: the storage does not answer.
        """
        try:
            storage, manifest = manifests.load(plan.manifest_uri, plan.manifest_xxh3)
        except MissingFileError as error:
            if not plan.checked:
                raise  # nobody has looked at it since it was committed
            # The committer has just read the manifest on its node, so this node's folder is at
            # fault and the checkpoint must not be marked as damaged.
            raise RequestError(
                f"{error} on this node: is the checkpoint folder shared by all nodes?"
            ) from error
        # Step 0 is that of a run which takes the parameters alone, from a checkpoint of any step.
        if plan.step and manifest.step != plan.step:
            problem = f"is of step {manifest.step}, not {plan.step}"
            raise DamagedError(plan.manifest_uri, problem)
        return cls(storage, manifest, cancelled)

    @property
    def uri(self) -> str:
        """The checkpoint's folder."""
        return self._storage.uri

    def index(self, number: int, first: int = 0, count: int | None = None) -> Runs:
        """What file ``number`` holds: its pieces from ``first`` on, at most ``count``.

        Raises:
            DamagedError: the file is missing, cut short, changed or another one.
            OSError: the storage does not answer.
        """
        pieces = self._pieces(number)
        pieces = pieces[first : len(pieces) if count is None else first + count]
        sums, chunks = [p.checksum for p in pieces], [p.chunks for p in pieces]
        return runs_of((p.piece for p in pieces), number, sums, chunks)

    def piece_count(self, number: int) -> int:
        """How many pieces file ``number`` holds. Raises as :meth:`index`."""
        return len(self._pieces(number))

    def fitting(self, number: int, first: int, most: int) -> int:
        """How many pieces of file ``number``, from ``first`` on, have ``most`` units together.

        At least one, if there is one. Raises as :meth:`index`.
        """
        count = units = 0
        for stored in self._pieces(number)[first:]:
            units += max(1, len(stored.chunks))
            if count and units > most:
                break
            count += 1
        return count

    def read(self, read: Read, target: memoryview) -> None:
        """Fill ``target`` with a part of a unit; parts of one unit are read in order.

        Raises:
            DamagedError: the file is cut short, or the unit is not what was written.
            SupersededError: cancelled.
            OSError: the storage does not answer.
        """
        path = self.manifest.files[read.file].path
        key = (read.file, read.first)
        hasher, position = self._partly.pop(key, (xxhash.xxh3_128(), 0))
        if position != read.start:
            raise RequestError(f"{path}: byte {read.start} of a piece is read after {position}")
        try:
            for begin in range(0, len(target), CHUNK_BYTES):
                self._cancelled.check()
                part = target[begin : begin + CHUNK_BYTES]
                read_exactly(self._storage, path, read.first + read.start + begin, part)
                hasher.update(part)
        except DamagedError as error:
            raise located(self._storage, error) from error
        if read.stop < read.size_bytes:
            self._partly[key] = hasher, read.stop
        elif hasher.hexdigest() != read.checksum:
            raise DamagedError(
                f"{self._storage.uri}/{path}", f"{self._name(read)} fails its checksum"
            )
        self.bytes_read += len(target)

    def _pieces(self, number: int) -> list[StoredPiece]:
        if number not in self._headers:
            self._cancelled.check()
            file = self.manifest.files[number]
            manifests.check_size(self._storage, file)
            self._headers[number] = pieces_of(self._storage, self.manifest, file)
        return self._headers[number]

    def _name(self, read: Read) -> str:
        """The piece of a unit, for people; its header may have been read by another node alone."""
        for stored in self._headers.get(read.file, ()):
            begin = stored.piece.slot_offset_bytes
            if begin <= read.first < begin + stored.piece.size_bytes:
                return f"{stored.piece.name} ({stored.piece.state})"
        return f"the piece at byte {read.first}"


# Fill the slot of one rank from storage, whatever layout wrote the checkpoint.
#
# This is the restore of a job of one rank, and of tools that read a checkpoint without ranks. A job
# of several ranks reads together, so that each byte is read once
# (:mod:`megascale_job.sizes.read_plan`); here one reader reads all that one layout needs. Memory
# beyond the slot is one window.
#
# The committer has checked the sizes of all files when it opened the attempt, so ten thousand ranks
# need not each stat ten thousand files.

WINDOW_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Filled:
    """What :func:`fill` read: the rank's small state, and how many bytes of tensors."""

    small_state: dict[str, Any]
    bytes_read: int


def fill(
    plan: RestorePlan,
    rank: int,
    layout: ShardLayout,
    image: memoryview,
    cancelled: Cancellation | None = None,
    *,
    alone: bool = False,
) -> Filled:
    """Read the stored checkpoint of ``plan`` into ``image``, a slot of ``layout``. Blocking.

    Bytes between the pieces are set to 0. With ``alone`` the rank is the only one of its job, so
    what its layout has no place for would be lost.

    Raises:
        DamagedError: a file is missing, cut short or changed.
        RequestError: the checkpoint is of another model, the uri is not supported, or there is no
            manifest.
        SupersededError: cancelled.
        OSError: the storage does not answer.
    """
    stored = StoredCheckpoint.open(plan, cancelled or Cancellation())
    # A piece may be shorter than its place in the slot; the trainer relies on zeros in the padding.
    np.frombuffer(image, np.uint8)[:] = 0
    try:
        wanted = runs_of(layout.pieces, 0)
        if alone:
            found = join([stored.index(number) for number in range(len(stored.manifest.files))])
            check_placed(found, wanted, weights_alone=plan.step == 0)
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
