"""Keeps a rank's spans in a run by hand: from its ring to files beside its log.

:mod:`megascale_common.node.spans.kept` has the files and reads them.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path

from megascale_common.node.spans import ops
from megascale_common.node.spans.kept import KeptFiles
from megascale_common.node.spans.ring import SpanRingReader
from megascale_job.layout import RankLayout

HALF_BYTES = 16 << 20  # of records in one file: half a million spans
_TAKEN_AT_ONCE = 4096  # records


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
        self._files = KeptFiles(folder, rank)
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
