"""From a global sample number to its arrays: which source, which of its sequences, where to learn.

The module is pure.

The position of a run is one number, its consumed samples. Sample n of the run never depends on the
batch size, on the data-parallel size, or on what was read before: a resumed run, also one with
another layout, continues the same stream.

* ``data.skips`` leave out whole global batches: what follows is as many samples further.
* The blend (:mod:`megascale_trainer.data.blend`) names the source and the sample's number j in it.
* A source shuffles its documents (:mod:`megascale_trainer.data.documents`) or its samples
  (:mod:`megascale_trainer.data.windows`), by ``data.shuffle``; sample j is its sequence j. The last
  token of a sequence is only a target.
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

from megascale_common.job.config import JobConfig
from megascale_trainer.data.blend import Blend, TokenBlend
from megascale_trainer.data.corpus import SequenceSource
from megascale_trainer.data.documents import DocumentSource
from megascale_trainer.data.errors import CorpusError
from megascale_trainer.data.indexed import IndexedDataset
from megascale_trainer.data.mapped import MappedIndex
from megascale_trainer.data.windows import WindowSource

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

    Raises:
        CorpusError: no sources, a bad weight, an empty source.
    """

    def __init__(self, config: JobConfig, corpora: Sequence[Any]) -> None:
        data, length = config.data, config.model.sequence_length
        self._sequence_length = length
        self._vocab_size = config.model.vocab_size
        self._document_attention = data.document_attention
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
            if data.blend == "weights":
                return Blend(weights).locate
            sizes = [source.sequences_per_epoch for source in self._sources]
            return TokenBlend(weights, sizes, data.seed).locate
        except ValueError as error:
            raise CorpusError(str(error)) from error

    @classmethod
    def open(cls, config: JobConfig, section: str = "data") -> SampleStream:
        """The stream over the files that ``config.data.sources`` name.

        ``section`` of the job has them, for messages.

        Raises:
            CorpusError: as above, or a file is missing or damaged; names the field.
        """
        reader = MappedIndex if config.data.shuffle == "samples" else IndexedDataset
        corpora = []
        for number, source in enumerate(config.data.sources):
            try:
                corpora.append(reader(source.prefix))
            except CorpusError as error:
                field = f"trainer.{section}.sources[{number}].prefix"
                raise CorpusError(f"{field}: {error}") from error
        return cls(config, corpora)

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
        lowest, highest = int(window.min()), int(window.max())
        if lowest < 0 or highest >= self._vocab_size:
            wrong = lowest if lowest < 0 else highest
            raise CorpusError(
                f"trainer.model.vocab_size: {self._vocab_size} is too small: sample {number} of "
                f"{self._prefixes[source]} has token id {wrong}; use the size of the "
                "tokenizer that made the file"
            )
