"""From a global sample number to its tokens: shuffled documents, end to end, cut into sequences.

Documents are shuffled by epoch. The module is pure.

The position of a run is one number, its consumed samples. Sample n of the run never depends on the
batch size, on the data-parallel size, or on what was read before: a resumed run, also one with
another layout, continues the same stream.

* :class:`~megascale_trainer.data.blend.Blend` names the source and the sample's number j within it.
* A source is an endless stream of tokens: epoch after epoch, each with all its documents in an
  order of its own, drawn from (data.seed, source, epoch) alone. Sample j reads tokens j*S .. j*S +
  S of it, the last one only as a target: each token of an epoch is an input exactly once, and
  nothing is ever padded.
* Within a global batch of G samples that starts at sample c, row b of micro-batch m of
  data-parallel rank d is sample c + (m * dp + d) * micro_batch_size + b. So the batch is always c
  .. c + G - 1, in this order, whatever dp is.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from megascale_common.job.config import JobConfig
from megascale_trainer.data.blend import Blend
from megascale_trainer.data.errors import CorpusError
from megascale_trainer.data.indexed import IndexedDataset, Tokens

EPOCHS_CACHED = 2  # neighbouring data-parallel ranks read either side of an epoch's end

Arrays = dict[str, npt.NDArray[Any]]


class Corpus(Protocol):
    """What packing needs of a corpus; :class:`IndexedDataset` is one."""

    @property
    def prefix(self) -> str:
        """Name for messages."""

    @property
    def document_lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each document."""

    def read(self, document: int, begin: int, count: int) -> Tokens:
        """Up to ``count`` tokens of ``document`` from its token ``begin`` on."""


def sample_numbers(
    first_sample: int, micro_batches: int, micro_batch_size: int, dp: int, dp_rank: int
) -> npt.NDArray[np.int64]:
    """Samples of one data-parallel rank in the step at ``first_sample``.

    int64 [micro_batches, micro_batch_size].
    """
    micro_batch = np.arange(micro_batches, dtype=np.int64)[:, None]
    row = np.arange(micro_batch_size, dtype=np.int64)[None, :]
    return first_sample + (micro_batch * dp + dp_rank) * micro_batch_size + row


def document_order(seed: int, source: int, epoch: int, documents: int) -> npt.NDArray[np.int64]:
    """The order of a source's documents in one epoch.

    Sorted by raw Philox output, a stream that numpy keeps (NEP 19); `Generator.permutation` may
    change with a release.
    """
    digest = hashlib.sha256(f"documents/{seed}/{source}/{epoch}".encode()).digest()
    keys = np.random.Philox(key=int.from_bytes(digest[:16], "little")).random_raw(documents)
    return np.argsort(keys, kind="stable")


