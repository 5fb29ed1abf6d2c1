"""The file format of recorded spans: one compressed JSON of all ranks, with optional context.

The file is zlib-compressed JSON: a list with one entry per rank, {"ops": operations as in
node.spans.ops, "columns": base64 of packed records by byte column}. Or it is an object with that
list as "ranks" and optional keys: "layout" ({"tp", "cp", "dp", "pp", "ep"}), "nodes" (one name per
rank),
"heartbeats" (by node, lists of [node_sent, driver_received, driver_sent, node_received] in
nanoseconds) and "counters" (a list of {"node", "name", "target", "before", "after"}).
"""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megascale_common.node.spans import ops, record
from megascale_common.node.spans.ring import kept_ranks
from megascale_driver.analysis.spans.clocks import Exchange
from megascale_driver.analysis.spans.decline import CounterChange
from megascale_driver.analysis.spans.table import RECORD, SpanTable
from megascale_job.layout import AXES, RankLayout

MAX_BYTES = 2 << 30  # of the JSON


@dataclass(frozen=True, slots=True, eq=False)
class Recorded:
    """Spans of a file, clock samples from its nodes' heartbeats, and changes of counters."""

    table: SpanTable
    heartbeats: Mapping[str, Sequence[Exchange]] = field(default_factory=dict)
    counters: Sequence[CounterChange] = ()


def rank_entry(own_ops: tuple[ops.Op, ...], records: bytes) -> dict[str, str]:
    """The entry of a rank, from its packed records."""
    columns = base64.b64encode(record.to_columns(records)).decode()
    return {"ops": ops.dump(own_ops).decode(), "columns": columns}


def dump(content: list[dict[str, str]] | dict[str, Any]) -> bytes:
    """The bytes of a file, from a list of ranks' entries or an object with it (see the module)."""
    return zlib.compress(json.dumps(content).encode(), 9)


def load(data: bytes) -> Recorded:
    """Read the bytes of a file; the inverse of :func:`dump`.

    Without a layout the ranks are data parallel; without nodes each rank has its own node.

    Raises:
        ValueError: another format, or more than MAX_BYTES of JSON; the message has the problem.
    """
    content = _json(data)
    if isinstance(content, list):
        content = {"ranks": content}
    if not isinstance(content, dict) or not isinstance(content.get("ranks"), list):
        raise ValueError('the file holds neither a list of ranks nor an object with "ranks"')
    by_rank = [_rank(number, entry) for number, entry in enumerate(content["ranks"])]
    try:
        layout = _layout(content.get("layout"), len(by_rank))
        nodes = content.get("nodes") or [f"n{rank + 1}" for rank in range(layout.world_size)]
        table = SpanTable.of_records(by_rank, layout, [str(node) for node in nodes])
        heartbeats = {
            str(node): [Exchange(*map(int, times)) for times in exchanges]
            for node, exchanges in (content.get("heartbeats") or {}).items()
        }
        counters = [CounterChange.of(entry) for entry in content.get("counters") or []]
    except (TypeError, AttributeError) as error:
        raise ValueError(f"layout, nodes, heartbeats or counters: {error}") from error
    return Recorded(table, heartbeats, counters)


def of_folder(folder: Path) -> Recorded:
    """The spans that the ranks of a run by hand have written to the folder of an attempt.

    Raises:
        ValueError: there are none, or some ranks are missing; the message has the problem.
    """
    ranks = kept_ranks(folder)
    layout = ranks[0].layout
    nodes = [""] * layout.world_size
    by_rank = []
    for kept in ranks:
        if kept.layout != layout or not 0 <= kept.rank < layout.world_size:
            raise ValueError(f"rank {kept.rank} is of another layout than rank {ranks[0].rank}")
        nodes[kept.rank] = kept.node
        records = np.frombuffer(kept.records, RECORD).copy()
        records["start_ns"] += kept.unix_offset_ns
        by_rank.append((kept.rank, records.tobytes(), kept.ops))
    if missing := [str(rank) for rank, node in enumerate(nodes) if not node]:
        raise ValueError(
            f"ranks {', '.join(missing[:8])} are missing: copy their spans-* files of every host "
            "into one folder"
        )
    return Recorded(SpanTable.of_records(by_rank, layout, nodes))


def _json(data: bytes) -> Any:
    unpacking = zlib.decompressobj()
    try:
        text = unpacking.decompress(data, MAX_BYTES)
        if unpacking.unconsumed_tail:
            raise ValueError(f"the JSON has more than {MAX_BYTES} bytes; record fewer steps")
        if not unpacking.eof:
            raise ValueError("the file is cut; record it again")
        return json.loads(text)
    except (zlib.error, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"no recorded spans (zlib-compressed JSON): {error}") from error


def _rank(number: int, entry: Any) -> tuple[int, bytes, tuple[ops.Op, ...]]:
    try:
        columns = base64.b64decode(entry["columns"], validate=True)
        return number, record.from_columns(columns), ops.load(entry["ops"].encode())
    except (TypeError, KeyError, AttributeError, ValueError, binascii.Error) as error:
        raise ValueError(f"ranks[{number}]: {type(error).__name__}: {error}") from error


def _layout(given: Any, ranks: int) -> RankLayout:
    if not given:
        return RankLayout(dp=max(ranks, 1))
    known = (*AXES, "ep")
    unknown = set(given) - set(known)
    if unknown:
        raise ValueError(f"layout: unknown axes {sorted(unknown)}; known are {', '.join(known)}")
    return RankLayout(**{axis: int(size) for axis, size in given.items()})
