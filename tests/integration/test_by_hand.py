"""Training by hand: torchrun and the trainer alone, without a driver and an agent."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.harness.by_hand import STEPS, HandRun, held, small_job, write_job
from tests.harness.paced import release

Start = Callable[..., HandRun]


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


def test_a_killed_run_goes_on_with_the_same_command_as_if_nothing_had_happened(
    tmp_path: Path, start: Start
) -> None:
    twin = tmp_path / "twin"
    twin.mkdir()
    two = {"dp": 2}
    whole = start(write_job(twin, small_job(twin, parallelism=two)), 2)
    job = write_job(tmp_path, small_job(tmp_path, parallelism=two, optimizer=held(7)))
    killed = start(job, 2)
    killed.await_step(6)
    killed.await_commit(4)
    killed.kill()
    assert max(killed.losses()) < STEPS

    release(killed.site)
    resumed = start(job, 2)
    assert resumed.end() == 0, resumed.story()
    assert whole.end() == 0, whole.story()
    assert resumed.events("attempt")[0]["restored_step"] == 4
    assert min(resumed.losses()) == 5
    assert {**killed.losses(), **resumed.losses()} == whole.losses()
    assert killed.losses().items() <= whole.losses().items()
    assert resumed.losses().keys() & killed.losses().keys() == {5, 6}
    assert list(whole.losses()) == list(range(1, STEPS + 1))
    # The attempt's number is the commit log's, and all attempts share the job's folder.
    folders = sorted(path.name for path in (tmp_path / "runs/jobs/hand").glob("attempt-*"))
    assert folders == ["attempt-000001", "attempt-000002"]
    assert not resumed.processes() and not whole.processes()


@pytest.mark.parametrize("ranks", [1, 2])
def test_sigterm_saves_and_ends_and_the_same_command_goes_on(
    tmp_path: Path, start: Start, ranks: int
) -> None:
    job = write_job(
        tmp_path,
        small_job(
            tmp_path,
            parallelism={"dp": ranks},
            optimizer=held(3),
            checkpoint={"interval_steps": 100},
        ),
    )
    first = start(job, ranks)
    first.await_step(2)
    status = first.end(signal.SIGTERM)
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
    }
