"""From a global sample number to its arrays: which source, which of its sequences, where to learn.

The module is pure.

The position of a run is one number, its consumed samples. Sample n of the run never depends on the
batch size, on the data-parallel size, or on what was read before: a resumed run continues the same
stream, even with another layout.

* ``data.skips`` leave out whole global batches: later samples move up by as many.
* The blend (:mod:`megascale_trainer.data.blend`) names the source and the sample's number j in it.
* A source (:mod:`megascale_trainer.data.samples`) shuffles its documents or its samples, by
  ``data.shuffle``; sample j is its sequence j. The last token of a sequence is only a target.
* Within a global batch of G samples that starts at sample c, row b of micro-batch m of
  data-parallel rank d is sample c + (m * dp + d) * micro_batch_size + b. So the batch is always c
  .. c + G - 1, in this order, whatever dp is.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from megascale_job.config import JobConfig
from megascale_job.corpus_record import CorpusRecord, record_path
from megascale_trainer.data.blend import Blend, TokenBlend
from megascale_trainer.data.corpus import MappedIndex, SequenceSource
from megascale_trainer.data.indexed import CorpusError, IndexedDataset, identity, token_range
from megascale_trainer.data.samples import DocumentSource, WindowSource

# Of corpora without a record, of all sources together, at the start of a run.
MAX_SCANNED_BYTES = 64 << 20

Arrays = dict[str, npt.NDArray[Any]]


def sample_numbers(
    first_sample: int, micro_batches: int, micro_batch_size: int, dp: int, dp_rank: int
) -> npt.NDArray[np.int64]:
    """Samples of one data-parallel rank in the step at ``first_sample``.

    int64 [micro_batches, micro_batch_size].
    """
    micro_batch = np.arange(micro_batches, dtype=np.int64)[:, None]
    row = np.arange(micro_batch_size, dtype=np.int64)[None, :]
    return first_sample + (micro_batch * dp + dp_rank) * micro_batch_size + row


class SampleStream:
    """All samples of a run.

    Args:
        corpora: one per source of ``config.data``, in its order; of the kind that
            ``data.shuffle`` needs (:mod:`megascale_trainer.data.corpus`).

    Attributes:
        identities: of the corpora, in their order, where they are files.
        blend_scheme: of the order of sources (:mod:`megascale_trainer.data.blend`).

    Raises:
        CorpusError: no sources, a bad weight, an empty source.
    """

    def __init__(self, config: JobConfig, corpora: Sequence[Any]) -> None:
        data, length = config.data, config.model.sequence_length
        self._sequence_length = length
        self._vocab_size = config.model.vocab_size
        self._document_attention = data.document_attention
        self.identities: tuple[str, ...] = ()
        self._prefixes = [str(corpus.prefix) for corpus in corpora]
        kind = WindowSource if data.shuffle == "samples" else DocumentSource
        self._sources: list[SequenceSource] = [
            kind(corpus, number, data.seed, length) for number, corpus in enumerate(corpora)
        ]
        self._locate = self._blend(config)
        batch = config.training.global_batch_size
        skips = sorted((skip.after_step * batch, skip.steps * batch) for skip in data.skips)
        self._skip_starts = [start for start, _ in skips]
        self._skip_totals = [0, *itertools.accumulate(samples for _, samples in skips)]

    def _blend(self, config: JobConfig) -> Callable[[int], tuple[int, int]]:
        data = config.data
        weights = [source.weight for source in data.sources]
        try:
            blend: Blend | TokenBlend
            if data.blend == "weights":
                blend = Blend(weights)
            else:
                sizes = [source.sequences_per_epoch for source in self._sources]
                blend = TokenBlend(weights, sizes, data.seed)
        except ValueError as error:
            raise CorpusError(str(error)) from error
        self.blend_scheme = blend.scheme
        return blend.locate

    @classmethod
    def open(cls, config: JobConfig, section: str = "data") -> SampleStream:
        """The stream over the files that ``config.data.sources`` name.

        ``section`` of the job has them, for messages.

        Raises:
            CorpusError: as above, or a file is missing or damaged; names the field.
        """
        reader = MappedIndex if config.data.shuffle == "samples" else IndexedDataset
        corpora, identities = [], []
        scanned_bytes = max(MAX_SCANNED_BYTES // max(1, len(config.data.sources)), 1)
        for number, source in enumerate(config.data.sources):
            try:
                corpora.append(reader(source.prefix))
                identities.append(identity(source.prefix))
                _check_content(corpora[-1], identities[-1], config.model.vocab_size, scanned_bytes)
            except OutsideVocabulary:
                raise
            except CorpusError as error:
                field = f"trainer.{section}.sources[{number}].prefix"
                raise CorpusError(f"{field}: {error}") from error
        stream = cls(config, corpora)
        stream.identities = tuple(identities)
        return stream

    def sample(self, number: int) -> Arrays:
        """Sample ``number``, each array of length S = model.sequence_length.

        ``tokens`` and ``targets`` int64; ``loss_weight`` float32, 0 where the target opens another
        document and in padding, else 1; ``document_start`` int32, the index in the sequence at
        which the token's document starts (0 everywhere without data.document_attention);
        ``position`` int64, the index less ``document_start``.

        Raises:
            CorpusError: a token id is outside the model's vocabulary.
        """
        source, ordinal = self._locate(number + self._skipped(number))
        length = self._sequence_length
        found = self._sources[source].sequence(ordinal)
        window = found.tokens
        self._check_vocabulary(window, source, number)
        # The piece at offset 0 opens the sequence: no boundary lies before it.
        boundaries = np.array(found.starts[1:], np.int64)
        loss_weight = np.ones(length, np.float32)
        loss_weight[boundaries - 1] = 0.0
        loss_weight[found.real :] = 0.0
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

    def _skipped(self, number: int) -> int:
        """Samples that ``data.skips`` leave out before sample ``number``."""
        return self._skip_totals[bisect_right(self._skip_starts, number)]

    def _check_vocabulary(self, window: npt.NDArray[np.int64], source: int, number: int) -> None:
        _check_range(
            int(window.min()),
            int(window.max()),
            self._vocab_size,
            f"sample {number} of {self._prefixes[source]}",
        )


class OutsideVocabulary(CorpusError):
    """A corpus has token ids that the model has not."""


def _check_range(lowest: int, highest: int, vocab_size: int, where: str) -> None:
    if lowest < 0:
        raise CorpusError(
            f"{where} has the negative token id {lowest}: its file is damaged, or was made with "
            "another type of tokens than its index says; tokenise again"
        )
    if highest >= vocab_size:
        raise OutsideVocabulary(
            f"trainer.model.vocab_size: {vocab_size} is too small: {where} has token id {highest}; "
            "use the size of the tokenizer that made the file"
        )


def _check_content(
    corpus: IndexedDataset | MappedIndex, found: str, vocab_size: int, scanned_bytes: int
) -> None:
    """Compare a corpus with its record and the model's vocabulary.

    Without a record its tokens are looked at, of a large file a part: each sample is checked too.
    """
    try:
        record = CorpusRecord.load(corpus.prefix)
    except (OSError, ValueError) as error:
        raise CorpusError(str(error)) from error
    if record is not None and record.identity != found:
        raise CorpusError(
            f"{record_path(corpus.prefix)}: is the record of another corpus than {corpus.prefix} "
            "now is: remove it where another program made this one, or tokenise again"
        )
    if record is not None:
        lowest, highest = 0, record.highest_token_id
    elif np.iinfo(corpus.dtype).min == 0 and np.iinfo(corpus.dtype).max < vocab_size:
        return  # no token can be outside
    else:
        lowest, highest = token_range(
            corpus.prefix, corpus.dtype, corpus.token_count, scanned_bytes
        )
    _check_range(lowest, highest, vocab_size, corpus.prefix)
