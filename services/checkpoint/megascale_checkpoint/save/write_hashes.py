"""The checksums of a rank's file, computed by other threads than the one that writes it.

Each chunk is hashed while the storage takes it: once for the file, once for its piece, which is
compared with the seal before the file gets its name. The writing thread makes no pass over the
bytes itself, which would cap what one rank writes below what a fast storage takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import xxhash

from megascale_checkpoint.checksums import balanced, piece_view
from megascale_checkpoint.commit.shard_file import chunk_checksums
from megascale_common.service.errors import DamagedError
from megascale_job.sizes.checkpoint_layout import ShardPiece

HASHING_THREADS = 4
INLINE_BYTES = 1 << 20  # a smaller chunk is hashed sooner than it is handed to a thread

Pieces = Sequence[tuple[ShardPiece, str]]  # each with its checksum of the seal


class WriteHashes:
    """Those of one file. Its chunks must not reach from one piece into the next."""

    def __init__(self, threads: ThreadPoolExecutor, pieces: Pieces) -> None:
        self._threads, self._pieces = threads, pieces
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
