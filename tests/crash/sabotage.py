"""Each sabotage takes out one guard of the checkpoint daemon; a crash run must then fail."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.crash.case import FLIP, REMOVE_RECORD, SWAP_FILE, SWAP_MANIFEST, SWAP_RECORD
from tests.crash.machine import FAILED_SYNC, KILL, LOST_REPLY, STALL, Process
from tests.crash.replica_case import FLIP_REPLICA, REPLICA_KINDS
from tests.crash.wire import CUT, FLIP_ON_THE_WAY, REFUSED

from megascale_checkpoint.commit import commit_log, commit_record, restore_decision
from megascale_checkpoint.commit import manifest as manifests
from megascale_checkpoint.commit.commit_log import CommitLog
from megascale_checkpoint.commit.commit_record import LogState, Record
from megascale_checkpoint.commit.restore_decision import RestoreDecision
from megascale_checkpoint.concurrency import Lane
from megascale_checkpoint.memory import slots
from megascale_checkpoint.replicas import sender
from megascale_checkpoint.replicas import store as replica_store
from megascale_checkpoint.replicas.connection import Connection
from megascale_checkpoint.replicas.protocol import SealedState
from megascale_checkpoint.replicas.server import ReplicaServer
from megascale_checkpoint.replicas.store import Filling, ReplicaStore
from megascale_checkpoint.restore.stored_checkpoint import StoredCheckpoint
from megascale_checkpoint.retention import retire
from megascale_checkpoint.retention.retire import Commit, Retention
from megascale_checkpoint.storage import FileStorage
from megascale_checkpoint.storage.disk import Disk
from megascale_common.service.errors import DamagedError

Patch = pytest.MonkeyPatch


def file_not_synced(patch: Patch) -> None:
    """A file gets its name without its bytes being synced."""
    patch.setattr(Process, "fsync", lambda self, descriptor: None)


def fsync_repeated(patch: Patch) -> None:
    """A failed fsync is called again on the same file, and its success believed."""
    fsync = Process.fsync

    def again(self: Process, descriptor: int) -> None:
        try:
            fsync(self, descriptor)
        except OSError:
            fsync(self, descriptor)

    patch.setattr(Process, "fsync", again)


def folder_not_synced(patch: Patch) -> None:
    """A new name is not synced."""
    patch.setattr(FileStorage, "_sync_folder", lambda self, folder: None)


def new_folder_not_synced(patch: Patch) -> None:
    """A new folder's name is not synced in its parent."""

    def make(self: Any, folder: Path) -> None:
        if self._inode(folder) is None:
            make(self, folder.parent)
            with suppress(FileExistsError):
                self._disk.mkdir(folder)

    patch.setattr(FileStorage, "_make_folder", make)


def name_synced_again(patch: Patch) -> None:
    """A name whose sync failed is synced again as it is, instead of written anew."""

    def sync(self: Any, folder: Path) -> None:
        self._disk.sync_folder(folder)

    def confirm(self: Any, path: str, data: bytes) -> bool:
        if self.size(path) is None or self.read(path) != data:
            return False
        sync(self, self._at(path).parent)
        return True

    patch.setattr(FileStorage, "_sync_folder", sync)
    patch.setattr(FileStorage, "confirm", confirm)


def create_overwrites(patch: Patch) -> None:
    """create-if-absent replaces what stands there."""

    def link(self: Any, source: str, target: Path) -> None:
        disk: Disk = self._disk
        with suppress(FileNotFoundError):
            disk.unlink(target)
        disk.link(source, target)

    patch.setattr(FileStorage, "_link", link)


def fence_ignored(patch: Patch) -> None:
    """An attempt appends although a later one is open."""
    patch.setattr(CommitLog, "_refuse_fenced", lambda self, attempt: None)


def damage_skipped(patch: Patch) -> None:
    """A damaged record is passed over, and what is behind it trusted."""

    def take(self: Any, seq: int, data: bytes) -> None:
        try:
            record = commit_record.decode(data, seq, self.state.previous)
        except DamagedError:
            self.state.seq = seq
            self.state.previous = self.state.end = commit_log.checksum(data)
            return
        self.records.append(record)
        self.state.apply(record, data)

    patch.setattr(CommitLog, "_take", take)


