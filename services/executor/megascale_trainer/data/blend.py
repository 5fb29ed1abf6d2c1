"""The source of each sample of a blend: shares follow the weights, at any sample.

The interleaving is deterministic, and any sample is found without computing those before it.

Weights whose ratio has few whole parts (:data:`MAX_PERIOD`) use a table, by the largest-deficit
rule: sample n goes to the source that is furthest behind its share of the first n + 1 samples (the
first such source on a tie). Shares are whole-number parts of their sum W. The deficits sum to one,
so the largest is above zero, and no source ever gets a whole sample ahead. After W samples all
deficits are whole, above minus one, and sum to zero: each source has had exactly its parts. So the
order repeats with period W, and one table of W entries serves every sample.

Finer weights, and those of many sources, use a tree whose leaves are the sources. Of m samples of a
node the left child gets m times its share, rounded: exact integer arithmetic that needs nothing but
m. The tree is Huffman's: weights at least double over three levels, so the rounding errors of the
levels above a source add up to less than two samples of that source, whatever the weights are, and
to less than one where no source is much heavier than its neighbours. Rounding never accumulates:
over a long run each source gets its share exactly.

:class:`TokenBlend` takes the shares from the sources' sizes: an epoch of the blend has every sample
of a source as often as its weight says, in a random order. That order is a :class:`Permutation`,
whose values are computed one by one: a Feistel network over the smallest power of two that holds
its n numbers permutes that domain, and a number outside of 0 .. n - 1 is sent through again until
it is inside (cycle walking: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002), less
than twice on average. Time and memory do not depend on n, and integer arithmetic gives the same
order on every machine and in every release.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from megascale_job.visible import counted

_ROUNDS = 8
_MASK = (1 << 64) - 1


class Permutation:
    """The permutation of ``range(size)`` that ``name`` stands for; ``size`` is at most 2**62.

    Raises:
        ValueError: ``size`` is not positive, or too large.
    """

    def __init__(self, size: int, name: str) -> None:
        if not 0 < size <= 1 << 62:
            raise ValueError(f"a permutation of {counted(size, 'number')}: give 1 to 2**62")
        self._size = size
        bits = max(2, (size - 1).bit_length())
        # Halves of b and b or b + 1 bits, which change sides every round.
        self._widths = bits - bits // 2, bits // 2
        keys = hashlib.shake_128(name.encode()).digest(8 * _ROUNDS)
        self._keys = [
            int.from_bytes(keys[start : start + 8], "little") for start in range(0, len(keys), 8)
        ]

    def __call__(self, index: int) -> int:
        """Where ``index`` goes.

        Raises:
            IndexError: it is not one of ``range(size)``.
        """
        if not 0 <= index < self._size:
            raise IndexError(f"{index} is not below {self._size}")
        index = self._once(index)
        while index >= self._size:
            index = self._once(index)
        return index

    def _once(self, index: int) -> int:
        """The permutation of the whole domain, twice the size at most."""
        wide, narrow = self._widths
        left, right = index >> narrow, index & ((1 << narrow) - 1)  # wide, narrow bits
        for number, key in enumerate(self._keys):
            width = narrow if number % 2 else wide
            left, right = right, left ^ (_mixed(right + key) & ((1 << width) - 1))
        return left << narrow | right  # an even number of rounds: wide and narrow again


def _mixed(value: int) -> int:
    """64 bits that each depend on all bits of ``value`` (the finalizer of splitmix64)."""
    value = (value * 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


# Weights of more parts have a tree; the table costs 16 bytes a part.
MAX_PERIOD = 10_000
# Versions of the order of samples. Another order has another number, which is stored with a run's
# position.
FIRST_SCHEME, TREE_SCHEME = 1, 2


def parts_of(weights: Sequence[float]) -> list[int]:
    """Whole-number parts in the proportion of ``weights``, exact in their decimal notation.

    Raises:
        ValueError: no weights, or one that is not a positive finite number.
    """
    _check(weights)
    exact = [Fraction(repr(float(weight))) for weight in weights]
    scale = math.lcm(*(fraction.denominator for fraction in exact))
    parts = [int(fraction * scale) for fraction in exact]
    divisor = math.gcd(*parts)
    return [part // divisor for part in parts]


def _check(weights: Sequence[float]) -> None:
    if not weights:
        raise ValueError("trainer.data.sources is empty: name at least one tokenised corpus")
    for number, weight in enumerate(weights):
        if not (math.isfinite(weight) and weight > 0):
            raise ValueError(
                f"trainer.data.sources[{number}].weight is {weight}: give a positive number"
            )


class Blend:
    """The interleaving of sources with the given weights.

    Attributes:
        parts: whole numbers in the proportion of the weights.
        period: their sum: after so many samples each source has had exactly its parts.
        scheme: of the order.

    Raises:
        ValueError: see :func:`parts_of`.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self.parts = parts_of(weights)
        self.period = sum(self.parts)
        self.scheme = FIRST_SCHEME if self.period <= MAX_PERIOD else TREE_SCHEME
        self._order = (_Table if self.scheme == FIRST_SCHEME else _Tree)(self.parts)

    def locate(self, sample: int) -> tuple[int, int]:
        """The source of global ``sample``, and how many samples of that source come before it."""
        return self._order.locate(sample)


