"""A pseudo-random permutation of 0 .. n - 1 of which each value is computed by itself.

A Feistel network over the smallest power of two that holds n numbers permutes that domain; a number
outside of 0 .. n - 1 is sent through again until it is inside (cycle walking: Black and Rogaway,
"Ciphers with Arbitrary Finite Domains", 2002), less than twice on average. Time and memory do not
depend on n. It is integer arithmetic alone, so every release and every machine has the same one.
"""

from __future__ import annotations

import hashlib

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
