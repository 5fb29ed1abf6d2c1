"""Small parts of the agent: options, folders, assignments, step records, budgets, heartbeats."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from tests.harness.waiting import CALL_TIMEOUT_S

from megascale.v1 import link_pb2
from megascale_common.node.unix_sockets import create_socket_folder
from megascale_common.service.errors import AssignmentError, OptionError, TemplateError
from megascale_common.service.wire_text import encodable
from megascale_executor.agent.channels import MessageChannel
from megascale_executor.agent.config import addresses_from, parse_devices, parse_topology
from megascale_executor.agent.link.driver_link import MAX_HEARTBEAT_BYTES, fit
from megascale_executor.agent.link.heartbeat import host_counters
from megascale_executor.agent.processes import child_processes, folders, job_inputs, template
from megascale_executor.agent.processes.child_processes import RestartBudget
from megascale_executor.agent.processes.job_processes import DEFAULT, JobProcesses
from megascale_executor.agent.processes.template import TemplateKeeper
from megascale_executor.agent.reports.step_reports import StepReports, to_proto
from megascale_executor.agent.run.assignment import check_assignment
from megascale_job import config as job_config
from megascale_job import loading
from megascale_job.config import CodeConfig
from megascale_job.layout import RankLayout, readers_of


def test_devices_and_topology() -> None:
    assert parse_devices("0-2,5") == (0, 1, 2, 5)
    assert parse_topology(["switch=s0,rack=r1", "host=h"]) == {
        "switch": "s0",
        "rack": "r1",
        "host": "h",
    }


@pytest.mark.parametrize("text", ["", "a", "1-", "0-100000"])
def test_bad_devices_name_the_option(text: str) -> None:
    with pytest.raises(OptionError, match="--devices"):
        parse_devices(text)


def test_agent_never_imports_torch() -> None:
    code = "import sys, megascale_executor.agent.node_agent as _; sys.exit('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], timeout=CALL_TIMEOUT_S, check=False).returncode
        == 0
    )


def test_driver_file_is_read_anew(tmp_path: Path) -> None:
    file = tmp_path / "driver.address"
    assert addresses_from((), file) == []
    file.write_text("127.0.0.1:1,127.0.0.1:2\n")
    assert addresses_from((), file) == ["127.0.0.1:1", "127.0.0.1:2"]


def test_socket_folder_of_a_dead_owner_goes_and_of_a_living_one_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with tempfile.TemporaryDirectory(
        dir="/tmp"
    ) as runtime:  # pytest's own folders are too long for sockets
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        mine = create_socket_folder("c", "n", "one")
        dead = create_socket_folder("c", "n", "two")
        (dead / "owner").write_text("1 12345\n")  # process 1 lives, but it started at another time
        other = create_socket_folder("c", "m", "three")
        create_socket_folder("c", "n", "four")
        assert mine.exists() and other.exists() and not dead.exists()
        assert mine.is_relative_to(runtime) and len(str(mine / "checkpoint.sock").encode()) < 108


def test_newest_attempt(tmp_path: Path) -> None:
    assert folders.newest_attempt(tmp_path, "job") == 0
    for number in (2, 10):
        folders.attempt_folder(tmp_path, "job", number).path.mkdir(parents=True)
    assert folders.newest_attempt(tmp_path, "job") == 10


def test_readers_share_a_data_parallel_rank() -> None:
    # tp=2, dp=2, pp=2: ranks 0,1,4,5 read dp rank 0 and 2,3,6,7 read dp rank 1.
    layout = RankLayout(tp=2, dp=2, pp=2)
    assert readers_of([0, 1, 2, 3], layout) == {0: (0, 2), 1: (1, 2), 2: (0, 2), 3: (1, 2)}
    assert readers_of([0, 1, 4, 5], layout) == {0: (0, 4), 1: (1, 4), 4: (2, 4), 5: (3, 4)}


def _config(dp: int) -> job_config.JobConfig:
    model = {"layers": 1, "hidden_size": 8, "heads": 1, "vocab_size": 8, "sequence_length": 4}
    return loading.from_accepted(
        {
            "name": "j",
            "model": model,
            "training": {"steps": 1, "global_batch_size": 4},
            "parallelism": {"dp": dp},
        }
    )


@pytest.mark.parametrize(
    ("ranks", "devices", "rank_nodes", "words"),
    [
        ([0, 1], [0], ["n", "n"], "2 ranks on 1 device"),
        ([0, 1], [0, 0], ["n", "n"], "once only"),
        ([0, 1], [0, 4], ["n", "n"], r"devices \[4\]"),
        ([0, 1], [0, 1], ["n", "m"], "rank_nodes gives it"),
        ([0, 1], [0, 1], ["n"], "world size of 2"),
    ],
)
def test_contradictory_assignments_are_refused(
    ranks: list[int], devices: list[int], rank_nodes: list[str], words: str
) -> None:
    given = link_pb2.AttemptAssignment(
        job="j", attempt=1, ranks=ranks, devices=devices, rank_nodes=rank_nodes
    )
    with pytest.raises(AssignmentError, match=words):
        check_assignment(given, _config(2), "n", {0, 1})


def test_step_record_on_the_wire() -> None:
    record = {
        "step": 3,
        "loss": 2.5,
        "step_time_s": 0.25,
        "completed_at_s": 1e9,
        "mfu_causal": None,
        "votes": 1,
        "data_wait_s": 0.0005,
        "memory_bytes": 3 << 40,
    }
    message = to_proto(record)
    assert (message.data_wait.ToMicroseconds(), message.memory_bytes) == (500, 3 << 40)
    assert (message.step, message.loss, message.step_time.ToMilliseconds()) == (3, 2.5, 250)
    assert message.completed_at.seconds == 1_000_000_000 and not message.HasField("mfu_causal")


def test_step_buffer_is_bounded_and_drops_the_oldest_and_the_senseless() -> None:
    reports = StepReports(limit=3)
    for step in range(5):
        reports.add("job", {"step": step})
    reports.add("job", {"step": "five"})
    reports.add("job", {"step": 6, "step_time_s": float("inf")})
    reports.add("job", {"step": 7, "completed_at_s": float("nan")})
    assert (len(reports), reports.dropped) == (3, 5)


def test_restart_budget_is_spent_and_comes_back() -> None:
    budget = RestartBudget(limit=2, window_s=10.0)
    first, second = budget.delay_s(0.0), budget.delay_s(1.0)
    assert first is not None and second is not None and first < second
    assert budget.delay_s(2.0) is None
    assert budget.delay_s(10.5) is not None


def test_heartbeat_is_cut_to_its_limit() -> None:
    beat = link_pb2.Heartbeat(
        workers=[link_pb2.WorkerStatus(rank=rank, error="e" * 4000) for rank in range(64)],
        logs=[link_pb2.LogFingerprint(signature="s", sample_line="x" * 512) for _ in range(32)],
    )
    short = fit(beat)
    assert (
        short.ByteSize() <= MAX_HEARTBEAT_BYTES
        and len(short.workers) == 64
        and short.workers[0].error
    )


def test_a_heartbeat_after_hundreds_of_jobs_still_tells_what_is_held() -> None:
    held = link_pb2.CheckpointProgress(job="now", sealed=[link_pb2.SealedSnapshot(rank=1, step=5)])
    old = [link_pb2.CheckpointProgress(job=f"j{i}", manifest_uri="m" * 200) for i in range(600)]
    short = fit(link_pb2.Heartbeat(checkpoints=[*old, held], failure="f" * 4000))
    assert short.ByteSize() <= MAX_HEARTBEAT_BYTES and [item.job for item in short.checkpoints] == [
        "now"
    ]


def test_a_name_serves_one_agent_of_a_folder(tmp_path: Path) -> None:
    descriptor = folders.lock_node(tmp_path, "n1")
    with pytest.raises(OSError, match=f"node n1 already runs here as pid {os.getpid()}"):
        folders.lock_node(tmp_path, "n1")
    os.close(descriptor)
    os.close(folders.lock_node(tmp_path, "n1"))


def test_what_a_worker_says_always_fits_a_message() -> None:
    text = encodable("No such file: /data/\udcff.bin")
    assert (
        text == "No such file: /data/?.bin"
        and link_pb2.WorkerStatus(error=text).SerializeToString()
    )


async def test_a_template_that_hangs_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Path(__file__).parents[1] / "harness" / "scripted_template.py"
    keeper = TemplateKeeper([sys.executable, str(script)], tmp_path / "template.log")
    keeper.begin()
    try:
        first = await keeper.ready()
        pid = keeper.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        monkeypatch.setattr(template, "FORK_TIMEOUT_S", 0.2)
        monkeypatch.setattr(child_processes, "TERMINATE_GRACE_S", 0.2)
        with (
            (tmp_path / "log").open("wb") as log,
            pytest.raises(TemplateError, match="forked nothing"),
        ):
            await first.fork(0, log.fileno(), log.fileno())
        async with asyncio.timeout(CALL_TIMEOUT_S):
            second = await keeper.ready()
        assert second is not first and keeper.pid != pid
        ours, theirs = MessageChannel.pair()
        with theirs, (tmp_path / "log").open("wb") as log:
            monkeypatch.setattr(template, "FORK_TIMEOUT_S", CALL_TIMEOUT_S)
            process = await second.fork(0, theirs.fileno(), log.fileno())
        process.kill()
        ours.close()
    finally:
        await keeper.stop()


async def test_an_attempt_of_other_code_gets_a_template_of_its_own(tmp_path: Path) -> None:
    script = Path(__file__).parents[1] / "harness" / "scripted_template.py"
    keeper = TemplateKeeper([sys.executable, str(script)], tmp_path / "template.log")
    keeper.begin()
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "own.py").write_text("VERSION = 1")

    def environment() -> str:
        return Path(f"/proc/{keeper.pid}/environ").read_text()

    try:
        installed = await keeper.ready_for(DEFAULT)
        assert await keeper.ready() is installed and str(folder) not in environment()
        code = JobProcesses(await job_inputs.find(CodeConfig(path=str(folder))))
        own = await keeper.ready_for(code)
        assert own is not installed and f"PYTHONPATH={folder}" in environment()
        assert await keeper.ready_for(replace(code)) is own
        (folder / "own.py").write_text("VERSION = 2")
        changed = JobProcesses(await job_inputs.find(CodeConfig(path=str(folder))))
        assert changed != code and await keeper.ready_for(changed) is not own
        await keeper.ready_for(DEFAULT)
        assert str(folder) not in environment()
    finally:
        await keeper.stop()


async def test_code_is_compared_by_digest_and_must_be_readable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "code"
    (folder / "package" / "__pycache__").mkdir(parents=True)
    (folder / "package" / "a.py").write_text("1")
    found = job_inputs.digest(folder)
    (folder / "package" / "__pycache__" / "a.pyc").write_text("compiled")
    assert job_inputs.digest(folder) == found
    (folder / "package" / "a.py").rename(folder / "package" / "b.py")
    assert job_inputs.digest(folder) != found, "names count"
    with pytest.raises(AssignmentError, match=f"code.sha256 is {found}: copy"):
        await job_inputs.find(CodeConfig(path=str(folder), sha256=found))
    with pytest.raises(AssignmentError, match="cannot be read on this node"):
        await job_inputs.find(CodeConfig(path=str(tmp_path / "absent")))
    monkeypatch.setattr(job_inputs, "MAX_FILES", 0)
    with pytest.raises(AssignmentError, match="give a folder with code alone"):
        job_inputs.digest(folder)


def test_counters_from_proc(tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    (tmp_path / "loadavg").write_text("1.50 1.0 0.5 1/100 42\n")
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable: 60 kB\n")
    columns = " ".join(str(number) for number in range(1, 17))
    (tmp_path / "net/dev").write_text(
        f"Inter-| x\n face | y\n    lo: {columns}\n  eth0:{columns}\n  ib0: {columns}\n"
    )
    found = host_counters(tmp_path, tmp_path)
    assert (found.load_1min, found.memory_available_bytes) == (1.5, 60 * 1024)
    assert (found.network_received_bytes, found.network_sent_bytes) == (2, 18)
    assert found.staging_free_bytes > 0
    assert host_counters(tmp_path / "absent", tmp_path / "absent") == link_pb2.HostCounters()
