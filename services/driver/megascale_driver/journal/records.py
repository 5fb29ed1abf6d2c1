"""Lines of the audit log as records in etcd: a key per line, or per block of a mass event.

The lines of one decision are few, as a rule: each has a key of its own, the form of all builds. A
mass event (a switch, all nodes) has thousands that differ in little: they become blocks, each with
what its lines have in common once (:mod:`megascale_driver.journal.coalesced`, if they are long).
Lines keep their numbers either way, and a block lies under the key of its first line.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

from megascale_common.service.errors import CodecError
from megascale_driver.core.values.events import Audit
from megascale_driver.journal import coalesced, codec

PLAIN_LINES = 24  # of one decision in one log; more become blocks
BLOCK_BYTES = 64 << 10  # a block is closed once its lines are as large
BLOCK_LINES = 512  # or as many: between two records of a log lies no larger gap
_NUMBER_DIGITS = 20


def folder(log: str) -> str:
    """Where the records of a log lie: a job's, or the cluster's for ""."""
    return f"jobs/{log}/log/" if log else "log/"


def key(log: str, seq: int) -> str:
    """The key of the record that begins with line ``seq``."""
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
    """(key, value, the version of its form) of the lines of one decision, in order."""
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
    if coalesced.SHAPES in values:
        return [codec.build(Audit, line) for line in coalesced.unpacked(values, where)]
    if "lines" not in values:
        return [codec.build(Audit, values)]
    common, own = values.get("common", {}), values["lines"]
    if not isinstance(common, dict) or not isinstance(own, list):
        raise CodecError(f"{where}: not a block of lines")
    return [codec.build(Audit, {**common, **line}) for line in own]


def _place(line: Audit) -> tuple[str, int]:
    return line.log, line.seq


def _of_many(lines: list[Audit]) -> Iterator[tuple[str, bytes, int]]:
    """The records of up to BLOCK_LINES lines: one, if they are long and differ in little."""
    texts = [codec.dump(line).decode() for line in lines]
    if sum(map(len, texts)) > BLOCK_BYTES:
        nodes = [_node_of(line) for line in lines]
        if (record := coalesced.packed(texts, nodes)) is not None:
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
