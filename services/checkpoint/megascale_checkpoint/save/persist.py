"""Stage 2 of a checkpoint: write one rank's sealed slot to a durable file.

Blocking: :mod:`megascale_checkpoint.save.rank_snapshots` runs it in a thread.
:mod:`megascale_checkpoint.restore.stored_checkpoint` is the way back.
"""

from __future__ import annotations

import errno
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import xxhash

from megascale.v1 import checkpoint_pb2
from megascale_checkpoint.checksums import balanced, piece_view
from megascale_checkpoint.commit import manifest
from megascale_checkpoint.commit.shard_file import (
    Origin,
    chunk_checksums,
    encode_header,
    piece_chunks,
    primary,
)
from megascale_checkpoint.concurrency import Cancellation
from megascale_checkpoint.memory.registration import RegisteredRank
from megascale_checkpoint.memory.slots import SlotSeal
from megascale_checkpoint.save.write_limit import LIMITS
from megascale_checkpoint.storage import Storage, open_storage
from megascale_common.service import logs
from megascale_common.service.errors import DamagedError, DataLossError
from megascale_job.sizes.checkpoint_layout import ShardPiece

# The checksums of a rank's file, computed by other threads than the one that writes it.
#
# Each chunk is hashed while the storage takes it: once for the file, once for its piece, which is
# compared with the seal before the file gets its name. The writing thread makes no pass over the
# bytes itself, which would cap what one rank writes below what a fast storage takes.

HASHING_THREADS = 4
INLINE_BYTES = 1 << 20  # a smaller chunk is hashed sooner than it is handed to a thread

Pieces = Sequence[tuple[ShardPiece, str]]  # each with its checksum of the seal


class WriteHashes:
    """Those of one file. Its chunks must not reach from one piece into the next."""

    def __init__(self, threads: ThreadPoolExecutor, pieces: Pieces) -> None:
        self._threads = threads
        self._pieces = pieces
        self._file = xxhash.xxh3_128()

    def chunk_checksums(self, image: memoryview) -> list[list[str]]:
        """Those of the chunks of each large piece, for the header; all threads share the pieces."""
        found: list[list[str]] = [[] for _ in self._pieces]

        def hash_all(share: list[int]) -> None:
            for index in share:
                found[index] = chunk_checksums(piece_view(self._pieces[index][0], image))

        sizes = [piece.size_bytes for piece, _ in self._pieces]
        list(self._threads.map(hash_all, balanced(sizes, HASHING_THREADS)))
        return found

    def header(self, data: bytes) -> Iterator[memoryview]:
        """The file begins with ``data``."""
        self._file.update(data)
        yield memoryview(data)

    def piece(self, number: int, chunks: Iterable[memoryview]) -> Iterator[memoryview]:
        """The chunks of a piece, hashed while the caller has them.

        Raises:
            DamagedError: what was written is not what was sealed. A stray write into a sealed slot
                costs this checkpoint only.
        """
        piece, expected = self._pieces[number]
        hasher = xxhash.xxh3_128()
        for chunk in chunks:
            hashing = [self._begin(each, chunk) for each in (self._file, hasher)]
            yield chunk
            for future in hashing:
                if future is not None:
                    future.result()
        if hasher.hexdigest() != expected:
            raise DamagedError(
                "staging slot", f"{piece.name} ({piece.state}) changed after it was sealed"
            )

    @property
    def file(self) -> str:
        """The checksum of all that was written."""
        return str(self._file.hexdigest())

    def _begin(self, hasher: xxhash.xxh3_128, chunk: memoryview) -> Future[None] | None:
        if len(chunk) < INLINE_BYTES:
            hasher.update(chunk)
            return None
        return self._threads.submit(hasher.update, chunk)


@contextmanager
def hashing(pieces: Pieces) -> Iterator[WriteHashes]:
    """The checksums of a file that the body writes; at its end no thread reads the slot."""
    with ThreadPoolExecutor(HASHING_THREADS, "write-hashes") as threads:
        yield WriteHashes(threads, pieces)


# Errors of a shared file system that fails over. A full or read-only one does not recover by
# itself, so its errors are not retried.
TRANSIENT = (
    errno.EIO,
    errno.ESTALE,
    errno.EAGAIN,
    errno.ETIMEDOUT,
    errno.ENOTCONN,
    errno.ECONNRESET,
    errno.EHOSTDOWN,
)
RETRY_PAUSES_S = (0.5, 2.0)
MAX_WRITINGS = 8  # of one rank's part of one step
Report = checkpoint_pb2.ReportPreparedRequest

