"""A real agent process with its checkpoint daemon and loader, against a driver on the wire."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import time
import zlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
from tests.harness.agent_process import TOKEN, AgentProcess, start_agent
from tests.harness.corpus import random_documents, write_corpus
from tests.harness.processes import living_processes_of_group, until_gone
from tests.harness.recording_driver import RecordingDriver, whole_on_one_node
from tests.harness.waiting import CALL_TIMEOUT_S, eventually

from megascale.v1 import (
    checkpoint_pb2,
    checkpoint_pb2_grpc,
    executor_pb2,
    executor_pb2_grpc,
    link_pb2,
    types_pb2,
)
from megascale_common.node.spans.record import SPAN, Span, from_columns
from megascale_common.service.channel import open_channel
from megascale_job import loading

IDLE, PREPARE, START = (
    link_pb2.DESIRED_PHASE_IDLE,
    link_pb2.DESIRED_PHASE_PREPARE,
    link_pb2.DESIRED_PHASE_START,
)


def assignment(
    tmp_path: Path,
    attempt: int = 1,
    *,
    steps_of_training: int = 10,
    uri: str = "",
    collective_timeout_s: float = 60.0,
    **labels: str,
) -> link_pb2.AttemptAssignment:
    """A small job of two ranks, both on node n0. ``labels`` are for the scripted training side."""
    config = loading.from_accepted(
        {
            "name": "demo",
            "model": {
                "layers": 2,
                "hidden_size": 32,
                "heads": 2,
                "vocab_size": 257,
                "sequence_length": 16,
            },
            "training": {"steps": steps_of_training, "global_batch_size": 4, "precision": "fp32"},
            "parallelism": {"dp": 2, "overlap": {"dp": True}},
            "data": {"sources": [{"prefix": str(tmp_path / "corpus")}]},
            "checkpoint": {"uri": uri, "interval_steps": 5 if uri else 0},
            "recovery": {"collective_timeout_s": collective_timeout_s},
            "labels": labels,
        }
    )
    return whole_on_one_node(config, attempt)


@pytest_asyncio.fixture
async def driver(tmp_path: Path) -> AsyncIterator[RecordingDriver]:
    """A driver whose address stands in driver.address."""
    made = RecordingDriver("test", TOKEN)
    await made.start(tmp_path / "driver.address")
    yield made
    await made.stop()


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentProcess]:
    """A running agent of node n0 with two CPU slots, ended by SIGTERM."""
    started = start_agent(tmp_path)
    yield started
    started.end()


async def run_attempt(
    driver: RecordingDriver,
    given: link_pb2.AttemptAssignment,
    until: link_pb2.AttemptPhase.ValueType,
) -> link_pb2.Heartbeat:
    """PREPARE, then START as the driver would; returns the first heartbeat in phase ``until``."""
    driver.want(PREPARE, given)
    prepared = await driver.until_phase(link_pb2.ATTEMPT_PHASE_PREPARED, attempt=given.attempt)
    given.store_endpoint = prepared.store_endpoint
    driver.want(START, given)
    return await driver.until_phase(until, attempt=given.attempt)


async def test_hello_then_heartbeats_with_clock_readings(
    driver: RecordingDriver, agent: AgentProcess
) -> None:
    await driver.until_joined()
    await driver.until(
        lambda: len(driver.beats) >= 3 and driver.beats[-1].HasField("ack_received_at")
    )
    hello = driver.hellos[-1]
    assert (hello.node, dict(hello.topology)) == ("n0", {"switch": "s0"})
    assert [device.index for device in hello.devices] == [0, 1]
    assert hello.checkpoint_endpoint and hello.executor_endpoint and hello.incarnation
    numbers = [beat.seq for beat in driver.beats]
    assert numbers == sorted(set(numbers))
    # A link that ends, as when the daemon came late, may take its last heartbeat along.
    assert driver.connections > 1 or numbers == list(range(1, len(numbers) + 1))
    last = driver.beats[-1]
    assert last.phase == link_pb2.ATTEMPT_PHASE_IDLE and last.epoch_seen == driver.epoch
    moments = [
        last.ack_driver_received_at,
        last.ack_driver_sent_at,
        last.ack_received_at,
        last.sent_at,
    ]
    assert all(moment.seconds for moment in moments)
    assert [m.ToNanoseconds() for m in moments] == sorted(m.ToNanoseconds() for m in moments)
    assert last.host.memory_available_bytes > 0 and last.host.staging_free_bytes > 0


async def test_attempt_runs_to_its_end(
    driver: RecordingDriver, agent: AgentProcess, tmp_path: Path
) -> None:
    await driver.until_joined()
    go = tmp_path / "go"
    given = assignment(
        tmp_path, uri=str(tmp_path / "checkpoints"), steps="12", interval_s="0.05", go=str(go)
    )
    version = driver.want(PREPARE, given)
    prepared = await driver.until_phase(link_pb2.ATTEMPT_PHASE_PREPARED)
    assert prepared.desired_version == version
    verdicts = {check.name: check.verdict for check in prepared.checks}
    assert set(verdicts) == {
        "checkpoint_daemon",
        "device_present",
        "disk_room",
        "memory_room",
        "compute",
        "gpu_health",
        "kernel_log",
        "network_profile",
    }
    # This driver has no profile, and CPUs use no NCCL.
    assert verdicts.pop("network_profile") == types_pb2.CHECK_VERDICT_SKIPPED
    assert verdicts.pop("gpu_health") == types_pb2.CHECK_VERDICT_SKIPPED  # these are CPUs
    kernel_log = verdicts.pop("kernel_log")  # who may read it depends on the host
    assert kernel_log in (types_pb2.CHECK_VERDICT_PASS, types_pb2.CHECK_VERDICT_SKIPPED)
    assert set(verdicts.values()) == {types_pb2.CHECK_VERDICT_PASS}
    host, _, port = prepared.store_endpoint.rpartition(":")
    assert host == "127.0.0.1" and int(port) > 0
    given.store_endpoint = prepared.store_endpoint
    driver.want(START, given)
    running = await driver.until_phase(link_pb2.ATTEMPT_PHASE_RUNNING)
    assert [worker.state for worker in running.workers] == [link_pb2.WORKER_STATE_RUNNING] * 2
    go.touch()
    finished = await driver.until_phase(link_pb2.ATTEMPT_PHASE_FINISHED)
    assert [(worker.exit_status, worker.step, worker.phase) for worker in finished.workers] == [
        (0, 12, "DONE")
    ] * 2
    await driver.until(lambda: len(driver.steps) >= 12)
    # Rank 0 alone reports.
    assert [record.step for record in driver.steps] == list(range(1, 13))
    assert driver.steps[0].step_time.ToMilliseconds() == 50 and not driver.steps[0].HasField(
        "mfu_causal"
    )
    logs = agent.node_folder / "jobs/demo/attempt-000001"
    assert "rank 0 of attempt 1 has 1 descriptors" in (logs / "rank-00000.log").read_text()
    assert "rank 1 of attempt 1 has 0 descriptors" in (logs / "rank-00001.log").read_text()
    # Idle, then the next attempt: the good end keeps the costly checks in force.
    driver.want(IDLE)
    await driver.until_phase(link_pb2.ATTEMPT_PHASE_IDLE)
    driver.want(PREPARE, assignment(tmp_path, 2))
    again = await driver.until_phase(link_pb2.ATTEMPT_PHASE_PREPARED, attempt=2)
    assert "finished well" in next(
        check.detail for check in again.checks if check.name == "compute"
    )


async def test_failed_worker_fails_the_attempt_and_stops_the_others(
    driver: RecordingDriver, agent: AgentProcess, tmp_path: Path
) -> None:
    driver.interval_s = 30.0
    await driver.until_joined()
    ways = {
        "vanish": (-9, ""),
        "exit": (3, ""),
        "watchdog": (-6, "COLLECTIVE"),
        "finish_early": (0, "OTHER"),
        "peer_absent": (1, "COLLECTIVE"),
        "DATA": (1, "DATA"),
        "BAD_JOB": (1, "BAD_JOB"),
        "CHECKPOINT_CORRUPT": (1, "CHECKPOINT_CORRUPT"),
    }
    for attempt, (how, (status, kind)) in enumerate(ways.items(), 1):
        given = assignment(
            tmp_path, attempt, collective_timeout_s=1.0, fail_rank="1", fail=how, fail_step="3"
        )
        failed = await run_attempt(driver, given, link_pb2.ATTEMPT_PHASE_FAILED)
        culprit = failed.workers[1]
        # One that has reported its error is killed if it has not ended a second later.
        slow = status == 1 and culprit.exit_status == -9
        assert (culprit.exit_status, culprit.error_kind) == (-9 if slow else status, kind)
        assert "rank 1" in failed.failure
        if how == "CHECKPOINT_CORRUPT":
            assert culprit.error == "/checkpoints/rank-00001.safetensors"
        if how == "peer_absent":
            waited = re.search(r"in group tp was in progress for (\S+) s", culprit.error)
            assert waited is not None and float(waited[1]) >= 1.0
        await driver.until(
            lambda: driver.beats[-1].workers[0].state == link_pb2.WORKER_STATE_EXITED
        )
        bystander = driver.beats[-1].workers[0]
        assert (bystander.exit_status, bystander.error_kind) == (-9, "STOPPED")
        assert culprit.exited_at.ToNanoseconds() <= bystander.exited_at.ToNanoseconds()
        await driver.until(
            lambda: any("scripted failure" in log.sample_line for log in driver.beats[-1].logs)
        )
        last = driver.beats[-1]
        assert (last.logs_job, last.logs_attempt) == (given.job, given.attempt)
        (root,) = (log for log in last.logs if "scripted failure" in log.sample_line)
        assert (root.first_rank, root.count, root.role, root.category) == (1, 1, "root", "unknown")


async def test_a_failure_that_the_stop_overtakes_is_reported_with_it(
    driver: RecordingDriver, agent: AgentProcess, tmp_path: Path
) -> None:
    """A peer reported first: the order to stop comes while the culprit is about to end."""
    await driver.until_joined()
    go = tmp_path / "go"
    given = assignment(tmp_path, fail_rank="1", fail="linger", fail_step="3", go=str(go))
    began_s = time.time()
    await run_attempt(driver, given, link_pb2.ATTEMPT_PHASE_RUNNING)
    go.touch()
    log = agent.node_folder / "jobs/demo/attempt-000001/rank-00001.log"
    await eventually(lambda: "the failure is reported" in log.read_text(), "the culprit's error")
    version = driver.want(IDLE)
    await driver.until(
        lambda: driver.beats[-1].desired_version == version and driver.beats[-1].attempt == 0
    )
    stopped = driver.beats[-1].stopped
    assert (stopped.job, stopped.attempt) == (given.job, given.attempt)
    (culprit,) = stopped.workers  # and not the bystander
    assert (culprit.rank, culprit.exit_status, culprit.error_kind) == (1, -9, "OTHER")
    assert culprit.error == "scripted OTHER"
    assert began_s < culprit.exited_at.ToNanoseconds() / 1e9 <= time.time()
    again = await run_attempt(driver, assignment(tmp_path, 2), link_pb2.ATTEMPT_PHASE_RUNNING)
    assert not again.HasField("stopped")
    version = driver.want(IDLE)
    await driver.until(
        lambda: driver.beats[-1].desired_version == version and driver.beats[-1].attempt == 0
    )
    assert not driver.beats[-1].HasField("stopped"), "nothing had failed"


async def test_killed_worker_is_reported_at_once(
    driver: RecordingDriver, agent: AgentProcess, tmp_path: Path
) -> None:
    driver.interval_s = 30.0
    await driver.until_joined()
    running = await run_attempt(driver, assignment(tmp_path), link_pb2.ATTEMPT_PHASE_RUNNING)
    os.kill(running.workers[0].pid, signal.SIGKILL)
    begin = time.monotonic()
    failed = await driver.until_phase(link_pb2.ATTEMPT_PHASE_FAILED)
    assert time.monotonic() - begin < driver.interval_s, "at once, not with the next heartbeat"
    assert failed.workers[0].exit_status == -9 and failed.workers[0].error_kind == ""
    assert (
        abs(failed.workers[0].exited_at.ToMilliseconds() / 1000 - time.time()) < driver.interval_s
    )


async def test_idle_kills_workers_and_a_newer_attempt_supersedes(
    driver: RecordingDriver, agent: AgentProcess, tmp_path: Path
) -> None:
    await driver.until_joined()
    running = await run_attempt(driver, assignment(tmp_path), link_pb2.ATTEMPT_PHASE_RUNNING)
    first = [worker.pid for worker in running.workers]
    driver.want(PREPARE, assignment(tmp_path, 2))
    await driver.until_phase(link_pb2.ATTEMPT_PHASE_PREPARED, attempt=2)
    assert not set(first) & set(living_processes_of_group(agent.process.pid))
    running = await run_attempt(driver, assignment(tmp_path, 3), link_pb2.ATTEMPT_PHASE_RUNNING)
    version = driver.want(IDLE)
    await driver.until(
        lambda: driver.beats[-1].desired_version == version and driver.beats[-1].attempt == 0
    )
    assert driver.beats[-1].phase == link_pb2.ATTEMPT_PHASE_IDLE
    roles = ["agent", "checkpoint", "template"]
    await eventually(lambda: sorted(pids_of(agent)) == roles, "the processes of an idle node")
    await eventually(lambda: sorted(agent.group()) == sorted(pids_of(agent).values()), "no others")


async def test_template_death_fails_the_attempt_and_the_next_one_works(
    driver: RecordingDriver, agent: AgentProcess, tmp_path: Path
) -> None:
    await driver.until_joined()
    running = await run_attempt(driver, assignment(tmp_path), link_pb2.ATTEMPT_PHASE_RUNNING)
    os.kill(await pid_of(agent, "template"), signal.SIGKILL)
    await driver.until_phase(link_pb2.ATTEMPT_PHASE_FAILED)
    driver.want(IDLE)
    await driver.until_phase(link_pb2.ATTEMPT_PHASE_IDLE)
    assert not {worker.pid for worker in running.workers} & set(agent.group())
    await run_attempt(driver, assignment(tmp_path, 2), link_pb2.ATTEMPT_PHASE_RUNNING)


async def test_a_loader_that_ends_fails_the_attempt_though_no_worker_waits_for_it(
    driver: RecordingDriver, agent: AgentProcess, tmp_path: Path
) -> None:
    """The scripted workers never ask for data, as real ones before their first step."""
    await driver.until_joined()
    running = await run_attempt(driver, assignment(tmp_path), link_pb2.ATTEMPT_PHASE_RUNNING)
    os.kill(await pid_of(agent, "loader"), signal.SIGKILL)
    failed = await driver.until_phase(link_pb2.ATTEMPT_PHASE_FAILED)
    assert "the data loader" in failed.failure and "killed by signal 9" in failed.failure
    log = (agent.node_folder / "agent.log").read_text()
    assert "fork_posix" not in log, "gRPC's fork handlers run in the agent's children"
    assert {worker.error_kind for worker in failed.workers} <= {"", "STOPPED"}
    driver.want(IDLE)
    await driver.until_phase(link_pb2.ATTEMPT_PHASE_IDLE)
    assert not {worker.pid for worker in running.workers} & set(agent.group())


async def test_a_dead_daemon_is_replaced_while_training_goes_on(
    driver: RecordingDriver, agent: AgentProcess, tmp_path: Path
) -> None:
    await driver.until_joined()
    await run_attempt(driver, assignment(tmp_path), link_pb2.ATTEMPT_PHASE_RUNNING)
    killed = await pid_of(agent, "checkpoint")
    os.kill(killed, signal.SIGKILL)
    await driver.until(
        lambda: len(driver.hellos) >= 2 or pids_of(agent).get("checkpoint", killed) != killed
    )
    seen = len(driver.steps)
    await driver.until(lambda: len(driver.steps) > seen + 3)
    assert driver.beats[-1].phase == link_pb2.ATTEMPT_PHASE_RUNNING


def pids_of(agent: AgentProcess) -> dict[str, int]:
    """The node's processes by role, as of the agent's last look."""
    pids: dict[str, int] = json.loads((agent.node_folder / "pids.json").read_text())
    return pids


async def pid_of(agent: AgentProcess, role: str) -> int:
    """The process of a role, once the agent has written it down."""
    return int(await eventually(lambda: pids_of(agent).get(role), f"the pid of the {role}"))


async def test_driver_restart_keeps_workers_and_step_records(
    driver: RecordingDriver, agent: AgentProcess, tmp_path: Path
) -> None:
    await driver.until_joined()
    given = assignment(tmp_path)
    running = await run_attempt(driver, given, link_pb2.ATTEMPT_PHASE_RUNNING)
    await driver.until(lambda: len(driver.steps) >= 2)
    await driver.stop()
    await asyncio.sleep(0.5)
    successor = RecordingDriver("test", TOKEN, revision=2)
    await successor.start(tmp_path / "driver.address")
    try:
        beat = await successor.until_phase(link_pb2.ATTEMPT_PHASE_RUNNING)
        assert [worker.pid for worker in beat.workers] == [worker.pid for worker in running.workers]
        assert beat.epoch_seen == successor.epoch
        assert (beat.job, beat.attempt) == ("demo", 1)
        # The new driver may send its desired state late: until then nothing changes, and then the
        # same attempt goes on.
        successor.want(START, given)
        await successor.until(lambda: successor.beats[-1].desired_version == 1)
        await successor.until(
            lambda: bool(successor.steps) and successor.steps[-1].step > driver.steps[-1].step + 10
        )
        seen = {record.step for record in [*driver.steps, *successor.steps]}
        assert seen == set(range(1, max(seen) + 1))
        assert successor.beats[-1].phase == link_pb2.ATTEMPT_PHASE_RUNNING
        assert successor.hellos[0].incarnation == driver.hellos[0].incarnation
    finally:
        await successor.stop()


async def test_lower_epoch_and_lower_version_are_refused(
    driver: RecordingDriver, agent: AgentProcess, tmp_path: Path
) -> None:
    driver.epoch.create_revision = 9
    await driver.until_joined()
    running = await run_attempt(driver, assignment(tmp_path), link_pb2.ATTEMPT_PHASE_RUNNING)
    connections = driver.connections
    stale = link_pb2.DesiredState(
        epoch=types_pb2.Epoch(cluster_generation=1, create_revision=8), version=99, phase=IDLE
    )
    driver.send(stale)
    await driver.until(
        lambda: driver.connections > connections
    )  # the session with the superseded driver has ended
    await driver.until_joined()
    connections = driver.connections
    old = link_pb2.DesiredState(epoch=driver.epoch, version=1, phase=IDLE)
    driver.send(old)
    await driver.until(lambda: driver.connections > connections)
    steps = len(driver.steps)
    await driver.until(lambda: len(driver.steps) > steps + 2)
    assert {worker.pid for worker in running.workers} <= set(agent.group())
    await driver.stop()
    deposed = RecordingDriver("test", TOKEN, revision=3)
    await deposed.start(tmp_path / "driver.address")
    deposed.want(IDLE)
    await deposed.until(
        lambda: len(deposed.hellos) >= 2
    )  # it dials again and again, and sends nothing but hellos
    assert deposed.beats == []
    assert {worker.pid for worker in running.workers} <= set(agent.group())
    await deposed.stop()


async def test_bad_assignments_fail_with_a_reason(
    driver: RecordingDriver, agent: AgentProcess, tmp_path: Path
) -> None:
    await driver.until_joined()
    foreign = assignment(tmp_path, 1)
    foreign.devices[:] = [0, 7]
    unprepared = assignment(tmp_path, 2)
    invalid = assignment(tmp_path, 3)
    invalid.spec.trainer.ClearField("model")
    for given, phase, words in (
        (foreign, PREPARE, "devices [7] are not of node n0"),
        (unprepared, START, "has not prepared"),
        (invalid, PREPARE, "model"),
    ):
        driver.want(phase, given)
        failed = await driver.until_phase(link_pb2.ATTEMPT_PHASE_FAILED, attempt=given.attempt)
        assert words in failed.failure


async def test_failed_self_check_fails_the_preparation(
    driver: RecordingDriver, tmp_path: Path
) -> None:
    scripted = Path(__file__).parents[1] / "harness" / "scripted_template.py"
    agent = start_agent(tmp_path, template=f"{sys.executable} {scripted} --verdict FAIL")
    try:
        await driver.until_joined()
        driver.want(PREPARE, assignment(tmp_path))
        failed = await driver.until_phase(link_pb2.ATTEMPT_PHASE_FAILED)
        assert failed.failure.startswith("self-check compute of cpu:0")
        bad = [check for check in failed.checks if check.verdict == types_pb2.CHECK_VERDICT_FAIL]
        assert [check.target for check in bad] == ["cpu:0", "cpu:1"]
    finally:
        agent.end()


async def test_broken_template_is_given_up_with_a_reason(
    driver: RecordingDriver, tmp_path: Path
) -> None:
    agent = start_agent(tmp_path, template="false")
    try:
        await driver.until_joined()
        driver.want(PREPARE, assignment(tmp_path))
        failed = await driver.until_phase(link_pb2.ATTEMPT_PHASE_FAILED)
        assert "template.log" in failed.failure
    finally:
        agent.end()


async def test_real_template_checks_compute_and_all_reduce(
    driver: RecordingDriver, tmp_path: Path
) -> None:
    agent = start_agent(tmp_path, template="")
    try:
        await driver.until_joined()
        driver.want(PREPARE, assignment(tmp_path))
        await driver.until_phase(link_pb2.ATTEMPT_PHASE_PREPARED)
        driver.want(PREPARE, assignment(tmp_path, 2))  # now that torch is imported
        prepared = await driver.until_phase(link_pb2.ATTEMPT_PHASE_PREPARED, attempt=2)
        done = {(check.name, check.target): check for check in prepared.checks}
        for name in ("compute", "all_reduce"):
            for device in ("cpu:0", "cpu:1"):
                check = done[name, device]
                assert check.verdict == types_pb2.CHECK_VERDICT_PASS, check.detail
                assert "known answer" in check.detail
    finally:
        agent.end()


async def test_real_training_resumes_from_the_memory_of_its_node(
    driver: RecordingDriver, tmp_path: Path
) -> None:
    """Real template, loader, daemon: a worker is killed, the next attempt resumes from memory."""
    write_corpus(tmp_path / "corpus", random_documents(seed=1, count=50, longest=60))
    agent = start_agent(tmp_path, template="")
    try:
        await driver.until_joined()
        # So many steps that the job does not end before its worker is killed.
        uri, steps = str(tmp_path / "checkpoints"), 20_000
        given = assignment(tmp_path, 1, steps_of_training=steps, uri=uri)
        running = await open_and_start(driver, given)
        await driver.until(
            lambda: (
                bool(driver.steps)
                and driver.steps[-1].step > 11
                and bool(sealed_by_all(driver.beats[-1], given))
            )
        )
        os.kill(running.workers[1].pid, signal.SIGKILL)
        await driver.until_phase(link_pb2.ATTEMPT_PHASE_FAILED)
        await driver.until(
            lambda: all(
                worker.state == link_pb2.WORKER_STATE_EXITED for worker in driver.beats[-1].workers
            )
        )
        failed = driver.beats[-1]
        assert [worker.exit_status for worker in failed.workers if not worker.error_kind] == [-9]
        again = assignment(tmp_path, 2, steps_of_training=steps, uri=uri)
        await open_and_start(driver, again)
        assert again.restore.source == types_pb2.RESTORE_SOURCE_MEMORY
        assert again.restore.step >= 5 and again.restore.step % 5 == 0
        await driver.until(lambda: driver.steps[-1].attempt == 2)
        assert again.restore.step <= max(
            record.step for record in driver.steps if record.attempt == 1
        )
        resumed = [record.step for record in driver.steps if record.attempt == 2]
        assert resumed[0] == again.restore.step + 1
        before = {record.step: record.loss for record in driver.steps if record.attempt == 1}
        repeated = [
            record for record in driver.steps if record.attempt == 2 and record.step in before
        ]
        assert all(record.loss == before[record.step] for record in repeated)
        await measured_spans(driver, ranks=2)
    finally:
        agent.end()


async def test_a_node_trains_while_nothing_can_be_logged(
    driver: RecordingDriver, tmp_path: Path
) -> None:
    """All logs of the node are full: it links again, its ranks end well, the commit counts."""
    write_corpus(tmp_path / "corpus", random_documents(seed=1, count=50, longest=60))
    attempt = tmp_path / "nodes/n0/jobs/demo/attempt-000001"
    attempt.mkdir(parents=True)
    names = ["agent.log", "template.log", "checkpoint.log", "self-check.log"]
    names += [
        f"{attempt.relative_to(tmp_path / 'nodes/n0')}/rank-0000{rank}.log" for rank in (0, 1)
    ]
    for name in names:
        (tmp_path / "nodes/n0" / name).symlink_to("/dev/full")
    agent = start_agent(tmp_path, template="")
    try:
        await driver.until_joined()
        given = assignment(tmp_path, steps_of_training=10, uri=str(tmp_path / "checkpoints"))
        await open_and_start(driver, given)
        finished = await driver.until_phase(link_pb2.ATTEMPT_PHASE_FINISHED)
        assert [worker.exit_status for worker in finished.workers] == [0, 0]
        assert not finished.failure
        [progress] = finished.checkpoints
        assert (progress.committed_step, progress.failure.error) == (10, "")
        linked = driver.connections
        await driver.stop()
        again = RecordingDriver("test", TOKEN, revision=2)
        await again.start(tmp_path / "driver.address")
        await again.until_joined()
        await again.stop()
        assert linked and agent.process.poll() is None
    finally:
        agent.end()


async def measured_spans(driver: RecordingDriver, ranks: int) -> None:
    """The driver gets what each rank of attempt 1 has measured, in Unix time."""

    def names(rank: int) -> set[str]:
        found = set()
        for batch in driver.spans:
            # One without spans brings counters of the node alone.
            if (batch.node, batch.rank, batch.attempt) == ("n0", rank, 1) and batch.count:
                records = from_columns(zlib.decompress(batch.columns))
                assert len(records) == batch.count * SPAN.size
                spans = [Span(*fields) for fields in SPAN.iter_unpack(records)]
                found |= {batch.operations[span.op].name for span in spans if span.step == 2}
                unix_s = (spans[0].start_ns + batch.unix_offset_ns) / 1e9
                assert abs(time.time() - unix_s) < 600 and batch.unix_offset_error_ns < 1e9
        return found

    expected = {"step", "forward", "backward", "optimizer", "data_wait", "snapshot"}
    await driver.until(
        lambda: all(expected <= names(rank) for rank in range(ranks)), "spans of all ranks"
    )


def sealed_by_all(beat: link_pb2.Heartbeat, given: link_pb2.AttemptAssignment) -> set[int]:
    """Steps whose snapshots all ranks have sealed."""
    steps = [
        {s.step for p in beat.checkpoints for s in p.sealed if s.rank == rank}
        for rank in given.ranks
    ]
    return set.intersection(*steps)


async def open_and_start(
    driver: RecordingDriver, given: link_pb2.AttemptAssignment
) -> link_pb2.Heartbeat:
    """PREPARE, OpenAttempt with what the node holds sealed, START; until RUNNING."""
    driver.want(PREPARE, given)
    prepared = await driver.until_phase(link_pb2.ATTEMPT_PHASE_PREPARED, attempt=given.attempt)
    common = max(sealed_by_all(prepared, given), default=0)
    given.store_endpoint, given.committer_endpoint = (
        prepared.store_endpoint,
        driver.hellos[-1].checkpoint_endpoint,
    )
    request = checkpoint_pb2.OpenAttemptRequest(
        job=given.job,
        uri=given.spec.checkpoint.uri,
        attempt=given.attempt,
        world_size=2,
        sealed_step=common,
        sealed_by_attempt=1 if common else 0,
        epoch=driver.epoch,
    )
    channel = open_channel(given.committer_endpoint, TOKEN)
    try:
        opened = await checkpoint_pb2_grpc.CheckpointServiceStub(channel).OpenAttempt(
            request, timeout=CALL_TIMEOUT_S
        )
    finally:
        await channel.close()
    given.restore.CopyFrom(opened.restore)
    driver.want(START, given)
    return await driver.until_phase(link_pb2.ATTEMPT_PHASE_RUNNING, attempt=given.attempt)


async def test_killed_agent_leaves_no_process_and_its_folder_goes_at_the_next_start(
    driver: RecordingDriver, agent: AgentProcess, tmp_path: Path
) -> None:
    await driver.until_joined()
    await run_attempt(
        driver, assignment(tmp_path, uri=str(tmp_path / "c")), link_pb2.ATTEMPT_PHASE_RUNNING
    )
    assert len(agent.group()) >= 6  # agent, template, daemon, loader, two workers
    folder = _socket_folder(driver.hellos[0].incarnation)
    assert folder.stat().st_mode & 0o777 == 0o700
    group = agent.group()
    os.kill(agent.process.pid, signal.SIGKILL)  # the agent alone
    agent.process.wait()
    until_gone(group, "processes of the killed agent")
    assert folder.exists()
    hellos = len(driver.hellos)
    successor = start_agent(tmp_path)
    try:
        await driver.until(lambda: len(driver.hellos) > hellos)
        assert driver.hellos[-1].incarnation != driver.hellos[0].incarnation
        assert not folder.exists()
        live = _socket_folder(driver.hellos[-1].incarnation)
        group = successor.group()
        successor.process.terminate()
        assert await asyncio.to_thread(successor.process.wait, CALL_TIMEOUT_S) == 0
        until_gone(group, "processes of the agent that stopped")
        assert not live.exists()
        assert not (successor.node_folder / "executor.address").exists()
    finally:
        successor.kill_group()  # it has ended, if all went well


def _socket_folder(incarnation: str) -> Path:
    parents = [Path(f"/tmp/megascale-{os.getuid()}")]
    if "XDG_RUNTIME_DIR" in os.environ:
        parents.append(Path(os.environ["XDG_RUNTIME_DIR"]) / "megascale")
    return next(folder for parent in parents for folder in parent.glob(f"*-{incarnation}"))


async def test_node_status_and_following_a_log(
    driver: RecordingDriver, agent: AgentProcess, tmp_path: Path
) -> None:
    await driver.until_joined()
    go = tmp_path / "go"
    given = assignment(tmp_path, steps="30", interval_s="0.03", go=str(go))
    await run_attempt(driver, given, link_pb2.ATTEMPT_PHASE_RUNNING)
    channel = open_channel(driver.hellos[0].executor_endpoint, TOKEN)
    try:
        stub = executor_pb2_grpc.ExecutorServiceStub(channel)
        status = await stub.GetNodeStatus(
            executor_pb2.GetNodeStatusRequest(), timeout=CALL_TIMEOUT_S
        )
        assert (status.hello.node, status.heartbeat.job) == ("n0", "demo")
        assert status.pids[0] == agent.process.pid
        await eventually(lambda: set(status.pids) == set(agent.group()), "its processes, no others")
        request = executor_pb2.TailWorkerLogsRequest(job="demo", rank=1, follow=True)
        lines = []
        async for response in stub.TailWorkerLogs(request, timeout=CALL_TIMEOUT_S):
            lines.append(response.line)
            go.touch()
        assert lines[1:] == [
            f"step {step}" for step in range(1, 31)
        ]  # ends by itself with the attempt
        last = executor_pb2.TailWorkerLogsRequest(job="demo", rank=0, attempt=1, lines=2)
        assert [r.line async for r in stub.TailWorkerLogs(last)] == ["step 29", "step 30"]
        for bad, code in (
            (executor_pb2.TailWorkerLogsRequest(job="../demo"), grpc.StatusCode.INVALID_ARGUMENT),
            (executor_pb2.TailWorkerLogsRequest(job="demo", rank=5), grpc.StatusCode.NOT_FOUND),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                [r async for r in stub.TailWorkerLogs(bad)]
            assert refused.value.code() == code
    finally:
        await channel.close()


async def test_step_records_wait_for_a_driver_that_takes_them(
    driver: RecordingDriver, agent: AgentProcess, tmp_path: Path
) -> None:
    driver.interval_s = 30.0  # a new link, as after a silence of six intervals, sends records again
    await driver.until_joined()
    driver.refusal = grpc.StatusCode.UNAVAILABLE  # as of a driver that has just lost its etcd
    await run_attempt(
        driver, assignment(tmp_path, steps="8", interval_s="0.02"), link_pb2.ATTEMPT_PHASE_RUNNING
    )
    await driver.until(lambda: driver.refused >= 2)
    # A watch of the job ends with it, so the end is not reported before the driver has the records.
    assert driver.steps == []
    assert driver.beats[-1].phase == link_pb2.ATTEMPT_PHASE_RUNNING
    driver.refusal = None
    await driver.until_phase(link_pb2.ATTEMPT_PHASE_FINISHED)
    assert [record.step for record in driver.steps] == list(range(1, 9))
    # What a driver has read and refused is not sent again.
    driver.refusal = grpc.StatusCode.NOT_FOUND
    driver.want(IDLE)
    await run_attempt(driver, assignment(tmp_path, 2, steps="3"), link_pb2.ATTEMPT_PHASE_FINISHED)
    await driver.until(lambda: driver.refused > 0 and len(driver.beats) > 0)
    await asyncio.sleep(0.3)
    driver.refusal = None
    await run_attempt(driver, assignment(tmp_path, 3, steps="2"), link_pb2.ATTEMPT_PHASE_FINISHED)
    await driver.until(lambda: bool(driver.steps) and driver.steps[-1].attempt == 3)
    assert 2 not in {record.attempt for record in driver.steps}
