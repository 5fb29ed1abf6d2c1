"""Records of a commit log: their stored form, and what a log means that has been read so far.

No clock, and no storage but to read a record of bounded size. A record is JSON with its own
checksum (``xxh3``) and, from version 2 on, the hash of the bytes of the record before
(``previous``), so neither a changed record nor one of another log goes undetected. Records of
version 1 carry no hash of the one before and are read as they are. Fields that are there are
checked; those that a build did not write yet are absent.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megascale_checkpoint.checksums import (
    COUNT,
    NUMBER,
    OBJECT,
    TEXT,
    TIME,
    TRUTH,
    Kind,
    check_fields,
    checksum,
    dump_record,
    list_of,
    load_record,
    object_of,
    whole,
)
from megascale_checkpoint.storage import Storage, read_bounded
from megascale_common.service.errors import DamagedError, NewerVersionError, RequestError
from megascale_job.restore import RestoreSource

FOLDER = "commits"
VERSION = 2
OLDEST_VERSION = 1
KINDS = ("OPEN", "COMMIT", "RETIRE", "PIN", "UNPIN", "REPAIR")
KEPT_OPENS = 16  # newest attempts whose OPEN a snapshot holds; older ones are fenced anyway
KEPT_COMMITS = 512  # newest commits that a snapshot holds, besides the pinned ones

MOST_RANKS = 1 << 20  # of a job, as records name them
# An OPEN names the node of each rank: 131,072 ranks on as many nodes take 14 MiB with names of 63
# characters, which is the longest that nodes have.
MAX_RECORD_BYTES = 16 << 20
# A snapshot has KEPT_OPENS of these; of 16,384 nodes they have 2 MiB each.
MAX_SNAPSHOT_BYTES = 64 << 20

Checkpoint = tuple[int, int]  # attempt and step of a commit

_MANIFEST = re.compile(r"attempts/attempt-\d{6,}/step-\d{9,}/manifest\.json")
_RUN = Kind(
    "a first and a last rank",
    lambda v: (
        isinstance(v, list)
        and len(v) == 2
        and all(type(each) is int for each in v)
        and 0 <= v[0] <= v[1] < MOST_RANKS
    ),
)
_FIELDS: dict[str, Kind] = {
    "time": TIME,
    "writer": TEXT,
    "job": TEXT,
    "world_size": whole(1, MOST_RANKS),
    "size_bytes": COUNT,
    "step": COUNT,
    "of_attempt": COUNT,
    "manifest": Kind(
        "that of a manifest below attempts/",
        lambda v: isinstance(v, str) and _MANIFEST.fullmatch(v) is not None,
    ),
    "manifest_xxh3": TEXT,
    "epoch": Kind(
        "a pair of whole numbers",
        lambda v: isinstance(v, list) and len(v) == 2 and all(map(COUNT.fits, v)),
    ),
    "restored_from": OBJECT,
    "load_uri": TEXT,
    "load_weights": TRUTH,
    "retention": OBJECT,
    "held": object_of(list_of(_RUN)),
    "by_hand": TRUTH,
    "name": TEXT,
    "stands_for": TEXT,
    "fence": TRUTH,
}
_REQUIRED = {
    "COMMIT": ("step", "manifest", "manifest_xxh3", "time"),
    "RETIRE": ("step",),
    "PIN": ("step",),
    "UNPIN": ("step",),
    "REPAIR": ("stands_for", "fence"),
}
_SOURCE = Kind(
    f"one of {', '.join(RestoreSource)}",
    lambda v: isinstance(v, str) and v.lower() in {each.value for each in RestoreSource},
)
_OLDER_FIELDS = {
    "source": _SOURCE,
    "step": COUNT,
    "written_by_attempt": COUNT,
    "manifest_uri": TEXT,
    "manifest_xxh3": TEXT,
    "older": list_of(OBJECT),
    "checked": TRUTH,
}
_RESTORED_FIELDS = {
    "source": _SOURCE,
    "step": COUNT,
    "attempt": COUNT,
    "manifest_uri": TEXT,
    "manifest_xxh3": TEXT,
    "older": list_of(OBJECT),
    "passed_over": list_of(TEXT),
}
_RETENTION_FIELDS = {"keep_latest": COUNT, "keep_every_steps": COUNT, "keep_every_hours": NUMBER}


@dataclass(frozen=True, slots=True)
class Record:
    """One record; ``values`` holds the fields of its kind.

    OPEN opens ``attempt`` and fences the ones below. COMMIT(step) makes a checkpoint exist, RETIRE
    ends that; PIN(name) and UNPIN keep a checkpoint from being retired: these three name it by
    ``of_attempt`` and ``step``. REPAIR stands where a damaged record was.
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
    """The file of record ``seq``, below the job's uri."""
    return f"{FOLDER}/{name_of(seq)}"


