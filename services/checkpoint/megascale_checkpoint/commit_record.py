"""Records of a commit log: their stored form, and what a log means that has been read so far.

Pure: no storage and no clock. A record is JSON with its own checksum (``xxh3``) and, from version 2
on, the hash of the bytes of the record before (``previous``), so neither a changed record nor one
of another log goes undetected. Records of version 1 carry no hash of the one before and are read as
they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megascale_checkpoint.checksums import checksum, dump_record, load_record
from megascale_common.service.errors import DamagedError, NewerVersionError

FOLDER = "commits"
VERSION = 2
OLDEST_VERSION = 1
KINDS = ("OPEN", "COMMIT", "RETIRE", "PIN", "UNPIN", "REPAIR")
KEPT_OPENS = 16  # newest attempts whose OPEN a snapshot holds; older ones are fenced anyway
KEPT_COMMITS = 512  # newest commits that a snapshot holds, besides the pinned ones

Checkpoint = tuple[int, int]  # attempt and step of a commit


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
    return dump_record(
        {"version": VERSION, "seq": seq, "attempt": attempt, "previous": previous, **values}
    )


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
    if not isinstance(version, int):
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
        or not isinstance(values.get("attempt"), int)
    ):
        raise DamagedError(path, f"is not record {seq} of a commit log")
    if version > 1 and values.get("previous") != previous:
        raise DamagedError(path, "does not follow the record before it: one of them was replaced")
    return Record(seq, values["kind"], values["attempt"], values)


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
    opens = [_record(*item) for item in values["opens"]]
    live = [_record(*item) for item in values["live"]]
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


def _record(seq: int, values: dict[str, Any]) -> Record:
    return Record(seq, values["kind"], values["attempt"], values)
