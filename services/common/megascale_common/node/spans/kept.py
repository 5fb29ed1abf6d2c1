"""A rank's spans in plain files beside its log, where no agent reads its ring: runs by hand.

    spans-00000.json     what the rank is, and the operations that its records count
    spans-00000.records  packed records, oldest first
    spans-00000.earlier  those before, once there are many; what is older still is gone

So the newest spans of a run of any length are there, in bounded room.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from megascale_common.job.rank_layout import RankLayout
from megascale_common.node.spans import ops
from megascale_common.node.spans.record import SPAN
from megascale_common.node.spans.ring import SpanRingReader

HALF_BYTES = 16 << 20  # of records in one file: half a million spans
_TAKEN_AT_ONCE = 4096  # records


@dataclass(frozen=True, slots=True)
class KeptRank:
    """What a file of spans says of its rank; ``unix_offset_ns``: Unix time less its clock."""

    rank: int
    node: str
    layout: RankLayout
    unix_offset_ns: int
    ops: tuple[ops.Op, ...]
    records: bytes


class SpanKeeper:
    """Moves what a rank writes into its ring to files in ``folder``; :meth:`take` never waits."""

    def __init__(
        self,
        ring: Path,
        folder: Path,
        rank: int,
        node: str,
        layout: RankLayout,
        half_bytes: int = HALF_BYTES,
    ) -> None:
        self._ring, self._half_bytes = ring, half_bytes
        self._files = _Files(folder, rank)
        self._head = {"rank": rank, "node": node, "layout": asdict(layout)}
        self._offset_ns = time.time_ns() - time.monotonic_ns()
        self._ops = 0
        self._reader: SpanRingReader | None = None

    def take(self) -> None:
        """Write what is there.

        Raises:
            OSError: the folder cannot be written.
        """
        if self._reader is None:
            try:
                self._reader = SpanRingReader(self._ring)
            except (OSError, ValueError):  # nothing is measured, or not yet
                return
        while data := self._reader.take(_TAKEN_AT_ONCE):
            self._write(data)

    def _write(self, data: bytes) -> None:
        assert self._reader is not None
        files = self._files
        # Operations first: a reader knows all that a record may count.
        known = self._reader.ops()
        if len(known) > self._ops:
            self._ops = len(known)
            head = {**self._head, "unix_offset_ns": self._offset_ns}
            fresh = files.head.with_suffix(".fresh")
            fresh.write_text(json.dumps({**head, "ops": ops.dump(known).decode()}))
            fresh.replace(files.head)
        with files.records.open("ab") as file:
            file.write(data)
            full = file.tell() >= self._half_bytes
        if full:
            files.records.replace(files.earlier)


class _Files:
    def __init__(self, folder: Path, rank: int) -> None:
        name = f"spans-{rank:05d}"
        self.head, self.records = folder / f"{name}.json", folder / f"{name}.records"
        self.earlier = folder / f"{name}.earlier"


def kept_ranks(folder: Path) -> list[KeptRank]:
    """The ranks whose spans lie in ``folder``, in order.

    Raises:
        ValueError: there are none, or a file is not of this format.
    """
    found = []
    for path in sorted(folder.glob("spans-*.json")):
        try:
            head = json.loads(path.read_text())
            files = _Files(folder, int(head["rank"]))
            records = b"".join(
                part.read_bytes() for part in (files.earlier, files.records) if part.exists()
            )
            whole = len(records) - len(records) % SPAN.size  # the last one may be being written
            layout = RankLayout(**head["layout"])
            known = ops.load(head["ops"].encode())
            place = int(head["rank"]), str(head["node"]), layout, int(head["unix_offset_ns"])
        except (KeyError, TypeError, ValueError, OSError) as error:
            raise ValueError(f"{os.fspath(path)}: no spans of a rank: {error}") from error
        found.append(KeptRank(*place, known, records[:whole]))
    if not found:
        raise ValueError("the folder holds no spans-*.json: give one of an attempt by hand")
    return found
