"""The rounds of a restore: bounded windows of each rank's reads, and what is exchanged in each.

A rank reads its stream (:class:`~megascale_job.sizes.read_plan.ReadPlan`) one window at a time
and sends what others need of it, all ranks in one exchange per round. A round has at most one
window of each reader, and no rank receives more than its share in a round, so the memory of every
rank is bounded whatever the two layouts are. Pure, and the same on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megascale_job.sizes.piece_runs import FILE, FIRST, LOWER, SIZE, UPPER, Ints, hexadecimal
from megascale_job.sizes.read_plan import (
    AT,
    BYTES,
    FROM,
    READER,
    STREAM,
    TARGET,
    TO,
    ReadPlan,
)

# A rank sends and receives at most this many windows in a round (a window that goes to more ranks
# is made smaller).
SHARE = 4
_LEAST_WINDOW = 4096


@dataclass(frozen=True, slots=True)
class Read:
    """Bytes ``start:stop`` of a unit, to byte ``at`` of the window.

    ``file`` -1 is the reader's own slot. The unit is ``size_bytes`` long, begins at ``first`` in
    the file and has ``checksum`` (xxh3-128, hexadecimal).
    """

    file: int
    first: int
    size_bytes: int
    checksum: str
    start: int
    stop: int
    at: int


@dataclass(frozen=True, slots=True)
class Round:
    """What one rank does in a round.

    Attributes:
        reads: into its window.
        kept: int64 [n, 3]: byte of the window, byte of the own state, bytes.
        sent: int64 [n, 2]: byte of the window, bytes; in the order of the send buffer.
        send_bytes: int64 [ranks], how much of the send buffer is for each rank.
        received: int64 [n, 2]: byte of the own state, bytes; in the order of the receive buffer.
        receive_bytes: int64 [ranks].
        exchanged: whether any rank sends anything: if not, no rank exchanges.
    """

    reads: tuple[Read, ...]
    kept: Ints
    sent: Ints
    send_bytes: Ints
    received: Ints
    receive_bytes: Ints
    exchanged: bool


class Rounds:
    """The rounds of a plan.

    Args:
        window_bytes: the largest window.
    """

    def __init__(self, plan: ReadPlan, window_bytes: int) -> None:
        self._plan, self._world = plan, len(plan.stream_bytes)
        self.window_bytes = window_bytes
        while True:
            windows = -(-plan.stream_bytes // self.window_bytes)
            self._first = np.concatenate(([0], np.cumsum(windows)))
            copies = _cut(plan.copies, self.window_bytes)
            window = self._first[copies[:, FROM]] + copies[:, AT] // self.window_bytes
            parts = _remote(copies, window, self._world)
            sent = np.zeros(int(self._first[-1]), np.int64)
            np.add.at(sent, parts[:, 0], parts[:, 2])
            most = int(sent.max(initial=0))
            if most <= SHARE * window_bytes or self.window_bytes <= _LEAST_WINDOW:
                break
            self.window_bytes //= 2
        budget = max(SHARE * window_bytes, int(parts[:, 2].max(initial=0)))
        self._round_of, self.count = _schedule(self._first, parts, budget)
        self._copies, self._round = copies, self._round_of[window]
        self._exchanged = np.zeros(self.count, bool)
        self._exchanged[self._round[copies[:, FROM] != copies[:, TO]]] = True

    def of_rank(self, rank: int) -> Iterator[Round]:
        """What ``rank`` does, round by round; every rank has ``count`` rounds."""
        mine = slice(int(self._first[rank]), int(self._first[rank + 1]))
        window_in = {int(r): number for number, r in enumerate(self._round_of[mine].tolist())}
        out = _Sorted(self._copies, self._round, self._copies[:, FROM] == rank, TO, self.count)
        into = _Sorted(self._copies, self._round, self._copies[:, TO] == rank, FROM, self.count)
        units = self._plan.units[self._plan.units[:, READER] == rank]
        for number in range(self.count):
            window = window_in.get(number)
            reads = () if window is None else self._reads(units, window)
            sent, received = out.of(number), into.of(number)
            own = sent[:, TO] == rank
            kept, sent = sent[own], sent[~own]
            received = received[received[:, FROM] != rank]
            yield Round(
                reads,
                np.stack((kept[:, AT] % self.window_bytes, kept[:, TARGET], kept[:, BYTES]), 1),
                np.stack((sent[:, AT] % self.window_bytes, sent[:, BYTES]), 1),
                self._per_rank(sent[:, TO], sent[:, BYTES]),
                received[:, [TARGET, BYTES]],
                self._per_rank(received[:, FROM], received[:, BYTES]),
                bool(self._exchanged[number]),
            )

    def _per_rank(self, ranks: Ints, sizes: Ints) -> Ints:
        found = np.zeros(self._world, np.int64)
        np.add.at(found, ranks, sizes)
        return found

    def _reads(self, units: Ints, window: int) -> tuple[Read, ...]:
        low, high = window * self.window_bytes, (window + 1) * self.window_bytes
        first = int(np.searchsorted(units[:, STREAM], low, "right")) - 1
        last = int(np.searchsorted(units[:, STREAM], high))
        reads = []
        for unit in units[first:last].tolist():
            start = max(low - unit[STREAM], 0)
            stop = min(high - unit[STREAM], unit[SIZE])
            digest = hexadecimal(unit[UPPER], unit[LOWER])
            at = unit[STREAM] + start - low
            reads.append(Read(unit[FILE], unit[FIRST], unit[SIZE], digest, start, stop, at))
        return tuple(reads)


class _Sorted:
    """The copies of one rank by round, within a round by peer, within that in the common order."""

    def __init__(
        self, copies: Ints, rounds: Ints, chosen: np.ndarray, peer: int, count: int
    ) -> None:
        copies, rounds = copies[chosen], rounds[chosen]
        order = np.lexsort((copies[:, peer], rounds))
        self._copies = copies[order]
        self._bounds = np.searchsorted(rounds[order], np.arange(count + 1))

    def of(self, number: int) -> Ints:
        """Those of one round."""
        return self._copies[self._bounds[number] : self._bounds[number + 1]]


def _cut(copies: Ints, window_bytes: int) -> Ints:
    """The copies, cut where a window of the reader's stream ends."""
    first = copies[:, AT] // window_bytes
    last = (copies[:, AT] + copies[:, BYTES] - 1) // window_bytes
    index = np.repeat(np.arange(len(copies)), last - first + 1)
    starts = np.cumsum(last - first + 1) - (last - first + 1)
    window = first[index] + np.arange(len(index)) - starts[index]
    cut = copies[index]
    low = np.maximum(copies[index, AT], window * window_bytes)
    high = np.minimum(copies[index, AT] + copies[index, BYTES], (window + 1) * window_bytes)
    cut[:, TARGET] += low - cut[:, AT]
    cut[:, AT], cut[:, BYTES] = low, high - low
    return cut


