"""Tokenised corpora on disk: reader and writer of Megatron's indexed dataset format.

``PREFIX.bin`` holds the tokens of all sequences one after the other. ``PREFIX.idx``, little-endian
throughout, holds

    magic b"MMIDIDX\0\0" | version u64 = 1 | dtype code u8 | sequences u64
    | document boundaries u64 | length of each sequence, int32
    | byte offset of each sequence, int64 | document boundaries, int64

A boundary is a sequence number; the first is 0 and the last the number of sequences, so there is
one boundary more than documents. Source: NVIDIA/Megatron-LM,
megatron/core/datasets/indexed_dataset.py.

The writer leaves all of a corpus on disk, or nothing. Workers receive the errors of this module if
their tokens cannot be delivered.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from megascale_job.corpus_record import record_path


class DataError(RuntimeError):
    """Tokenised data cannot be delivered: its loader has ended, is slow, or refuses the request.

    The message names the file or the field, and the remedy.
    """


class CorpusError(DataError):
    """Tokenised data is missing, damaged or does not fit the job; a new attempt cannot help."""


MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
TOKEN_DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}
HEADER = struct.Struct("<9sQBQQ")
# Blocks that the identity of a corpus reads of each file. It is stored with checkpoints, so these
# numbers must stay.
_INDEX_BLOCK_BYTES, _INDEX_BLOCKS = 1 << 16, 16
_TOKEN_BLOCK_BYTES, _TOKEN_BLOCKS = 1 << 12, 8

SCANNED_BLOCK_BYTES = 1 << 18

Buffer = bytes | mmap.mmap
Tokens = npt.NDArray[np.integer[Any]]


def bin_path(prefix: str | Path) -> Path:
    """Path of the token file of ``prefix``."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    """Path of the index file of ``prefix``."""
    return Path(f"{prefix}.idx")


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The narrowest dtype for a vocabulary of this size that Megatron's tools use as well."""
    return TOKEN_DTYPES[8] if vocab_size < 65_500 else TOKEN_DTYPES[4]


def identity(prefix: str | Path) -> str:
    """The identity of a corpus: 32 hexadecimal digits from its sizes and its content.

    Evenly spread blocks of each file are read (an index of up to 1 MiB as a whole). Two corpora of
    the same sizes differ in these blocks, unless only a few tokens were edited by hand.

    Raises:
        CorpusError: a file cannot be read.
    """
    return identity_of_files(idx_path(prefix), bin_path(prefix))


