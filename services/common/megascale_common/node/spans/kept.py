"""A rank's spans in plain files beside its log, where no agent reads its ring: runs by hand.

    spans-00000.json     what the rank is, and the operations that its records count
    spans-00000.records  packed records, oldest first
    spans-00000.earlier  those before, once there are many; what is older still is gone

So the newest spans of a run of any length are there, in bounded room.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from megascale_common.node.spans import ops
from megascale_common.node.spans.record import SPAN
from megascale_job.layout import RankLayout


@dataclass(frozen=True, slots=True)
class KeptRank:
    """What a file of spans says of its rank; ``unix_offset_ns``: Unix time less its clock."""

    rank: int
    node: str
    layout: RankLayout
    unix_offset_ns: int
    ops: tuple[ops.Op, ...]
    records: bytes


class KeptFiles:
    """The files of a rank in ``folder``."""

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
            files = KeptFiles(folder, int(head["rank"]))
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
