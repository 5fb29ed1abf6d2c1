"""What let a commit log lie: a stalled storage, a flipped bit, a failed fsync, a swapped file."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
import threading
from pathlib import Path

import msgspec
import pytest
from tests.harness.checkpoint_files import COMMIT, write_checkpoint
from tests.unit.test_checkpoint_damage import LAYOUTS, VALUES, decided

from megascale.v1 import checkpoint_pb2
from megascale_checkpoint.checksums import checksum
from megascale_checkpoint.commit import manifest as manifests
from megascale_checkpoint.commit.commit_log import CommitLog
from megascale_checkpoint.commit.restore_decision import SealedStep
from megascale_checkpoint.restore import stored_checkpoint as restore
from megascale_checkpoint.serve.committer import Committer
from megascale_checkpoint.serve.opening import Opening
from megascale_checkpoint.storage import FileStorage
from megascale_common.service.errors import DamagedError, UnavailableError
from megascale_job.config import CheckpointConfig

STALLED = "commits/000000000002.json"


async def opened(committer: Committer, root: Path, attempt: int, job: str = "job") -> int:
    """Open an attempt of one rank; the record's number."""
    none = SealedStep(0, 0)
    record, _ = await committer.open_attempt(
        Opening(job, CheckpointConfig(uri=str(root)), 1), attempt, none, frozenset(), (1, attempt)
    )
    return record.seq


def prepared(root: Path, step: int) -> checkpoint_pb2.ReportPreparedRequest:
    """Write a file as the only rank, and the report of it."""
    data, name = b"%d" % step, manifests.rank_file(0)
    FileStorage(root).create(f"{manifests.step_folder(1, step)}/{name}", data)
    file = checkpoint_pb2.PreparedFile(path=name, size_bytes=len(data), xxh3=checksum(data))
    return checkpoint_pb2.ReportPreparedRequest(
        job="job", attempt=1, step=step, rank=0, files=[file]
    )


async def test_a_stalled_storage_never_has_two_appends_of_one_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stalls, go_on, read_on = threading.Event(), threading.Event(), threading.Event()
    create, read = FileStorage.create, FileStorage.read

    def stalling(storage: FileStorage, path: str, data: bytes) -> bool:
        won = create(storage, path, data)
        if path == STALLED:
            stalls.set()
            go_on.wait()
        return won

    def reading(storage: FileStorage, path: str) -> bytes:
        data = read(storage, path)
        if path == STALLED and stalls.is_set():
            read_on.wait()
        return data

    monkeypatch.setattr(FileStorage, "create", stalling)
    monkeypatch.setattr(FileStorage, "read", reading)
    committer = Committer(lambda _: None)
    await opened(committer, tmp_path, 1)
    first, second, third = (prepared(tmp_path, step) for step in (10, 20, 30))
    # The handler's deadline passes while the record of step 10 is being created.
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await committer.report(first)
    await asyncio.to_thread(stalls.wait)
    later = asyncio.create_task(committer.report(second))
    await asyncio.wait([later], timeout=0.5)
    go_on.set()
    await asyncio.wait([later], timeout=0.5)
    read_on.set()
    assert await later
    assert await committer.report(third)
    committer.close()
    assert await opened(Committer(lambda _: None), tmp_path, 2) == 5, "OPEN, three COMMITs, OPEN"
    log = CommitLog(FileStorage(tmp_path))
    log.refresh()
    assert [record.step for record in log.commits()] == [30, 20, 10]
    assert await committer.report(first), "its caller learns of it when it reports again"


async def test_a_caller_that_waits_for_a_stuck_storage_learns_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    create = FileStorage.create

    def stuck(storage: FileStorage, path: str, data: bytes) -> bool:
        if path == STALLED:
            go_on.wait()
        return create(storage, path, data)

    monkeypatch.setattr(FileStorage, "create", stuck)
    monkeypatch.setattr("megascale_checkpoint.serve.committer.COMMIT_S", 0.1)
    committer = Committer(lambda _: None)
    await opened(committer, tmp_path, 1)
    report = prepared(tmp_path, 10)
    for _ in range(2):
        with pytest.raises(UnavailableError, match=r"has not answered for 0 s") as caught:
            await committer.report(report)
        assert caught.value.reason == "STORAGE_UNAVAILABLE"
    with monkeypatch.context() as short:
        short.setattr("megascale_checkpoint.serve.committer.OPEN_S", 0.1)
        with pytest.raises(UnavailableError, match="commit log"):
            await opened(committer, tmp_path, 2)
    # Another job, on a storage that answers, does not wait for this one.
    assert await opened(committer, tmp_path / "other", 1, "other") == 1
    go_on.set()
    monkeypatch.setattr("megascale_checkpoint.serve.committer.COMMIT_S", 10.0)
    assert await committer.report(report)
    committer.close()


def test_a_flipped_bit_in_an_open_record_keeps_the_fence(tmp_path: Path) -> None:
    zombie, next_one = CommitLog(FileStorage(tmp_path)), CommitLog(FileStorage(tmp_path))
    zombie.append_open(1, dict)
    zombie.append_commit(1, 10, COMMIT)
    next_one.append_open(2, dict)
    path = tmp_path / "commits" / "000000000003.json"
    data = bytearray(path.read_bytes())
    data[data.index(b"OPEN")] ^= 1
    path.write_bytes(data)
    for log in (zombie, CommitLog(FileStorage(tmp_path))):
        with pytest.raises(DamagedError, match="megascale checkpoint repair"):
            log.append_commit(1, 20, COMMIT)
        with pytest.raises(DamagedError, match=r"000000000003\.json"):
            log.append_open(3, dict)
    assert len(list((tmp_path / "commits").iterdir())) == 3


def test_a_record_whose_folder_could_not_be_synced_is_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = CommitLog(FileStorage(tmp_path))
    log.append_open(1, dict)
    record = tmp_path / STALLED
    lost: list[int] = []
    fsync = os.fsync

    def failing(descriptor: int) -> None:
        # Once, when the record has its name: what follows is as the kernel does it, success.
        if not lost and stat.S_ISDIR(os.fstat(descriptor).st_mode) and record.exists():
            lost.append(record.stat().st_ino)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", failing)
    try:
        log.append_commit(1, 10, COMMIT)
    except OSError:
        log.append_commit(1, 10, COMMIT)
    assert lost and record.stat().st_ino not in lost, "reported, and never written again"


def test_a_record_of_another_writer_is_durable_before_one_stands_on_it(tmp_path: Path) -> None:
    CommitLog(FileStorage(tmp_path)).append_open(1, dict)
    first = tmp_path / "commits" / "000000000001.json"
    inode = first.stat().st_ino
    log = CommitLog(FileStorage(tmp_path))
    log.append_commit(1, 10, COMMIT)
    confirmed = first.stat().st_ino
    assert confirmed != inode, "its writer may have been killed before its sync"
    log.append_commit(1, 20, COMMIT)
    assert first.stat().st_ino == confirmed


def test_what_is_restored_is_what_was_committed(tmp_path: Path) -> None:
    uri = write_checkpoint(tmp_path, LAYOUTS, VALUES)
    plan = decided(tmp_path).plan
    assert plan.manifest_xxh3 == checksum(Path(uri).read_bytes())
    _, manifest = manifests.load(uri)
    other = manifests.encode(msgspec.structs.replace(manifest, created_at="later"))
    Path(uri).write_bytes(other)
    image = memoryview(bytearray(LAYOUTS[0].slot_bytes))
    with pytest.raises(DamagedError, match="is not the manifest that was committed"):
        restore.fill(plan, 0, LAYOUTS[0], image)
