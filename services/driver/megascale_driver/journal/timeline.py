"""Lines of several logs in one list, in the order of their times, from outside of any memory.

Each log is read in its own order from etcd and from the export
(:mod:`megascale_driver.journal.older_lines`), and the heads of all are merged. A page reads a
bounded number of lines, whether they are wanted or not, so a page of a rare subject can be empty
although more follow.

A token has a time and the line that a reader received last. The driver that served the page
remembers the reader's place in every log; any other driver finds it by bisection in etcd. Times
within a log can go back a little if the next leader's clock is behind: a line counts from the
latest time before it in its log. If clocks of drivers are more than ``SKEW_S`` apart, lines can be
missed when the driver changes in the middle of a list.
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
from megascale_driver.journal.older_lines import OlderLines

PREFIX = "t"  # prefix of a token; tokens of lists in memory begin with a number
PAGE_LINES = 5_000  # lines read for one page, wanted or not
READERS = 4  # readers whose places are remembered
LOGS_AT_ONCE = 16  # logs read concurrently
HELD_LINES = 20_000  # lines of all logs together that a reader holds between two pages,
LEAST_READ, MOST_READ = 16, 512  # and lines of one log per read
SKEW_S = 60.0

Key = tuple[float, str, int]  # time, log, number: the order of the list


@dataclass(frozen=True, slots=True)
class Log:
    """A log to read: a job's name or "", when it began, and its last line so far."""

    name: str
    begun_s: float
    last: int


@dataclass(frozen=True, slots=True)
class TimePage:
    """Wanted lines in order, and the token for the next page; "" if there is none."""

    lines: tuple[Audit, ...]
    token: str


@dataclass(slots=True)
class _Place:
    """A reader's place in one log: behind line ``seq``; ``ahead`` has lines already read."""

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
    """Reads pages on demand, at any driver that holds the state."""

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
        # Removed, so that two readers with one token have separate places.
        places = self._places.pop(token, None)
        if places is None:
            places = await self._find(logs, behind[0])
        at_once = max(LEAST_READ, min(MOST_READ, HELD_LINES // max(1, len(logs))))
        lasts = {log.name: log.last for log in logs}
        for log in logs:
            places.setdefault(log.name, _Place())  # for a job that is newer than the list
        heads = [name for name in lasts if name in places]
        await _each(heads, lambda name: self._read(places[name], name, lasts[name], at_once))
        heap = [places[name].head() for name in heads if places[name].ahead]
        heapq.heapify(heap)
        found: list[Audit] = []
        newest, taken = behind, 0
        # A merge of sorted logs: the heap has the next line of each.
        while heap and len(found) < count and taken < PAGE_LINES:
            key = heapq.heappop(heap)
            place = places[key[1]]
            line = place.take()
            if not place.ahead:
                await self._read(place, key[1], lasts[key[1]], at_once)
            if place.ahead:
                heapq.heappush(heap, place.head())
            if key <= behind:
                continue  # before the token: the bisection stops a little earlier
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
        """Read lines ahead, if the log has any behind the place."""
        while not place.ahead and place.seq < last:
            place.ahead.extend(await self._older.behind(log, place.seq, count))
            if not place.ahead:
                place.seq += count  # unreadable records; the leader has logged them

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
        """A number before the first line of ``at_s`` in etcd; True: all lines there are later."""
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
                # an unreadable record counts as later, so the list begins before it
                return records.number(item.key), math.inf

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
    """Do the work for every name, some concurrently; the first error ends it."""
    room = asyncio.Semaphore(LOGS_AT_ONCE)

    async def one(name: str) -> None:
        async with room:
            await work(name)

    await asyncio.gather(*(one(name) for name in names))


def is_token(token: str) -> bool:
    """True if the token belongs to a list by time."""
    return token.startswith(PREFIX)


def position(token: str) -> Key:
    """The newest key that a token has received; ``tSECONDS`` is right before that time.

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
