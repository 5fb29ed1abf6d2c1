"""Which source each sample of a blend comes from: exact shares, in constant time.

The interleaving is deterministic.

The largest-deficit rule: sample n goes to the source that is furthest behind its share of the first
n + 1 samples (the first such source on a tie). Shares are whole-number parts of their sum W. The
deficits sum to one, so the largest is above zero, and no source ever gets a whole sample ahead.
After W samples all deficits are whole, above minus one, and sum to zero: each source has had
exactly its parts. So the order repeats with period W, and one table of W entries serves every
sample.

:class:`TokenBlend` takes the shares from the sources' sizes: an epoch of the blend has every sample
of a source as often as its weight says, in a random order.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from megascale_trainer.data.permutation import Permutation

# Finer weights are rounded to this many parts; the table costs 16 bytes a part.
MAX_PERIOD = 10_000


def parts_of(weights: Sequence[float]) -> list[int]:
    """Whole-number parts in the proportion of ``weights``.

    They are exact in the weights' decimal notation up to :data:`MAX_PERIOD`.

    Finer weights are rounded by largest remainder; every source keeps at least one part.

    Raises:
        ValueError: no weights, or one that is not a positive finite number.
    """
    _check(weights)
    exact = [Fraction(repr(float(weight))) for weight in weights]
    scale = math.lcm(*(fraction.denominator for fraction in exact))
    parts = [int(fraction * scale) for fraction in exact]
    divisor = math.gcd(*parts)
    parts = [part // divisor for part in parts]
    return parts if sum(parts) <= MAX_PERIOD else _rounded(exact)


def _check(weights: Sequence[float]) -> None:
    if not weights:
        raise ValueError("trainer.data.sources is empty: name at least one tokenised corpus")
    for number, weight in enumerate(weights):
        if not (math.isfinite(weight) and weight > 0):
            raise ValueError(
                f"trainer.data.sources[{number}].weight is {weight}: give a positive number"
            )


def _rounded(exact: list[Fraction]) -> list[int]:
    total = sum(exact)
    shares = [fraction / total * (MAX_PERIOD - len(exact)) for fraction in exact]
    parts = [int(share) + 1 for share in shares]
    by_remainder = sorted(
        range(len(parts)), key=lambda source: (int(shares[source]) - shares[source], source)
    )
    for source in by_remainder[: MAX_PERIOD - sum(parts)]:
        parts[source] += 1
    return parts


class Blend:
    """The interleaving of sources with the given weights.

    Raises:
        ValueError: see :func:`parts_of`.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self.parts = parts_of(weights)
        self.period = sum(self.parts)
        shares = np.array(self.parts, np.int64)
        counts = np.zeros(len(shares), np.int64)
        self._source: npt.NDArray[np.int32] = np.empty(self.period, np.int32)
        self._ordinal: npt.NDArray[np.int64] = np.empty(self.period, np.int64)
        for sample in range(self.period):
            chosen = int(np.argmax(shares * (sample + 1) - counts * self.period))
            self._source[sample], self._ordinal[sample] = chosen, counts[chosen]
            counts[chosen] += 1

    def locate(self, sample: int) -> tuple[int, int]:
        """The source of global ``sample``, and how many samples of that source come before it."""
        rounds, place = divmod(sample, self.period)
        source = int(self._source[place])
        return source, rounds * self.parts[source] + int(self._ordinal[place])


class TokenBlend:
    """The order of an epoch of all sources: ``weights[s] * sizes[s]`` samples of source s.

    With weights of 1 every sample of every source comes once in an epoch. Other weights are
    rounded to whole samples, one at least. The order of each epoch is a permutation drawn from
    ``seed`` and its number alone; a table of one number for each source serves every sample.

    Raises:
        ValueError: no weights, or one that is not a positive finite number.
    """

    def __init__(self, weights: Sequence[float], sizes: Sequence[int], seed: int) -> None:
        _check(weights)
        self.counts = [
            max(1, round(Fraction(repr(float(weight))) * size))
            for weight, size in zip(weights, sizes, strict=True)
        ]
        self._ends = list(itertools.accumulate(self.counts))
        self._seed = seed
        self._orders: dict[int, Permutation] = {}

    @property
    def samples_per_epoch(self) -> int:
        """Samples of one epoch of the blend."""
        return self._ends[-1]

    def locate(self, sample: int) -> tuple[int, int]:
        """The source of global ``sample``, and which of the source's samples it is."""
        epoch, place = divmod(sample, self.samples_per_epoch)
        if epoch not in self._orders:
            self._orders = {old: self._orders[old] for old in self._orders if abs(old - epoch) == 1}
            name = f"blend/{self._seed}/{epoch}"
            self._orders[epoch] = Permutation(self.samples_per_epoch, name)
        place = self._orders[epoch](place)
        source = bisect_right(self._ends, place)
        first = self._ends[source] - self.counts[source]
        return source, epoch * self.counts[source] + place - first
