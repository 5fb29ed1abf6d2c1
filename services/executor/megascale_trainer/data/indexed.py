"""Tokenised corpora on disk: the reader of Megatron's indexed dataset format.

``PREFIX.bin`` holds the tokens of all sequences one after the other. ``PREFIX.idx``, little-endian
throughout, holds

    magic b"MMIDIDX\\0\\0" | version u64 = 1 | dtype code u8 | sequences u64
    | document boundaries u64 | length of each sequence, int32
    | byte offset of each sequence, int64 | document boundaries, int64

A boundary is a sequence number; the first is 0 and the last the number of sequences, so there is
one boundary more than documents. Source: NVIDIA/Megatron-LM,
megatron/core/datasets/indexed_dataset.py.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megascale_trainer.data.errors import CorpusError

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


class IndexedDataset:
    """A memory-mapped corpus; opening it checks that index and token file belong together.

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
        index = _map_bytes(idx_path(prefix))
        self.dtype, lengths, offsets, boundaries = _parse_index(index, idx_path(prefix))
        self.sequence_count = len(lengths)
        starts = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=starts[1:])
        if not np.array_equal(offsets, starts[:-1] * self.dtype.itemsize):
            raise CorpusError(
                f"{idx_path(prefix)}: byte offsets do not follow from the sequence lengths; "
                "tokenise again"
            )
        self._document_starts: npt.NDArray[np.int64] = starts[boundaries]
        self.document_lengths: npt.NDArray[np.int64] = np.diff(self._document_starts)
        self.token_count = int(starts[-1])
        self._tokens = self._map_tokens(bin_path(prefix))

    def _map_tokens(self, path: Path) -> Tokens:
        expected_bytes = self.token_count * self.dtype.itemsize
        try:
            size_bytes = path.stat().st_size
            if size_bytes != expected_bytes:
                problem = "truncated" if size_bytes < expected_bytes else "not the one indexed"
                raise CorpusError(
                    f"{path}: {problem}: has {size_bytes} bytes where {idx_path(self.prefix)} "
                    f"announces {expected_bytes}; tokenise again"
                )
            # An empty file cannot be mapped.
            return (
                np.memmap(path, self.dtype, mode="r") if expected_bytes else np.empty(0, self.dtype)
            )
        except OSError as error:
            raise _unreadable(path, error) from error

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
    """The content of a file, not read before it is used; an empty file cannot be mapped."""
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


def _parse_index(
    index: Buffer, path: Path
) -> tuple[np.dtype[Any], npt.NDArray[np.int32], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """dtype, sequence lengths, byte offsets and document boundaries of an ``.idx`` file."""
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
    if (lengths < 0).any():
        raise CorpusError(f"{path}: a sequence has a negative length; tokenise again")
    whole = boundaries >= 1 and documents[0] == 0 and documents[-1] == sequences
    if not whole or (np.diff(documents) < 0).any():
        raise CorpusError(
            f"{path}: document boundaries do not run from 0 to {sequences}; tokenise again"
        )
    return TOKEN_DTYPES[code], lengths, offsets, documents
