"""Reads of ranges of keys, a page at a time; none reads more of a log than it returns."""

from __future__ import annotations

from collections.abc import AsyncIterator

from megascale_common.etcd.errors import ResourceExhausted
from megascale_common.etcd.operations import Etcd, KeyValue
from megascale_driver.journal import records

PAGE_KEYS = 512


def end_of(prefix: str) -> str:
    """The first key behind all that begin with ``prefix``, which ends with a slash."""
    return prefix[:-1] + chr(ord(prefix[-1]) + 1)


async def items(
    client: Etcd, start: str, end: str, page_keys: int = PAGE_KEYS
) -> AsyncIterator[KeyValue]:
    """The keys of a range in order, a page at a time.

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
        start = f"{page.items[-1].key}\0"


async def job_names(client: Etcd) -> list[str]:
    """The names of all jobs, found without an index: each read costs etcd all logs behind it."""
    names: list[str] = []
    start = "jobs/"
    while page := (await client.get_range(start, "jobs0", limit=1)).items:
        names.append(page[0].key.removeprefix("jobs/").partition("/")[0])
        start = f"jobs/{names[-1]}0"  # "0" follows "/"
    return names


async def last_number(client: Etcd, log: str, hint: int = 0) -> int:
    """The number of a log's last record, 0 if it has none: in O(log lines) small reads.

    ``hint`` is the number of a line at or before the end, 0 if none is known. Every read but the
    first without a hint is of a short range: etcd goes through all keys of a range, whatever the
    limit, and sorts in descending order by reading all of it. The end can be searched for because
    a log has no gap wider than a block, but the trimmed part in front.
    """
    gap = records.BLOCK_LINES

    async def newest_in(first: int, last: int) -> int | None:
        start, end = records.key(log, max(0, first)), records.key(log, last + 1)
        page = await client.get_range(start, end)
        return records.number(page.items[-1].key) if page.items else None

    low = await newest_in(hint - gap + 1, hint + gap) if hint else None
    if low is None:
        folder = records.folder(log)
        page = await client.get_range(folder, end_of(folder), limit=1)
        if not page.items:
            return 0
        low = records.number(page.items[0].key)
    step = gap
    while (found := await newest_in(low + step, low + step + gap - 1)) is not None:
        low, step = found, 2 * step
    # There is no record in the gap that begins at `low + step`, so there is none behind it.
    high = low + step
    while high - low > gap:
        middle = (low + high) // 2
        if (found := await newest_in(middle, middle + gap - 1)) is not None:
            low = max(low, found)
        else:
            high = middle
    return await newest_in(low, low + 2 * gap) or low