class SourceStream:
    """The endless token stream of one source.

    Raises:
        CorpusError: the source has no tokens.
    """

    def __init__(self, corpus: Corpus, source: int, seed: int) -> None:
        self._corpus = corpus
        self._source, self._seed = source, seed
        self._nonempty = np.flatnonzero(corpus.document_lengths)
        self._lengths = corpus.document_lengths[self._nonempty]
        self._tokens_per_epoch = int(self._lengths.sum())
        self._epochs: OrderedDict[int, tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = (
            OrderedDict()
        )
        if not self._tokens_per_epoch:
            raise CorpusError(
                f"{corpus.prefix}: has no tokens; leave it out of data.sources or tokenise again"
            )

    def read(self, begin: int, count: int) -> tuple[Tokens, list[int]]:
        """``count`` tokens from ``begin`` on, and the offsets at which pieces of documents start.

        The tokens are int64 [count].

        Offset 0 is always among them, also in the middle of a document.
        """
        tokens = np.empty(count, np.int64)
        starts: list[int] = []
        filled = 0
        while filled < count:
            epoch, place = divmod(begin + filled, self._tokens_per_epoch)
            order, ends = self._epoch(epoch)
            number = int(np.searchsorted(ends, place, side="right"))
            while filled < count and number < len(order):
                skipped = place - int(ends[number] - self._lengths[order[number]])
                piece = self._corpus.read(
                    int(self._nonempty[order[number]]), skipped, count - filled
                )
                tokens[filled : filled + len(piece)] = piece
                starts.append(filled)
                filled += len(piece)
                place += len(piece)
                number += 1
        return tokens, starts

    def _epoch(self, epoch: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Order of the documents in ``epoch``, and where each ends in it."""
        if epoch not in self._epochs:
            order = document_order(self._seed, self._source, epoch, len(self._lengths))
            self._epochs[epoch] = order, np.cumsum(self._lengths[order])
            if len(self._epochs) > EPOCHS_CACHED:
                self._epochs.popitem(last=False)
        self._epochs.move_to_end(epoch)
        return self._epochs[epoch]


class SampleStream:
    """All samples of a run.

    Args:
        corpora: one per source of ``config.data``, in its order.

    Raises:
        CorpusError: no sources, a bad weight, an empty source.
    """

    def __init__(self, config: JobConfig, corpora: Sequence[Corpus]) -> None:
        self._sequence_length = config.model.sequence_length
        self._vocab_size = config.model.vocab_size
        self._document_attention = config.data.document_attention
        self._corpora = corpora
        try:
            self._blend = Blend([source.weight for source in config.data.sources])
        except ValueError as error:
            raise CorpusError(str(error)) from error
        self._sources = [
            SourceStream(corpus, number, config.data.seed) for number, corpus in enumerate(corpora)
        ]

    @classmethod
    def open(cls, config: JobConfig, section: str = "data") -> SampleStream:
        """The stream over the files that ``config.data.sources`` name.

        ``section`` of the job has them, for messages.

        Raises:
            CorpusError: as above, or a file is missing or damaged; names the field.
        """
        corpora = []
        for number, source in enumerate(config.data.sources):
            try:
                corpora.append(IndexedDataset(source.prefix))
            except CorpusError as error:
                field = f"trainer.{section}.sources[{number}].prefix"
                raise CorpusError(f"{field}: {error}") from error
        return cls(config, corpora)

    def sample(self, number: int) -> Arrays:
        """Sample ``number``, each array of length S = model.sequence_length.

        ``tokens`` and ``targets`` int64; ``loss_weight`` float32, 0 where the target opens another
        document, else 1; ``document_start`` int32, the index in the sequence at which the token's
        document starts (0 everywhere without data.document_attention); ``position`` int64, the
        index less ``document_start``.

        Raises:
            CorpusError: a token id is outside the model's vocabulary.
        """
        source, ordinal = self._blend.locate(number)
        length = self._sequence_length
        window, starts = self._sources[source].read(ordinal * length, length + 1)
        self._check_vocabulary(window, source, number)
        # The piece at offset 0 opens the sequence: no boundary lies before it.
        boundaries = np.array(starts[1:], np.int64)
        loss_weight = np.ones(length, np.float32)
        loss_weight[boundaries - 1] = 0.0
        document_start = np.zeros(length, np.int32)
        if self._document_attention:
            inside = boundaries[boundaries < length]
            document_start[inside] = inside
            np.maximum.accumulate(document_start, out=document_start)
        return {
            "tokens": window[:-1],
            "targets": window[1:],
            "loss_weight": loss_weight,
            "position": np.arange(length, dtype=np.int64) - document_start,
            "document_start": document_start,
        }

    def _check_vocabulary(self, window: Tokens, source: int, number: int) -> None:
        lowest, highest = int(window.min()), int(window.max())
        if lowest < 0 or highest >= self._vocab_size:
            wrong = lowest if lowest < 0 else highest
            raise CorpusError(
                f"trainer.model.vocab_size: {self._vocab_size} is too small: sample {number} of "
                f"{self._corpora[source].prefix} has token id {wrong}; use the size of the "
                "tokenizer that made the file"
            )
