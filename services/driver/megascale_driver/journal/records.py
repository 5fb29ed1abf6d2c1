"""Lines of the audit log as records in etcd: a key per line, or per block of a mass event.

Usually a decision has few lines: each has its own key, the form of all builds. A mass event (a
switch, all nodes) has thousands of similar lines: they become blocks, each of which has their
common parts once (:mod:`megascale_driver.journal.pieces`, if they are long). Lines keep their
numbers either way, and a block has the key of its first line.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from itertools import groupby
from typing import Any

from megascale_common.etcd.errors import ResourceExhausted
from megascale_common.etcd.operations import Etcd, KeyValue
from megascale_common.service.errors import CodecError
from megascale_driver.core.values.events import Audit
from megascale_driver.journal import codec, pieces

PLAIN_LINES = 24  # lines of one decision in one log; more become blocks
BLOCK_BYTES = 64 << 10  # a block is closed at this size
BLOCK_LINES = 512  # or at this number of lines: no gap between two records of a log is larger
_NUMBER_DIGITS = 20


def folder(log: str) -> str:
    """The folder for the records of a log: a job's, or for "" the cluster's."""
    return f"jobs/{log}/log/" if log else "log/"


def key(log: str, seq: int) -> str:
    """The key of the record whose first line is ``seq``."""
    return f"{folder(log)}{seq:0{_NUMBER_DIGITS}d}"


def number(record_key: str) -> int:
    """The number of the first line in a record.

    Raises:
        CodecError: not the key of a record.
    """
    text = record_key.rpartition("/")[2]
    if len(text) != _NUMBER_DIGITS or not text.isdecimal():
        raise CodecError(f"{record_key}: not the key of a line of the log")
    return int(text)


def records(lines: Iterable[Audit]) -> Iterator[tuple[str, bytes, int]]:
    """(key, value, version of the form) of the lines of one decision, in order."""
    for log, found in groupby(sorted(lines, key=_place), key=lambda line: line.log):
        group = list(found)
        if len(group) <= PLAIN_LINES:
            for line in group:
                yield key(log, line.seq), codec.dump(line), codec.BASIC_VERSION
        else:
            for first in range(0, len(group), BLOCK_LINES):
                yield from _of_many(group[first : first + BLOCK_LINES])


def lines_of(value: bytes, where: str) -> list[Audit]:
    """The lines of a record.

    Raises:
        CodecError: it cannot be read.
    """
    values = codec.parse(value, where)
    if pieces.SHAPES in values:
        return [codec.build(Audit, line) for line in pieces.values_of(values, where)]
    if "lines" not in values:
        return [codec.build(Audit, values)]
    common, own = values.get("common", {}), values["lines"]
    if not isinstance(common, dict) or not isinstance(own, list):
        raise CodecError(f"{where}: not a block of lines")
    return [codec.build(Audit, {**common, **line}) for line in own]


def _place(line: Audit) -> tuple[str, int]:
    return line.log, line.seq


def _of_many(lines: list[Audit]) -> Iterator[tuple[str, bytes, int]]:
    """The records of up to BLOCK_LINES lines: a single one if the lines are long and similar."""
    texts = [codec.dump(line).decode() for line in lines]
    if sum(map(len, texts)) > BLOCK_BYTES:
        nodes = [_node_of(line) for line in lines]
        if (record := pieces.record_of(texts, nodes)) is not None:
            yield key(lines[0].log, lines[0].seq), codec.text(record), codec.SCHEMA_VERSION
            return
    for block in _blocks(lines):
        yield key(lines[0].log, block[0]["seq"]), _packed(block), codec.PARTS_VERSION


def _node_of(line: Audit) -> str:
    kind, _, name = line.subject.partition("/")
    return name if kind == "nodes" else ""


def _blocks(lines: list[Audit]) -> Iterator[list[dict[str, Any]]]:
    block: list[dict[str, Any]] = []
    size_bytes = 0
    for line in lines:
        values = codec.plain(line)
        block.append(values)
        size_bytes += 80 + len(line.message) + sum(len(str(item)) for item in values["evidence"])
        if size_bytes >= BLOCK_BYTES or len(block) == BLOCK_LINES:
            yield block
            block, size_bytes = [], 0
    if block:
        yield block


def _packed(block: list[dict[str, Any]]) -> bytes:
    first = block[0]
    same = {name for name in first if all(line[name] == first[name] for line in block)}
    return codec.text(
        {
            "common": {name: first[name] for name in same},
            "lines": [{n: v for n, v in line.items() if n not in same} for line in block],
        }
    )


# Reads of key ranges, page by page; none reads more of a log than it returns.

PAGE_KEYS = 512


def end_of(prefix: str) -> str:
    """The first key behind all keys with ``prefix``, which ends with a slash."""
    return prefix[:-1] + chr(ord(prefix[-1]) + 1)


async def items(
    client: Etcd, start: str, end: str, page_keys: int = PAGE_KEYS
) -> AsyncIterator[KeyValue]:
    """The keys of a range in order, page by page.

    Pages are not read at one revision: this is for a leader, whose fence keeps all others from
    writing.
    """
    while start < end:
        try:
            page = await client.get_range(start, end, limit=page_keys)
        except ResourceExhausted:  # the page is larger than a client accepts
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
    """The names of all jobs, found without an index: each read makes etcd scan the rest."""
    names: list[str] = []
    start = "jobs/"
    while page := (await client.get_range(start, "jobs0", limit=1)).items:
        names.append(page[0].key.removeprefix("jobs/").partition("/")[0])
        start = f"jobs/{names[-1]}0"  # "0" follows "/"
    return names


async def last_number(client: Etcd, log: str, hint: int = 0) -> int:
    """The number of a log's last record, 0 without one: in O(log lines) small reads.

    ``hint``: the number of a line at or before the end, 0 if none is known. All reads except the
    first one without a hint are of short ranges: etcd scans all keys of a range, whatever the
    limit, and sorts in descending order by reading everything. The end can be found by bisection
    because a log has no gap wider than a block, except for the trimmed part at its beginning.
    """
    gap = BLOCK_LINES

    async def newest_in(first: int, last: int) -> int | None:
        start, end = key(log, max(0, first)), key(log, last + 1)
        page = await client.get_range(start, end)
        return number(page.items[-1].key) if page.items else None

    low = await newest_in(hint - gap + 1, hint + gap) if hint else None
    if low is None:
        start = folder(log)
        page = await client.get_range(start, end_of(start), limit=1)
        if not page.items:
            return 0
        low = number(page.items[0].key)
    step = gap
    while (found := await newest_in(low + step, low + step + gap - 1)) is not None:
        low, step = found, 2 * step
    # The gap that begins at `low + step` has no record, so there is none behind it.
    high = low + step
    while high - low > gap:
        middle = (low + high) // 2
        if (found := await newest_in(middle, middle + gap - 1)) is not None:
            low = max(low, found)
        else:
            high = middle
    return await newest_in(low, low + 2 * gap) or low