class _Table:
    """The largest-deficit rule, one period of it."""

    def __init__(self, parts: list[int]) -> None:
        self._parts = parts
        self._period = sum(parts)
        shares = np.array(parts, np.int64)
        counts = np.zeros(len(shares), np.int64)
        self._source: npt.NDArray[np.int32] = np.empty(self._period, np.int32)
        self._ordinal: npt.NDArray[np.int64] = np.empty(self._period, np.int64)
        for sample in range(self._period):
            chosen = int(np.argmax(shares * (sample + 1) - counts * self._period))
            self._source[sample], self._ordinal[sample] = chosen, counts[chosen]
            counts[chosen] += 1

    def locate(self, sample: int) -> tuple[int, int]:
        """See :meth:`Blend.locate`."""
        rounds, place = divmod(sample, self._period)
        source = int(self._source[place])
        return source, rounds * self._parts[source] + int(self._ordinal[place])


class _Tree:
    """Huffman's tree of the parts; nodes 0 to n - 1 are the sources."""

    def __init__(self, parts: list[int]) -> None:
        self._weights = list(parts)
        self._children: list[tuple[int, int]] = []
        self._sources = len(parts)
        heap = [(weight, node) for node, weight in enumerate(parts)]
        heapq.heapify(heap)
        while len(heap) > 1:
            lighter, left = heapq.heappop(heap)
            heavier, right = heapq.heappop(heap)
            node = len(self._weights)
            self._weights.append(lighter + heavier)
            self._children.append((left, right))
            heapq.heappush(heap, (lighter + heavier, node))
        self._root = heap[0][1]

    def locate(self, sample: int) -> tuple[int, int]:
        """See :meth:`Blend.locate`."""
        node, ordinal = self._root, sample
        while node >= self._sources:
            left, right = self._children[node - self._sources]
            share, whole = self._weights[left], self._weights[node]
            before = _rounded(ordinal * share, whole)
            if _rounded((ordinal + 1) * share, whole) > before:
                node, ordinal = left, before
            else:
                node, ordinal = right, ordinal - before
        return node, ordinal


def _rounded(dividend: int, divisor: int) -> int:
    return (2 * dividend + divisor) // (2 * divisor)


class TokenBlend:
    """The order of an epoch of all sources: ``weights[s] * sizes[s]`` samples of source s.

    With weights of 1 every sample of every source comes once in an epoch. Where a weight asks for
    part of a sample, some epochs have one sample more of the source than others, so that all of
    them together have what it says. The order of each epoch is a permutation drawn from ``seed``
    and its number alone; a table of one number for each source serves every sample of it.

    Attributes:
        scheme: of the order.

    Raises:
        ValueError: no weights, or one that is not a positive finite number.
    """

    def __init__(self, weights: Sequence[float], sizes: Sequence[int], seed: int) -> None:
        _check(weights)
        self._exact = [
            Fraction(repr(float(weight))) * size
            for weight, size in zip(weights, sizes, strict=True)
        ]
        whole = all(count.denominator == 1 for count in self._exact)
        self.scheme = FIRST_SCHEME if whole else TREE_SCHEME
        self._mean = sum(self._exact)
        self._seed = seed
        self._epochs: dict[int, _Epoch] = {}

    def locate(self, sample: int) -> tuple[int, int]:
        """The source of global ``sample``, and how many samples of that source come before it."""
        epoch = self._epoch_of(sample)
        if epoch not in self._epochs:
            self._epochs = {old: self._epochs[old] for old in self._epochs if abs(old - epoch) == 1}
            before, after = self._counts(epoch), self._counts(epoch + 1)
            self._epochs[epoch] = _Epoch(before, after, f"blend/{self._seed}/{epoch}")
        return self._epochs[epoch].locate(sample)

    def _counts(self, epochs: int) -> list[int]:
        """Samples of each source in the first ``epochs`` epochs."""
        return [_rounded(count.numerator * epochs, count.denominator) for count in self._exact]

    def _epoch_of(self, sample: int) -> int:
        for number, epoch in self._epochs.items():
            if epoch.first <= sample < epoch.end:
                return number
        guess = int(sample / self._mean)
        while sum(self._counts(guess)) > sample:
            guess -= 1
        while sum(self._counts(guess + 1)) <= sample:
            guess += 1
        return guess


class _Epoch:
    """One epoch: the counts of each source ``before`` it and ``after`` it."""

    def __init__(self, before: list[int], after: list[int], name: str) -> None:
        self._before = before
        counts = [end - begin for begin, end in zip(before, after, strict=True)]
        self._firsts = [0, *accumulate(counts)]
        self.first = sum(before)
        self.end = self.first + self._firsts[-1]
        self._order = Permutation(self._firsts[-1], name)

    def locate(self, sample: int) -> tuple[int, int]:
        """See :meth:`TokenBlend.locate`."""
        place = self._order(sample - self.first)
        source = bisect_right(self._firsts, place) - 1
        return source, self._before[source] + place - self._firsts[source]