def record_checksum_ignored(patch: Patch) -> None:
    """A record is believed whose checksum is wrong."""

    def load(data: bytes, file: str) -> dict[str, Any]:
        try:
            values = json.loads(data)
            values.pop("xxh3", None)
        except (ValueError, AttributeError) as error:
            raise DamagedError(file, str(error)) from error
        return dict(values)

    patch.setattr(commit_record, "load_record", load)
    patch.setattr(commit_record, "is_as_written", lambda data, values: True)


def chain_ignored(patch: Patch) -> None:
    """A record is believed whatever record it follows."""
    decode = commit_record.decode

    def any_previous(data: bytes, seq: int, previous: str) -> Record:
        values = commit_record.load_record(data, commit_record.path_of(seq))
        return decode(data, seq, values.get("previous", ""))

    patch.setattr(commit_record, "decode", any_previous)


def manifest_hash_ignored(patch: Patch) -> None:
    """What is restored need not be the manifest that was committed."""
    from_record = RestoreDecision.from_record

    def without(values: Any) -> RestoreDecision:
        decision = from_record(values)
        return replace(decision, plan=replace(decision.plan, manifest_xxh3=""))

    patch.setattr(RestoreDecision, "from_record", without)
    patch.setattr(restore_decision, "check_commit", lambda record, uri: manifests.load(uri)[1])


def size_only(patch: Patch) -> None:
    """A file is believed that has the right size."""

    read = StoredCheckpoint.read

    def believing(self: StoredCheckpoint, wanted: Any, target: memoryview) -> None:
        try:
            read(self, wanted, target)
        except DamagedError as error:
            if "fails its checksum" not in error.problem:
                raise

    patch.setattr(StoredCheckpoint, "read", believing)


def gap_accepted(patch: Patch) -> None:
    """A missing record is taken for the end of the log."""
    begin: Callable[[Any, bool], None] = CommitLog._begin

    def without(self: Any, whole: bool) -> None:
        begin(self, whole)
        self._highest = 0

    patch.setattr(CommitLog, "_begin", without)


def two_writers(patch: Patch) -> None:
    """An append begins while the one before is under way."""

    class Beside(Lane):
        def _submit(self, call: Callable[[], Any]) -> Any:
            return Lane("beside")._submit_alone(call)

        def _submit_alone(self, call: Callable[[], Any]) -> Any:
            return Lane._submit(self, call)

    patch.setattr(Lane, "_submit_alone", Lane._submit, raising=False)
    patch.setattr(commit_log, "Lane", Beside)


def tail_ignored(patch: Patch) -> None:
    """A snapshot is taken for the whole log."""
    refresh = CommitLog.refresh

    def without(self: Any, *, whole: bool = False) -> None:
        if not self._begun and not whole:
            self.settle()
            self._begin(whole)
        if whole or not self._snapshot:
            refresh(self, whole=whole)

    patch.setattr(CommitLog, "refresh", without)


def end_not_confirmed(patch: Patch) -> None:
    """A record stands on one of another writer that may not be durable."""
    patch.setattr(CommitLog, "_confirm_end", lambda self: None)


def outcome_forgotten(patch: Patch) -> None:
    """An append whose reply is lost counts as not done, and its record as durable when read."""
    settle: Callable[[Any], bool] = CommitLog.settle

    def forgetful(self: Any) -> bool:
        try:
            return settle(self)
        except OSError:
            self._unsettled = None
            raise

    def create_alone(storage: FileStorage, path: str, data: bytes) -> bool:
        return storage.create(path, data)

    patch.setattr(CommitLog, "settle", forgetful)
    patch.setattr(commit_log, "settle", create_alone)
    patch.setattr(CommitLog, "_confirm_end", lambda self: None)


def manifest_not_confirmed(patch: Patch) -> None:
    """A manifest that stands there counts as durable."""

    def write(storage: FileStorage, path: str, manifest: manifests.Manifest) -> bytes:
        data = manifests.encode(manifest)
        try:
            if storage.create(path, data):
                return data
        except OSError:
            if storage.size(path) is None:
                raise
        return storage.read(path)

    patch.setattr(manifests, "write", write)


def snapshot_unchecked(patch: Patch) -> None:
    """A snapshot forgets the commits that it should hold."""
    encode_state = commit_record.encode_state

    def forgetful(state: LogState) -> bytes:
        return encode_state(replace(state, live={}, last=(0, 0)))

    patch.setattr(commit_record, "encode_state", forgetful)


