"""Lines of several logs in one list, in the order of their times: what no driver holds in memory.

Each log is read in its own order from etcd and from the export (:mod:`megascale_driver.journal
.older`), and the heads of all are merged. A page takes a bounded number of lines, whether they are
wanted or not, so a page of a rare subject may be empty though more follow.

A token has a time and the line that a reader received last. Its place in every log is remembered
by the driver that served the page; any other finds it, by bisection in etcd. Times of one log may
go back a little where the next leader's clock is behind: a line counts from the latest time before
it in its log. Clocks of drivers that are more than ``SKEW_S`` apart may cost lines at a change of
the driver in the middle of a list.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field

from megascale_common.etcd.operations import Etcd
from megascale_common.service.errors import CodecError
from megascale_driver.core.values.events import Audit
from megascale_driver.journal import audit_log, records
from megascale_driver.journal.older import OlderLines

PREFIX = "t"  # of a token; those of lists in memory begin with a number
PAGE_LINES = 5_000  # taken for one page, wanted or not
READERS = 4  # whose places are remembered
LOGS_AT_ONCE = 16  # read side by side
HELD_LINES = 20_000  # of all logs together that a reader holds between two pages,
LEAST_READ, MOST_READ = 16, 512  # and of one log at a time
SKEW_S = 60.0

Key = tuple[float, str, int]  # time, log, number: the order of the list


@dataclass(frozen=True, slots=True)
class Log:
    """A log that is read: a job's name or "", when it began, and its last line so far."""

    name: str
    begun_s: float
    last: int


@dataclass(frozen=True, slots=True)
class TimePage:
    """Wanted lines in order, and the token of what follows; "" if nothing does."""

    lines: tuple[Audit, ...]
    token: str


@dataclass(slots=True)
class _Place:
    """Where a reader is in one log: behind line ``seq``, of which ``ahead`` are read already."""

    seq: int = 0
    at_s: float = -math.inf  # the latest time of a line up to there
    ahead: deque[Audit] = field(default_factory=deque)

    def head(self) -> Key:
        line = self.ahead[0]
        return max(line.at_s, self.at_s), line.log, line.seq

    def take(self) -> Audit:
        line = self.ahead.popleft()
        self.seq = line.seq
        self.at_s = max(line.at_s, self.at_s)
        return line


class Timeline:
    """Reads pages on demand; any driver that holds the state may."""

    def __init__(self, client: Etcd, older: OlderLines) -> None:
        self._client = client
        self._older = older
        self._places: dict[str, dict[str, _Place]] = {}

    async def page(
        self, logs: Sequence[Log], token: str, wanted: Callable[[Audit], bool], count: int
    ) -> TimePage:
        """Up to ``count`` wanted lines behind ``token``.

        Raises:
            ValueError: not a token.
            ExpiredError: lines have left etcd, and this driver does not find them in its export.
            EtcdError: etcd does not answer.
        """
        behind = position(token)
        # Taken out: two readers at one token each get places of their own.
        places = self._places.pop(token, None)
        if places is None:
            places = await self._find(logs, behind[0])
        at_once = max(LEAST_READ, min(MOST_READ, HELD_LINES // max(1, len(logs))))
        lasts = {log.name: log.last for log in logs}
        for log in logs:
            places.setdefault(log.name, _Place())  # of a job that is newer than the list
        heads = [name for name in lasts if name in places]
        await _each(heads, lambda name: self._read(places[name], name, lasts[name], at_once))
        heap = [places[name].head() for name in heads if places[name].ahead]
        heapq.heapify(heap)
        found: list[Audit] = []
        newest, taken = behind, 0
        while heap and len(found) < count and taken < PAGE_LINES:
            key = heapq.heappop(heap)
            place = places[key[1]]
            line = place.take()
            if not place.ahead:
                await self._read(place, key[1], lasts[key[1]], at_once)
            if place.ahead:
                heapq.heappush(heap, place.head())
            if key <= behind:
                continue  # before the token: the search begins a little earlier
            newest, taken = key, taken + 1
            if wanted(line):
                found.append(line)
        if not heap:
            return TimePage(tuple(found), "")
        following = _text(newest)
        while len(self._places) >= READERS:
            del self._places[next(iter(self._places))]
        self._places[following] = places
        return TimePage(tuple(found), following)

    async def _read(self, place: _Place, log: str, last: int, count: int) -> None:
        """Have lines ahead, if the log has any behind the place."""
        while not place.ahead and place.seq < last:
            place.ahead.extend(await self._older.behind(log, place.seq, count))
            if not place.ahead:
                place.seq += count  # records that cannot be read; the leader has logged them

    async def _find(self, logs: Sequence[Log], at_s: float) -> dict[str, _Place]:
        """The place in each log before its first line of ``at_s``, or a little earlier."""
        places = {log.name: _Place() for log in logs}
        early_s = at_s - SKEW_S
        searched = {log.name: log for log in logs if log.begun_s < early_s}
        trimmed: list[str] = []

        async def search(name: str) -> None:
            places[name].seq, later = await self._bisect(name, searched[name].last, early_s)
            if later and places[name].seq:
                trimmed.append(name)

        await _each(searched, search)
        for name, seq in (await self._older.exported_before(trimmed, early_s)).items():
            places[name].seq = seq
        return places

    async def _bisect(self, log: str, last: int, at_s: float) -> tuple[int, bool]:
        """A number before the first line of ``at_s`` in etcd, and whether all there are later."""
        folder = records.folder(log)
        end = records.key(log, last + 1)

        async def first(start: str) -> tuple[int, float] | None:
            """Number and time of the first record from ``start`` on."""
            page = await self._client.get_range(start, end, limit=1)
            if not page.items:
                return None
            (item,) = page.items
            try:
                return records.number(item.key), records.lines_of(item.value, item.key)[0].at_s
            except CodecError:
                return records.number(item.key), math.inf  # then the list begins before it

        oldest = await first(folder)
        if oldest is None:
            return last, False
        low, behind = oldest[0], last + 1
        if oldest[1] >= at_s:
            return low - 1, True
        while behind - low > 1:
            middle = (low + behind) // 2
            found = await first(records.key(log, middle))
            if found is not None and found[0] < behind and found[1] < at_s:
                low = found[0]
            else:
                behind = middle
        return low - 1, False


async def _each(names: Iterable[str], work: Callable[[str], Awaitable[None]]) -> None:
    """Do the work for every name, some at once; the first error ends it."""
    room = asyncio.Semaphore(LOGS_AT_ONCE)

    async def one(name: str) -> None:
        async with room:
            await work(name)

    await asyncio.gather(*(one(name) for name in names))


def is_token(token: str) -> bool:
    """Whether a token is of a list by time."""
    return token.startswith(PREFIX)


def position(token: str) -> Key:
    """What a token says has been received; ``tSECONDS`` is right before a time.

    Raises:
        ValueError: not a token.
    """
    at, colon, line = token.removeprefix(PREFIX).partition(":")
    try:
        at_s = float(at)
    except ValueError:
        at_s = math.nan
    if not is_token(token) or not 0 <= at_s < math.inf:
        raise ValueError(f"{token!r} is not a token of this cluster")
    log, seq = audit_log.place_of(line) if colon else ("", -1)
    return at_s, log, seq


def _text(key: Key) -> str:
    return f"{PREFIX}{key[0]!r}:{key[2]}.{key[1]}"