def name_of(seq: int) -> str:
    """The file's name of record ``seq``."""
    return f"{seq:012d}.json"


def seq_of(name: str) -> int | None:
    """The inverse of :func:`name_of`; None for a file that is no record."""
    number = name.removesuffix(".json")
    return int(number) if len(number) == 12 and number.isdecimal() and number != name else None


def encode(values: Mapping[str, Any], seq: int, attempt: int, previous: str) -> bytes:
    """Bytes of a record of the present version; ``previous`` is the hash of the record before."""
    data = dump_record(
        {"version": VERSION, "seq": seq, "attempt": attempt, "previous": previous, **values}
    )
    if len(data) > MAX_RECORD_BYTES:  # no reader would take it
        raise RequestError(
            f"{path_of(seq)} would have {len(data)} bytes, and records have {MAX_RECORD_BYTES} at "
            "most: give shorter texts, or the ranks to fewer nodes"
        )
    return data


def read(storage: Storage, path: str) -> bytes:
    """The bytes of a record.

    Raises:
        DamagedError: there are more than a record has.
        FileNotFoundError: there is none.
    """
    return read_bounded(storage, path, MAX_RECORD_BYTES, path)


def read_state(storage: Storage, path: str) -> LogState:
    """The state that the snapshot ``path`` holds.

    Raises:
        DamagedError: it is not what was written, of another version, or larger than any.
        FileNotFoundError: there is none.
    """
    return decode_state(read_bounded(storage, path, MAX_SNAPSHOT_BYTES, path), path)


def decode(data: bytes, seq: int, previous: str) -> Record:
    """The inverse of :func:`encode`.

    Raises:
        DamagedError: it is not what was written, or does not follow the record of hash
            ``previous``.
        NewerVersionError: a newer build wrote it.
    """
    path = path_of(seq)
    values = load_record(data, path)
    # The next record has the hash of these bytes: another blank between two words counts as well.
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
        version < OLDEST_VERSION
        or values.get("seq") != seq
        or values.get("kind") not in KINDS
        or not COUNT.fits(values.get("attempt"))
    ):
        raise DamagedError(path, f"is not record {seq} of a commit log")
    _check_meaning(values, path)
    if version > 1 and values.get("previous") != previous:
        raise DamagedError(path, "does not follow the record before it: one of them was replaced")
    return Record(seq, values["kind"], values["attempt"], values)


def _check_meaning(values: dict[str, Any], file: str) -> None:
    """Raise DamagedError where a field is not what its kind of record has there."""
    check_fields(values, _FIELDS, file, required=_REQUIRED.get(values["kind"], ()))
    if values["kind"] != "OPEN":
        return
    check_fields(values.get("retention", {}), _RETENTION_FIELDS, file, where="retention")
    restored = values.get("restored_from", {})
    check_fields(restored, _RESTORED_FIELDS, file, where="restored_from")
    required = ("source", "step", "written_by_attempt", "manifest_uri")
    for older in restored.get("older", ()):
        where = "restored_from.older"
        check_fields(older, _OLDER_FIELDS, file, required=required, where=where)


