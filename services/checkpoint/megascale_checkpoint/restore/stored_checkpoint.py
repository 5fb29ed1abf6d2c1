"""One committed checkpoint on storage, read in parts: the index of its files, and verified bytes.

The manifest is compared with the hash in its COMMIT record before anything is read. A unit (a
stored piece, or a chunk of a large one) can be read in several parts, in order; it is verified
against its checksum when its last byte is read.

Ranks of one job read together, so that each byte is read once
(:mod:`megascale_job.sizes.read_plan`). :func:`fill` is for a job of one rank and for tools: one
reader reads everything that one layout needs, whatever layout wrote the checkpoint, with one window
of memory beyond the slot.
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
    """An open checkpoint; calls block. Several threads can read different units at the same time.

    Attributes:
        manifest: as it was committed. Files are numbered in its order.
        bytes_read: bytes of tensors read so far, without headers.
    """

    def __init__(self, storage: Storage, manifest: Manifest, cancelled: Cancellation) -> None:
        self.manifest = manifest
        self.bytes_read = 0
        self._storage = storage
        self._cancelled = cancelled
        self._headers: dict[int, list[StoredPiece]] = {}
        # Units that are partly read: the checksum so far, and the bytes in it.
        self._partly: dict[tuple[int, int], tuple[Any, int]] = {}

    @classmethod
    def open(cls, plan: RestorePlan, cancelled: Cancellation) -> StoredCheckpoint:
        """Read and verify the manifest of ``plan``.

        Raises:
            DamagedError: it is not the one that was committed, or of another step; or it is missing
                and the plan is not ``checked``.
            RequestError: it is missing on this node, or the uri is not supported.
            OSError: the storage does not answer.
        """
        try:
            storage, manifest = manifests.load(plan.manifest_uri, plan.manifest_xxh3)
        except MissingFileError as error:
            if not plan.checked:
                raise  # not checked since it was committed, so it may be gone everywhere
            # The committer has just read the manifest on its node, so this node's folder is at
            # fault and the checkpoint must not be marked as damaged.
            raise RequestError(
                f"{error} on this node: is the checkpoint folder shared by all nodes?"
            ) from error
        # A plan of step 0 takes the parameters alone, from a checkpoint of any step.
        if plan.step and manifest.step != plan.step:
            problem = f"is of step {manifest.step}, not {plan.step}"
            raise DamagedError(plan.manifest_uri, problem)
        return cls(storage, manifest, cancelled)

    @property
    def uri(self) -> str:
        """The checkpoint's folder."""
        return self._storage.uri

    def index(self, number: int, first: int = 0, count: int | None = None) -> Runs:
        """The pieces in file ``number`` from ``first`` on, at most ``count``.

        Raises:
            DamagedError: the file is missing, cut short, changed or not of this checkpoint.
            OSError: the storage does not answer.
        """
        pieces = self._pieces(number)
        pieces = pieces[first : len(pieces) if count is None else first + count]
        sums, chunks = [p.checksum for p in pieces], [p.chunks for p in pieces]
        return runs_of((p.piece for p in pieces), number, sums, chunks)

    def piece_count(self, number: int) -> int:
        """Number of pieces in file ``number``; raises as :meth:`index`."""
        return len(self._pieces(number))

    def pieces_within(self, number: int, first: int, most: int) -> int:
        """Number of pieces of file ``number``, from ``first`` on, with at most ``most`` units.

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
        """Fill ``target`` with a part of a unit; the parts of one unit must be read in order.

        Raises:
            DamagedError: the file is cut short, or the unit is not what was written.
            SupersededError: cancelled.
            OSError: the storage does not answer.
        """
        path = self.manifest.files[read.file].path
        key = (read.file, read.first)
        # Removed while it is read, so that after an error the unit starts from its beginning again.
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
        """A name for the piece of a unit; by place if only another node has read its header."""
        for stored in self._headers.get(read.file, ()):
            begin = stored.piece.slot_offset_bytes
            if begin <= read.first < begin + stored.piece.size_bytes:
                return f"{stored.piece.name} ({stored.piece.state})"
        return f"the piece at byte {read.first}"


WINDOW_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Filled:
    """The result of :func:`fill`: the rank's small state, and the bytes of tensors read."""

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

    Bytes between the pieces are set to 0. With ``alone`` the rank is the only one of its job: a
    stored piece without a place in its layout would be lost, and is refused.

    Raises:
        DamagedError: a file is missing, cut short or changed.
        RequestError: the checkpoint is of another model, the uri is not supported, or there is no
            manifest.
        SupersededError: cancelled.
        OSError: the storage does not answer.
    """
    stored = StoredCheckpoint.open(plan, cancelled or Cancellation())
    # A piece can be shorter than its place in the slot; the trainer relies on zeros in the padding.
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
    # In rounds of one window: a read can hold bytes that belong to several places of the slot.
    for part in Rounds(reads, max(1, len(window))).of_rank(0):
        for read in part.reads:
            stored.read(read, window[read.at : read.at + read.stop - read.start])
        for at, target, size in part.kept.tolist():
            image[target : target + size] = window[at : at + size]
    small_state = stored.manifest.small_state_of(rank, layout.digest())
    return Filled(small_state, stored.bytes_read)


def _index(stored: StoredCheckpoint, rank: int, wanted: Runs) -> Runs:
    """The index of as many files as it takes to find every piece that the rank needs.

    Files are tried from the rank's own one downwards. In the same layout the own file has every
    piece except those replicated over tensor parallelism, which the nearest lower rank with tp 0
    has written (tp is the innermost axis). Sizes need no check first: the committer has checked
    them when it opened the attempt, so that ten thousand ranks need not stat ten thousand files
    each.
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
