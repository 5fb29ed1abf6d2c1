"""Reads of ranges of keys, a page at a time; none reads more of a log than it returns."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

from megascale_common.etcd.errors import ResourceExhausted
from megascale_common.etcd.operations import KeyValue
from megascale_common.etcd.protocol import Etcd
from megascale_driver.journal import records

PAGE_KEYS = 512


def end_of(prefix: str) -> str:
    """The first key behind all that begin with ``prefix``, which ends with a slash."""
    return prefix[:-1] + chr(ord(prefix[-1]) + 1)


async def items(
    client: Etcd,
    start: str,
    end: str,
    skip: Callable[[str], str | None] = lambda key: None,
    page_keys: int = PAGE_KEYS,
) -> AsyncIterator[KeyValue]:
    """The keys of a range in order, a page at a time.

    ``skip`` gets the last key of each page, and may name a later key to go on from.

    Not at one revision: for a leader, whose fence keeps all others from writing.
    """
    while start < end:
        try:
            page = await client.get_range(start, end, limit=page_keys)
        except ResourceExhausted:  # more than a client receives at once
            if page_keys == 1:
                raise
            page_keys //= 2
            continue
        for item in page.items:
            yield item
        if not page.more:
            return
        last = page.items[-1].key
        start = skip(last) or f"{last}\0"


async def last_number(client: Etcd, log: str) -> int:
    """The number of a log's last record, 0 if it has none: in O(log lines) small reads.

    etcd sorts a range in descending order by reading all of it, so the end is searched for: a log
    has no gaps but the trimmed part in front.
    """
    end = end_of(records.folder(log))

    async def at_or_after(number: int) -> int | None:
        page = await client.get_range(records.key(log, number), end, limit=1)
        return records.number(page.items[0].key) if page.items else None

    if (low := await at_or_after(0)) is None:
        return 0
    step = 1
    while (found := await at_or_after(low + step)) is not None:
        low, step = found, 2 * step
    high = low + step  # there is no record at or behind it
    while high - low > 1:
        middle = (low + high) // 2
        if (found := await at_or_after(middle)) is not None:
            low = found
        else:
            high = middle
    return low