def identity_of_files(index: Path, tokens: Path) -> str:
    """See :func:`identity`."""
    digest = hashlib.sha256()
    for path, block_bytes, blocks in (
        (index, _INDEX_BLOCK_BYTES, _INDEX_BLOCKS),
        (tokens, _TOKEN_BLOCK_BYTES, _TOKEN_BLOCKS),
    ):
        try:
            with path.open("rb", buffering=0) as file:
                size_bytes = os.fstat(file.fileno()).st_size
                digest.update(struct.pack("<q", size_bytes))
                last = max(0, size_bytes - block_bytes)
                for place in sorted({last * number // (blocks - 1) for number in range(blocks)}):
                    digest.update(os.pread(file.fileno(), block_bytes, place))
        except OSError as error:
            raise _unreadable(path, error) from error
    return digest.hexdigest()[:32]


def token_range(
    prefix: str | Path, dtype: np.dtype[Any], token_count: int, most_bytes: int
) -> tuple[int, int]:
    """The lowest and the highest token id, from all tokens or, above ``most_bytes``, from samples.

    The samples are evenly spread blocks.

    Raises:
        CorpusError: the file cannot be read.
    """
    if not token_count:
        return 0, 0
    item_bytes, lowest, highest = dtype.itemsize, 0, 0
    blocks = max(1, most_bytes // SCANNED_BLOCK_BYTES)
    per_block = SCANNED_BLOCK_BYTES // item_bytes
    last = max(0, token_count - per_block)
    if token_count <= blocks * per_block:
        places = list(range(0, token_count, per_block))
    else:
        places = [last * number // max(1, blocks - 1) for number in range(blocks)]
    try:
        with bin_path(prefix).open("rb", buffering=0) as file:
            for place in places:
                data = os.pread(file.fileno(), per_block * item_bytes, place * item_bytes)
                found = np.frombuffer(data[: len(data) // item_bytes * item_bytes], dtype)
                if len(found):
                    lowest = min(lowest, int(found.min()))
                    highest = max(highest, int(found.max()))
    except OSError as error:
        raise _unreadable(bin_path(prefix), error) from error
    return lowest, highest


class IndexedDataset:
    """A memory-mapped corpus. Opening it checks that index and token file belong together.

    Attributes:
        prefix: path without suffix.
        dtype: token type on disk.
        sequence_count: number of sequences.
        document_lengths: tokens of each document, int64 [documents].
        token_count: tokens in all.

    Raises:
        CorpusError: a file is missing, truncated, not of this format, or the two disagree; names
            the file.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = str(prefix)
        parts = open_index(idx_path(prefix))
        _check_content(parts, idx_path(prefix))
        self.dtype = parts.dtype
        self.sequence_count = len(parts.lengths)
        starts = np.zeros(self.sequence_count + 1, np.int64)
        np.cumsum(parts.lengths, out=starts[1:])
        if not np.array_equal(parts.offsets, starts[:-1] * self.dtype.itemsize):
            raise CorpusError(
                f"{idx_path(prefix)}: byte offsets do not follow from the sequence lengths; "
                "tokenise again"
            )
        self._document_starts: npt.NDArray[np.int64] = starts[parts.boundaries]
        self.document_lengths: npt.NDArray[np.int64] = np.diff(self._document_starts)
        self.token_count = int(starts[-1])
        self._tokens = map_tokens(self.prefix, self.token_count, self.dtype)

    @property
    def document_count(self) -> int:
        """Number of documents."""
        return len(self.document_lengths)

    def read(self, document: int, begin: int = 0, count: int | None = None) -> Tokens:
        """Up to ``count`` tokens (None: all) of ``document`` from its token ``begin`` on.

        A view, in the dtype on disk.
        """
        start = int(self._document_starts[document]) + begin
        end = int(self._document_starts[document + 1])
        return self._tokens[start : end if count is None else min(end, start + count)]


def _map_bytes(path: Path) -> Buffer:
    """The content of a file, read when it is used; b"" for an empty one, which cannot be mapped."""
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) if path.stat().st_size else b""
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> CorpusError:
    remedy = (
        "make it with `megascale data tokenize`, or correct the prefix"
        if not path.exists()
        else "check its rights"
    )
    return CorpusError(f"{path}: cannot be read: {error.strerror}; {remedy}")


@dataclass(frozen=True, slots=True)
class IndexParts:
    """The content of an ``.idx`` file; the arrays are views of the mapped file."""

    dtype: np.dtype[Any]
    lengths: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]
    boundaries: npt.NDArray[np.int64]


def open_index(path: Path, *, scattered: bool = False) -> IndexParts:
    """The parts of an index file, after a check of header and size; its entries are not read.

    ``scattered``: few entries will be read, so the kernel should not read ahead.

    Raises:
        CorpusError: it cannot be read, is truncated, or not of this format; names the file.
    """
    index = _map_bytes(path)
    if scattered and isinstance(index, mmap.mmap):
        index.madvise(mmap.MADV_RANDOM)
    if index[: len(MAGIC)] != MAGIC[: len(index)] or not index:
        raise CorpusError(
            f"{path}: not an indexed dataset (wrong magic); give the prefix of a .bin/.idx pair"
        )
    if len(index) < HEADER.size:
        raise CorpusError(f"{path}: truncated in its header; tokenise again")
    _, version, code, sequences, boundaries = HEADER.unpack_from(index)
    if version != VERSION:
        raise CorpusError(
            f"{path}: version {version} of the format; this reader reads version {VERSION}"
        )
    if code not in TOKEN_DTYPES:
        raise CorpusError(
            f"{path}: dtype code {code} is not an integer token type "
            f"(known: {sorted(TOKEN_DTYPES)})"
        )
    expected_bytes = HEADER.size + 12 * sequences + 8 * boundaries
    if len(index) != expected_bytes:
        problem = "truncated" if len(index) < expected_bytes else "longer than a plain text corpus"
        raise CorpusError(
            f"{path}: {problem}: {len(index)} bytes where its header announces {expected_bytes}"
        )
    lengths = np.frombuffer(index, "<i4", sequences, HEADER.size)
    offsets = np.frombuffer(index, "<i8", sequences, HEADER.size + 4 * sequences)
    documents = np.frombuffer(index, "<i8", boundaries, HEADER.size + 12 * sequences)
    if not (boundaries >= 1 and documents[0] == 0 and documents[-1] == sequences):
        raise _bad_boundaries(path, sequences)
    return IndexParts(TOKEN_DTYPES[code], lengths, offsets, documents)


def map_tokens(prefix: str, token_count: int, dtype: np.dtype[Any]) -> Tokens:
    """The tokens of a corpus, mapped.

    Raises:
        CorpusError: the file is missing, or of another size than its index announces.
    """
    path = _checked_tokens(prefix, token_count, dtype)
    try:
        # An empty file cannot be mapped.
        return np.memmap(path, dtype, mode="r") if token_count else np.empty(0, dtype)
    except OSError as error:
        raise _unreadable(path, error) from error


class TokenFile:
    """The tokens of a corpus; each range is one read of exactly its bytes.

    A mapped file would also read the surroundings: 128 KiB for a sample of 4 KiB.

    Raises:
        CorpusError: the file is missing, or of another size than its index announces.
    """

    def __init__(self, prefix: str, token_count: int, dtype: np.dtype[Any]) -> None:
        self._path = _checked_tokens(prefix, token_count, dtype)
        self._dtype = dtype
        try:
            self._file = self._path.open("rb", buffering=0)
        except OSError as error:
            raise _unreadable(self._path, error) from error
        os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)

    def read(self, begin: int, count: int) -> Tokens:
        """``count`` tokens from ``begin`` on.

        Raises:
            CorpusError: the file cannot be read, or has become shorter.
        """
        item_bytes = self._dtype.itemsize
        try:
            data = os.pread(self._file.fileno(), count * item_bytes, begin * item_bytes)
        except OSError as error:
            raise _unreadable(self._path, error) from error
        if len(data) != count * item_bytes:
            raise CorpusError(f"{self._path}: has become shorter while it was read; restore it")
        return np.frombuffer(data, self._dtype)


def _checked_tokens(prefix: str, token_count: int, dtype: np.dtype[Any]) -> Path:
    path, expected_bytes = bin_path(prefix), token_count * dtype.itemsize
    try:
        size_bytes = path.stat().st_size
    except OSError as error:
        raise _unreadable(path, error) from error
    if size_bytes != expected_bytes:
        problem = "truncated" if size_bytes < expected_bytes else "not the one indexed"
        raise CorpusError(
            f"{path}: {problem}: has {size_bytes} bytes where {idx_path(prefix)} "
            f"announces {expected_bytes}; tokenise again"
        )
    return path


def _bad_boundaries(path: Path, sequences: int) -> CorpusError:
    return CorpusError(
        f"{path}: document boundaries do not run from 0 to {sequences}; tokenise again"
    )


def _check_content(parts: IndexParts, path: Path) -> None:
    if (parts.lengths < 0).any():
        raise CorpusError(f"{path}: a sequence has a negative length; tokenise again")
    if (np.diff(parts.boundaries) < 0).any():
        raise _bad_boundaries(path, len(parts.lengths))


MAX_DOCUMENT_TOKENS = 2**31 - 1  # lengths are int32


class IndexedWriter:
    """Writes a corpus document by document, one sequence each.

    Nothing appears under the corpus's name before it is complete.

    Use it as a context manager: leaving it normally publishes ``.bin`` then ``.idx``; an exception
    discards both.

    Attributes:
        documents, tokens: counts so far.
        highest: the highest token id so far, -1 without any.
        sha256: hex digest of ``.bin``, once published.
        identity: :func:`identity` of the corpus, once published.
        companions: content of files that are published with the corpus, by path; None removes one.
        describe: makes more companions once ``sha256`` and ``identity`` are known.

    Raises:
        DataError: the folder cannot be written.
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype[Any]) -> None:
        self._code = {known: code for code, known in TOKEN_DTYPES.items()}[np.dtype(dtype)]
        self._dtype = np.dtype(dtype)
        self._bin = bin_path(prefix)
        self._idx = idx_path(prefix)
        self._temporary = [_draft(path) for path in (self._bin, self._idx)]
        self._lengths: list[int] = []
        self._open_tokens = 0  # tokens of the document that has not ended
        self._digest = hashlib.sha256()
        self.tokens = 0
        self.highest = -1
        self.sha256 = self.identity = ""
        self.companions: dict[Path, bytes | None] = {record_path(prefix): None}
        self.describe: Callable[[], dict[Path, bytes | None]] = dict
        try:
            self._file = self._temporary[0].open("wb")
        except OSError as error:
            raise DataError(f"{self._bin}: cannot be written: {error.strerror}") from error

    @property
    def documents(self) -> int:
        """Documents added so far."""
        return len(self._lengths)

    def add_document(self, tokens: Tokens) -> None:
        """Append one document; raises as :meth:`append`."""
        self.append(tokens)
        self.end_document()

    def append(self, tokens: Tokens) -> None:
        """Append tokens of a document that has not ended.

        Raises:
            ValueError: a token does not fit the dtype.
            DataError: the document is longer than the format allows.
        """
        limits = np.iinfo(self._dtype)
        self._open_tokens += len(tokens)
        if self._open_tokens > MAX_DOCUMENT_TOKENS:
            raise DataError(
                f"{self._bin}: document {self.documents} has more than {MAX_DOCUMENT_TOKENS} "
                "tokens, which the format cannot hold: divide it"
            )
        if not len(tokens):
            return
        lowest, highest = int(tokens.min()), int(tokens.max())
        if lowest < limits.min or highest > limits.max:
            raise ValueError(f"token ids {lowest}..{highest} do not fit {self._dtype.name}")
        data = np.ascontiguousarray(tokens, self._dtype).tobytes()
        self._file.write(data)
        self._digest.update(data)
        self.tokens += len(tokens)
        self.highest = max(self.highest, highest)

    def end_document(self) -> None:
        """The document has ended; it may be empty."""
        self._lengths.append(self._open_tokens)
        self._open_tokens = 0

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._publish()
        finally:
            self._file.close()
            for path in (*self._temporary, *map(_draft, self.companions)):
                path.unlink(missing_ok=True)

    def _publish(self) -> None:
        _sync(self._file)
        lengths = np.array(self._lengths, np.int64)
        offsets = (np.cumsum(lengths) - lengths) * self._dtype.itemsize
        count = len(lengths)
        with self._temporary[1].open("wb") as file:
            file.write(HEADER.pack(MAGIC, VERSION, self._code, count, count + 1))
            file.write(lengths.astype("<i4").tobytes())
            file.write(offsets.astype("<i8").tobytes())
            file.write(np.arange(count + 1, dtype="<i8").tobytes())
            _sync(file)
        self.sha256 = self._digest.hexdigest()
        self.identity = identity_of_files(self._temporary[1], self._temporary[0])
        self.companions |= self.describe()
        for path, content in self.companions.items():
            if content is not None:
                with _draft(path).open("wb") as file:
                    file.write(content)
                    _sync(file)
        # A corpus exists through its index. So an old index is removed first and the new one comes
        # last: a crash in between never leaves an index with tokens of another corpus.
        self._idx.unlink(missing_ok=True)
        for path, content in self.companions.items():
            if content is None:
                path.unlink(missing_ok=True)
            else:
                _draft(path).replace(path)
        self._temporary[0].replace(self._bin)
        self._temporary[1].replace(self._idx)
        folder = os.open(self._bin.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _draft(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def _sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())
