"""The commit log of a job: which attempts were opened and which checkpoints exist. It lies beside
the checkpoints.

Records are files ``commits/{seq:012d}.json``, numbered from 1, created only if absent and never
changed. OPEN(attempt)
fences all earlier attempts: a COMMIT is appended under the next free number only after every record
below it has been read, so if a later OPEN took that number the writer loses the race, reads it, and
knows that it is superseded. No lock, lease or clock takes part; losing etcd or copying the folder
loses nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megascale_checkpoint import manifest as manifests
from megascale_checkpoint.checksums import dump_record, load_record
from megascale_checkpoint.errors import CheckpointError, DamagedError, SupersededError
from megascale_checkpoint.storage import Storage

FOLDER = "commits"
VERSION = 1
MAX_LOST_RACES = 100  # each means that somebody else appended; more is a defect, not contention


@dataclass(frozen=True, slots=True)
class Record:
    """One record; ``values`` holds the fields of its kind (OPEN or COMMIT)."""

    seq: int
    kind: str
    attempt: int
    values: dict[str, Any]

    @property
    def step(self) -> int:
        """Step of a COMMIT."""
        return int(self.values["step"])


class CommitLog:
    """A view of one job's log that only ever grows. Calls block; one caller at a time."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._next = 1
        self.records: list[Record] = []
        self.damaged: list[DamagedError] = []

    def refresh(self) -> None:
        """Read the records that were appended since the last call.

        A record that was damaged after it was written is passed over and kept in ``damaged``.

        Raises:
            CheckpointError: a record was removed: what stood in it is unknown, so nothing may be
                appended.
            OSError: the storage does not answer.
        """
        if self._next == 1:
            self._check_contiguous()
        while True:
            path = _path(self._next)
            try:
                data = self._storage.read(path)
            except FileNotFoundError:
                return
            try:
                self.records.append(_decode(data, path, self._next))
            except DamagedError as error:
                self.damaged.append(error)
            self._next += 1

    def commits(self) -> list[Record]:
        """COMMIT records, newest first."""
        return [record for record in reversed(self.records) if record.kind == "COMMIT"]

    def find_open(self, attempt: int) -> Record | None:
        """The OPEN record of an attempt."""
        return next((r for r in self.records if r.kind == "OPEN" and r.attempt == attempt), None)

    def find_commit(self, attempt: int, step: int) -> Record | None:
        """The COMMIT record of a checkpoint."""
        return next((r for r in self.commits() if (r.attempt, r.step) == (attempt, step)), None)

    def append_open(self, attempt: int, decide: Callable[[], dict[str, Any]]) -> Record:
        """OPEN(attempt) with the fields that ``decide`` returns, called anew whenever the log has
        grown meanwhile.

        The record that is there already when the attempt was opened before.

        Raises:
            SupersededError: a later attempt has been opened.
        """

        def make() -> dict[str, Any] | Record:
            return self.find_open(attempt) or {**decide(), "kind": "OPEN"}

        return self._append(attempt, make)

    def append_commit(self, attempt: int, step: int, fields: dict[str, Any]) -> Record:
        """COMMIT(attempt, step); the record that is there already when it was committed before.

        Raises:
            SupersededError: a later attempt has been opened, or a later step of this one is
                committed.
            CheckpointError: the attempt was never opened.
        """

        def make() -> dict[str, Any] | Record:
            found = self.find_commit(attempt, step)
            if found is not None:
                return found
            if self.find_open(attempt) is None:
                raise CheckpointError(
                    f"attempt {attempt} was never opened in this log: call OpenAttempt first"
                )
            newest = max((r.step for r in self.commits() if r.attempt == attempt), default=0)
            if newest > step:
                raise SupersededError(
                    f"step {step} comes too late: step {newest} of attempt {attempt} is committed"
                )
            return {**fields, "kind": "COMMIT", "step": step}

        return self._append(attempt, make)

    def _append(self, attempt: int, make: Callable[[], dict[str, Any] | Record]) -> Record:
        for _ in range(MAX_LOST_RACES):
            self.refresh()
            latest = max((record.attempt for record in self.records), default=0)
            if latest > attempt:
                raise SupersededError(
                    f"attempt {attempt} is superseded: attempt {latest} has been opened in {self._storage.uri}"
                )
            made = make()
            if isinstance(made, Record):
                return made
            values = {
                "version": VERSION,
                "seq": self._next,
                "attempt": attempt,
                "time": manifests.now(),
                **made,
            }
            path = _path(self._next)
            if self._storage.create(path, dump_record(values)):
                record = _decode(dump_record(values), path, self._next)
                self.records.append(record)
                self._next += 1
                return record
        raise CheckpointError(
            f"gave up after losing {MAX_LOST_RACES} races for the end of {self._storage.uri}/{FOLDER}"
        )

    def _check_contiguous(self) -> None:
        names = self._storage.names(FOLDER)
        for seq, name in enumerate(names, start=1):
            if name != f"{seq:012d}.json":
                raise CheckpointError(
                    f"{self._storage.uri}/{_path(seq)} is missing although later records exist: "
                    "restore it from a backup, or start in a new folder"
                )


def _path(seq: int) -> str:
    return f"{FOLDER}/{seq:012d}.json"


def _decode(data: bytes, path: str, seq: int) -> Record:
    values = load_record(data, path)
    if (
        values.get("version") != VERSION
        or values.get("seq") != seq
        or values.get("kind") not in ("OPEN", "COMMIT")
    ):
        raise DamagedError(path, f"is not record {seq} of a log of version {VERSION}")
    return Record(seq, values["kind"], int(values["attempt"]), values)
