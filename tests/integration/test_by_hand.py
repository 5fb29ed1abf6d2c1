"""Training by hand: torchrun and the trainer alone, without a driver and an agent."""

from __future__ import annotations

import argparse
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from docs.examples import train_by_hand
from tests.harness import program_start
from tests.harness.by_hand import STEPS, HandRun, held, small_job, write_job
from tests.harness.corpus import write_corpus
from tests.harness.local_cluster import UpProcess, settle
from tests.harness.networks import two_networks, why_not
from tests.harness.paced import release

from megascale_client import Client, load_job
from megascale_driver.analysis.spans import recorded

Start = Callable[..., HandRun]
# A step that waits for a kill or a cancel: as long as they may take, and no job hangs by then.
LONG_S = 30.0


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts runs in the test's folder; all are ended with the test."""
    runs: list[HandRun] = []

    def begin(job: Path, ranks: int = 1, *options: str) -> HandRun:
        runs.append(HandRun(job.parent, job, ranks, *options))
        return runs[-1]

    yield begin
    for run in runs:
        run.close()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of two ranks that train without an end in between."""
    folder = tmp_path_factory.mktemp("whole")
    job = write_job(folder, small_job(folder, parallelism={"dp": 2}))
    run = HandRun(folder, job, 2, executed=True)
    try:
        assert run.end() == 0, run.story()
        losses = run.losses()
    finally:
        run.close()
    assert list(losses) == list(range(1, STEPS + 1))
    return losses


@pytest.mark.slow
def test_a_killed_run_goes_on_with_the_same_command_as_if_nothing_had_happened(
    tmp_path: Path, start: Start, whole: dict[int, float]
) -> None:
    two = {"dp": 2}
    job = write_job(tmp_path, small_job(tmp_path, parallelism=two, optimizer=held(7, LONG_S)))
    killed = start(job, 2)
    killed.await_step(6)
    killed.await_commit(4)
    killed.kill()
    assert max(killed.losses()) < STEPS

    release(killed.site)
    resumed = start(job, 2)
    assert resumed.end() == 0, resumed.story()
    assert resumed.events("attempt")[0]["restored_step"] == 4
    assert min(resumed.losses()) == 5
    assert {**killed.losses(), **resumed.losses()} == whole
    assert killed.losses().items() <= whole.items()
    assert resumed.losses().keys() & killed.losses().keys() == {5, 6}
    # The attempt's number is the commit log's, and all attempts share the job's folder.
    folders = sorted(path.name for path in (tmp_path / "runs/jobs/hand").glob("attempt-*"))
    assert folders == ["attempt-000001", "attempt-000002"]
    # Of both ranks the spans of all steps of the resumed attempt are there, on one clock.
    found = recorded.of_folder(tmp_path / "runs/jobs/hand/attempt-000002").table
    steps = found.of_op("step")
    assert {(rank, step) for rank, step in zip(steps.rank, steps.step, strict=True)} == {
        (rank, step) for rank in range(2) for step in range(5, STEPS + 1)
    }
    assert abs(int(steps.start_ns[steps.rank == 0][0]) / 1e9 - time.time()) < 3600
    assert not resumed.processes()


# What ends a run, of how many ranks, by which signal; torchrun passes on what it is asked to.
ENDS = [
    (1, signal.SIGTERM),
    pytest.param(1, signal.SIGUSR1, marks=pytest.mark.slow),
    pytest.param(1, signal.SIGHUP, marks=pytest.mark.slow),
    pytest.param(1, signal.SIGUSR2, marks=pytest.mark.slow),
    pytest.param(2, signal.SIGTERM, marks=pytest.mark.slow),
    pytest.param(2, signal.SIGHUP, marks=pytest.mark.slow),
    pytest.param(2, signal.SIGUSR1, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("ranks", "number"), ENDS)
def test_a_signal_saves_and_ends_and_the_same_command_goes_on(
    tmp_path: Path,
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    ranks: int,
    number: signal.Signals,
) -> None:
    monkeypatch.setenv("PET_SIGNALS_TO_HANDLE", "SIGTERM,SIGHUP,SIGUSR1")  # --signals-to-handle
    job = write_job(
        tmp_path,
        small_job(
            tmp_path,
            parallelism={"dp": ranks},
            optimizer=held(3, 1.0),
            checkpoint={"interval_steps": 100},
        ),
    )
    first = start(job, ranks)
    first.await_step(2)
    status = first.end(number)
    saved = first.events("end")
    assert saved and saved[0]["step"] < STEPS, first.story()
    assert status == (0 if ranks == 1 else 1)  # torchrun itself reports the signal
    release(first.site)
    second = start(job, ranks)
    assert second.end() == 0, second.story()
    assert min(second.losses()) == saved[0]["step"] + 1
    assert second.events("end")[0] == {
        "event": "end",
        "step": STEPS,
        "steps": STEPS,
        "not_saved": "",
        "failed_saves": 0,
        "skipped": 0,
    }


def test_ctrl_c_of_a_job_without_checkpoints_ends_it_in_a_sentence(
    tmp_path: Path, start: Start
) -> None:
    nowhere = {"uri": "", "interval_steps": 0}
    run = start(write_job(tmp_path, small_job(tmp_path, optimizer=held(3), checkpoint=nowhere)))
    run.await_step(2)
    assert run.end(signal.SIGINT) == 1
    text = "ended by Ctrl-C; the job has no checkpoint.uri, so nothing is saved\n"
    assert run.errors.read_text() == text


def test_a_save_that_fails_is_reported_and_so_is_the_next_that_succeeds(
    tmp_path: Path, start: Start
) -> None:
    folder = tmp_path / "checkpoints" / "attempts" / "attempt-000001"
    folder.mkdir(parents=True)
    (folder / "step-000000004").write_text("in the way")
    run = start(write_job(tmp_path, small_job(tmp_path)))
    assert run.end() == 0, run.story()
    (failed,) = run.events("save_failed")
    assert failed["failed_step"] == 4 and "step-000000004" in failed["error"]
    assert run.events("saved")
    (end,) = run.events("end")
    assert (end["failed_saves"], end["not_saved"]) == (1, "")


def test_a_last_save_that_fails_ends_the_run_with_its_reason(tmp_path: Path, start: Start) -> None:
    folder = tmp_path / "checkpoints" / "attempts" / "attempt-000001"
    folder.mkdir(parents=True)
    (folder / f"step-{STEPS:09}").write_text("in the way")
    last = {"interval_steps": 100, "final_timeout_s": 3}
    run = start(write_job(tmp_path, small_job(tmp_path, checkpoint=last)))
    assert run.end() == 1, run.story()
    (end,) = run.events("end")
    assert "in the way" not in end["not_saved"] and f"step-{STEPS:09}" in end["not_saved"]
    assert "the last step is not saved" in run.errors.read_text()


@pytest.mark.slow
def test_a_run_that_another_supersedes_ends_and_says_so(tmp_path: Path, start: Start) -> None:
    job = write_job(tmp_path, small_job(tmp_path, optimizer=held(5, LONG_S)))
    first = start(job)
    first.await_commit(4)
    second = start(job)
    assert first.end() == 1, first.story()
    (superseded,) = first.events("superseded")
    assert superseded == {"event": "superseded", "attempt": 1, "newest_attempt": 2}
    assert "attempt 1 is superseded" in first.errors.read_text()
    assert "complete checkpoint is of step 4" in first.errors.read_text()
    release(second.site)
    assert second.end() == 0, second.story()


SLOW_REMOVAL = """
import sys
if "megascale_checkpoint" in sys.orig_argv:
    import time
    from megascale_checkpoint.retention import collect as collector
    removed = collector.collect
    def collect(*what):
        time.sleep(1.0)
        removed(*what)
    collector.collect = collect
