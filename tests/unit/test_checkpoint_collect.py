"""Retired checkpoints: the record goes first, and a crash at any call leaves nothing half there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.harness.checkpoint_files import write_checkpoint
from tests.harness.checkpoint_node import layout_of

from megascale_checkpoint.commit.commit_log import CommitLog
from megascale_checkpoint.commit.restore_decision import check_commit
from megascale_checkpoint.retention import retire as loads
from megascale_checkpoint.retention.collect import collect, collect_all, leftovers
from megascale_checkpoint.retention.retire import Retention, newest_whole, pin, retire, unpin
from megascale_checkpoint.storage import FileStorage, join, split
from megascale_checkpoint.storage.disk import SystemDisk
from megascale_common.service.errors import (
    NotFoundError,
    NotReadyError,
    StateError,
)
from megascale_job.restore import RestorePlan, RestoreSource

VALUES = {"matrix": np.ones((8, 96), np.float32), "bias": np.zeros(96, np.float32)}
LATEST = Retention(keep_latest=2)


def write(root: Path, *steps: int, attempt: int = 1) -> None:
    for step in steps:
        write_checkpoint(root, [layout_of(0, 1)], VALUES, step=step, attempt=attempt)


def opened(storage: FileStorage) -> CommitLog:
    log = CommitLog(storage)
    log.refresh()
    return log


def run(storage: FileStorage, rules: Retention = LATEST) -> list[int]:
    """One run of retention, as the command does it; returns the steps retired."""
    log = opened(storage)
    records = retire(log, rules, newest_whole(log, storage.uri))
    for record in records:
        collect(storage, split(record.values["manifest"])[0])
    log = opened(storage)
    collect_all(log, storage)
    return [record.step for record in records]


def folders(root: Path) -> list[str]:
    return sorted(path.name for path in root.glob("attempts/*/step-*"))


def steps(storage: FileStorage) -> list[int]:
    return [record.step for record in opened(storage).commits()]


def test_files_go_with_their_checkpoint(tmp_path: Path) -> None:
    storage = FileStorage(tmp_path)
    write(tmp_path, 10, 20, 30, 40)
    pin(opened(storage), (1, 20), "the paper's figure 3")
    assert run(storage) == [10]
    assert steps(storage) == [40, 30, 20] and len(folders(tmp_path)) == 3
    assert run(storage) == []
    unpin(opened(storage), (1, 20))
    assert run(storage) == [20] and steps(storage) == [40, 30]
    assert folders(tmp_path) == ["step-000000030", "step-000000040"]


def test_a_damaged_newest_one_does_not_count(tmp_path: Path) -> None:
    storage = FileStorage(tmp_path)
    write(tmp_path, 10, 20, 30, 40)
    for step in (30, 40):
        next(tmp_path.glob(f"attempts/*/step-0000000{step}/rank-*")).unlink()
    assert newest_whole(opened(storage), storage.uri) == (1, 20)
    assert run(storage) == [10] and steps(storage) == [40, 30, 20]
    for path in tmp_path.glob("attempts/*/*/rank-*"):
        path.unlink()
    assert run(storage, Retention(keep_latest=1)) == []


def test_what_an_attempt_restores_stays_until_it_has_committed(tmp_path: Path) -> None:
    storage = FileStorage(tmp_path)
    write(tmp_path, 10, 20, 30)
    restored = {"source": "storage", "attempt": 1, "step": 10}
    opened(storage).append_open(2, lambda: {"job": "job", "restored_from": restored})
    assert run(storage, Retention(keep_latest=1)) == [20] and steps(storage) == [30, 10]
    write(tmp_path, 15, attempt=2)
    assert run(storage, Retention(keep_latest=1)) == [10, 30] and steps(storage) == [15]


def test_what_another_writer_has_pinned_or_retired_meanwhile_is_left(tmp_path: Path) -> None:
    storage = FileStorage(tmp_path)
    write(tmp_path, 10, 20, 30)
    log = opened(storage)

    def meanwhile(done: int, total: int) -> None:
        if done == 0:
            pin(opened(storage), (1, 20), "mine")

    found = retire(log, Retention(keep_latest=1), (1, 30), progress=meanwhile)
    assert [record.step for record in found] == [10] and steps(storage) == [30, 20]
    with pytest.raises(NotFoundError, match="not a complete checkpoint"):
        pin(opened(storage), (1, 10), "too late")
    with pytest.raises(StateError, match="not pinned"):
        unpin(opened(storage), (1, 30))


def test_what_never_became_a_checkpoint_is_collected_when_it_no_longer_can(tmp_path: Path) -> None:
    storage = FileStorage(tmp_path)
    write(tmp_path, 10, 20, 30)
    below = f"{tmp_path}/attempts/attempt-000001"
    for step in (5, 40):  # given up; perhaps in progress
        storage.create(f"attempts/attempt-000001/step-{step:09d}/rank-00000.safetensors", b"1")
    storage.create("attempts/attempt-000002/step-000000050/rank-00000.safetensors", b"1")
    storage.create("attempts/notes/step-000000001/mine", b"1")
    Path(below, "step-000000005", ".rank-00001.unfinished").write_text("half")
    assert [found.checkpoint for found in leftovers(opened(storage), storage, pytest.fail)] == [
        (1, 5)
    ]
    opened(storage).append_open(3, lambda: {"job": "job"})
    assert collect_all(opened(storage), storage) == 3
    assert folders(tmp_path) == ["step-000000001", *(f"step-0000000{n}" for n in (10, 20, 30))]


class Crash(OSError):
    """The power goes: this call and all after it do nothing."""


class CrashingDisk(SystemDisk):
    """Carries out so many changes, and none after them."""

    def __init__(self, changes: int) -> None:
        super().__init__()
        self._left = changes

    def _change(self) -> None:
        if self._left == 0:
            raise Crash("the power is gone")
        self._left -= 1

    def link(self, source: str, target: Path) -> None:
        self._change()
        super().link(source, target)

    def unlink(self, path: str | Path) -> None:
        self._change()
        super().unlink(path)

    def rmdir(self, path: Path) -> None:
        self._change()
        super().rmdir(path)


def crashes(root: Path) -> Iterator[int]:
    """The number of changes before a crash, until a run has none."""
    for changes in range(200):
        where = root / str(changes)
        write(where, 10, 20, 30, 40)
        try:
            run(FileStorage(where, CrashingDisk(changes)))
        except Crash:
            yield changes
            continue
        if len(folders(where)) == 2:
            return
        yield changes  # the command has reported it and ended
    raise AssertionError("the run never ends")


def test_after_a_crash_at_any_change_nothing_is_half_there(tmp_path: Path) -> None:
    count = 0
    for changes in crashes(tmp_path):
        count += 1
        root = tmp_path / str(changes)
        storage = FileStorage(root)
        for record in opened(storage).commits():  # each that exists is whole
            check_commit(record, join(storage.uri, record.values["manifest"]))
        assert steps(storage)[:2] == [40, 30]
        run(storage)
        assert steps(storage) == [40, 30]
        assert folders(root) == ["step-000000030", "step-000000040"]
    assert count > 10


def test_the_manifest_goes_before_the_files(tmp_path: Path) -> None:
    write(tmp_path, 10)
    folder = "attempts/attempt-000001/step-000000010"
    FileStorage(tmp_path).create(f"{folder}/first-by-name", b"1")
    with pytest.raises(Crash):
        collect(FileStorage(tmp_path, CrashingDisk(1)), folder)
    assert FileStorage(tmp_path).names(folder) == ["first-by-name", "rank-00000.safetensors"]


def test_what_another_job_loads_is_pinned_until_that_has_committed(tmp_path: Path) -> None:
    storage = FileStorage(tmp_path)
    write(tmp_path, 10, 20)
    manifest = join(storage.uri, opened(storage).find_commit(1, 10).values["manifest"])  # type: ignore[union-attr]
    plan = RestorePlan(RestoreSource.STORAGE, 10, 0, manifest)
    loads.hold("other", storage.uri, plan)
    loads.hold("other", storage.uri, plan)
    assert opened(storage).pins() == {(1, 10): "job other starts from it"}
    assert run(storage, Retention(keep_latest=1)) == []
    own = FileStorage(tmp_path / "own")
    record = CommitLog(own).append_open(1, lambda: {"job": "other", "load_uri": storage.uri})
    loads.release(record)
    assert run(storage, Retention(keep_latest=1)) == [10]
    with pytest.raises(NotReadyError, match="removed while it was chosen"):
        loads.hold("other", storage.uri, plan)
