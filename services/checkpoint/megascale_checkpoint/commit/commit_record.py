"""Records of a commit log: their stored form, and the state that a sequence of them adds up to.

Pure, except that records of bounded size are read from storage. A record is JSON with its own
checksum (``xxh3``) and the hash of the previous record's bytes (``previous``), so a changed record
and one from another log are both detected. Structs of msgspec define what each kind of record must
hold; the fields are kept as written, including those of later builds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType

from megascale_checkpoint.checksums import (
    Count,
    Number,
    Time,
    checksum,
    convert,
    dump_record,
    is_count,
    load_record,
    shown,
)
from megascale_checkpoint.storage import Storage, read_bounded
from megascale_common.service.errors import DamagedError, NewerVersionError, RequestError
from megascale_job.restore import RestoreSource

FOLDER = "commits"
VERSION = 2
KINDS = ("OPEN", "COMMIT", "RETIRE", "PIN", "UNPIN", "REPAIR")
KEPT_OPENS = 16  # newest attempts whose OPEN a snapshot holds; older ones are fenced anyway
KEPT_COMMITS = 512  # newest commits that a snapshot holds, apart from the pinned ones

MOST_RANKS = 1 << 20  # of one job
# An OPEN names the node of each rank: 131,072 ranks on as many nodes take 14 MiB with names of 63
# characters, the longest that a node can have.
MAX_RECORD_BYTES = 16 << 20
# A snapshot has KEPT_OPENS of these; of 16,384 nodes they have 2 MiB each.
MAX_SNAPSHOT_BYTES = 64 << 20

Checkpoint = tuple[int, int]  # attempt and step of a commit

_MANIFEST = re.compile(r"attempts/attempt-\d{6,}/step-\d{9,}/manifest\.json")
_Rank = Annotated[int, Meta(ge=0, lt=MOST_RANKS)]
_Pair = tuple[Count, Count]


class _Common(Struct):
    """Fields that any kind of record may have; unknown ones, of later builds, are ignored."""

    time: Time | UnsetType = UNSET
    writer: str = ""
    job: str = ""
    of_attempt: Count = 0


class _OlderPlan(Struct):
    source: RestoreSource
    step: Count
    written_by_attempt: Count
    manifest_uri: str
    manifest_xxh3: str = ""
    older: list[dict[str, Any]] = []
    checked: bool = True


class _RestoredFrom(Struct):
    source: RestoreSource = RestoreSource.NONE
    step: Count = 0
    attempt: Count = 0
    manifest_uri: str = ""
    manifest_xxh3: str = ""
    older: list[_OlderPlan] = []
    passed_over: list[str] = []


class _Retention(Struct):
    keep_latest: Count = 0
    keep_every_steps: Count = 0
    keep_every_hours: Number = 0.0


class _Open(_Common):
    world_size: Annotated[int, Meta(ge=1, le=MOST_RANKS)] = 1
    epoch: _Pair = (0, 0)
    restored_from: _RestoredFrom | UnsetType = UNSET
    load_uri: str = ""
    load_weights: bool = False
    retention: _Retention | UnsetType = UNSET
    held: dict[str, list[tuple[_Rank, _Rank]]] = {}
    by_hand: bool = False

    def __post_init__(self) -> None:
        for runs in self.held.values():
            if any(first > last for first, last in runs):
                raise ValueError("held has a first rank that is above the last")


class _OfCheckpoint(_Common, kw_only=True):
    """RETIRE, PIN and UNPIN name a checkpoint."""

    step: Count
    name: str = ""


class _Commit(_Common, kw_only=True):
    time: Time
    step: Count
    manifest: str
    manifest_xxh3: str
    world_size: Annotated[int, Meta(ge=1, le=MOST_RANKS)] = 1
    size_bytes: Count = 0

    def __post_init__(self) -> None:
        if _MANIFEST.fullmatch(self.manifest) is None:
            raise ValueError(
                f"manifest is {shown(self.manifest)} where the path of a manifest below attempts/ "
                "is needed"
            )


class _Repair(_Common, kw_only=True):
    stands_for: str
    fence: bool


_FORMS: dict[str, type[_Common]] = {
    "OPEN": _Open,
    "COMMIT": _Commit,
    "RETIRE": _OfCheckpoint,
    "PIN": _OfCheckpoint,
    "UNPIN": _OfCheckpoint,
    "REPAIR": _Repair,
}


@dataclass(frozen=True, slots=True)
class Record:
    """One record; ``values`` holds the fields of its kind.

    OPEN opens ``attempt`` and fences all lower ones. COMMIT(step) makes a checkpoint exist, and
    RETIRE ends that. PIN(name) keeps a checkpoint from being retired, until UNPIN. RETIRE, PIN and
    UNPIN name the checkpoint by ``of_attempt`` and ``step``. REPAIR replaces a damaged record.
    """

    seq: int
    kind: str
    attempt: int
    values: dict[str, Any]

    @property
    def step(self) -> int:
        """Step of the checkpoint that the record is about."""
        return int(self.values["step"])

    @property
    def checkpoint(self) -> Checkpoint:
        """Attempt and step of the checkpoint that the record is about."""
        return int(self.values.get("of_attempt", self.attempt)), self.step


def path_of(seq: int) -> str:
    """Path of record ``seq`` below the job's uri."""
    return f"{FOLDER}/{name_of(seq)}"


