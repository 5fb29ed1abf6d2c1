"""What packing needs of a corpus, and what it makes of one: sequences of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from megascale_trainer.data.indexed import Tokens


@dataclass(frozen=True, slots=True)
class Sequence:
    """The tokens of one sample, and one more as the last target.

    ``tokens`` is int64 [S + 1]. ``starts`` are the offsets at which pieces of documents start; 0 is
    always among them, also in the middle of a document. From ``real`` on, tokens are padding: no
    inputs of the corpus.
    """

    tokens: npt.NDArray[np.int64]
    starts: list[int]
    real: int


class SequenceSource(Protocol):
    """The endless sequences of one source of the blend, numbered from 0."""

    @property
    def sequences_per_epoch(self) -> int:
        """Sequences after which all tokens have been seen; rounded up where one spans two."""

    def sequence(self, number: int) -> Sequence:
        """Sequence ``number`` of the run.

        Raises:
            CorpusError: the corpus's files contradict themselves.
        """


class Corpus(Protocol):
    """Documents with their lengths in memory; :class:`IndexedDataset` is one."""

    @property
    def prefix(self) -> str:
        """Name for messages."""

    @property
    def document_lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each document."""

    def read(self, document: int, begin: int, count: int) -> Tokens:
        """Up to ``count`` tokens of ``document`` from its token ``begin`` on."""


class MappedCorpus(Protocol):
    """Documents one after another on disk, found without an index in memory."""

    @property
    def prefix(self) -> str:
        """Name for messages."""

    @property
    def token_count(self) -> int:
        """Tokens in all."""

    def read_range(self, begin: int, count: int) -> tuple[Tokens, npt.NDArray[np.int64]]:
        """``count`` tokens of the corpus from ``begin`` on, and where in them documents start."""