def commit_before_files(patch: Patch) -> None:
    """A rank reports its file before it is written."""

    def write(self: Any, path: str, chunks: Iterable[bytes | memoryview]) -> int:
        target = self._at(path)
        self._make_folder(target.parent)
        descriptor, name = self._disk.create_temporary(target.parent, ".early.")
        self._link(name, target)
        self._disk.unlink(name)
        size = 0
        for chunk in chunks:
            self._write_all(descriptor, memoryview(chunk))
            size += len(chunk)
        self._sync_folder(target.parent)
        return size

    patch.setattr(FileStorage, "write", write)


def replica_unchecked(patch: Patch) -> None:
    """What arrives from a peer is believed."""

    def believing(
        self: Connection, state: SealedState, numbers: Any, image: memoryview, where: str
    ) -> None:
        for piece in (state.pieces[number] for number in numbers):
            self._receive_into(image[piece.offset : piece.offset + piece.size_bytes])

    patch.setattr(Connection, "receive_pieces", believing)


def replica_age_ignored(patch: Patch) -> None:
    """A replica takes the place of another, whichever is older."""
    patch.setattr(replica_store, "_age", lambda slot: (0, 0))


def replicated_slot_reused(patch: Patch) -> None:
    """What is whole at the peer is not held here until a later step is."""
    patch.setattr(slots, "HELD_FOR_REPLICAS", 0)


def copy_given_up(patch: Patch) -> None:
    """A copy that failed is not tried again, and the ranks decide on the next step."""
    patch.setattr(sender, "RETRY_FOR_S", 0.0)


def part_of_a_replica_kept(patch: Patch) -> None:
    """A copy that was cut off counts as whole."""

    async def finish(self: ReplicaServer, filling: Filling, whole: bool) -> None:
        self._store.sealed_now(filling)

    patch.setattr(ReplicaServer, "_finish", finish)


def damaged_replica_offered_again(patch: Patch) -> None:
    """A replica that was found damaged stays."""
    patch.setattr(ReplicaStore, "discard", lambda self, slot: None)


def newest_collected(patch: Patch) -> None:
    """The rules of retention let the newest complete checkpoint go."""

    def expendable(
        commits: Sequence[Commit], retention: Retention, protected: Collection[Any]
    ) -> list[Commit]:
        return [] if retention.keeps_all else list(commits)

    patch.setattr(retire, "expendable", expendable)


def collected_before_the_record(patch: Patch) -> None:
    """The files of a checkpoint go, and its record of existence stays."""
    append = CommitLog.append

    def without(self: CommitLog, attempt: int | None, make: Any) -> Record:
        def kept() -> Any:
            values = make()
            if isinstance(values, dict) and values.get("kind") == "RETIRE":
                path = f"{manifests.step_folder(values['of_attempt'], values['step'])}"
                for name in self._storage.names(path):
                    self._storage.delete(f"{path}/{name}")
            return values

        return append(self, attempt, kept)

    patch.setattr(CommitLog, "append", without)


# Each with the faults that try its guard; all kinds where none are named.
SABOTAGES: dict[Callable[[Patch], None], tuple[str, ...]] = {
    file_not_synced: (),
    fsync_repeated: (FAILED_SYNC,),
    folder_not_synced: (),
    new_folder_not_synced: (),
    name_synced_again: (FAILED_SYNC,),
    create_overwrites: (LOST_REPLY, FAILED_SYNC),
    fence_ignored: (),
    damage_skipped: (),
    record_checksum_ignored: (FLIP,),
    chain_ignored: (SWAP_RECORD,),
    manifest_hash_ignored: (SWAP_MANIFEST,),
    size_only: (SWAP_FILE,),
    gap_accepted: (REMOVE_RECORD,),
    two_writers: (STALL,),
    tail_ignored: (),
    end_not_confirmed: (FAILED_SYNC,),
    outcome_forgotten: (FAILED_SYNC,),
    manifest_not_confirmed: (FAILED_SYNC,),
    snapshot_unchecked: (),
    commit_before_files: (),
    replica_unchecked: (FLIP_ON_THE_WAY,),
    replica_age_ignored: REPLICA_KINDS,
    replicated_slot_reused: REPLICA_KINDS,
    part_of_a_replica_kept: (CUT,),
    damaged_replica_offered_again: (FLIP_REPLICA,),
    copy_given_up: (REFUSED,),
    newest_collected: (),
    # It shows when the newer checkpoint is damaged; stalls, timed by the clock, are left out.
    collected_before_the_record: (KILL, SWAP_FILE, SWAP_MANIFEST),
}
