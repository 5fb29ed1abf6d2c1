"""Reads a rank's dump of NCCL's flight recorder: its position in each communicator. Pure.

torch keeps the newest operations of each communicator in memory and dumps them as JSON
(``torch._C._distributed_c10d._dump_nccl_trace_json()``), some megabytes per rank. The agent reads
the dump on the node and sends only the positions, from which the driver finds out which ranks wait
for which. The format is that of versions 2.x
(torch/csrc/distributed/c10d/FlightRecorderDetail.hpp).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

MAX_DUMP_BYTES = 64 << 20  # of a rank; 2,000 entries with stacks have about 4 MiB
_VERSION = re.compile(r"2\.\d+")
_COMPLETED = "completed"
_UNDESCRIBED = ("", "undefined")  # several groups share these descriptions


class GroupRecord(NamedTuple):
    """A rank's position in the transfers, or in the collectives, of one communicator.

    Args:
        group: name of the communicator.
        ranks: its members, ascending; empty if unknown. Evenly spaced ones are a range.
        p2p: true for its transfers, which are numbered separately from its collectives.
        entered: number of the newest operation that the rank's host has enqueued.
        waits_in: number of the first operation that its device has not completed; 0 if none.
        operation: name of that operation.
    """

    group: str
    ranks: range | tuple[int, ...]
    p2p: bool
    entered: int
    waits_in: int = 0
    operation: str = ""


@dataclass(frozen=True, slots=True)
class RankRecord:
    """A rank's positions in all of its communicators."""

    rank: int
    groups: tuple[GroupRecord, ...]


def parse(rank: int, data: bytes) -> RankRecord:
    """The dump of one rank.

    Raises:
        ValueError: it is too long, not such JSON, or of another version; the text says which.
    """
    if len(data) > MAX_DUMP_BYTES:
        raise ValueError(f"the dump of rank {rank} has {len(data)} bytes, {MAX_DUMP_BYTES} at most")
    try:
        found = json.loads(data)
        version = str(found["version"])
        if not _VERSION.fullmatch(version):
            raise ValueError(f"the dump of rank {rank} is of version {version}, not 2.x")
        members = {
            str(name): (str(config["desc"]), _ranks(json.loads(config["ranks"] or "[]")))
            for name, config in found["pg_config"].items()
        }
        by_group: dict[tuple[str, range | tuple[int, ...], bool], list[tuple[int, str, str]]] = {}
        for entry in found.get("entries", ()):
            name, desc = (str(each) for each in entry["process_group"])
            is_p2p = bool(entry["is_p2p"])
            number = int(entry["p2p_seq_id" if is_p2p else "collective_seq_id"])
            what = str(entry["profiling_name"]).removeprefix("nccl:")
            known_desc, ranks = members.get(name, (desc, ()))
            key = name if known_desc in _UNDESCRIBED else known_desc, ranks, is_p2p
            by_group.setdefault(key, []).append((number, what, str(entry["state"])))
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"the dump of rank {rank} is none of torch's: {error!r}") from None
    return RankRecord(rank, tuple(_record(*key, each) for key, each in by_group.items()))


def _record(
    group: str,
    ranks: range | tuple[int, ...],
    p2p: bool,
    operations: list[tuple[int, str, str]],
) -> GroupRecord:
    open_ones: list[Any] = sorted(each for each in operations if each[2] != _COMPLETED)
    number, what, _ = open_ones[0] if open_ones else (0, "", "")
    entered = max(each[0] for each in operations)
    return GroupRecord(group, ranks, p2p, entered, number, what)


def _ranks(given: Sequence[int]) -> range | tuple[int, ...]:
    """Sorted ranks; a range if they are evenly spaced, as those of a layout's axes always are."""
    ranks = sorted(int(rank) for rank in given)
    if not ranks:
        return ()
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    spaced = range(ranks[0], ranks[-1] + 1, step) if step > 0 else range(0)
    return spaced if list(spaced) == ranks else tuple(ranks)
