"""Commands about nodes and events against a scripted driver: what they send, print and return."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.harness.cli_process import run, start
from tests.harness.scripted_driver import TOKEN, ScriptedDriver, start_driver
from tests.harness.waiting import CALL_TIMEOUT_S, eventually

from megascale.v1 import driver_pb2, types_pb2
from megascale_cli.exits import FAILED, INTERRUPTED, NOT_FOUND, OK, REFUSED, USAGE


@pytest.fixture
async def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ScriptedDriver]:
    """A driver that the commands find by $MEGASCALE_RUN_FOLDER."""
    scripted = await start_driver()
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "driver.address").write_text(scripted.address)
    monkeypatch.setenv("MEGASCALE_RUN_FOLDER", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "160")
    yield scripted
    await scripted.server.stop(0)


async def test_a_node_is_cordoned_and_put_back(driver: ScriptedDriver) -> None:
    status, output, _ = await run("cordon", "n1", "--reason", "a cable")
    assert (status, output) == (OK, "node n1 is cordoned\njob x goes on there\n")
    status, output, _ = await run("cordon", "n1", "--reason", "a cable", "--check", "--json")
    assert (status, json.loads(output)["node"]["disposition"]) == (OK, "NODE_DISPOSITION_CORDONED")
    status, output, _ = await run("uncordon", "n1", "--reason", "replaced")
    assert (status, output) == (OK, "node n1 is schedulable\n")
    sent = [(request.name, request.reason, request.validate_only) for request in driver.requests]
    assert sent == [("n1", "a cable", False), ("n1", "a cable", True), ("n1", "replaced", False)]


def profile(name: str, *states: types_pb2.TraceState.ValueType) -> driver_pb2.Profile:
    made = driver_pb2.Profile(id=name, first_step=7, last_step=8)
    for rank, state in enumerate(states):
        detail = "" if state == types_pb2.TRACE_STATE_WRITTEN else "the disk is full"
        made.traces.add(
            rank=rank,
            node="n1",
            path=f"/{rank}.json.gz",
            state=state,
            size_bytes=2048,
            detail=detail,
        )
    return made


async def test_a_profile_is_awaited_and_a_missing_trace_is_a_failed_command(
    driver: ScriptedDriver,
) -> None:
    pending, written, failed = (
        types_pb2.TRACE_STATE_PENDING, types_pb2.TRACE_STATE_WRITTEN, types_pb2.TRACE_STATE_FAILED,
    )  # fmt: skip
    driver.profiles = [
        profile("p1", pending, pending),
        profile("p1", written, pending),
        profile("p1", written, failed),
    ]
    status, output, _ = await run(
        "profile", "x", "--steps", "2", "--ranks", "0,1", "--reason", "slow"
    )
    assert status == FAILED and driver.profiles == []
    assert output.splitlines() == [
        "job x: steps 7 to 8 will be profiled",
        "rank 0 on node n1: /0.json.gz (2.0 KiB)",
        "rank 1 on node n1: failed the disk is full",
        "open a trace at https://ui.perfetto.dev (it is read in the browser; nothing is uploaded)",
    ]
    sent = driver.requests[0]
    assert (list(sent.ranks), sent.steps, sent.first_step, sent.reason) == (
        [0, 1],
        2,
        0,
        "slow",
    ) and sent.request_id
    driver.profiles = [profile("p2", pending)]
    status, _, errors = await run("profile", "x")
    assert (status, "another profile was requested since" in errors) == (REFUSED, True)
    driver.requests.clear()
    status, output, _ = await run("profile", "x", "--no-wait", "--json")
    assert (status, json.loads(output)["id"], len(driver.requests)) == (OK, "p1", 1)


async def test_a_failed_check_is_a_failed_command(driver: ScriptedDriver) -> None:
    driver.verdicts = {"disk_room": types_pb2.CHECK_VERDICT_FAIL}
    status, output, _ = await run("diagnose", "n1")
    assert (status, "device_present" in output, "pass" in output) == (OK, True, True)
    status, output, _ = await run(
        "diagnose", "n1", "--check", "disk_room", "--check", "matrix_product", "--json"
    )
    verdicts = {check["name"]: check["verdict"] for check in map(json.loads, output.splitlines())}
    assert (status, verdicts) == (
        FAILED,
        {"disk_room": "CHECK_VERDICT_FAIL", "matrix_product": "CHECK_VERDICT_PASS"},
    )


@pytest.mark.parametrize("name", ["", "n1"])
async def test_events_are_those_of_the_cluster_or_of_a_job(
    driver: ScriptedDriver, name: str
) -> None:
    driver.updates = [1, 2]
    status, output, _ = await run("events", *([name] if name else []), "--json")
    assert (status, [json.loads(line)["seq"] for line in output.splitlines()]) == (OK, ["1", "2"])
    assert driver.requests[0].subject == (f"jobs/{name}" if name else "")


@pytest.mark.parametrize(
    ("name", "token"), [("", "t0"), ("nodes/n1", "t0"), ("n1", "0.n1"), ("jobs/n1", "0.n1")]
)
async def test_all_events_begin_with_the_oldest_that_can_be_read(
    driver: ScriptedDriver, name: str, token: str
) -> None:
    driver.updates = [1, 2]
    status, _, _ = await run("events", *([name] if name else []), "--all")
    assert (status, driver.requests[0].page_token) == (OK, token)
    status, _, errors = await run("events", "--all", "--follow")
    assert status != OK and "--all" in errors and len(driver.requests) == 1


async def test_events_are_followed_across_a_lost_driver_until_ctrl_c(
    driver: ScriptedDriver,
) -> None:
    driver.updates, driver.break_after = [1, 2], 2
    process = await start("events", "nodes/n1", "--follow", "--json")
    assert process.stdout is not None

    async def line() -> int:
        assert process.stdout is not None
        return int(
            json.loads(await asyncio.wait_for(process.stdout.readline(), CALL_TIMEOUT_S))["seq"]
        )

    assert [await line() for _ in range(2)] == [
        1,
        2,
    ]  # once each, though they are in the list and in the stream
    driver.updates.append(3)  # the stream breaks before it
    assert await line() == 3
    driver.updates.append(4)
    assert await line() == 4
    os.kill(process.pid, signal.SIGINT)
    output, errors = await process.communicate()
    assert (process.returncode, output, errors) == (INTERRUPTED, b"", b"")


JOB_FILE = """name: x
trainer:
  model: {layers: 1, hidden_size: 16, heads: 2, vocab_size: 257, sequence_length: 16}
  training: {steps: 2, global_batch_size: 2}
  data: {sources: [{prefix: /corpus}]}
