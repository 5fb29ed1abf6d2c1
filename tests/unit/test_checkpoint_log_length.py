"""A long commit log: what it costs to open and to append, and what snapshots may not hide."""

from __future__ import annotations

import pytest
from tests.harness.checkpoint_files import COMMIT
from tests.unit.test_checkpoint_commit_log import MemoryStorage

from megascale_checkpoint.commit import commit_log
from megascale_checkpoint.commit.commit_log import SNAPSHOT_EVERY, CommitLog
from megascale_checkpoint.commit.commit_record import KEPT_COMMITS, path_of
from megascale_common.service.errors import DamagedError, SupersededError


class Counting(MemoryStorage):
    """Counts the operations."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.count = 0
        super().__init__(files, self._add)

    def _add(self) -> None:
        self.count += 1


def grown(files: dict[str, bytes], length: int) -> None:
    """A log of one attempt with ``length`` records, the last of them COMMITs."""
    log = CommitLog(MemoryStorage(files))
    log.append_open(1, dict)
    for step in range(1, length):
        log.append_commit(1, step, COMMIT)


def costs(files: dict[str, bytes]) -> tuple[int, int]:
    """Operations of opening the log and of one append in it."""
    storage = Counting(dict(files))
    log = CommitLog(storage)
    log.refresh()
    opening = storage.count
    log.append_commit(1, 1_000_000, COMMIT)
    first = storage.count
    log.append_commit(1, 1_000_001, COMMIT)
    assert first - opening <= 8, "with a snapshot and the confirmation of the record before"
    return opening, storage.count - first


def test_opening_and_appending_cost_the_same_at_any_length() -> None:
    files: dict[str, bytes] = {}
    grown(files, 10 * SNAPSHOT_EVERY + 3)
    opening, appending = costs(files)
    assert opening <= SNAPSHOT_EVERY + 5
    assert appending <= 2, "look for the next record, create it"
    assert len([name for name in files if name.startswith("snapshots/")]) == 2


def test_a_snapshot_counts_only_with_the_records_behind_it() -> None:
    files: dict[str, bytes] = {}
    grown(files, SNAPSHOT_EVERY + 1)
    other = CommitLog(MemoryStorage(files))
    other.append_open(2, dict)
    log = CommitLog(MemoryStorage(files))
    log.refresh()
    assert log.state.attempt == 2 and len(log.commits()) == SNAPSHOT_EVERY
    with pytest.raises(SupersededError):
        log.append_commit(1, 1_000_000, COMMIT)


@pytest.mark.parametrize("part", ["snapshot", "record"])
def test_a_damaged_snapshot_is_passed_over_and_damage_behind_it_is_not(part: str) -> None:
    files: dict[str, bytes] = {}
    grown(files, 2 * SNAPSHOT_EVERY + 10)
    newest = max(name for name in files if name.startswith("snapshots/"))
    seq = int(newest.removeprefix("snapshots/").removesuffix(".json"))
    path = newest if part == "snapshot" else path_of(seq)
    files[path] = files[path].replace(b"COMMIT", b"COMMIU", 1)
    log = CommitLog(MemoryStorage(files))
    log.refresh()
    if part == "snapshot":
        assert not log.damaged and log.state.seq == 2 * SNAPSHOT_EVERY + 10
    else:
        assert [error.file for error in log.damaged] == [path]


def test_a_missing_end_that_a_snapshot_has_seen_is_a_gap() -> None:
    files: dict[str, bytes] = {}
    grown(files, SNAPSHOT_EVERY)
    del files[path_of(SNAPSHOT_EVERY)]
    with pytest.raises(DamagedError, match="is missing although later records exist"):
        CommitLog(MemoryStorage(files)).append_commit(1, 1_000_000, COMMIT)


def test_a_snapshot_holds_the_newest_commits_and_the_pinned_ones() -> None:
    files: dict[str, bytes] = {}
    grown(files, 3)
    log = CommitLog(MemoryStorage(files))
    pin = {"kind": "PIN", "of_attempt": 1, "step": 1, "name": "best"}
    log.append(None, lambda: pin)
    log.append(None, lambda: {"kind": "RETIRE", "of_attempt": 1, "step": 2})
    for step in range(3, KEPT_COMMITS + SNAPSHOT_EVERY):
        log.append_commit(1, step, COMMIT)
    again, whole = CommitLog(MemoryStorage(files)), CommitLog(MemoryStorage(files))
    again.refresh()
    whole.refresh(whole=True)
    assert [r.step for r in whole.commits()][-2:] == [3, 1], "2 is retired"
    kept = [record.step for record in again.commits()]
    assert kept[-1] == 1 and 2 not in kept and 0 < again.state.older < SNAPSHOT_EVERY
    assert len(kept) + again.state.older == len(whole.commits())
    assert again.pins() == whole.pins() == {(1, 1): "best"}
    again.append(None, lambda: {"kind": "UNPIN", "of_attempt": 1, "step": 1})
    assert again.pins() == {}


def test_a_snapshot_that_cannot_be_written_costs_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files: dict[str, bytes] = {}
    monkeypatch.setattr(commit_log, "SNAPSHOT_EVERY", 4)
    create = MemoryStorage.create

    def failing(storage: MemoryStorage, path: str, data: bytes) -> bool:
        if path.startswith("snapshots/"):
            raise OSError("no space")
        return create(storage, path, data)

    monkeypatch.setattr(MemoryStorage, "create", failing)
    grown(files, 10)
    monkeypatch.setattr(MemoryStorage, "create", create)
    log = CommitLog(MemoryStorage(files))
    log.append_commit(1, 10, COMMIT)
    assert any(name.startswith("snapshots/") for name in files), "written with the next record"
