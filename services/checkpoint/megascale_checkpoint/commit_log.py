"""The commit log of a job: which attempts were opened and which checkpoints exist.

Records are files ``commits/{seq:012d}.json`` beside the checkpoints, numbered from 1, created only
if absent and never changed. OPEN(attempt) fences all earlier attempts: a writer appends under the
next free number only after it has read every record below it. If a later OPEN takes that number
first, the create fails, and the writer reads the OPEN and stops as superseded. Create-if-absent of
the storage is the only primitive: no lock, no lease, no clock. The log therefore survives the loss
of etcd and a copy of the whole folder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megascale_checkpoint import manifest as manifests
from megascale_checkpoint.checksums import dump_record, load_record
from megascale_checkpoint.storage import Storage
from megascale_common.service.errors import (
    DamagedError,
    DataLossError,
    SupersededError,
)

FOLDER = "commits"
VERSION = 1
MAX_LOST_RACES = 100  # another writer appended each time; more than this is a defect


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
    """One job's log as read so far; it only grows. Calls block; not for concurrent callers."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._next = 1
        self.records: list[Record] = []
        self.damaged: list[DamagedError] = []

    def refresh(self) -> None:
        """Read the records that were appended since the last call.

        A record that was damaged after it was written is skipped and kept in ``damaged``.

        Raises:
            ServiceError: a record was removed. It may have been a fence, so nothing may be
                appended.
            OSError: the storage does not answer.
        """
        # Reading by number stops at the first missing file, so a gap would hide every later record,
        # a fence among them: the listing rules gaps out before anything is read.
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
                # Its number is taken all the same: the next append goes behind it.
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
        """Append OPEN(attempt) with the fields that ``decide`` returns.

        ``decide`` is called again whenever the log has grown in the meantime. An attempt that was
        opened before keeps its record, which is returned.

        Raises:
            SupersededError: a later attempt has been opened.
        """

        def make() -> dict[str, Any] | Record:
            return self.find_open(attempt) or {**decide(), "kind": "OPEN"}

        return self._append(attempt, make)

    def append_commit(self, attempt: int, step: int, fields: dict[str, Any]) -> Record:
        """Append COMMIT(attempt, step), or return the record of an earlier commit of the step.

        Raises:
            SupersededError: a later attempt has been opened, or a later step of this one is
                committed.
            ServiceError: the attempt was never opened.
        """

        def make() -> dict[str, Any] | Record:
            found = self.find_commit(attempt, step)
            if found is not None:
                return found
            if self.find_open(attempt) is None:
                raise DataLossError(
                    f"attempt {attempt} was never opened in this log: call OpenAttempt first"
                )
            # Readers take the last COMMIT as the newest state, so steps must not go backwards.
            newest = max((r.step for r in self.commits() if r.attempt == attempt), default=0)
            if newest > step:
                raise SupersededError(
                    f"step {step} comes too late: step {newest} of attempt {attempt} is committed"
                )
            return {**fields, "kind": "COMMIT", "step": step}

        return self._append(attempt, make)

    def _append(self, attempt: int, make: Callable[[], dict[str, Any] | Record]) -> Record:
        for _ in range(MAX_LOST_RACES):
            # The order is what fences: read to the end of the log, check for a later attempt, then
            # create the next number. An OPEN that lands in between takes that number, the create
            # fails, and the next round reads it.
            self.refresh()
            latest = max((record.attempt for record in self.records), default=0)
            if latest > attempt:
                raise SupersededError(
                    f"attempt {attempt} is superseded: attempt {latest} has been opened in "
                    f"{self._storage.uri}"
                )
            made = make()
            if isinstance(made, Record):  # appended before, by this writer or another
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
                # Decoded from the bytes, so that the writer holds what every reader will.
                record = _decode(dump_record(values), path, self._next)
                self.records.append(record)
                self._next += 1
                return record
        raise DataLossError(
            f"given up after losing {MAX_LOST_RACES} races for the end of "
            f"{self._storage.uri}/{FOLDER}"
        )

    def _check_contiguous(self) -> None:
        names = self._storage.names(FOLDER)
        for seq, name in enumerate(names, start=1):
            if name != f"{seq:012d}.json":
                raise DataLossError(
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