def name_of(seq: int) -> str:
    """File name of record ``seq``."""
    return f"{seq:012d}.json"


def seq_of(name: str) -> int | None:
    """The number in a record's file name; None for any other file."""
    number = name.removesuffix(".json")
    return int(number) if len(number) == 12 and number.isdecimal() and number != name else None


def encode(values: Mapping[str, Any], seq: int, attempt: int, previous: str) -> bytes:
    """Bytes of a record in the current version; ``previous`` is the hash of the record before."""
    data = dump_record(
        {"version": VERSION, "seq": seq, "attempt": attempt, "previous": previous, **values}
    )
    if len(data) > MAX_RECORD_BYTES:  # no reader would accept it
        raise RequestError(
            f"{path_of(seq)} would have {len(data)} bytes, and records have {MAX_RECORD_BYTES} at "
            "most: give shorter texts, or the ranks to fewer nodes"
        )
    return data


def read(storage: Storage, path: str) -> bytes:
    """The bytes of a record.

    Raises:
        DamagedError: it is larger than a record can be.
        FileNotFoundError: there is none.
    """
    return read_bounded(storage, path, MAX_RECORD_BYTES, path)


def read_state(storage: Storage, path: str) -> LogState:
    """The state in the snapshot ``path``.

    Raises:
        DamagedError: it is not what was written, of another version, or larger than a snapshot.
        FileNotFoundError: there is none.
    """
    return decode_state(read_bounded(storage, path, MAX_SNAPSHOT_BYTES, path), path)


def decode(data: bytes, seq: int, previous: str) -> Record:
    """The inverse of :func:`encode`.

    Raises:
        DamagedError: it is not what was written, or does not follow the record whose hash is
            ``previous``.
        NewerVersionError: a newer build wrote it.
    """
    path = path_of(seq)
    values = load_record(data, path)
    # The next record holds the hash of these bytes, so even one more space counts as damage.
    if not is_as_written(data, values):
        raise DamagedError(path, "its bytes are not those that were written")
    version = values.get("version")
    if type(version) is not int:
        raise DamagedError(path, "has no version")
    if version > VERSION:
        raise NewerVersionError(
            f"{path} is of version {version}, and this build reads up to {VERSION}: "
            "run the newer build on every node"
        )
    if (
        version < VERSION
        or values.get("seq") != seq
        or values.get("kind") not in KINDS
        or not is_count(values.get("attempt"))
    ):
        raise DamagedError(path, f"is not record {seq} of a commit log")
    convert(values, _FORMS[values["kind"]], path)
    if values.get("previous") != previous:
        raise DamagedError(path, "does not follow the record before it: one of them was replaced")
    return Record(seq, values["kind"], values["attempt"], values)


def is_as_written(data: bytes, values: Mapping[str, Any]) -> bool:
    """True if ``data`` is byte for byte how ``values`` are written."""
    return data == dump_record(values)


