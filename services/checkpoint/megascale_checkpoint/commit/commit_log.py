"""The commit log of a job: which attempts were opened and which checkpoints exist.

Records are files ``commits/{seq:012d}.json`` next to the checkpoints, numbered from 1. Every
SNAPSHOT_EVERY records, the state that they add up to is written to ``snapshots/{seq:012d}.json``;
opening a log of any length reads the newest snapshot and the records after it. A daemon reads and
appends through one :class:`LogWriter` per log, which runs its calls one after the other.

Note [Commit log fence]
~~~~~~~~~~~~~~~~~~~~~~~
OPEN(attempt) fences all earlier attempts, and COMMIT(step) makes a checkpoint exist: files that no
COMMIT names are no checkpoint, however complete they look. A writer first reads the log to its end
and checks that no later attempt is open, then creates the record with the next number, only if that
name is free. If a later OPEN takes the number in between, the create fails; the writer reads the
OPEN and stops as superseded. Create-if-absent is therefore all that the storage has to offer: no
lock, no lease, no clock. The log survives the loss of etcd and a copy of the whole folder, and two
daemons may both believe that they are the committer.

A record that is damaged or missing may have been a fence, so it counts as one: nothing after it is
read, and nothing is appended until ``megascale checkpoint repair`` has put a REPAIR in its place.

Note [Fenced append]
~~~~~~~~~~~~~~~~~~~~
A create that raises may have succeeded: the reply can be lost after the storage has acted. To treat
it as failed could append the record twice, to treat it as done could report a checkpoint that does
not exist. So the writer keeps number and bytes, and before it appends anything else it creates the
identical bytes again (:meth:`CommitLog.settle`). Every writer puts a random name of its own into
its records, so bytes that are equal to its own can only be its own: the lost reply was a success.
Other bytes mean that another writer has the number. A read alone could not decide this, because the
first create may still be on its way.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from megascale_checkpoint.checksums import checksum
from megascale_checkpoint.commit import commit_record as records
from megascale_checkpoint.commit import manifest as manifests
from megascale_checkpoint.commit.commit_record import LogState, Record
from megascale_checkpoint.concurrency import Lane
from megascale_checkpoint.storage import Storage, open_storage, settle
from megascale_common.service import logs
from megascale_common.service.errors import (
    DamagedError,
    DataLossError,
    SupersededError,
)

__all__ = ["CommitLog", "Record"]

SNAPSHOTS = "snapshots"
DAMAGED = "damaged"  # what a repair keeps: {seq:012d}-{hash}.json
SNAPSHOT_EVERY = 256
KEPT_SNAPSHOTS = 2  # the one before serves when the newest is damaged
MAX_LOST_RACES = 100  # times that another writer appended first; more is a defect
Make = Callable[[], dict[str, Any] | Record]

log = logs.get("commit-log")


@dataclass(slots=True)
class _Unsettled:
    """An append of unknown outcome, settled before the next one: see Note [Fenced append]."""

    seq: int
    data: bytes


def kept_damaged(storage: Storage) -> dict[int, str]:
    """Files with the bytes of records that were, or were about to be, repaired, by number."""
    names = storage.names(DAMAGED)
    numbers = [records.seq_of(f"{name[:12]}.json") for name in names]
    return {seq: f"{DAMAGED}/{name}" for seq, name in zip(numbers, names, strict=True) if seq}


class CommitLog:
    """One job's log as read so far; it only grows. Calls block; not for concurrent callers.

    Attributes:
        state: the state that the records read so far add up to.
        records: the records read one by one: all after the snapshot that reading began with.
        damaged: the damaged or missing record at which reading has stopped, if there is one.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._begun = False
        self._highest = 0  # number of the last record in the listings
        self._snapshot = 0  # number of the last record in the newest snapshot
        self._unsettled: _Unsettled | None = None
        # The newest record where another writer wrote it: it may not be durable yet.
        self._unconfirmed: tuple[str, bytes] | None = None
        self._writer = uuid.uuid4().hex
        self.state = LogState()
        self.records: list[Record] = []
        self.damaged: list[DamagedError] = []

    @property
    def uri(self) -> str:
        """The job's uri, below which the log lies."""
        return self._storage.uri

    def refresh(self, *, whole: bool = False) -> None:
        """Read the records that were appended since the last call.

        Reading stops before a record that is damaged or missing, which is kept in ``damaged``.

        Args:
            whole: on the first call, read every record and no snapshot.

        Raises:
            NewerVersionError: a newer build has appended.
            OSError: the storage does not answer.
        """
        self.settle()
        if self.damaged:
            return
        if not self._begun:
            self._begin(whole)
        while not self.damaged:
            seq = self.state.seq + 1
            try:
                data = records.read(self._storage, records.path_of(seq))
            except DamagedError as error:
                self.damaged.append(error)
                return
            except FileNotFoundError:
                if seq <= self._highest:
                    problem = "is missing although later records exist"
                    self.damaged.append(DamagedError(records.path_of(seq), problem))
                return
            self._take(seq, data)
            # An earlier record needs no confirmation: the writer of this one has confirmed it.
            self._unconfirmed = (records.path_of(seq), data)

    @property
    def settled(self) -> bool:
        """True if no append of unknown outcome is left."""
        return self._unsettled is None

    def settle(self) -> bool:
        """Find out whether the append of unknown outcome succeeded; if so, apply its record.

        See Note [Fenced append]. Returns True if there was one and its record is in the log.

        Raises:
            OSError: its outcome is still unknown.
        """
        unsettled = self._unsettled
        if unsettled is None:
            return False
        stands = settle(self._storage, records.path_of(unsettled.seq), unsettled.data)
        self._unsettled = None
        if not stands:
            return False
        self._take(unsettled.seq, unsettled.data)
        self._unconfirmed = None
        if self.state.seq - self._snapshot >= SNAPSHOT_EVERY:
            self._write_snapshot()
        return True

    def refuse_damaged(self) -> None:
        """Raise DamagedError, with the remedy, if reading has stopped at a damaged record."""
        for error in self.damaged:
            problem = (
                f"{error.problem}; nothing is appended after it: look at it with "
                f"`megascale checkpoint repair {self._storage.uri}`"
            )
            raise DamagedError(f"{self._storage.uri}/{error.file}", problem)

    def commits(self) -> list[Record]:
        """COMMIT records that are not retired, newest first."""
        return list(reversed(self.state.live.values()))

    def pins(self) -> dict[records.Checkpoint, str]:
        """Names of the pinned checkpoints, by attempt and step."""
        return dict(self.state.pins)

    def find_open(self, attempt: int) -> Record | None:
        """The OPEN record of an attempt; None unless it is one of the newest KEPT_OPENS."""
        return self.state.opens.get(attempt)

    def find_commit(self, attempt: int, step: int) -> Record | None:
        """The COMMIT record of a checkpoint that is not retired."""
        return self.state.live.get((attempt, step))

    def append_open(self, attempt: int, decide: Callable[[], dict[str, Any]]) -> Record:
        """Append OPEN(attempt) with the fields that ``decide`` returns.

        ``decide`` is called again whenever another record was appended in the meantime. An attempt
        that was opened before keeps its record, which is returned.

        Raises:
            SupersededError: a later attempt has been opened.
            DamagedError: the log is damaged.
        """

        def make() -> dict[str, Any] | Record:
            return self.find_open(attempt) or {**decide(), "kind": "OPEN"}

        return self.append(attempt, make)

    def append_next_open(self, decide: Callable[[], dict[str, Any]]) -> Record:
        """Append OPEN of the attempt that follows the newest one at that moment.

        The attempt gets its number with the record, by create-if-absent: of two runs that start at
        the same time one creates its record first, and the other becomes the attempt after it.

        Raises:
            DamagedError: the log is damaged.
        """
        for _ in range(MAX_LOST_RACES):
            self.refresh()
            self.refuse_damaged()
            self._confirm_end()
            # Above `closed` too: attempts up to it can no longer append.
            attempt = max(self.state.attempt, self.state.closed) + 1
            record = self._create(attempt, {**decide(), "kind": "OPEN"})
            if record is not None:
                return record
        raise self._lost_races()

    def append_commit(self, attempt: int, step: int, fields: dict[str, Any]) -> Record:
        """Append COMMIT(attempt, step), or return the record of an earlier commit of the step.

        Raises:
            SupersededError: a later attempt has been opened, or a later step of this one is
                committed.
            DamagedError: the log is damaged.
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
            # Readers take the last COMMIT as the newest state, so its step must be the highest.
            newest = self.state.newest_step(attempt)
            if newest >= step:
                raise SupersededError(
                    f"step {step} comes too late: step {newest} of attempt {attempt} is committed"
                )
            return {**fields, "kind": "COMMIT", "step": step}

        return self.append(attempt, make)

    def append(self, attempt: int | None, make: Make) -> Record:
        """Append the record whose kind and fields ``make`` returns.

        ``make`` is called with the log read to its end, and again whenever another writer has
        appended first, so whatever it checks still holds when the record is created. It returns a
        Record if an existing one will do.

        Args:
            attempt: the attempt that writes the record; None for an administrator, who is never
                fenced.

        Raises:
            SupersededError: a later attempt has been opened.
            DamagedError: the log is damaged; nothing is appended until it is repaired.
            OSError: the storage does not answer. The outcome can be unknown; the next call settles
                it first.
        """
        for _ in range(MAX_LOST_RACES):
            # This order is the fence (Note [Commit log fence]): read to the end, check for a later
            # attempt, create the next number. An OPEN that comes in between takes that number, the
            # create fails, and the next round reads it.
            self.refresh()
            self.refuse_damaged()
            self._confirm_end()
            if attempt is not None:
                self._refuse_fenced(attempt)
            made = make()
            if isinstance(made, Record):  # appended before, by this writer or another
                return made
            record = self._create(self.state.attempt if attempt is None else attempt, made)
            if record is not None:
                return record
        raise self._lost_races()

    def _lost_races(self) -> DataLossError:
        return DataLossError(
            f"given up after losing {MAX_LOST_RACES} races for the end of "
            f"{self._storage.uri}/{records.FOLDER}"
        )

    def _create(self, attempt: int, made: dict[str, Any]) -> Record | None:
        """Create the next record; None if another writer has taken its number."""
        seq = self.state.seq + 1
        # The writer's name makes these bytes unique: see Note [Fenced append].
        values = {"time": manifests.now(), "writer": self._writer, **made}
        self._unsettled = _Unsettled(seq, records.encode(values, seq, attempt, self.state.previous))
        return self.records[-1] if self.settle() else None

    def _take(self, seq: int, data: bytes) -> None:
        try:
            record = records.decode(data, seq, self.state.previous)
        except DamagedError as error:
            self.damaged.append(error)
            return
        self.records.append(record)
        self.state.apply(record, data)

    def _confirm_end(self) -> None:
        """Make the last record durable before the next one, or an answer, builds on it."""
        # Another writer wrote it and may have been killed between write and sync: we can read it
        # now, and after a crash of the host it could be gone while our record refers to it.
        if self._unconfirmed is None:
            return
        path, data = self._unconfirmed
        if not self._storage.confirm(path, data):
            self.damaged.append(DamagedError(path, "was changed or removed while it was read"))
            self.refuse_damaged()
        self._unconfirmed = None

    def _refuse_fenced(self, attempt: int) -> None:
        if self.state.attempt > attempt:
            raise SupersededError(
                f"attempt {attempt} is superseded: attempt {self.state.attempt} has been opened in "
                f"{self._storage.uri}",
                metadata={"attempt": str(self.state.attempt)},
            )
        if self.state.closed >= attempt:
            raise DataLossError(
                f"attempt {attempt} can no longer append, because {self._storage.uri} was repaired "
                "where a later attempt may have been opened: stop the job and submit it again"
            )

    def _begin(self, whole: bool) -> None:
        """Load a snapshot, and find the number of the last record."""
        snapshots = [seq for seq in map(records.seq_of, self._storage.names(SNAPSHOTS)) if seq]
        if not whole:
            self._begin_with_snapshot(sorted(snapshots, reverse=True))
        # Reading by number stops at the first missing file, so a gap would hide every later record,
        # even a fence. The listing shows gaps: a number that is listed, has a snapshot or was kept
        # aside by a repair must exist.
        listed = self._storage.names(records.FOLDER, after=records.name_of(self.state.seq))
        numbers = [seq for seq in map(records.seq_of, listed) if seq]
        self._highest = max([*snapshots, *numbers, *kept_damaged(self._storage)], default=0)
        self._begun = True

    def _begin_with_snapshot(self, snapshots: list[int]) -> None:
        """Load the newest snapshot that is whole and matches the record that it names."""
        for seq in snapshots:
            path = f"{SNAPSHOTS}/{records.name_of(seq)}"
            try:
                state = records.read_state(self._storage, path)
                end = checksum(records.read(self._storage, records.path_of(seq)))
            except (DamagedError, FileNotFoundError) as error:
                log.warning("snapshot of the commit log is passed over", error=str(error))
                continue
            if (state.seq, state.end) == (seq, end):
                self.state = state
                self._snapshot = seq
                return
            log.warning("snapshot of the commit log is passed over", error=f"{path}: of another")

    def _write_snapshot(self) -> None:
        # Only saves time later: if it cannot be written now, the next append tries again.
        seq = self.state.seq
        data = records.encode_state(self.state)
        if len(data) > records.MAX_SNAPSHOT_BYTES:
            problem = f"it would have {len(data)} bytes"
            log.warning("snapshot of the commit log is not written", seq=seq, error=problem)
            return
        try:
            self._storage.create(f"{SNAPSHOTS}/{records.name_of(seq)}", data)
            self._snapshot = seq
            for name in self._storage.names(SNAPSHOTS)[:-KEPT_SNAPSHOTS]:
                self._storage.delete(f"{SNAPSHOTS}/{name}")
        except OSError as error:
            log.warning("snapshot of the commit log is not written", seq=seq, error=str(error))


T = TypeVar("T")
KEPT_WRITERS = 64  # of idle logs; the least recently used one is dropped first


class LogWriter:
    """The commit log at ``uri``, used through :meth:`call` alone.

    Its calls run in a lane of their own, one after the other. A caller can give up waiting, as a
    handler does at its deadline; its append is then finished or settled before the next one begins,
    so a storage that stalls never has two appends of one daemon in progress. A storage that is
    stuck holds up only the jobs that use it.
    """

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self._lane = Lane(f"commit log {uri}")
        self._log: CommitLog | None = None

    @property
    def idle(self) -> bool:
        """True if no call runs or waits, and no append is of unknown outcome."""
        return self._lane.waiting == 0 and (self._log is None or self._log.settled)

    async def call(
        self,
        work: Callable[[CommitLog], T],
        timeout_s: float | None = None,
        *,
        anew: bool = False,
    ) -> T:
        """Run ``work`` on the log, in the lane, and return its result.

        Args:
            timeout_s: how long the caller waits; work that has begun is finished all the same.
            anew: read the log from storage again, and forget what was read before.

        Raises:
            UnavailableError: not done in time.
        """
        return await self._lane.run(lambda: work(self._open(anew)), timeout_s)

    def _open(self, anew: bool) -> CommitLog:
        if self._log is not None and (anew or self._log.damaged):
            self._log.settle()  # an append of unknown outcome belongs to the log that made it
            self._log = None
        if self._log is None:
            self._log = CommitLog(open_storage(self._uri))
        return self._log


class LogWriters:
    """The writers of a daemon, by uri."""

    def __init__(self) -> None:
        self._writers: dict[str, LogWriter] = {}

    def of(self, uri: str) -> LogWriter:
        """The writer of the log at ``uri``, made on first use. Call it each time: do not keep it.

        Raises:
            RequestError: the uri is not supported.
        """
        open_storage(uri)
        writer = self._writers.pop(uri, None) or LogWriter(uri)
        self._writers[uri] = writer
        idle = [key for key, other in self._writers.items() if other.idle and key != uri]
        for key in idle[: max(0, len(self._writers) - KEPT_WRITERS)]:
            del self._writers[key]
        return writer
