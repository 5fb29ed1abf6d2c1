"""Traces of ranks: the named steps and no others, unchanged losses, failures that end nothing."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from tests.harness.ranks import RankPool
from tests.harness.training import tiny_job

STEPS = 7
PROGRAM = "tests.harness.profiling:train_under_profiler"


def profiled(
    pool: RankPool,
    folder: Path,
    commands: dict[str, dict[str, Any]],
    *,
    pp: int = 1,
    dp: int = 1,
    **options: Any,
) -> list[dict[str, Any]]:
    folder.mkdir()
    job = tiny_job(parallelism={"pp": pp, "dp": dp, "overlap": {"dp": dp > 1}})
    ranks = pp * dp
    return pool.run(PROGRAM, ranks, folder, job=job, steps=STEPS, commands=commands, **options)


def command(name: str, first: int, last: int, **more: Any) -> dict[str, Any]:
    return {"id": name, "first_step": first, "last_step": last, **more}


def spans(path: Path) -> list[str]:
    """Names of the spans that the trainer has given, in the order of their beginnings."""
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    found = sorted((e["ts"], e["name"]) for e in events if e.get("cat") == "user_annotation")
    return [name for _, name in found if not name.startswith("gloo:")]


def test_every_rank_traces_the_steps_named_and_trains_as_without(
    pool: RankPool, tmp_path: Path
) -> None:
    commands = {"2": command("one", 3, 4), "5": command("two", 6, 6)}
    with_traces = profiled(pool, tmp_path / "with", commands, pp=2)
    without = profiled(pool, tmp_path / "without", {}, pp=2)
    assert [rank["losses"] for rank in with_traces] == [rank["losses"] for rank in without]
    for rank, found in enumerate(with_traces):
        answers = [(answer["kind"], answer["id"], answer["state"]) for answer in found["answers"]]
        assert answers == [("profiled", "one", "written"), ("profiled", "two", "written")]
        path = tmp_path / "with" / f"trace-one-{rank}.json.gz"
        assert found["answers"][0]["size_bytes"] == path.stat().st_size
        names = spans(path)
        assert [name for name in names if name.startswith("step ")] == ["step 3", "step 4"]
        kinds = [name.split()[0] for name in names[: names.index("step 4")]]
        assert (kinds.count("forward"), kinds.count("backward"), kinds.count("optimizer")) == (
            8,
            8,
            1,
        )
        sends, receives = ("send_activation", "wait_gradient") if rank == 0 else (
            "send_gradient", "wait_activation",
        )  # fmt: skip
        assert kinds.count(sends) == kinds.count(receives) == 8
        assert names[:3] == (
            ["step 3", "forward 0.0", "send_activation 0.0"]
            if rank == 0
            else ["step 3", "post_activation 0.0", "wait_activation 0.0"]
        )
        again = spans(tmp_path / "with" / f"trace-two-{rank}.json.gz")
        assert [name for name in again if name.startswith("step ")] == ["step 6"]
    left = [path.name for path in (tmp_path / "with").iterdir() if path.name.startswith(".trace")]
    assert left == []


def test_no_transfer_outlives_the_profile_in_which_it_was_begun(
    pool: RankPool, tmp_path: Path
) -> None:
    """It would write into the profile's freed memory: ranks were killed by SIGSEGV."""
    for found in profiled(pool, tmp_path / "gathers", {"2": command("one", 3, 4)}, dp=2):
        assert [answer["state"] for answer in found["answers"]] == ["written"]
        travelling = dict(enumerate(found["travelling"], start=1))
        assert travelling.pop(4) == 0
        assert all(travelling.values()), "the other steps end while parameters travel"


def test_what_arrives_too_late_or_in_between_is_skipped_with_a_reason(
    pool: RankPool, tmp_path: Path
) -> None:
    commands = {
        "2": command("late", 1, 2),
        "3": command("stale", 4, 5, not_after_s=1.0),
        "5": command("replaced", 6, 6),
        "6": command("last", 7, 7),
    }
    (found,) = profiled(pool, tmp_path / "run", commands)
    answers = {answer["id"]: (answer["state"], answer["detail"]) for answer in found["answers"]}
    assert answers["late"] == ("skipped", "the request arrived before step 2, its first step is 1")
    assert answers["stale"] == ("skipped", "it took too long to reach step 4")
    assert answers["replaced"] == ("skipped", "another profile was asked for before its first step")
    assert answers["last"] == ("written", "")
    assert spans(tmp_path / "run" / "trace-last-0.json.gz")[0] == "step 7"
    assert [path.name for path in (tmp_path / "run").glob("trace*")] == ["trace-last-0.json.gz"]


def test_a_cancelled_profile_is_not_begun_and_one_that_has_begun_goes_on(
    pool: RankPool, tmp_path: Path
) -> None:
    commands = {
        "1": command("early", 5, 5),
        "2": {"kind": "cancel_profile", "id": "early"},
        "3": command("begun", 3, 4),
        "4": {"kind": "cancel_profile", "id": "begun"},
        "6": {"kind": "cancel_profile", "id": "unknown"},
    }
    (found,) = profiled(pool, tmp_path / "run", commands)
    answers = {answer["id"]: (answer["state"], answer["detail"]) for answer in found["answers"]}
    assert answers == {
        "early": ("skipped", "cancelled before its first step"),
        "begun": ("written", ""),
    }


def test_one_profile_at_a_time(pool: RankPool, tmp_path: Path) -> None:
    commands = {"2": command("first", 2, 5), "3": command("second", 4, 4)}
    (found,) = profiled(pool, tmp_path / "run", commands)
    answers = {answer["id"]: (answer["state"], answer["detail"]) for answer in found["answers"]}
    assert answers["first"] == ("written", "")
    assert (
        answers["second"][0] == "failed"
        and "previous profile is still being recorded" in answers["second"][1]
    )


@pytest.mark.parametrize(
    ("more", "options", "said"),
    [
        ({"path": "/nowhere/trace.json.gz"}, {}, "FileNotFoundError"),
        ({}, {"file_limit_bytes": 100_000}, "is the disk full?"),
    ],
)
def test_a_trace_that_cannot_be_written_is_reported_and_training_goes_on(
    pool: RankPool, tmp_path: Path, more: dict[str, Any], options: dict[str, Any], said: str
) -> None:
    (found,) = profiled(pool, tmp_path / "run", {"1": command("lost", 2, 3, **more)}, **options)
    (answer,) = found["answers"]
    assert (answer["state"], answer["size_bytes"]) == ("failed", 0)
    assert said in answer["detail"]
    assert len(found["losses"]) == STEPS
    assert list((tmp_path / "run").glob("*trace*")) == []
