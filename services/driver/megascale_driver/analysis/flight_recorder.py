"""Culprits of a hang from NCCL's flight recorder: ranks that did not enter an operation.

On a GPU the host of a rank runs ahead of its device, so a status page shows what was enqueued. The
flight record also has what the device has completed
(:mod:`megascale_common.node.flight_record`). In its first incomplete operation a rank waits for the
members that have not enqueued it. A rank for which others wait, and which waits for no rank, holds
the others up (MegaScale section 5.2; Note [Blame in a hang] in
:mod:`megascale_driver.analysis.progress`).

``python -m megascale_driver.analysis.flight_recorder FOLDER`` reads one file per rank, whose name
ends with the rank (``nccl_trace_rank_12``, optionally with ``.json``). The last line of stdout is
one JSON object. Exit status 0: some ranks are named; 1: none can be; 2: no such files.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from megascale_common.node.flight_record import MAX_DUMP_BYTES, RankRecord, parse

MAX_NAMED: Final = 4
_RANK = re.compile(r"(\d+)(?:\.json)?$")


_Group = tuple[str, range | tuple[int, ...], bool]  # name, members, transfers or collectives


@dataclass(frozen=True, slots=True)
class Missing:
    """An operation that some ranks are inside and others have not entered."""

    group: str
    operation: str
    number: int
    waiting: tuple[int, ...]
    missing: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The ranks that hold the others up, the operations they have not entered, and a sentence."""

    culprits: tuple[int, ...]
    missing: tuple[Missing, ...]
    without_dump: tuple[int, ...]
    sentence: str


def verdict(records: Sequence[RankRecord], world_size: int = 0) -> Verdict:
    """Find the ranks that hold the others up; ``world_size`` 0: all ranks in the records.

    Each group is visited once per operation that members are in, so the time is linear in ranks.
    """
    # The recorder numbers transfers and collectives of a group separately, so both have keys of
    # their own.
    entered: dict[_Group, dict[int, int]] = {}
    inside: dict[tuple[_Group, int], tuple[str, list[int]]] = {}
    for record in records:
        for each in record.groups:
            key = each.group, each.ranks, each.p2p
            entered.setdefault(key, {})[record.rank] = each.entered
            if each.waits_in:
                place = inside.setdefault((key, each.waits_in), (each.operation, []))
                place[1].append(record.rank)
    known = {record.rank for record in records}
    everyone = set(range(world_size)) or known.union(*(ranks for _, ranks, _ in entered))
    absent = everyone - known
    waiting, awaited = set[int](), set[int]()
    found: list[tuple[Missing, set[int]]] = []
    for (key, number), (operation, ranks) in inside.items():
        group, members, _ = key
        behind = {
            rank
            for rank in members or everyone
            if rank in absent or entered[key].get(rank, 0) < number
        }
        if behind:
            waiting.update(ranks)
            awaited |= behind
            waits = Missing(group, operation, number, tuple(sorted(ranks)), tuple(sorted(behind)))
            found.append((waits, behind))
    # A rank without a record can only be waited for, never wait: the silent rank is a culprit.
    culprits = awaited - waiting
    missing = sorted(
        (each for each, behind in found if behind & culprits),
        key=lambda each: (each.group, each.number, each.waiting),
    )
    named = tuple(sorted(culprits))
    return Verdict(named, tuple(missing), tuple(sorted(absent)), _sentence(named, missing, absent))


def _sentence(culprits: Sequence[int], missing: Sequence[Missing], absent: set[int]) -> str:
    if not culprits:
        return "No rank is waited for that waits for none: every operation was entered by all."
    named = _ranks(culprits)
    silent = ", of which no dump came from " + _ranks(sorted(absent)) if absent else ""
    most = max(missing, key=lambda each: len(each.waiting))
    return (
        f"{named} did not enter {most.operation} {most.number} of {most.group}, "
        f"in which {_ranks(most.waiting)} waited{silent}."
    )


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:MAX_NAMED]))
    more = f" and {len(ranks) - MAX_NAMED} more" if len(ranks) > MAX_NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


def read_folder(folder: Path) -> list[RankRecord]:
    """The dumps of a folder; each file name ends with its rank.

    Raises:
        ValueError: there are none, or a file cannot be read; the message names it.
    """
    records = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        named = _RANK.search(path.name)
        if named is None or not path.is_file():
            continue
        with path.open("rb") as file:
            data = file.read(MAX_DUMP_BYTES + 1)
        try:
            records.append(parse(int(named[1]), data))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    if not records:
        raise ValueError(f"{folder}: no file there ends with a rank; give a folder of dumps")
    return records


def main(arguments: list[str] | None = None) -> int:
    """Read a folder and print the verdict; returns the exit status."""
    given = sys.argv[1:] if arguments is None else arguments
    if len(given) != 1:
        print("usage: python -m megascale_driver.analysis.flight_recorder FOLDER", file=sys.stderr)
        return 2
    try:
        found = verdict(read_folder(Path(given[0])))
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    print(found.sentence, file=sys.stderr)
    answer: dict[str, Any] = asdict(found)
    print(json.dumps(answer))
    return 0 if found.culprits else 1


if __name__ == "__main__":
    sys.exit(main())