"""


def test_a_run_keeps_as_many_checkpoints_as_it_was_asked_to(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SLOW_REMOVAL)
    keeps = {"keep_latest": 1, "interval_steps": 2}
    run = HandRun(tmp_path, write_job(tmp_path, small_job(tmp_path, checkpoint=keeps)), 1,
                  executed=True)  # fmt: skip
    try:
        assert run.end() == 0, run.story()
    finally:
        run.close()
    found = (tmp_path / "checkpoints").glob("attempts/*/step-*/manifest.json")
    assert [path.parent.name for path in found] == [f"step-{STEPS:09}"]


def test_steps_without_a_target_are_skipped_by_name(tmp_path: Path, start: Start) -> None:
    values = small_job(tmp_path, training={"steps": 3}, data={"sources": [{"prefix": "empty"}]})
    write_corpus(tmp_path / "empty", [[5]] * 400)  # documents of one token: no next one
    run = start(write_job(tmp_path, values))
    assert run.end() == 0, run.story()
    assert "NaN" not in run.output.read_text()
    steps = run.events("step")
    assert [step["loss"] for step in steps] == [None] * 3
    assert {step["skipped_because"] for step in steps} == {"no_targets"}
    assert run.events("end")[0]["skipped"] == 3


@pytest.mark.slow
def test_a_time_limit_saves_and_ends(tmp_path: Path, start: Start) -> None:
    rare = {"interval_steps": 100}
    job = write_job(tmp_path, small_job(tmp_path, optimizer=held(3), checkpoint=rare))
    run = start(job, 1, "--time-limit", "1s")
    assert run.end() == 0, run.story()
    assert "saves and ends: the time limit" in [note["text"] for note in run.events("note")]
    (end,) = run.events("end")
    assert end["step"] < STEPS, run.story()
    run.await_commit(end["step"])


@pytest.mark.slow
def test_two_torchruns_as_two_hosts_train_and_commit_together(tmp_path: Path) -> None:
    job = write_job(tmp_path, small_job(tmp_path, parallelism={"dp": 4}))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}")
    ranked = [(*options, "--node-rank", str(node)) for node in range(2)]
    runs = [HandRun(tmp_path, job, 2, rendezvous=rendezvous) for rendezvous in ranked]
    try:
        assert [run.end() for run in runs] == [0, 0], "\n".join(run.story() for run in runs)
        (first,) = (run for run in runs if run.events("end"))
        assert list(first.losses()) == list(range(1, STEPS + 1))
        first.await_commit(STEPS)
        # Each has a loader and a daemon of its own, and rank 0's is the committer.
        logs = {path.name for path in (tmp_path / "runs/jobs/hand").glob("*.log")}
        assert logs == {"loader.log", "loader-1.log", "checkpoint.log", "checkpoint-1.log"}
        for run in runs:
            run.await_none()
    finally:
        for run in runs:
            run.close()


@pytest.mark.slow
def test_hosts_that_share_no_loopback_commit_together_on_an_insecure_network(
    tmp_path: Path,
) -> None:
    if missing := why_not():
        pytest.skip(missing)
    job = write_job(tmp_path, small_job(tmp_path, parallelism={"dp": 2}))
    with two_networks() as networks:
        options = ("--nnodes", "2", "--master-addr", networks[0].address, "--master-port", "29500")

        def runs(*more: str) -> list[HandRun]:
            return [
                HandRun(
                    tmp_path,
                    job,
                    1,
                    *more,
                    rendezvous=(*options, "--node-rank", str(number)),
                    inside=network.inside,
                )
                for number, network in enumerate(networks)
            ]

        refused = runs()
        try:
            assert all(run.end() for run in refused)
            for run in refused:  # rank 0 as well: it does not wait for the other host
                errors = run.errors.read_text()
                assert "checkpoint.uri: rank 0's checkpoint daemon listens on loopback" in errors
                assert "give --insecure-network" in errors
        finally:
            for run in refused:
                run.close()

        trusting = runs("--insecure-network")
        try:
            story = "\n".join(run.story() for run in trusting)
            assert [run.end() for run in trusting] == [0, 0], story
            (first,) = (run for run in trusting if run.events("end"))
            assert list(first.losses()) == list(range(1, STEPS + 1))
            first.await_commit(STEPS)
            for run in trusting:
                run.await_none()
        finally:
            for run in trusting:
                run.close()


@pytest.mark.slow
def test_a_warm_start_takes_the_parameters_alone_or_goes_on(tmp_path: Path, start: Start) -> None:
    first = start(write_job(tmp_path, small_job(tmp_path, checkpoint={"uri": "first"})))
    assert first.end() == 0, first.story()
    last = first.losses()[STEPS]
    short = {"steps": 4}

    load = {"load_uri": "first", "uri": "beyond"}
    beyond = start(write_job(tmp_path, small_job(tmp_path, checkpoint=load, training=short)))
    assert beyond.end() == 1
    errors = beyond.errors.read_text()
    assert "BAD_JOB" in errors and "checkpoint.load_uri" in errors and "give more steps" in errors

    load = {"load_uri": "first", "uri": "tuned", "load": "weights"}
    job = write_job(tmp_path, small_job(tmp_path, checkpoint=load, training=short))
    tuned = start(job)
    assert tuned.end() == 0, tuned.story()
    assert list(tuned.losses()) == [1, 2, 3, 4]
    assert abs(tuned.losses()[1] - last) < 0.3 < abs(first.losses()[1] - last)
    records = tuned.events("step")
    assert records[0]["consumed_samples"] == 8
    # Once it has a checkpoint of its own, it goes on from that.
    again = start(job)
    assert again.end() == 0 and again.events("attempt")[0]["restored_step"] == 4


def test_a_resume_in_other_data_is_refused_and_another_schedule_is_said(
    tmp_path: Path, start: Start
) -> None:
    short = {"steps": 4}
    first = start(write_job(tmp_path, small_job(tmp_path, training=short)))
    assert first.end() == 0, first.story()
    rate = first.events("step")[-1]["learning_rate"]

    longer = {"steps": 8}
    for section, values, field in (
        ("data", {"seed": 7}, "trainer.data.seed: 7 here and 1234 in the checkpoint"),
        ("model", {"sequence_length": 8}, "trainer.model.sequence_length: 8 here and 16 in"),
    ):
        changes = {section: values, "training": longer}
        other = start(write_job(tmp_path, small_job(tmp_path, **changes)))
        assert other.end() == 1
        errors = other.errors.read_text()
        assert "BAD_JOB" in errors and field in errors and "checkpoint.load: weights" in errors

    again = start(write_job(tmp_path, small_job(tmp_path, training=longer)))
    assert again.end() == 0, again.story()
    assert list(again.losses()) == [5, 6, 7, 8]
    (note,) = [line["text"] for line in again.events("note") if "schedule" in line["text"]]
    new = again.events("step")[0]["learning_rate"]
    assert "trainer.training.steps 4 in the checkpoint and 8 here" in note
    assert f"was {rate:.6g} and that of step 5 is {new:.6g}" in note


@pytest.mark.slow
def test_a_run_begun_by_hand_goes_on_under_a_driver_and_back(
    tmp_path: Path, start: Start, whole: dict[int, float]
) -> None:
    two = {"parallelism": {"dp": 2}, "checkpoint": {"interval_steps": 2}}
    first = start(write_job(tmp_path, small_job(tmp_path, **two, optimizer=held(4, LONG_S))), 2)
    first.await_step(3)
    first.await_commit(2)
    first.kill()
    cluster = tmp_path / "cluster"
    with UpProcess(cluster, "--nodes", "1", "--devices-per-node", "2", "--device", "cpu") as up:
        paused = small_job(tmp_path, **two, optimizer=held(8, LONG_S))
        job = write_job(tmp_path, paused)
        with Client.from_run_folder(cluster) as client:
            client.submit(load_job(job))
            records: dict[int, float] = {}
            for update in client.watch("hand"):
                if update.HasField("step"):
                    records[update.step.step] = update.step.loss
                    if update.step.step == 7:
                        break
            first.await_commit(6)
            found = client.get("hand")
            assert (found.attempt, found.restored_step) == (2, 2)
            client.cancel("hand", reason="the run goes on by hand")
            settle(cluster)
        up.stop()
    third = start(write_job(tmp_path, small_job(tmp_path, **two)), 2)
    assert third.end() == 0, third.story()
    assert third.events("attempt")[0]["attempt"] == 3
    assert third.events("attempt")[0]["restored_step"] >= 6
    assert min(records) == 3
    assert {**first.losses(), **records, **third.losses()} == whole
    for part in (first.losses(), records):
        assert part.items() <= whole.items()


def test_the_example_tells_why_its_run_ended_before_the_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train_by_hand, "RUN", tmp_path)  # without the corpus
    options = argparse.Namespace(device="cpu", ranks=1)
    with pytest.raises(SystemExit), program_start.forked():
        list(train_by_hand.steps_of("text", options, kill_at=3))
    assert "corpus" in capsys.readouterr().err