def _remote(copies: Ints, window: Ints, world: int) -> Ints:
    """What each window sends to each other rank: int64 [n, 3] of window, rank, bytes; sorted."""
    away = copies[:, FROM] != copies[:, TO]
    key, inverse = np.unique(window[away] * world + copies[away, TO], return_inverse=True)
    sizes = np.zeros(len(key), np.int64)
    np.add.at(sizes, inverse, copies[away, BYTES])
    return np.stack((key // world, key % world, sizes), 1)


def _schedule(first: Ints, parts: Ints, budget: int) -> tuple[Ints, int]:
    """The round of each window: at most one of a reader, at most ``budget`` bytes to a rank.

    Returns:
        The rounds int64 [windows], and their number.
    """
    count = int(first[-1])
    rounds = np.zeros(count, np.int64)
    bounds = np.searchsorted(parts[:, 0], np.arange(count + 1)).tolist()
    ranks, sizes = parts[:, 1].tolist(), parts[:, 2].tolist()
    following, end = first[:-1].tolist(), first[1:].tolist()
    active, number = [r for r in range(len(end)) if following[r] < end[r]], 0
    while active:
        left: dict[int, int] = {}
        for reader in active:
            window = following[reader]
            low, high = bounds[window], bounds[window + 1]
            if all(left.get(ranks[i], budget) >= sizes[i] for i in range(low, high)):
                for i in range(low, high):
                    left[ranks[i]] = left.get(ranks[i], budget) - sizes[i]
                rounds[window] = number
                following[reader] += 1
        number += 1
        # Another reader is first in the next round: none waits for ever.
        active = [r for r in active[1:] + active[:1] if following[r] < end[r]]
    return rounds, number