log = logs.get("persist")


class Progress:
    """How far a file is, and when the storage last took a piece of it.

    Written by one thread, read by another.
    """

    def __init__(self, total_bytes: int = 0) -> None:
        self.moved_s = time.monotonic()
        self.total_bytes = total_bytes
        self.written_bytes = 0

    def begin(self) -> None:
        """A try begins: its file is written from the start."""
        self.moved()
        self.written_bytes = 0

    def moved(self, size_bytes: int = 0) -> None:
        """The storage has taken a piece."""
        self.moved_s = time.monotonic()
        self.written_bytes += size_bytes

    @property
    def still_s(self) -> float:
        """For how long it has taken nothing."""
        return time.monotonic() - self.moved_s


def persist(
    registration: RegisteredRank,
    seal: SlotSeal,
    image: memoryview,
    cancelled: Cancellation,
    progress: Progress,
) -> Report:
    """:func:`write_rank_file` with retries while the storage may be failing over; same errors."""
    # Each try writes a new temporary file. A failed fsync is never repeated on the same descriptor:
    # the kernel may have dropped the dirty pages, and a second fsync would then succeed without
    # them.
    for pause_s in RETRY_PAUSES_S:
        try:
            return write_rank_file(registration, seal, image, cancelled, progress)
        except OSError as error:
            if error.errno not in TRANSIENT:
                raise
            progress.begin()
            log.warning(
                "write failed, retrying",
                job=registration.job,
                step=seal.step,
                error=str(error),
            )
        cancelled.pause(pause_s)
    return write_rank_file(registration, seal, image, cancelled, progress)


def write_rank_file(
    registration: RegisteredRank,
    seal: SlotSeal,
    image: memoryview,
    cancelled: Cancellation,
    progress: Progress | None = None,
) -> Report:
    """Write the primary pieces of a sealed slot under the job's uri, straight from the slot.

    Returns the report to the committer: the rank's part of the checkpoint is durable.

    Raises:
        OSError: the storage is full, read-only or does not answer.
        DamagedError: the slot changed after it was sealed.
        SupersededError: cancelled.
        ServiceError: the step was persisted MAX_WRITINGS times before.
    """
    storage = open_storage(registration.uri)
    folder = manifest.step_folder(seal.attempt, seal.step)
    name = _free_name(storage, folder, registration.rank)
    path = f"{folder}/{name}"
    pieces = primary(registration.layout, seal.checksums)
    origin = Origin(registration.job, seal.attempt, seal.step, registration.rank)
    limit = registration.max_write_mib_per_s
    held = progress.moved if progress is not None else lambda: None
    with hashing(pieces) as hashes:
        header = encode_header(origin, pieces, hashes.chunk_checksums(image))

        def paced(written: Iterator[memoryview]) -> Iterator[memoryview]:
            return LIMITS.paced(registration.job, limit, written, cancelled, held)

        def written() -> Iterator[memoryview]:
            yield from hashes.header(header)
            for number, (piece, _) in enumerate(pieces):
                yield from hashes.piece(number, paced(piece_chunks(piece, image)))

        def chunks() -> Iterator[memoryview]:
            for chunk in written():
                cancelled.check()
                yield chunk
                if progress is not None:
                    progress.moved(len(chunk))

        size_bytes = _write(storage, path, chunks())
    return Report(
        job=registration.job,
        attempt=seal.attempt,
        step=seal.step,
        rank=registration.rank,
        files=[checkpoint_pb2.PreparedFile(path=name, size_bytes=size_bytes, xxh3=hashes.file)],
        layout_digest=seal.layout_digest,
        small_state_json=json.dumps(seal.small_state),
    )


def _free_name(storage: Storage, folder: str, rank: int) -> str:
    """A name that no file has: a daemon that ended before its report may have left one.

    Which file counts is decided by the report, and then by the manifest.
    """
    names = (manifest.rank_file(rank, writing) for writing in range(1, MAX_WRITINGS + 1))
    free = (name for name in names if storage.size(f"{folder}/{name}") is None)
    return next(free, manifest.rank_file(rank))


def _write(storage: Storage, path: str, chunks: Iterator[memoryview]) -> int:
    try:
        return storage.write(path, chunks)
    except FileExistsError as error:
        raise DataLossError(
            f"{storage.uri}/{path} exists already: this step was persisted before"
        ) from error
