"""What NCCL's flight recorder says of a hang: which ranks did not enter which operation.

torch keeps the newest operations of each rank's communicators in memory and dumps them as JSON
(``torch._C._distributed_c10d._dump_nccl_trace_json()``). On a GPU a rank's host is ahead of its
device, so a status page shows what was enqueued; the dump also has what the device has completed.
A rank waits, in its first operation that is not complete, for the members that have not enqueued
it. Who is waited for and waits for nobody holds the others up (MegaScale, section 5.2).

The format is that of versions 2.x (torch/csrc/distributed/c10d/FlightRecorderDetail.hpp).
``python -m megascale_driver.analysis.flight_recorder FOLDER`` reads a file for each rank, whose
name ends with the rank (``nccl_trace_rank_12``, ``.json`` may follow). The last line of stdout is
one JSON object. Exit status 0: some ranks are named; 1: none can be; 2: no such files.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

MAX_DUMP_BYTES: Final = 64 << 20  # of a rank; 2,000 entries with stacks have some 4 MiB
MAX_NAMED: Final = 4
_RANK = re.compile(r"(\d+)(?:\.json)?$")
_VERSION = re.compile(r"2\.\d+")


class Operation(NamedTuple):
    """An operation of a communicator on one rank: its ``number`` there, and what it is."""

    number: int
    name: str
    state: str  # scheduled, started or completed


@dataclass(frozen=True, slots=True)
class RankTrace:
    """A rank's communicators, each with the newest operations in order.

    A key is the communicator's name, its members, and whether its transfers or its collectives are
    counted, which have numbers of their own.
    """

    rank: int
    operations: Mapping[tuple[str, tuple[int, ...], bool], tuple[Operation, ...]]


@dataclass(frozen=True, slots=True)
class Missing:
    """An operation that some ranks are inside of and others have not entered."""

    group: str
    operation: str
    number: int
    waiting: tuple[int, ...]
    missing: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The ranks that hold the others up, what they have not entered, and both in a sentence."""

    culprits: tuple[int, ...]
    missing: tuple[Missing, ...]
    without_dump: tuple[int, ...]
    sentence: str


def parse(rank: int, data: bytes) -> RankTrace:
    """The dump of one rank.

    Raises:
        ValueError: it is too long, no such JSON, or of another version; it says which.
    """
    if len(data) > MAX_DUMP_BYTES:
        raise ValueError(f"the dump of rank {rank} has {len(data)} bytes, {MAX_DUMP_BYTES} at most")
    try:
        found = json.loads(data)
        version = str(found["version"])
        if not _VERSION.fullmatch(version):
            raise ValueError(f"the dump of rank {rank} is of version {version}, not 2.x")
        members = {
            str(name): (str(config["desc"]), tuple(json.loads(config["ranks"] or "[]")))
            for name, config in found["pg_config"].items()
        }
        by_group: dict[tuple[str, tuple[int, ...], bool], list[Operation]] = {}
        for entry in found.get("entries", ()):
            name, desc = (str(each) for each in entry["process_group"])
            is_p2p = bool(entry["is_p2p"])
            number = int(entry["p2p_seq_id" if is_p2p else "collective_seq_id"])
            what = str(entry["profiling_name"]).removeprefix("nccl:")
            known_desc, ranks = members.get(name, (desc, ()))
            one = Operation(number, what, str(entry["state"]))
            by_group.setdefault((known_desc or name, ranks, is_p2p), []).append(one)
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"the dump of rank {rank} is none of torch's: {error!r}") from None
    return RankTrace(rank, {key: tuple(sorted(each)) for key, each in by_group.items()})


def verdict(traces: Sequence[RankTrace], world_size: int = 0) -> Verdict:
    """Who holds the others up; ``world_size`` 0: as many ranks as the dumps name."""
    members = {rank for trace in traces for _, ranks, _ in trace.operations for rank in ranks}
    everyone = set(range(world_size)) or members | {trace.rank for trace in traces}
    absent = everyone - {trace.rank for trace in traces}
    entered: dict[tuple[str, tuple[int, ...], bool], dict[int, int]] = {}
    for trace in traces:
        for key, operations in trace.operations.items():
            entered.setdefault(key, {})[trace.rank] = operations[-1].number
    waits: dict[int, set[int]] = {}
    found: dict[tuple[str, tuple[int, ...], int], tuple[str, set[int], set[int]]] = {}
    for trace in traces:
        for key, operations in trace.operations.items():
            first = next((each for each in operations if each.state != "completed"), None)
            if first is None:
                continue
            group, ranks, _ = key
            behind = {
                rank
                for rank in ranks or everyone
                if rank not in absent and entered[key].get(rank, 0) < first.number
            }
            behind |= absent & set(ranks or everyone)
            if behind:
                waits.setdefault(trace.rank, set()).update(behind)
                place = (group, ranks, first.number)
                _, waiting, late = found.setdefault(place, (first.name, set(), set()))
                waiting.add(trace.rank)
                late |= behind
    awaited = set[int]().union(*waits.values())
    # A rank without a dump is waited for and says nothing: it is the silent one.
    culprits = tuple(sorted(awaited - waits.keys()))
    missing = tuple(
        Missing(group, name, number, tuple(sorted(waiting)), tuple(sorted(behind)))
        for (group, _, number), (name, waiting, behind) in sorted(found.items())
        if behind & set(culprits)
    )
    sentence = _sentence(culprits, missing, absent)
    return Verdict(culprits, missing, tuple(sorted(absent)), sentence)


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


def read_folder(folder: Path) -> list[RankTrace]:
    """The dumps of a folder, by the rank at the end of each name.

    Raises:
        ValueError: there are none, or one cannot be read; it says which.
    """
    traces = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        named = _RANK.search(path.name)
        if named is None or not path.is_file():
            continue
        with path.open("rb") as file:
            data = file.read(MAX_DUMP_BYTES + 1)
        try:
            traces.append(parse(int(named[1]), data))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    if not traces:
        raise ValueError(f"{folder}: no file there ends with a rank; give a folder of dumps")
    return traces


def main(arguments: list[str] | None = None) -> int:
    """Read a folder, print the verdict; returns the exit status."""
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
