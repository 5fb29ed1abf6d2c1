"""A source whose samples are shuffled: documents end to end, cut once, in an order of each epoch.

The documents of a corpus of T tokens stand in the order of the file; window w is its tokens w*S ..
w*S + S - 1, so an epoch has ceil(T / S) windows. Sequence j of a run is window p(j mod n) of epoch
j div n, where p is the permutation of that epoch
(:mod:`megascale_trainer.data.permutation`), drawn from (data.seed, source, epoch) alone. Every
token of an epoch is an input exactly once. The last window is filled up with padding that has no
weight. Nothing is kept in memory of the documents, of which there may be any number.
"""

from __future__ import annotations

import numpy as np

from megascale_trainer.data.corpus import MappedCorpus, Sequence
from megascale_trainer.data.errors import CorpusError
from megascale_trainer.data.permutation import Permutation

_PADDING = 0  # a token of every vocabulary


class WindowSource:
    """See :class:`megascale_trainer.data.corpus.SequenceSource`.

    Raises:
        CorpusError: the source has no tokens.
    """

    def __init__(self, corpus: MappedCorpus, source: int, seed: int, length: int) -> None:
        self._corpus, self._length = corpus, length
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
