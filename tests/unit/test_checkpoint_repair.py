"""Repair of a commit log: a flipped bit is taken back, and what is lost leaves a fence behind."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.harness.checkpoint_files import COMMIT
from tests.harness.properties import examples
from typer.testing import CliRunner

from megascale_checkpoint.commands.app import app
from megascale_checkpoint.commit import commit_repair
from megascale_checkpoint.commit.commit_log import CommitLog
from megascale_checkpoint.storage import FileStorage
from megascale_common.service.errors import DamagedError, DataLossError, SupersededError


def written(root: Path) -> CommitLog:
    """OPEN 1, COMMIT 10, OPEN 2, COMMIT 20, COMMIT 30."""
    log = CommitLog(FileStorage(root))
    log.append_open(1, dict)
    log.append_commit(1, 10, COMMIT)
    log.append_open(2, dict)
    log.append_commit(2, 20, COMMIT)
    log.append_commit(2, 30, COMMIT)
    return log


def read(root: Path) -> CommitLog:
    log = CommitLog(FileStorage(root))
    log.refresh(whole=True)
    return log


def steps(root: Path) -> list[int]:
    log = read(root)
    assert not log.damaged
    return [record.step for record in log.commits()]


def record_file(root: Path, seq: int) -> Path:
    return root / "commits" / f"{seq:012d}.json"


def repaired(root: Path) -> list[commit_repair.Repair]:
    plan = commit_repair.plan(FileStorage(root))
    commit_repair.carry_out(FileStorage(root), plan)
    return plan


@examples(25)
@given(st.integers(1, 5), st.integers(0, 1 << 16))
@example(5, 9)  # a blank of the last record, which no other record's hash covers
def test_a_flipped_bit_anywhere_is_taken_back(
    tmp_path_factory: pytest.TempPathFactory, seq: int, bit: int
) -> None:
    root = tmp_path_factory.mktemp("log")
    written(root)
    path = record_file(root, seq)
    whole = path.read_bytes()
    data = bytearray(whole)
    bit %= 8 * len(data)
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
    assert read(root).damaged
    assert [repair.restored for repair in repaired(root)] == [True]
    assert path.read_bytes() == whole
    assert (root / "damaged").is_dir() and steps(root) == [30, 20, 10]


def garble(path: Path) -> None:
    path.write_bytes(random.Random(1).randbytes(300))


@pytest.mark.parametrize("damage", [garble, Path.unlink])
@pytest.mark.parametrize(
    ("seq", "left"), [(1, [30, 20, 10]), (2, [30, 20]), (3, [30, 20, 10]), (4, [30, 10])]
)
def test_what_is_behind_a_lost_record_is_trusted_again(
    tmp_path: Path, seq: int, left: list[int], damage: object
) -> None:
    assert callable(damage)
    written(tmp_path)
    damage(record_file(tmp_path, seq))
    with pytest.raises(DamagedError, match="repair"):
        CommitLog(FileStorage(tmp_path)).append_open(3, dict)
    (repair,) = repaired(tmp_path)
    assert repair.seq == seq and not repair.restored
    assert steps(tmp_path) == left
    with pytest.raises(SupersededError):
        CommitLog(FileStorage(tmp_path)).append_commit(1, 40, COMMIT)
    CommitLog(FileStorage(tmp_path)).append_open(3, dict)
    assert commit_repair.plan(FileStorage(tmp_path)) == []


def test_a_lost_end_closes_the_attempts_so_far(tmp_path: Path) -> None:
    written(tmp_path)
    garble(record_file(tmp_path, 5))
    (repair,) = repaired(tmp_path)
    assert repair.fence
    log = CommitLog(FileStorage(tmp_path))
    with pytest.raises(DataLossError, match=r"attempt 2 can no longer append.*submit it again"):
        log.append_commit(2, 40, COMMIT)
    log.append_open(3, dict)
    log.append_commit(3, 40, COMMIT)
    assert steps(tmp_path) == [40, 20, 10]


def test_two_lost_records_and_a_swapped_one(tmp_path: Path) -> None:
    written(tmp_path)
    garble(record_file(tmp_path, 2))
    record_file(tmp_path, 3).unlink()
    assert [repair.seq for repair in repaired(tmp_path)] == [2, 3]
    assert steps(tmp_path) == [30, 20]
    other = tmp_path / "other"
    written(other)
    record_file(tmp_path, 4).write_bytes(record_file(other, 4).read_bytes())
    assert [error.file for error in read(tmp_path).damaged] == ["commits/000000000004.json"]
    assert [repair.seq for repair in repaired(tmp_path)] == [4]
    assert steps(tmp_path) == [30]


@pytest.mark.parametrize(
    ("seq", "bit", "left"), [(4, False, [30, 10]), (5, False, [20, 10]), (5, True, [30, 20, 10])]
)
def test_an_interrupted_repair_is_carried_out_the_next_time(
    tmp_path: Path, seq: int, bit: bool, left: list[int]
) -> None:
    written(tmp_path)
    path = record_file(tmp_path, seq)
    if bit:
        path.write_bytes(path.read_bytes().replace(b"COMMIT", b"COMMIU"))
    else:
        garble(path)
    storage = FileStorage(tmp_path)
    (repair,) = commit_repair.plan(storage)
    assert repair.damaged is not None
    storage.create(repair.kept, repair.damaged)
    storage.delete(f"commits/{seq:012d}.json")
    with pytest.raises(DataLossError, match="has changed meanwhile"):
        commit_repair.carry_out(storage, [repair])
    # The last record is gone now, and with it perhaps a fence.
    with pytest.raises(DamagedError, match="is missing"):
        CommitLog(FileStorage(tmp_path)).append_open(3, dict)
    repaired(tmp_path)
    assert steps(tmp_path) == left


def test_the_command_shows_first_and_repairs_when_told(tmp_path: Path) -> None:
    runner = CliRunner()
    written(tmp_path)
    whole = runner.invoke(app, ["repair", str(tmp_path)])
    assert whole.exit_code == 0 and "nothing to repair" in whole.output
    garble(record_file(tmp_path, 5))
    before = record_file(tmp_path, 5).read_bytes()
    shown = runner.invoke(app, ["repair", str(tmp_path)])
    assert shown.exit_code == 1 and "repeat with --yes" in shown.output
    assert "record 5: is not JSON" in shown.output and "can no longer append" in shown.output
    assert record_file(tmp_path, 5).read_bytes() == before
    done = runner.invoke(app, ["repair", str(tmp_path), "--yes"])
    assert done.exit_code == 0 and "1 record repaired" in done.output
    (kept,) = (tmp_path / "damaged").iterdir()
    assert kept.read_bytes() == before
    assert runner.invoke(app, ["repair", str(tmp_path)]).exit_code == 0
