"""Tables, logs, clones and configurations, against a scripted driver: what pipes and people get."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest
import yaml
from tests.harness.cli_process import run, start
from tests.harness.scripted_driver import TOKEN, ScriptedDriver, start_driver
from tests.harness.waiting import CALL_TIMEOUT_S

from megascale.v1 import driver_pb2, job_pb2, types_pb2
from megascale_cli.exits import INTERRUPTED, NOT_FOUND, OK, UNAVAILABLE, USAGE
from megascale_client import load_job, parse_job

LONG = "a-name-of-a-job-that-is-as-long-as-names-may-be-63-characters-x"
REASON = "why " * 100 + "end"
VALUES = {
    "name": "first",
    "trainer": {
        "model": {
            "layers": 2,
            "hidden_size": 16,
            "heads": 2,
            "vocab_size": 257,
            "sequence_length": 16,
        },
        "parallelism": {"dp": 2, "pp": 2},
        "training": {"steps": 200, "global_batch_size": 2, "precision": "fp32"},
        "data": {"sources": [{"prefix": "/corpus"}]},
    },
    "checkpoint": {"uri": "/checkpoints/first", "interval_steps": 20},
}


@pytest.fixture
async def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ScriptedDriver]:
    """A driver that the commands find by $MEGASCALE_RUN_FOLDER, with three jobs."""
    scripted = await start_driver()
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "driver.address").write_text(scripted.address)
    monkeypatch.setenv("MEGASCALE_RUN_FOLDER", str(tmp_path))
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.chdir(tmp_path)
    scripted.jobs = [
        listed("first", types_pb2.JOB_PHASE_RUNNING, 50, 1),
        listed(LONG, types_pb2.JOB_PHASE_QUEUED, 0, 3),
        listed("third", types_pb2.JOB_PHASE_SUCCEEDED, 200, 2),
    ]
    yield scripted
    await scripted.server.stop(0)


def listed(
    name: str, phase: types_pb2.JobPhase.ValueType, step: int, created_s: int
) -> driver_pb2.Job:
    spec = job_pb2.JobSpec()
    spec.CopyFrom(parse_job({**VALUES, "name": name}))
    job = driver_pb2.Job(spec=spec, phase=phase, step=step, phase_reason=REASON)
    job.created_at.FromSeconds(created_s)
    job.last_record.step_time.FromTimedelta(timedelta(seconds=2))
    return job


async def test_a_pipe_gets_a_table_with_nothing_cut_or_wrapped(driver: ScriptedDriver) -> None:
    status, output, _ = await run("jobs")
    head, *rows = output.splitlines()
    assert (status, head.split()[:5], len(rows)) == (
        OK,
        ["NAME", "PHASE", "STEP", "DONE", "ETA"],
        3,
    )
    assert [row.split()[0] for row in rows] == [LONG, "first", "third"]
    assert all(row.endswith(REASON) for row in rows)
    assert len({row.index(REASON) for row in rows} | {head.index("WHY")}) == 1


async def test_a_sentence_is_not_wrapped_in_a_pipe(driver: ScriptedDriver) -> None:
    status, output, _ = await run("job", LONG)
    assert (status, output.splitlines()[0].endswith(REASON)) == (OK, True)
    folder = "folder-" * 20
    Path(folder).mkdir()
    Path(folder, "job.yaml").write_text(yaml.safe_dump(VALUES))
    status, output, _ = await run("submit", f"{folder}/job.yaml", "--check")
    assert (status, len(output.splitlines()), folder in output) == (OK, 1, True)


async def test_jobs_show_their_progress_and_the_time_left(driver: ScriptedDriver) -> None:
    rows = [line.split() for line in (await run("jobs"))[1].splitlines()]
    assert [row[:5] for row in rows[1:]] == [
        [LONG, "queued", "0/200", "0%", "-"],
        ["first", "running", "50/200", "25%", "5m"],
        ["third", "succeeded", "200/200", "100%", "-"],
    ]
    assert "step 50 of 200 (25%, about 5m left)" in (await run("job", "first"))[1]
    # The newest step alone says little: the driver sends the median of the newest ones.
    driver.jobs[0].typical_step_time.FromSeconds(4)
    assert "(25%, about 10m left)" in (await run("job", "first"))[1]
    assert (await run("jobs"))[1].splitlines()[2].split()[4] == "10m"


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["--phase", "running"], ["first"]),
        (["--phase", "QUEUED", "--phase", "succeeded"], [LONG, "third"]),
        (["--sort", "progress"], ["third", "first", LONG]),
        (["--sort", "created"], [LONG, "third", "first"]),
        (["--sort", "phase"], [LONG, "first", "third"]),
        (["--sort", "eta"], ["first", LONG, "third"]),
    ],
)
async def test_jobs_are_chosen_and_sorted(
    driver: ScriptedDriver, options: list[str], names: list[str]
) -> None:
    status, output, _ = await run("jobs", *options, "--json")
    shown = [json.loads(line)["spec"]["name"] for line in output.splitlines()]
    assert (status, shown) == (OK, names)


async def test_an_unknown_phase_is_wrong_usage(driver: ScriptedDriver) -> None:
    status, _, errors = await run("jobs", "--phase", "asleep")
    assert (status, "give one of QUEUED" in errors) == (USAGE, True)


async def test_watched_jobs_are_shown_again_when_they_change(driver: ScriptedDriver) -> None:
    process = await start("jobs", "--watch", "--json")
    assert process.stdout is not None

    async def line() -> tuple[str, str]:
        assert process.stdout is not None
        text = await asyncio.wait_for(process.stdout.readline(), CALL_TIMEOUT_S)
        job = json.loads(text)
        return job["spec"]["name"], job["step"]

    assert {await line() for _ in range(3)} == {("first", "50"), (LONG, "0"), ("third", "200")}
    driver.jobs[0].step = 51
    assert await line() == ("first", "51")
    os.kill(process.pid, signal.SIGINT)
    output, errors = await process.communicate()
    assert (process.returncode, output, errors) == (INTERRUPTED, b"", b"")


async def test_logs_of_all_ranks_have_their_rank(driver: ScriptedDriver) -> None:
    status, output, errors = await run("logs", "first", "--all", "--lines", "2")
    expected = [f"[{rank}] line {number}" for rank in range(4) for number in range(2)]
    assert (status, output.splitlines(), errors) == (OK, expected, "")
    status, output, _ = await run("logs", "first", "--all", "--grep", "^line 7$", "--json")
    found = [json.loads(line) for line in output.splitlines()]
    assert (status, found) == (OK, [{"rank": rank, "line": "line 7"} for rank in range(4)])
    status, output, errors = await run("logs", "first", "--grep", "no such line")
    assert (status, output) == (OK, "")
    assert errors == "the log of rank 0 of job first: no line matches 'no such line'\n"


async def test_a_rank_that_cannot_be_read_does_not_hide_the_others(driver: ScriptedDriver) -> None:
    driver.lost_ranks = {1, 2}
    status, output, errors = await run("logs", "first", "--all", "--lines", "1")
    assert (status, output.splitlines()) == (UNAVAILABLE, ["[0] line 0", "[3] line 0"])
    assert errors.splitlines() == [
        "error: rank 1: node n2 is lost",
        "error: rank 2: node n2 is lost",
    ]


async def test_logs_of_all_ranks_are_followed_at_once(driver: ScriptedDriver) -> None:
    process = await start("logs", "first", "--all", "--follow", "--lines", "1")
    assert process.stdout is not None
    lines = {await asyncio.wait_for(process.stdout.readline(), CALL_TIMEOUT_S) for _ in range(4)}
    assert lines == {f"[{rank}] line 0\n".encode() for rank in range(4)}
    os.kill(process.pid, signal.SIGINT)
    assert (await process.communicate(), process.returncode) == ((b"", b""), INTERRUPTED)


async def test_a_job_is_cloned_with_changes(driver: ScriptedDriver, tmp_path: Path) -> None:
    status, output, _ = await run(
        *("clone", "first", "--set", "trainer.training.steps=500"),
        *("--set", "trainer.data.sources[0].prefix=corpus", "--set", "labels={a: b}"),
    )
    assert (status, output.splitlines()[1]) == (OK, "its checkpoints: /checkpoints/first-2")
    (sent,) = (each.spec for each in driver.requests if hasattr(each, "spec"))
    expected = parse_job(VALUES)
    expected.name, expected.checkpoint.uri = "first-2", "/checkpoints/first-2"
    expected.trainer.training.steps, expected.labels["a"] = 500, "b"
    expected.trainer.data.sources[0].prefix = str(tmp_path / "corpus")
    assert sent == expected
    assert (await run("clone", "first", "--name", "other", "-o", "other.yaml"))[0] == OK
    written = load_job("other.yaml")
    assert (written.name, written.checkpoint.uri) == ("other", "/checkpoints/other")
    assert written.trainer == parse_job(VALUES).trainer
    status, _, errors = await run("clone", "first", "-o", "other.yaml")
    assert (status, "give another --output" in errors) == (USAGE, True)


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("trainer.training.stepz=1", "did you mean 'steps'?"),
        ("trainer.training.steps=many", "trainer.training.steps: expected a whole number"),
        ("trainer.training.steps", "is not PATH=VALUE"),
        ("name.first=x", "name.first: the job has no 'first' there"),
        ("trainer.data.sources[3].prefix=x", "the job has no 3 there"),
        ("trainer..steps=1", "is not PATH=VALUE"),
        ("labels={a", "the value is not YAML"),
        ("=1", "is not PATH=VALUE"),
    ],
)
async def test_a_wrong_change_of_a_clone_is_reported(
    driver: ScriptedDriver, setting: str, problem: str
) -> None:
    status, _, errors = await run("clone", "first", "--set", setting)
    assert (status, problem in errors) == (USAGE, True), errors


async def test_a_configuration_is_shown_with_its_defaults(driver: ScriptedDriver) -> None:
    Path("job.yaml").write_text(yaml.safe_dump(VALUES))
    status, output, _ = await run("config", "show", "job.yaml")
    assert (status, yaml.safe_load(output)) == (OK, VALUES)
    status, output, _ = await run("config", "show", "first", "--effective", "--json")
    found = json.loads(output)
    model, optimizer = found["trainer"]["model"], found["trainer"]["optimizer"]
    assert (status, model["ffn_size"], model["kv_heads"], model["block"]) == (OK, 64, 2, "parallel")
    assert (optimizer["learning_rate"], found["recovery"]["spare_nodes"]) == (3e-4, 0)
    status, output, _ = await run("config", "show", "job.yaml", "--effective")
    assert (status, yaml.safe_load(output)) == (OK, found)
    Path("again.yaml").write_text(output)
    assert (await run("config", "diff", "again.yaml", "first"))[:2] == (OK, "")


async def test_two_configurations_differ_by_field(driver: ScriptedDriver) -> None:
    other = {**VALUES, "name": "other", "priority": 2, "owner": "Ann"}
    Path("job.yaml").write_text(yaml.safe_dump(other))
    status, output, _ = await run("config", "diff", "first", "job.yaml", "--json")
    assert status == OK
    assert [json.loads(line) for line in output.splitlines()] == [
        {"field": "name", "first": "first", "second": "other"},
        {"field": "owner", "first": "", "second": "Ann"},
        {"field": "priority", "first": 0, "second": 2},
    ]
    status, output, _ = await run("config", "diff", "first", "job.yaml")
    assert output.splitlines()[3].split() == ["priority", "0", "2"]


async def test_a_refused_job_has_no_effective_configuration(driver: ScriptedDriver) -> None:
    Path("job.yaml").write_text(yaml.safe_dump({**VALUES, "name": "No Name"}))
    status, _, errors = await run("config", "show", "job.yaml", "--effective", "--json")
    (problem,) = json.loads(errors)["problems"]
    assert (status, problem["field"], bool(problem["remedy"])) == (USAGE, "name", True)


@pytest.mark.parametrize(
    "arguments",
    [
        ["events", "jobs/none"],
        ["events", "none"],
        ["events", "nodes/none"],
        ["config", "show", "none"],
    ],
)
async def test_an_unknown_name_is_not_found(driver: ScriptedDriver, arguments: list[str]) -> None:
    driver.unknown = {"none"}
    status, output, errors = await run(*arguments)
    assert (status, output, "none" in errors) == (NOT_FOUND, "", True)


async def test_a_reader_of_events_that_leaves_ends_them_quietly(driver: ScriptedDriver) -> None:
    driver.updates = list(range(20_000))
    process = await start("events")
    assert process.stdout is not None and process.stderr is not None
    await process.stdout.readline()
    process.stdout._transport.close()  # type: ignore[attr-defined]
    errors = await asyncio.wait_for(process.stderr.read(), 30)
    assert (await process.wait(), errors) == (OK, b"")


HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202egnp.exe\x08"
OBEYED = ("\x1b", "\x07", "\x9b", "\u202e", "\x08")


@pytest.mark.parametrize(
    "command",
    [
        ["jobs"],
        ["job", "first"],
        ["events"],
        ["logs", "first"],
        ["logs", "first", "--all"],
        ["checkpoint", "list", "first"],
        ["config", "show", "first"],
        ["config", "diff", "first", "third"],
        ["cordon", "n1", "--reason", HOSTILE],
        ["diagnose", "n1"],
        ["job", HOSTILE],
    ],
    ids=" ".join,
)
async def test_escape_sequences_are_shown_and_not_sent_to_the_terminal(
    driver: ScriptedDriver, command: list[str]
) -> None:
    driver.hostile, driver.updates = HOSTILE, [1]
    driver.verdicts = {HOSTILE: types_pb2.CHECK_VERDICT_FAIL}
    driver.checkpoints = [driver_pb2.Checkpoint(step=1, manifest_uri=HOSTILE, pin=HOSTILE)]
    driver.unknown = {HOSTILE}
    for job in driver.jobs:
        job.phase_reason = HOSTILE + job.spec.name
        job.spec.owner = HOSTILE + job.spec.name
        job.conditions.add(message=HOSTILE)
    _, output, errors = await run(*command)
    assert output + errors, "something is printed"
    assert not [sign for sign in OBEYED if sign in output + errors]
    _, output, _ = await run("logs", "first", "--raw", "--lines", "1")
    assert output == f"line 0{HOSTILE}\n"
