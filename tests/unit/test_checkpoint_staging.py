"""Staging memory: fully allocated or refused, private, and removed when its owner has ended."""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.harness.checkpoint_files import registration_of

from megascale_checkpoint.memory.slots import slots_of
from megascale_checkpoint.memory.staging import LOCK_FILE, OWNER_FILE, StagingFolder
from megascale_common.service.errors import LimitError
from megascale_job.sizes.checkpoint_layout import ShardLayout
from megascale_job.sizes.memory import REPLICA_SLOTS

PAGE = 4096


def folder(base: Path, incarnation: str = "i1", limit_bytes: int | None = None) -> StagingFolder:
    return StagingFolder(base / "staging", "c", "n", incarnation, limit_bytes)


def test_slots_are_allocated_private_files(tmp_path: Path) -> None:
    staging = folder(tmp_path)
    slots = staging.allocate("job", 3, 3 * PAGE, 3)
    assert [len(slot.view) for slot in slots] == [3 * PAGE] * 3
    assert staging.used_bytes == 9 * PAGE
    for slot in slots:
        assert slot.path.stat().st_blocks * 512 >= 3 * PAGE, (
            "a hole would be SIGBUS on a full tmpfs"
        )
        assert slot.path.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "staging").stat().st_mode & 0o777 == 0o700
    slots[0].view[0:4] = b"data"
    assert slots[0].path.read_bytes()[:4] == b"data"
    staging.free(slots)
    assert staging.used_bytes == 0 and not slots[0].path.exists()


def test_freed_slots_keep_no_page_and_no_descriptor_whoever_holds_a_view(tmp_path: Path) -> None:
    """The traceback of a failed write holds one, and no garbage collection comes for minutes."""
    staging = folder(tmp_path)
    gc.collect()
    gc.disable()
    try:
        before = len(os.listdir("/proc/self/fd"))
        slots = staging.allocate("job", 0, 3 * PAGE, 4)
        pages = [os.open(slot.path, os.O_RDONLY) for slot in slots]
        assert all(os.fstat(each).st_blocks for each in pages)
        slots[0].view[:4] = b"data"
        held = [slot.view[:4] for slot in slots]
        exported = np.frombuffer(slots[1].view, np.uint8)
        staging.free(slots)
        assert [os.fstat(each).st_blocks for each in pages] == [0] * 4
        for each in pages:
            os.close(each)
        assert len(os.listdir("/proc/self/fd")) == before
        # A thread that still reads finds zeros, and is not killed.
        assert bytes(held[0]) == bytes(4) and not exported.any()
    finally:
        gc.enable()


def test_the_addresses_of_a_freed_slot_go_with_its_last_view(tmp_path: Path) -> None:
    staging = folder(tmp_path)
    [slot] = staging.allocate("job", 0, PAGE, 1)
    held = slot.view[:4]

    def mapped() -> bool:
        return str(tmp_path) in Path("/proc/self/maps").read_text()

    staging.free([slot])
    del slot
    assert mapped()
    held.release()
    del held
    assert not mapped()


def test_slots_as_many_as_the_ranks_of_the_node_have_room_for(tmp_path: Path) -> None:
    """Not as if each host had eight ranks: two ranks get all the slots that two have room for."""
    staging = folder(tmp_path, "a", 2 * 7 * PAGE)
    assert staging.affordable_slots(PAGE, 7, 2) == 7
    assert staging.affordable_slots(PAGE, 7, 2, replica_bytes=2 * PAGE) == 5
    assert staging.affordable_slots(PAGE, 7, 2, replica_bytes=9 * PAGE) == 2
    assert staging.affordable_slots(PAGE, 7, 8) == 2, "never less than two"
    assert staging.affordable_slots(PAGE, 6, 1) == 6, "never more than wanted"
    staging.allocate("job", 0, PAGE, 7)
    assert staging.affordable_slots(PAGE, 7, 2) == 7, "the second rank has the same share"


def test_a_small_rank_leaves_room_for_replicas_of_the_largest(tmp_path: Path) -> None:
    """A stage of dense layers beside one of experts: the peer's slots are not like the own."""
    layout = ShardLayout((), PAGE)
    given = replace(registration_of("", 0, 2, layout), slots=0, replica_target="peer:1")
    assert given.wanted_slots == 5
    assert len(slots_of(given, folder(tmp_path / "alike", limit_bytes=11 * PAGE))) == 5
    staging = folder(tmp_path / "larger", limit_bytes=11 * PAGE)
    assert len(slots_of(replace(given, largest_slot_bytes=4 * PAGE), staging)) == 3
    assert len(staging.allocate("job/replicas", 1, 4 * PAGE, REPLICA_SLOTS)) == 2


def test_slots_are_shared_with_the_other_daemons_of_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, file_bytes = 256 * PAGE, 257 * PAGE  # the last page has what has landed
    staged = 0
    monkeypatch.setattr(StagingFolder, "_system_bytes", lambda _: 2 * 6 * file_bytes - staged)
    first = folder(tmp_path, "a")
    assert first.affordable_slots(size, 20, 1) == 12, "it is alone"
    second = folder(tmp_path, "b")
    assert first.affordable_slots(size, 20, 1) == 6
    first.allocate("job", 0, size, 6)
    staged = 6 * file_bytes
    assert second.affordable_slots(size, 20, 1) == 6