def is_as_written(data: bytes, values: Mapping[str, Any]) -> bool:
    """Whether ``data`` is the one form in which ``values`` are written."""
    return data == dump_record(values)


@dataclass(slots=True)
class LogState:
    """What the records up to ``seq`` mean.

    Attributes:
        end: the hash of the bytes of record ``seq``.
        previous: the hash that record ``seq`` + 1 must name; another one behind a REPAIR.
        attempt: the highest attempt seen; lower ones are fenced.
        closed: attempts up to this one may append no more: a record was repaired that may have been
            their fence.
        jobs: names of the jobs that have appended; more than one is a mistake of who configured
            them.
        epoch: the highest of a driver that has opened an attempt.
        opens: the newest OPEN records, by attempt.
        live: COMMIT records that are not retired, oldest first.
        last: attempt and step of the newest COMMIT, retired or not.
        pins: names by pinned checkpoint.
        older: live commits that a snapshot has left out; reading the whole log shows them.
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
        """Take up the next record, whose bytes are ``data``."""
        self.seq, self.end = record.seq, checksum(data)
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
                # The record behind still names the hash of what the repair has replaced.
                self.previous = record.values["stands_for"] or self.previous
                if record.values["fence"]:
                    self.closed = max(self.closed, record.attempt)

    def newest_step(self, attempt: int) -> int:
        """The newest step that ``attempt`` has committed, retired or not; -1 when none.

        An imported model is step 0.
        """
        return self.last[1] if self.last[0] == attempt else -1


def encode_state(state: LogState) -> bytes:
    """Bytes of a snapshot of ``state``: with its tail, the records behind, it is the whole log."""
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


def decode_state(data: bytes, file: str) -> LogState:
    """The inverse of :func:`encode_state`.

    Raises:
        DamagedError: ``file`` is not what was written, or of another version.
    """
    values = load_record(data, file)
    if values.get("version") != VERSION:
        raise DamagedError(file, f"is of version {values.get('version')}; this is {VERSION}")
    check_fields(values, _STATE_FIELDS, file, required=_STATE_FIELDS)
    opens = [_record(seq, item, file) for seq, item in values["opens"]]
    live = [_record(seq, item, file) for seq, item in values["live"]]
    if any(record.kind != "OPEN" for record in opens) or any(
        record.kind != "COMMIT" for record in live
    ):
        raise DamagedError(file, "holds records of another kind")
    return LogState(
        seq=values["seq"],
        end=values["end"],
        previous=values["previous"],
        attempt=values["attempt"],
        closed=values["closed"],
        jobs=values["jobs"],
        epoch=tuple(values["epoch"]),
        opens={record.attempt: record for record in opens},
        live={record.checkpoint: record for record in live},
        last=(values["last"][0], values["last"][1]),
        pins={(attempt, step): name for attempt, step, name in values["pins"]},
        older=values["older"],
    )


def _is_record(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and COUNT.fits(value[0])


def _is_pin(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 3
        and all(map(COUNT.fits, value[:2]))
        and TEXT.fits(value[2])
    )


_STATE_FIELDS: dict[str, Kind] = {
    "seq": COUNT,
    "end": TEXT,
    "previous": TEXT,
    "attempt": COUNT,
    "closed": COUNT,
    "jobs": list_of(TEXT),
    "epoch": _FIELDS["epoch"],
    "opens": list_of(Kind("a record with its number", _is_record)),
    "live": list_of(Kind("a record with its number", _is_record)),
    "last": _FIELDS["epoch"],
    "pins": list_of(Kind("attempt, step and name", _is_pin)),
    "older": COUNT,
}


def _record(seq: int, values: Any, file: str) -> Record:
    check_fields(values, {"attempt": COUNT, "kind": TEXT}, file, required=("attempt", "kind"))
    _check_meaning(values, file)
    return Record(seq, values["kind"], values["attempt"], values)
