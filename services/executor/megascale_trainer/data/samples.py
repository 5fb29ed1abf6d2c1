"""Two sources of samples: shuffled documents, or shuffled windows of a corpus in file order.

Both draw the order of each epoch from (data.seed, source, epoch) alone, and in both every token of
an epoch is an input exactly once.

:class:`DocumentSource` is an endless stream of tokens: epoch after epoch, all documents end to end
in that epoch's order. Sequence j is tokens j*S .. j*S + S of the stream; nothing is ever padded.
The order is sorted in memory: 16 bytes per document for each cached epoch, and some 30 while one is
made.

:class:`WindowSource` cuts the documents, end to end in the order of the file, into windows: window
w is tokens w*S .. w*S + S - 1, so a corpus of T tokens has n = ceil(T / S) windows per epoch.
Sequence j of a run is window p(j mod n) of epoch j div n, where p is the epoch's permutation
(:mod:`megascale_trainer.data.blend`). The last window is filled up with padding that has no weight.
Nothing about the documents is kept in memory, so there may be any number of them.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict

import numpy as np
import numpy.typing as npt

# numpy imports np.random at its first use, and a part of it swallows whatever exception comes then,
# that of a signal to end the process included.
from numpy.random import Philox

from megascale_trainer.data.blend import Permutation
from megascale_trainer.data.corpus import Corpus, MappedCorpus, Sequence
from megascale_trainer.data.indexed import CorpusError

_PADDING = 0  # a token of every vocabulary


class WindowSource:
    """See :class:`megascale_trainer.data.corpus.SequenceSource`.

    Raises:
        CorpusError: the source has no tokens.
    """

    def __init__(self, corpus: MappedCorpus, source: int, seed: int, length: int) -> None:
        self._corpus = corpus
        self._length = length
        self._name = f"samples/{seed}/{source}"
        self._orders: dict[int, Permutation] = {}
        if not corpus.token_count:
            raise CorpusError(
                f"{corpus.prefix}: has no tokens; leave it out of data.sources or tokenise again"
            )

    @property
    def sequences_per_epoch(self) -> int:
        """Windows of the corpus, the last one filled up."""
        return -(-self._corpus.token_count // self._length)

    def sequence(self, number: int) -> Sequence:
        """Sequence ``number`` of the run."""
        epoch, place = divmod(number, self.sequences_per_epoch)
        return self._window(self._order(epoch)(place))

    def _window(self, window: int) -> Sequence:
        begin = window * self._length
        count = min(self._length + 1, self._corpus.token_count - begin)
        found, starts = self._corpus.read_range(begin, count)
        tokens = np.full(self._length + 1, _PADDING, np.int64)
        tokens[:count] = found
        inside = [0, *(int(start) for start in starts if start > 0)]
        if count <= self._length:  # padding is a document of its own
            inside.append(count)
        return Sequence(tokens, inside, min(count, self._length))

    def _order(self, epoch: int) -> Permutation:
        if epoch not in self._orders:
            # Data-parallel ranks read either side of an epoch's end.
            self._orders = {old: self._orders[old] for old in self._orders if abs(old - epoch) == 1}
            size = self.sequences_per_epoch
            self._orders[epoch] = Permutation(size, f"{self._name}/{epoch}")
        return self._orders[epoch]


EPOCHS_CACHED = 2  # neighbouring data-parallel ranks read either side of an epoch's end


def document_order(seed: int, source: int, epoch: int, documents: int) -> npt.NDArray[np.int64]:
    """The order of a source's documents in one epoch.

    Sorted by raw Philox output, a stream that numpy keeps (NEP 19); `Generator.permutation` may
    change with a release.
    """
    digest = hashlib.sha256(f"documents/{seed}/{source}/{epoch}".encode()).digest()
    keys = Philox(key=int.from_bytes(digest[:16], "little")).random_raw(documents)
    return np.argsort(keys, kind="stable")


class DocumentSource:
    """The endless token stream of one source, cut into sequences.

    See :class:`megascale_trainer.data.corpus.SequenceSource`.

    Raises:
        CorpusError: the source has no tokens.
    """

    def __init__(self, corpus: Corpus, source: int, seed: int, length: int) -> None:
        self._corpus = corpus
        self._length = length
        self._source = source
        self._seed = seed
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

    @property
    def sequences_per_epoch(self) -> int:
        """Sequences until the stream has passed all documents, the last one rounded up."""
        return -(-self._tokens_per_epoch // self._length)

    def sequence(self, number: int) -> Sequence:
        """Sequence ``number`` of the run; nothing of it is padding."""
        tokens, starts = self._read(number * self._length, self._length + 1)
        return Sequence(tokens, starts, self._length)

    def _read(self, begin: int, count: int) -> tuple[npt.NDArray[np.int64], list[int]]:
        """``count`` tokens (int64) from ``begin`` on, and where in them pieces of documents start.

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
