"""What the cgroups of a process leave, in both versions, from files as the kernel writes them."""

from __future__ import annotations

import sys
from pathlib import Path

from megascale_common.node.host import left_bytes
from megascale_job.config import CheckpointConfig
from megascale_job.sizes.memory import wanted_slots

GIB = 1 << 30


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_the_tightest_cgroup_above_the_process_counts(tmp_path: Path) -> None:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    write(proc / "self", cgroup="0::/pod/daemon\n")
    stat = f"anon 1\ninactive_file {GIB}\n"
    used = str(6 * GIB)
    write(cgroups, cgroup__controllers="memory")  # the root has no limit
    write(cgroups / "pod", memory__max=str(10 * GIB), memory__current=used, memory__stat=stat)
    write(cgroups / "pod" / "daemon", memory__max="max", memory__current="0", memory__stat=stat)
    assert left_bytes(proc, cgroups) == 5 * GIB
    write(cgroups / "pod" / "daemon", memory__max=str(GIB))
    assert left_bytes(proc, cgroups) == 2 * GIB
    write(cgroups / "pod", memory__max=str(GIB))
    assert left_bytes(proc, cgroups) == 0


def test_version_1_and_no_cgroups_at_all(tmp_path: Path) -> None:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    assert left_bytes(proc, cgroups) == sys.maxsize
    write(proc / "self", cgroup="5:cpu,cpuacct:/\n4:memory:/job\n")
    folder = cgroups / "memory" / "job"
    write(
        folder,
        memory__limit_in_bytes=str(9223372036854771712),
        memory__usage_in_bytes="1",
        memory__stat="",
    )
    assert left_bytes(proc, cgroups) == sys.maxsize
    write(folder, memory__limit_in_bytes=str(4 * GIB), memory__usage_in_bytes=str(GIB))
    assert left_bytes(proc, cgroups) == 3 * GIB


def test_slots_follow_the_interval() -> None:
    def slots(persisted: int, in_memory: int = 0, given: int = 0) -> int:
        return wanted_slots(
            CheckpointConfig(
                uri="/c", interval_steps=persisted, snapshot_interval_steps=in_memory, slots=given
            )
        )

    assert (slots(100), slots(1), slots(0)) == (3, 5, 3)
    assert slots(100, in_memory=2) == 4
    assert slots(100, given=2) == 2
    replicated = CheckpointConfig(uri="/c", snapshot_interval_steps=1, replicas=1)
    assert wanted_slots(replicated) == 7, "the two states at the peer are held here, too"
    assert wanted_slots(CheckpointConfig()) == 0
