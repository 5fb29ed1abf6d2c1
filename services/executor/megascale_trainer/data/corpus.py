"""A tokenised corpus of any number of documents, read through its mapped index.

Opening it reads the header, the first and the last entries. The documents of a range of tokens are
found by a search in the mapped offsets, which starts where their mean length suggests. Damage that
:class:`megascale_trainer.data.indexed.IndexedDataset` finds in its full check at the start, this
reader finds at the place that it reads.

:class:`Corpus` is what packing needs of a corpus.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from megascale_trainer.data.indexed import CorpusError, TokenFile, Tokens, idx_path, open_index


@dataclass(frozen=True, slots=True)
class Sequence:
    """The tokens of one sample, and one more as the last target.

    ``tokens`` is int64 [S + 1]. ``starts`` are the offsets at which pieces of documents start; 0 is
    always among them, even in the middle of a document. Tokens from ``real`` on are padding.
    """

    tokens: npt.NDArray[np.int64]
    starts: list[int]
    real: int


class SequenceSource(Protocol):
    """The endless sequences of one source of the blend, numbered from 0."""

    @property
    def sequences_per_epoch(self) -> int:
        """Number of sequences that cover all tokens once, rounded up."""

    def sequence(self, number: int) -> Sequence:
        """Sequence ``number`` of the run.

        Raises:
            CorpusError: the corpus's files contradict themselves.
        """


class Corpus(Protocol):
    """Documents whose lengths are in memory, such as :class:`IndexedDataset`."""

    @property
    def prefix(self) -> str:
        """Name for messages."""

    @property
    def document_lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each document."""

    def read(self, document: int, begin: int, count: int) -> Tokens:
        """Up to ``count`` tokens of ``document`` from its token ``begin`` on."""


class MappedCorpus(Protocol):
    """Documents one after the other on disk, found without an index in memory."""

    @property
    def prefix(self) -> str:
        """Name for messages."""

    @property
    def token_count(self) -> int:
        """Tokens in all."""

    def read_range(self, begin: int, count: int) -> tuple[Tokens, npt.NDArray[np.int64]]:
        """``count`` tokens from ``begin`` on, and the offsets in them at which documents start."""


_GUESSES, _NEAR = 4, 64  # the entries of 64 neighbouring documents are in one or two pages


class MappedIndex:
    """See :class:`megascale_trainer.data.corpus.MappedCorpus`.

    Attributes:
        prefix: path without suffix.
        dtype: token type on disk.
        token_count: tokens in all.

    Raises:
        CorpusError: a file is missing, truncated, not of this format, or the two disagree; names
            the file.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = str(prefix)
        self._parts = parts = open_index(idx_path(prefix), scattered=True)
        self.dtype = parts.dtype
        self._item_bytes = parts.dtype.itemsize
        size_bytes = 0
        if len(parts.lengths):
            size_bytes = int(parts.offsets[-1]) + int(parts.lengths[-1]) * self._item_bytes
        if size_bytes < 0 or size_bytes % self._item_bytes or self._start(0):
            raise self._contradiction()
        self.token_count = size_bytes // self._item_bytes
        self._tokens = TokenFile(self.prefix, self.token_count, parts.dtype)

    def read_range(self, begin: int, count: int) -> tuple[Tokens, npt.NDArray[np.int64]]:
        """``count`` tokens from ``begin`` on, and the offsets in them at which documents start.

        An empty document starts nowhere.

        Raises:
            CorpusError: the index does not rise there.
        """
        end, documents = begin + count, len(self._parts.boundaries) - 1
        first, last = self._first_from(begin, documents), self._first_from(end, documents)
        sequences = self._parts.boundaries[first : last + 1]
        inside = sequences < len(self._parts.offsets)  # the end of the last document is no start
        if bool((sequences < 0).any()):
            raise self._contradiction()
        found = self._parts.offsets[sequences[inside]] // self._item_bytes - begin
        rises = bool((np.diff(sequences) >= 0).all() and (np.diff(found) >= 0).all())
        starts = found[: last - first]
        if not rises or (len(starts) and not (starts[0] >= 0 and starts[-1] < count)):
            raise self._contradiction()
        return self._tokens.read(begin, count), np.unique(starts)

    def _first_from(self, token: int, documents: int) -> int:
        """The first document that starts at ``token`` or later.

        The search begins at an interpolated place: in a cold index every distant probe is a read.
        """
        at = self._guess(token, documents)
        low = high = at
        stride = 1
        while low > 0 and self._start(low) >= token:
            high, low = low, max(0, low - stride)
            stride *= 2
        stride = 1
        while high < documents and self._start(high) < token:
            low, high = high, min(documents, high + stride)
            stride *= 2
        return bisect_left(range(documents), token, low, high, key=self._start)

    def _guess(self, token: int, documents: int) -> int:
        """An estimate of the document of ``token``, from the mean length of documents."""
        at, last = documents * token // self.token_count, max(documents - 1, 0)
        for _ in range(_GUESSES):
            at = min(max(at, 0), last)
            further = (token - self._start(at)) * documents // self.token_count
            if abs(further) <= _NEAR:
                break
            at += further
        return min(max(at, 0), last)

    def _start(self, document: int) -> int:
        """First token of a document; the end of the corpus for an empty one at its end."""
        sequence = int(self._parts.boundaries[document])
        if not 0 <= sequence <= len(self._parts.offsets):
            raise self._contradiction()
        if sequence == len(self._parts.offsets):
            return self.token_count if sequence else 0
        offset_bytes = int(self._parts.offsets[sequence])
        if offset_bytes < 0:
            raise self._contradiction()
        return offset_bytes // self._item_bytes

    def _contradiction(self) -> CorpusError:
        return CorpusError(
            f"{idx_path(self.prefix)}: byte offsets or document boundaries do not rise; "
            "tokenise again"
        )