@dataclass(slots=True)
class LogState:
    """The state after record ``seq``.

    Attributes:
        end: hash of the bytes of record ``seq``.
        previous: hash that record ``seq`` + 1 must name; differs from ``end`` after a REPAIR.
        attempt: the highest attempt seen; lower ones are fenced.
        closed: attempts up to this one can no longer append, because a record was repaired that may
            have been their fence.
        jobs: names of the jobs that have appended; more than one is a mistake in their
            configuration.
        epoch: the highest epoch of a driver that has opened an attempt.
        opens: the newest OPEN records, by attempt.
        live: COMMIT records that are not retired, oldest first.
        last: attempt and step of the newest COMMIT, retired or not.
        pins: name of each pin, by checkpoint.
        older: number of live commits that a snapshot has left out; the whole log has them.
    """

    seq: int = 0
    end: str = ""
    previous: str = ""
    attempt: int = 0
    closed: int = 0
    jobs: list[str] = field(default_factory=list)
    epoch: tuple[int, ...] = (0, 0)
    opens: dict[int, Record] = field(default_factory=dict)
    live: dict[Checkpoint, Record] = field(default_factory=dict)
    last: Checkpoint = (0, 0)
    pins: dict[Checkpoint, str] = field(default_factory=dict)
    older: int = 0

    def apply(self, record: Record, data: bytes) -> None:
        """Add the next record, whose bytes are ``data``."""
        self.seq = record.seq
        self.end = checksum(data)
        self.previous = self.end
        self.attempt = max(self.attempt, record.attempt)
        job = record.values.get("job")
        if job and job not in self.jobs:
            self.jobs.append(job)
        match record.kind:
            case "OPEN":
                self.opens[record.attempt] = record
                self.epoch = max(self.epoch, tuple(record.values.get("epoch", (0, 0))))
                for attempt in list(self.opens)[:-KEPT_OPENS]:
                    del self.opens[attempt]
            case "COMMIT":
                self.live[record.checkpoint] = record
                self.last = record.checkpoint
            case "RETIRE":
                self.live.pop(record.checkpoint, None)
                self.pins.pop(record.checkpoint, None)
            case "PIN":
                self.pins[record.checkpoint] = str(record.values.get("name", ""))
            case "UNPIN":
                self.pins.pop(record.checkpoint, None)
            case "REPAIR":
                # The record after it still names the hash of the record that was replaced.
                self.previous = record.values["stands_for"] or self.previous
                if record.values["fence"]:
                    self.closed = max(self.closed, record.attempt)

    def newest_step(self, attempt: int) -> int:
        """The newest step that ``attempt`` has committed, retired or not; -1 for none.

        Not 0, because an imported model is committed as step 0.
        """
        return self.last[1] if self.last[0] == attempt else -1


def encode_state(state: LogState) -> bytes:
    """Bytes of a snapshot of ``state``; with the records after it, it replaces the whole log."""
    kept = set(list(state.live)[-KEPT_COMMITS:]) | set(state.pins)
    commits = [record for key, record in state.live.items() if key in kept]
    return dump_record(
        {
            "version": VERSION,
            "seq": state.seq,
            "end": state.end,
            "previous": state.previous,
            "attempt": state.attempt,
            "closed": state.closed,
            "jobs": state.jobs,
            "epoch": list(state.epoch),
            "opens": [[r.seq, r.values] for r in state.opens.values()],
            "live": [[r.seq, r.values] for r in commits],
            "last": list(state.last),
            "pins": [[*key, name] for key, name in state.pins.items()],
            "older": state.older + len(state.live) - len(commits),
        }
    )


class _Snapshot(Struct):
    """The stored form of a LogState: records with their numbers, pins as attempt, step, name."""

    seq: Count
    end: str
    previous: str
    attempt: Count
    closed: Count
    jobs: list[str]
    epoch: _Pair
    opens: list[tuple[Count, dict[str, Any]]]
    live: list[tuple[Count, dict[str, Any]]]
    last: _Pair
    pins: list[tuple[Count, Count, str]]
    older: Count


def decode_state(data: bytes, file: str) -> LogState:
    """The inverse of :func:`encode_state`.

    Raises:
        DamagedError: ``file`` is not what was written, or of another version.
    """
    values = load_record(data, file)
    if values.get("version") != VERSION:
        raise DamagedError(file, f"is of version {values.get('version')}; this is {VERSION}")
    snapshot = convert(values, _Snapshot, file)
    opens = [_record(seq, item, file) for seq, item in snapshot.opens]
    live = [_record(seq, item, file) for seq, item in snapshot.live]
    if any(record.kind != "OPEN" for record in opens) or any(
        record.kind != "COMMIT" for record in live
    ):
        raise DamagedError(file, "holds records of another kind")
    return LogState(
        seq=snapshot.seq,
        end=snapshot.end,
        previous=snapshot.previous,
        attempt=snapshot.attempt,
        closed=snapshot.closed,
        jobs=snapshot.jobs,
        epoch=snapshot.epoch,
        opens={record.attempt: record for record in opens},
        live={record.checkpoint: record for record in live},
        last=snapshot.last,
        pins={(attempt, step): name for attempt, step, name in snapshot.pins},
        older=snapshot.older,
    )


class _Stored(Struct):
    attempt: Count
    kind: Annotated[str, Meta(pattern=f"^({'|'.join(KINDS)})$")]


def _record(seq: int, values: dict[str, Any], file: str) -> Record:
    stored = convert(values, _Stored, file)
    convert(values, _FORMS[stored.kind], file)
    return Record(seq, stored.kind, stored.attempt, values)
