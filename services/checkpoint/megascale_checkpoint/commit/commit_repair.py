"""Repairs a commit log in which records are damaged or missing.

A record in which one bit has flipped is restored, because its checksum shows which bit; so is one
that a snapshot still holds. Any other is replaced by a REPAIR, which states what is known of the
lost record. If the lost record may have been the OPEN of a later attempt, the REPAIR also closes
the log for the attempts so far (see Note [Commit log fence]). Damaged bytes are kept in
``damaged/``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megascale_checkpoint.checksums import checksum, dump_record, load_record
from megascale_checkpoint.commit import commit_record as records
from megascale_checkpoint.commit import manifest as manifests
from megascale_checkpoint.commit.commit_log import DAMAGED, SNAPSHOTS, kept_damaged
from megascale_checkpoint.commit.commit_record import LogState
from megascale_checkpoint.storage import Storage, settle
from megascale_common.service.errors import DamagedError, DataLossError
from megascale_job.visible import counted

MOST_REPAIRS = 1000  # more means that this is not a damaged log but another folder
LONGEST_RECORD_BYTES = 1 << 14  # longest record in which each bit is tried


@dataclass(frozen=True, slots=True)
class Repair:
    """The repair of one record.

    Attributes:
        problem: what is wrong with it.
        damaged: its present bytes; None if it is missing.
        data: its bytes after the repair.
        restored: True if these are the original bytes, False if they are a REPAIR.
        fence: True if the attempts so far can no longer append.
    """

    seq: int
    problem: str
    damaged: bytes | None
    data: bytes
    restored: bool
    fence: bool

    @property
    def kept(self) -> str:
        """Path at which the damaged bytes are kept; "" if there are none."""
        if self.damaged is None:
            return ""
        return f"{DAMAGED}/{self.seq:012d}-{checksum(self.damaged)[:16]}.json"


def plan(storage: Storage) -> list[Repair]:
    """The repairs that the log needs, in order. Reads every record; changes nothing.

    Raises:
        DataLossError: a newer build wrote the log, or more records are missing than can be
            replaced.
        OSError: the storage does not answer.
    """
    numbers = [seq for seq in map(records.seq_of, storage.names(records.FOLDER)) if seq]
    kept = kept_damaged(storage)  # a repair that was interrupted has kept them already
    highest = max([*numbers, *kept], default=0)
    if highest - len(numbers) > MOST_REPAIRS:
        raise DataLossError(
            f"{storage.uri}: of {counted(highest, 'record')} only {len(numbers)} are there: "
            "restore the folder from a backup, or start in a new one"
        )
    snapshots = _from_snapshots(storage)
    state, found = LogState(), []
    data, behind = _read(storage, 1), _read(storage, 2)
    for seq in range(1, highest + 1):
        further = _read(storage, seq + 2)
        next_is_wrong = _previous(further) not in ("", checksum(behind or b""))
        bytes_before = data
        if data is None and seq in kept:
            bytes_before = records.read(storage, kept[seq])
        repair = _repair_of(
            state, seq, data, bytes_before, _values(behind), next_is_wrong, snapshots.get(seq)
        )
        if repair is not None:
            found.append(repair)
        now = repair.data if repair is not None else data
        assert now is not None
        state.apply(records.decode(now, seq, state.previous), now)
        data, behind = behind, further
    return found


def carry_out(storage: Storage, repairs: list[Repair]) -> None:
    """Keep the damaged bytes aside, and write the planned records in their place.

    Can be called again after an interruption, with a new plan.

    Raises:
        DataLossError: the log has changed since it was planned.
        OSError: the storage does not answer.
    """
    for repair in repairs:
        path = records.path_of(repair.seq)
        if _read(storage, repair.seq) != repair.damaged:
            raise DataLossError(f"{storage.uri}/{path} has changed meanwhile: look at it again")
        if repair.damaged is not None:
            # Order: the copy is durable before the original goes, so no crash loses both.
            settle(storage, repair.kept, repair.damaged)
            storage.delete(path)
        if not settle(storage, path, repair.data):
            raise DataLossError(f"{storage.uri}/{path} has changed meanwhile: look at it again")


def _repair_of(
    state: LogState,
    seq: int,
    data: bytes | None,
    known: bytes | None,
    behind: dict[str, Any] | None,
    next_is_wrong: bool,
    in_snapshot: dict[str, Any] | None,
) -> Repair | None:
    """The repair of record ``seq``; None if it is whole.

    Args:
        known: its bytes, or those that an interrupted repair has kept aside.
        behind: the record after it, if that one's own checksum is right.
        next_is_wrong: True if the record after that does not follow it.
    """
    wanted = behind.get("previous", "") if behind is not None else ""
    problem, record = "is missing", None
    if data is not None:
        try:
            record = records.decode(data, seq, state.previous)
            if record.kind == "REPAIR" or wanted in ("", checksum(data)):
                return None
            problem = "is not the record that the next one follows"
        except DamagedError as error:
            problem = error.problem
    for candidate in _candidates(known, in_snapshot):
        if _is_record(candidate, seq, state.previous, wanted):
            return Repair(seq, problem, data, candidate, restored=True, fence=False)
    if record is not None and next_is_wrong:
        return None  # whole: the damage is in the next record, which is repaired in its turn
    # Attempts never decrease in a log: if the next record is of the same attempt, the lost one
    # cannot have opened a later attempt, and no fence is lost.
    fence = behind is None or behind.get("attempt") != state.attempt
    values = {
        "kind": "REPAIR",
        "time": manifests.now(),
        "problem": problem,
        "damaged_xxh3": checksum(data) if data is not None else "",
        "stands_for": wanted,
        "fence": fence,
    }
    repaired = records.encode(values, seq, state.attempt, state.previous)
    return Repair(seq, problem, data, repaired, restored=False, fence=fence)


def _candidates(data: bytes | None, in_snapshot: dict[str, Any] | None) -> Iterator[bytes]:
    """Candidates for the original bytes: from a snapshot, reformatted, or with one bit flipped."""
    if in_snapshot is not None:
        yield dump_record(in_snapshot)
    if data is None:
        return
    values = _values(data)
    if values is not None:
        yield dump_record(values)
    elif len(data) <= LONGEST_RECORD_BYTES:
        for bit in range(8 * len(data)):
            flipped = bytearray(data)
            flipped[bit // 8] ^= 1 << bit % 8
            yield bytes(flipped)


def _is_record(data: bytes, seq: int, previous: str, wanted: str) -> bool:
    if wanted and checksum(data) != wanted:
        return False
    try:
        records.decode(data, seq, previous)
    except DamagedError:
        return False
    return True


def _from_snapshots(storage: Storage) -> dict[int, dict[str, Any]]:
    """Fields of the records that snapshots hold, by number."""
    held: dict[int, dict[str, Any]] = {}
    for name in storage.names(SNAPSHOTS):
        path = f"{SNAPSHOTS}/{name}"
        try:
            state = records.read_state(storage, path)
        except DamagedError:
            continue
        for record in [*state.opens.values(), *state.live.values()]:
            held[record.seq] = record.values
    return held


def _previous(data: bytes | None) -> str:
    """The hash that a record names for the one before it; "" if that is not known."""
    return str((_values(data) or {}).get("previous", ""))


def _values(data: bytes | None) -> dict[str, Any] | None:
    """Fields of a record, or None if its own checksum is wrong."""
    if data is None:
        return None
    try:
        return load_record(data, "")
    except DamagedError:
        return None


def _read(storage: Storage, seq: int) -> bytes | None:
    try:
        return records.read(storage, records.path_of(seq))
    except FileNotFoundError:
        return None
    except DamagedError as error:  # too large to keep aside
        raise DamagedError(error.file, f"{error.problem}: move it elsewhere, and repeat") from error
