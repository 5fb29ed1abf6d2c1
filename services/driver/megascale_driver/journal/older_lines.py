"""Lines of the audit log that no driver holds in memory: read from etcd and from the export.

One log is read at a time, a job's or the cluster's. Its lines are numbered without gaps, so a
missing line is detected. :mod:`megascale_driver.journal.timeline` merges several logs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator
from pathlib import Path

from megascale_common.etcd.operations import Etcd
from megascale_common.service.errors import CodecError, ExpiredError
from megascale_driver.core.values.events import Audit
from megascale_driver.journal import codec, records

PLACES = 256  # remembered places in the export, over all logs and readers


class OlderLines:
    """Reads pages on demand; ``export``: the folder of this driver's own export, if it has one.

    Any driver can read: lines never change, and lines that leave etcd are exported before.
    """

    def __init__(self, client: Etcd, export: Path | None) -> None:
        self._client = client
        self._export = export
        # (log, line) that a reader has reached: the file and offset where it continues.
        self._places: dict[tuple[str, int], tuple[str, int]] = {}

    async def behind(self, log: str, seq: int, count: int) -> list[Audit]:
        """Up to ``count`` lines of a log behind number ``seq``, without a gap.

        For 0 they begin with the oldest line that can be read.

        Raises:
            ExpiredError: they have left etcd, and this driver does not find them in its export.
            EtcdError: etcd does not answer.
        """
        stored = await self._stored(log, seq, count)
        # The usual case: etcd still has them, so the export is not opened.
        if stored and stored[0].seq == seq + 1:
            return stored
        oldest = await self._oldest(log)
        if oldest <= seq + 1:
            return stored
        exported: list[Audit] = []
        if self._export is not None:
            wanted = min(count, oldest - seq - 1)
            exported = await asyncio.to_thread(self._exported, self._export, log, seq, wanted)
        if exported and exported[-1].seq == oldest - 1 and len(exported) < count:
            # The page continues with the lines in etcd.
            exported += await self._stored(log, oldest - 1, count - len(exported))
        if not exported and not seq:
            return await self._stored(log, oldest - 1, count)
        if not exported:
            raise ExpiredError(self._where(log, seq + 1, oldest - 1))
        return exported

    async def exported_before(self, logs: Collection[str], at_s: float) -> dict[str, int]:
        """By log, the number before its first exported line of ``at_s`` or later, if any."""
        if self._export is None or not logs:
            return {}
        return await asyncio.to_thread(_before, self._export, frozenset(logs), at_s)

    async def _stored(self, log: str, seq: int, count: int) -> list[Audit]:
        """Lines in etcd with numbers from ``seq`` + 1 to ``seq`` + ``count``."""
        # A block has the key of its first line, which can be before ``seq``.
        start = records.key(log, max(0, seq + 1 - records.BLOCK_LINES))
        lines: list[Audit] = []
        async for item in records.items(self._client, start, records.key(log, seq + count + 1)):
            try:
                lines += records.lines_of(item.value, item.key)
            except CodecError:
                continue  # the leader has logged it
        return [line for line in lines if seq < line.seq <= seq + count]

    async def _oldest(self, log: str) -> int:
        """The number of the oldest line in etcd; 0 without one."""
        folder = records.folder(log)
        page = await self._client.get_range(folder, records.end_of(folder), limit=1)
        return records.number(page.items[0].key) if page.items else 0

    def _exported(self, folder: Path, log: str, seq: int, count: int) -> list[Audit]:
        """Exported lines behind ``seq`` without a gap; for 0 from the oldest one on."""
        name, offset = self._places.pop((log, seq), ("", 0))
        found: dict[int, Audit] = {}
        for path in sorted(folder.glob("audit-*.jsonl")):
            if path.name < name:
                continue
            for line, end in _lines(path, log, offset if path.name == name else 0):
                if line.seq <= seq or (found and line.seq != max(found) + 1):
                    continue  # a page before, or repeated after a crash
                if not found and seq and line.seq != seq + 1:
                    return []
                found[line.seq] = line
                if len(found) == count:
                    while len(self._places) >= PLACES:
                        del self._places[next(iter(self._places))]
                    self._places[log, line.seq] = path.name, end
                    return list(found.values())
        return list(found.values())

    def _where(self, log: str, first: int, last: int) -> str:
        whose = f"job {log}'s log" if log else "the cluster's log"
        what = f"lines {first} to {last} of {whose} have left etcd (--audit-lines, --audit-days)"
        if self._export is None:
            return (
                f"{what}; this driver exports none (--audit-export), so look for audit-*.jsonl on "
                "the hosts of the drivers that led before"
            )
        return (
            f"{what}, and are not among the files audit-*.jsonl in {self._export} on this driver's "
            "host: look there on the hosts of the drivers that led before, or give all drivers one "
            "shared folder"
        )


def _before(folder: Path, logs: frozenset[str], at_s: float) -> dict[str, int]:
    found: dict[str, int] = {}
    for path in sorted(folder.glob("audit-*.jsonl")):
        with path.open("rb") as file:
            for text in file:
                try:
                    line = codec.load(Audit, text)
                except CodecError:
                    continue  # half a line, or an unreadable record
                if line.log in logs and line.at_s >= at_s:
                    found[line.log] = min(line.seq - 1, found.get(line.log, line.seq))
    return found


def _lines(path: Path, log: str, offset: int) -> Iterator[tuple[Audit, int]]:
    """The lines of a log in a file from ``offset`` on, each with the offset behind it."""
    wanted = b'"log":' + codec.text(log)
    with path.open("rb") as file:
        file.seek(offset)
        for text in file:
            offset += len(text)
            if wanted in text:
                try:
                    line = codec.load(Audit, text)
                except CodecError:
                    continue  # half a line, or an unreadable record
                if line.log == log:
                    yield line, offset