"""


@pytest.mark.parametrize("command", [("watch", "x"), ("submit", "x.yaml", "--watch")])
async def test_ctrl_c_of_a_watch_says_that_the_job_continues(
    driver: ScriptedDriver,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: tuple[str, ...],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.yaml").write_text(JOB_FILE)
    driver.phases = [types_pb2.JOB_PHASE_RUNNING]
    process = await start(*command)
    assert process.stdout is not None
    while b"running" not in await asyncio.wait_for(process.stdout.readline(), CALL_TIMEOUT_S):
        pass
    os.kill(process.pid, signal.SIGINT)
    _, errors = await process.communicate()
    said = b"job x continues; `megascale watch x` shows it\n"
    assert (process.returncode, errors) == (INTERRUPTED, said)


@pytest.mark.parametrize("tail", [(), ("--tail", "1")])
async def test_a_watch_prints_what_the_driver_says_of_itself(
    driver: ScriptedDriver, tail: tuple[str, ...]
) -> None:
    driver.updates, driver.streamed_note = [1, 2], "this driver does not lead: \x1b[2Jetcd is down"
    note = "note: this driver does not lead: \\x1b[2Jetcd is down\n"
    status, output, errors = await run("watch", "x", *tail)
    assert (status, "step 2" in output, errors) == (OK, True, note)
    status, output, errors = await run("watch", "x", "--json", *tail)
    assert (status, json.loads(output.splitlines()[0])["note"]) == (OK, driver.streamed_note)
    process = await start("events", "nodes/n1", "--follow")
    assert process.stderr is not None
    assert await asyncio.wait_for(process.stderr.readline(), CALL_TIMEOUT_S) == note.encode()
    os.kill(process.pid, signal.SIGINT)
    output_bytes, _ = await process.communicate()
    assert output_bytes.count(b"\n") == 2  # its events, and no line for the note


async def test_a_watch_may_begin_near_the_present(driver: ScriptedDriver) -> None:
    driver.jobs = [driver_pb2.Job(phase=types_pb2.JOB_PHASE_SUCCEEDED)]
    driver.jobs[0].spec.name = "x"
    driver.jobs[0].last_record.MergeFrom(types_pb2.StepRecord(step=8, attempt=1))
    driver.updates = list(range(1, 9))
    status, output, _ = await run("watch", "x", "--tail", "2")
    shown = [line.split("/")[0] for line in output.splitlines() if line.startswith("step")]
    assert (status, shown) == (OK, ["step 7", "step 8"])
    _, output, _ = await run("watch", "x", "--tail", "3", "--json")
    updates = [json.loads(line) for line in output.splitlines()]
    steps = [update["step"]["step"] for update in updates if "step" in update]
    assert steps == ["6", "7", "8"]
    _, output, _ = await run("watch", "x")
    assert output.count("step ") == 8


async def test_status_is_the_overview_of_the_cluster(driver: ScriptedDriver) -> None:
    status, output, _ = await run("status")
    assert (status, output) == (OK, (await run("cluster"))[1])
    assert "cluster scripted: 0 nodes alive, 0 jobs running" in output


async def test_an_error_of_fetch_is_one_line(driver: ScriptedDriver, tmp_path: Path) -> None:
    driver.unknown = {"x"}
    status, output, errors = await run("checkpoint", "fetch", "x", "--to", str(tmp_path / "to"))
    assert (status, output) == (NOT_FOUND, "")
    assert len(errors.splitlines()) == 1 and errors.startswith("error: ")


@pytest.mark.parametrize(
    ("words", "names"), [("cordon n", ["n0", "n1", "n2"]), ("diagnose n2", ["n2"])]
)
async def test_a_shell_completes_the_clusters_names(
    driver: ScriptedDriver, monkeypatch: pytest.MonkeyPatch, words: str, names: list[str]
) -> None:
    monkeypatch.setenv("_MEGASCALE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", f"megascale {words}")
    monkeypatch.setenv("COMP_CWORD", "2")

    async def completed() -> bool:
        """A shell waits for a second, and shows nothing if the answer comes later."""
        return (await run())[1].split() == names

    await eventually(completed, "the names")
    await driver.server.stop(0)
    assert (await run())[1].split() == []


async def test_a_refused_job_is_reported_field_by_field(
    driver: ScriptedDriver, tmp_path: Path
) -> None:
    (tmp_path / "job.yaml").write_text("name: [1]\n")
    status, _, errors = await run("submit", str(tmp_path / "job.yaml"))
    assert (status, "name: expected text" in errors, driver.requests) == (USAGE, True, [])