def test_room_is_measured_while_other_daemons_come_and_go(tmp_path: Path) -> None:
    staging, ended = folder(tmp_path), threading.Event()

    def come_and_go() -> None:
        while not ended.is_set():
            for ranks in range(3):
                (tmp_path / f"staging/other/n{ranks}/i/job/rank-00000").mkdir(parents=True)
            shutil.rmtree(tmp_path / "staging/other")

    other = threading.Thread(target=come_and_go)
    other.start()
    try:
        for _ in range(200):
            assert staging.room_bytes() > 0
            assert staging.affordable_slots(PAGE, 2, 1) == 2
    finally:
        ended.set()
        other.join()


def test_what_exceeds_the_room_is_refused(tmp_path: Path) -> None:
    small = folder(tmp_path, "b", 8 * 3 * PAGE - 1)
    assert len(small.allocate("job", 0, PAGE, 2)) == 2
    assert len(small.allocate("job", 1, PAGE, 4)) == 4
    with pytest.raises(
        LimitError,
        match=r"no room for the snapshot slots of rank 2 of job.*--staging-limit-bytes",
    ):
        small.allocate("job", 2, 30 * PAGE, 2)
    assert small.used_bytes == 6 * PAGE


def test_folders_of_dead_owners_go_at_the_next_start(tmp_path: Path) -> None:
    crash = (
        "import os, sys; from pathlib import Path\n"
        "from megascale_checkpoint.memory.staging import StagingFolder\n"
        "staging = StagingFolder(Path(sys.argv[1]), 'c', 'n', 'dead')\n"
        "staging.allocate('job', 0, 4096, 2)\n"
        "os._exit(9)\n"
    )
    subprocess.run([sys.executable, "-c", crash, str(tmp_path / "staging")], check=False)
    left = tmp_path / "staging" / "c" / "n"
    assert (left / "dead" / "job" / "rank-00000" / "slot-0").exists()
    folder(tmp_path, "other-boot").allocate("job", 0, PAGE, 2)
    owner = json.loads((left / "other-boot" / OWNER_FILE).read_text())
    (left / "other-boot" / OWNER_FILE).write_text(
        json.dumps({**owner, "boot_id": "an earlier boot"})
    )
    living = folder(tmp_path, "living")
    assert sorted(p.name for p in left.iterdir() if p.is_dir()) == ["living"]
    again = folder(tmp_path, "beside")
    assert sorted(p.name for p in left.iterdir() if p.is_dir()) == ["beside", "living"]
    living.remove()
    again.remove()
    assert not (tmp_path / "staging").exists()


def test_nothing_is_left_of_a_daemon_at_whose_folder_another_has_looked(tmp_path: Path) -> None:
    """Each that starts looks at the folders of all others, and must leave nothing there."""
    first = StagingFolder(tmp_path / "staging", "first", "n", "i1")
    second = StagingFolder(tmp_path / "staging", "second", "n", "i1")
    first.remove()
    assert [path.name for path in (tmp_path / "staging").iterdir()] == ["second"]
    second.remove()
    assert not (tmp_path / "staging").exists()


def test_empty_folders_of_ended_daemons_go_at_the_next_start(tmp_path: Path) -> None:
    left = tmp_path / "staging" / "ended" / "n"
    left.mkdir(parents=True, mode=0o700)
    (tmp_path / "staging").chmod(0o700)
    (left / LOCK_FILE).touch()
    folder(tmp_path)
    assert not left.parent.exists()


def test_daemons_that_come_and_go_leave_nothing_and_fail_none(tmp_path: Path) -> None:
    def come_and_go(number: int) -> None:
        for each in range(60):
            found = StagingFolder(tmp_path / "staging", f"c{number % 2}", "n", f"i{number}-{each}")
            assert (found.path / OWNER_FILE).exists(), "nobody takes it for a stale one"
            found.remove()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(come_and_go, range(4)))
    assert not (tmp_path / "staging").exists()


def test_a_pid_that_was_given_to_another_process_is_not_the_owner(tmp_path: Path) -> None:
    folder(tmp_path, "old")
    file = tmp_path / "staging" / "c" / "n" / "old" / OWNER_FILE
    file.write_text(json.dumps({**json.loads(file.read_text()), "start_ticks": "1"}))
    folder(tmp_path, "new")
    assert not file.exists()


def test_two_living_daemons_cannot_share_an_incarnation(tmp_path: Path) -> None:
    folder(tmp_path)
    with pytest.raises(LimitError, match="another checkpoint daemon uses"):
        folder(tmp_path)


def test_a_folder_open_to_others_is_refused(tmp_path: Path) -> None:
    os.mkdir(tmp_path / "staging")
    os.chmod(tmp_path / "staging", 0o777)
    with pytest.raises(LimitError, match="mode 0700"):
        folder(tmp_path)


def test_a_renewed_slot_is_other_memory_under_the_same_name(tmp_path: Path) -> None:
    staging = folder(tmp_path)
    (old, _) = staging.allocate("job", 0, PAGE, 2)
    stale = os.open(old.path, os.O_RDWR)
    new = staging.renew(old)
    os.pwrite(stale, b"zombie", 0)
    os.close(stale)
    assert bytes(new.view[:6]) == bytes(6)
    assert staging.used_bytes == 2 * PAGE


def test_slots_that_could_not_be_renewed_are_given_back_once(tmp_path: Path) -> None:
    staging = folder(tmp_path)
    slots = staging.allocate("job", 0, PAGE, 2)
    hindrance = tmp_path / "elsewhere"
    slots[0].path.parent.rename(hindrance)
    with pytest.raises(LimitError, match="cannot be allocated again"):
        staging.renew(slots[0])
    hindrance.rename(slots[0].path.parent)
    staging.free(slots)
    assert staging.used_bytes == 0
    assert len(staging.allocate("job", 1, PAGE, 2)) == 2
