"""Bad inputs at a running cluster: each is refused with its status, and nothing is lost.

After every case the cluster still answers, and its list of jobs is as it was before.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.harness.bad_jobs import SOURCES, BadJob, changed, each_kind_of_bad_job, good_job
from tests.harness.command_line import Answer, command
from tests.harness.corpus import random_documents, write_corpus
from tests.harness.local_cluster import UpProcess, settle
from tests.harness.paced import paced
from tests.harness.waiting import until

from megascale_cli.exits import FAILED, NOT_FOUND, OK, REFUSED, USAGE

STEPS = 2
ENDED = "ended"  # a job that has succeeded
RUNNING = "running"
VARIABLE = "MEGASCALE_RUN_FOLDER"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a cluster of two CPU nodes, with a corpus and a job that has ended."""
    folder = tmp_path_factory.mktemp("bad")
    write_corpus(folder / "corpus", random_documents(seed=3, count=40, longest=100))
    options = ("--nodes", "2", "--devices-per-node", "1", "--device", "cpu")
    with UpProcess(folder / "runs", *options), pytest.MonkeyPatch.context() as environment:
        environment.setenv(VARIABLE, str(folder / "runs"))
        job = good_job(ENDED, folder / "corpus", STEPS)
        job["checkpoint"] = {"uri": str(folder / "checkpoints"), "interval_steps": 2}
        (folder / "ended.yaml").write_text(yaml.safe_dump(job))
        done = command("submit", folder / "ended.yaml", "--watch")
        assert done.status == OK, done.text
        yield folder


@pytest.fixture(autouse=True)
def before(cluster: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """The jobs before the case: whatever it sends, the cluster answers and has them afterwards."""
    monkeypatch.setenv(VARIABLE, str(cluster / "runs"))
    monkeypatch.chdir(cluster)
    before = jobs()
    yield before
    assert {name: phase for name, phase in jobs().items() if name in before} == before
    until(both_nodes_live, "both nodes alive")  # one that is slow is suspected for a moment


def both_nodes_live() -> bool:
    nodes = command("nodes", "--json").objects
    assert [node["disposition"] for node in nodes] == ["NODE_DISPOSITION_SCHEDULABLE"] * 2, nodes
    return [node["liveness"] for node in nodes] == ["NODE_LIVENESS_ALIVE"] * 2


def jobs() -> dict[str, str]:
    answer = command("jobs", "--json")
    assert answer.status == OK, answer.text
    return {job["spec"]["name"]: job["phase"] for job in answer.objects}


def submitted(job: dict[str, Any], *options: str) -> Answer:
    Path("job.yaml").write_text(yaml.safe_dump(job))
    return command("submit", "job.yaml", *options)


@each_kind_of_bad_job
def test_the_driver_refuses_a_bad_job_and_stores_nothing(
    bad: BadJob, before: dict[str, str]
) -> None:
    answer = submitted(changed(good_job("good"), bad.changes), "--json")
    assert answer.status == USAGE, answer.text
    assert answer.error["kind"] in ("InvalidJob", "InvalidRequest")
    found = {problem["field"]: problem for problem in answer.error["problems"]}
    assert bad.field in found, found
    assert bad.problem in found[bad.field]["problem"], found
    assert bad.remedy in found[bad.field]["remedy"], found
    assert jobs() == before


def _missing(folder: Path) -> None:
    pass


def _empty(folder: Path) -> None:
    (folder / "bad.bin").write_bytes(b"")
    (folder / "bad.idx").write_bytes(b"")


def _garbage(folder: Path) -> None:
    (folder / "bad.bin").write_bytes(os.urandom(4096))
    (folder / "bad.idx").write_bytes(os.urandom(4096))


def _copied(folder: Path) -> None:
    for suffix in ("bin", "idx"):
        shutil.copy(folder.parent / f"corpus.{suffix}", folder / f"bad.{suffix}")


def _tokens_cut(folder: Path) -> None:
    _copied(folder)
    os.truncate(folder / "bad.bin", 100)


def _index_cut(folder: Path) -> None:
    _copied(folder)
    os.truncate(folder / "bad.idx", 40)


def _header_cut(folder: Path) -> None:
    _copied(folder)
    os.truncate(folder / "bad.idx", 10)


def _index_alone(folder: Path) -> None:
    _copied(folder)
    (folder / "bad.bin").unlink()


def _folders(folder: Path) -> None:
    (folder / "bad.bin").mkdir()
    (folder / "bad.idx").mkdir()


def _no_documents(folder: Path) -> None:
    write_corpus(folder / "bad", [])


def _no_tokens(folder: Path) -> None:
    write_corpus(folder / "bad", [[], []])


def _large_tokens(folder: Path) -> None:
    write_corpus(folder / "bad", [list(range(0, 40_000, 7))] * 4, vocab_size=40_000)


CORPORA = (
    _missing, _empty, _garbage, _tokens_cut, _index_cut, _header_cut, _index_alone, _folders,
    _no_documents, _no_tokens, _large_tokens,
)  # fmt: skip


def fails_at_once(answer: Answer, name: str, field: str, *words: str) -> None:
    """The job was refused at submit by its field, or has failed in its first attempt.

    Each of ``words`` must be in what the user sees.
    """
    if answer.status == USAGE:
        found = {problem["field"]: problem for problem in answer.error["problems"]}
        assert field in found and found[field]["remedy"], found
        assert name not in jobs()
        seen = json.dumps(found)
    else:
        assert answer.status == FAILED, answer.text
        (job,) = command("job", name, "--json").objects
        assert job["phase"] == "JOB_PHASE_FAILED", job
        assert (job["attempt"], job["restarts"]) == ("1", 0), job["phase_reason"]
        seen = job["phase_reason"] + command("explain", name).stdout
    for word in words:
        assert word in seen, seen


IN_SHORT = (_missing, _garbage, _tokens_cut, _large_tokens)


@pytest.mark.parametrize(
    "made",
    [
        pytest.param(
            made,
            id=made.__name__.strip("_"),
            marks=() if made in IN_SHORT else pytest.mark.slow,
        )
        for made in CORPORA
    ],
)
def test_a_bad_corpus_ends_a_job_at_once(made: Callable[[Path], None], cluster: Path) -> None:
    name = f"corpus-{made.__name__.strip('_').replace('_', '-')}"
    folder = cluster / name
    folder.mkdir()
    made(folder)
    answer = submitted(good_job(name, folder / "bad"), "--watch", "--json")
    fails_at_once(answer, name, f"{SOURCES}[0].prefix", str(folder / "bad"))


URIS = {
    "a-file": "corpus.bin",
    "below-a-file": "corpus.bin/checkpoints",
    "in-proc": "/proc/1/checkpoints",
    "no-name": "/" + "x" * 300,
}


@pytest.mark.parametrize(
    ("field", "case"),
    [
        ("uri", "a-file"),
        ("uri", "in-proc"),
        ("load_uri", "a-file"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                ("uri", "below-a-file"),
                ("uri", "no-name"),
                ("load_uri", "below-a-file"),
                ("load_uri", "in-proc"),
                ("load_uri", "no-name"),
            )
        ),
    ],
)
def test_a_folder_that_cannot_be_used_ends_a_job_at_once(
    case: str, field: str, cluster: Path
) -> None:
    name = f"{field.replace('_', '-')}-{case}"
    place = str(cluster / URIS[case])
    checkpoint = {"uri": str(cluster / "own" / name), "interval_steps": 1, field: place}
    job = changed(good_job(name, cluster / "corpus", 4), {"checkpoint": checkpoint})
    answer = submitted(job, "--watch", "--json")
    fails_at_once(answer, name, f"checkpoint.{field}", place)


def test_another_jobs_folder_is_refused(cluster: Path) -> None:
    place = str(cluster / "checkpoints")
    files = {path: path.stat().st_mtime_ns for path in Path(place).rglob("*") if path.is_file()}
    checkpoint = {"uri": place, "interval_steps": 1}
    job = changed(good_job("thief", cluster / "corpus", 4), {"checkpoint": checkpoint})
    answer = submitted(job, "--watch", "--json")
    fails_at_once(answer, "thief", "checkpoint.uri", place, ENDED)
    assert {p: p.stat().st_mtime_ns for p in Path(place).rglob("*") if p.is_file()} == files


def test_a_full_disk_is_no_success(cluster: Path) -> None:
    place = cluster / "full"
    place.mkdir()
    small = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)]
    if subprocess.run(small, check=False, capture_output=True).returncode:
        pytest.skip("only root can mount a small file system")
    try:
        checkpoint = {
            "uri": str(place / "checkpoints"),
            "interval_steps": 2,
            "final_timeout_s": 3,  # within which the write has to fail
        }
        job = changed(good_job("full", cluster / "corpus"), {"checkpoint": checkpoint})
        answer = submitted(job, "--watch")
        assert answer.status == FAILED, answer.text
        assert "space" in answer.text and str(place) in answer.text
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


VERBS_OF_JOBS = (
    ["job"], ["watch"], ["explain"], ["logs"], ["profile"], ["checkpoint", "list"],
    ["cancel", "--reason", "x"], ["checkpoint", "fetch", "--to", "copy"],
)  # fmt: skip
VERBS_OF_NODES = ("cordon", "uncordon", "evict")
ODD_NAMES = ("数据", "../../etc/passwd", "naïve", "🚀", "a/b", "a" * 300, "a b", "[red]x[/red]")


def job_is_not_found(verb: list[str], name: str) -> None:
    answer = command(*verb, name)
    assert answer.status == NOT_FOUND, (verb, name, answer.text)
    assert "megascale jobs" in answer.stderr, answer.stderr
    assert not Path("copy").exists()


def node_is_not_found(verb: str, name: str) -> None:
    answer = command(verb, name, "--reason", "x")
    assert answer.status == NOT_FOUND, (verb, name, answer.text)
    assert "megascale nodes" in answer.stderr, answer.stderr


def test_an_unknown_name_is_not_found_by_any_verb() -> None:
    for verb in VERBS_OF_JOBS:
        job_is_not_found(verb, "nobody")
    for each in VERBS_OF_NODES:
        node_is_not_found(each, "nobody")
    assert command("diagnose", "nobody").status == NOT_FOUND


def test_an_odd_name_is_not_found() -> None:
    for name in ODD_NAMES:
        job_is_not_found(["explain"], name)
        node_is_not_found("cordon", name)


def test_events_of_an_unknown_or_impossible_subject_are_refused() -> None:
    for name in ("nobody", "jobs/nobody", "nodes/nobody", "数据"):
        assert command("events", name).status == NOT_FOUND, name
    for subject in ("jobs/", "nodes/", "cats/tom", "/", "a/b/c"):
        assert command("events", subject).status in (USAGE, NOT_FOUND), subject


def test_an_empty_name_is_refused() -> None:
    for verb in (["job", ""], ["explain", ""], ["cordon", "", "--reason", "x"]):
        assert command(*verb).status in (USAGE, NOT_FOUND), verb


# A command that cannot be met, its status (None: any failure), words of its error.
REQUESTS: tuple[tuple[str, int | None, str], ...] = (
    ("submit ended.yaml", REFUSED, "exists"),
    ("cancel ended --reason again", REFUSED, "ended"),
    ("profile ended", REFUSED, "running"),
    ("logs ended --rank 7", USAGE, "7 is not one of the job's 1 rank"),
    ("logs ended --attempt 9", NOT_FOUND, "attempt 9"),
    (f"logs ended --rank {2**32}", USAGE, "--rank"),
    ("logs ended --attempt 99999999999", NOT_FOUND, "attempt 99999999999"),
    (f"logs ended --attempt {10**30}", USAGE, "--attempt"),
    (f"profile ended --ranks {2**32}", USAGE, "--ranks"),
    (f"profile ended --first-step {10**30}", USAGE, "--first-step"),
    (f"checkpoint fetch ended --step {10**30} --to copy", USAGE, "--step"),
    ("logs ended --lines 999999999", USAGE, "--lines"),
    ("logs ended --rank -1", USAGE, "--rank"),
    ("profile ended --ranks 0,x", USAGE, "--ranks"),
    ("profile ended --ranks 9", USAGE, "9"),
    ("profile ended --ranks ,", USAGE, "--ranks"),
    ("profile ended --steps 0", USAGE, "--steps"),
    ("profile ended --steps 21", USAGE, "--steps"),
    ("checkpoint fetch ended --step 1 --to copy", NOT_FOUND, "2"),
    ("checkpoint fetch ended --step 0 --to copy", USAGE, "--step"),
    ("checkpoint fetch ended --to checkpoints", REFUSED, "is taken"),
    ("checkpoint fetch ended --to corpus.bin/x", REFUSED, "you can write to"),
    ("checkpoint verify nowhere", NOT_FOUND, "nowhere"),
    ("checkpoint verify corpus.bin", NOT_FOUND, "corpus.bin"),
    ("cancel ended", USAGE, "--reason"),
    ("cordon n1", USAGE, "--reason"),
    ("diagnose n1 --check no_such_check", USAGE, "no_such_check"),
    ("jobs --cluster corpus.bin", None, "corpus.bin"),
    ("up --run-folder runs", None, "in use"),
    ("up --run-folder corpus.bin", None, "corpus.bin"),
    ("up --run-folder corpus.bin/x", None, "corpus.bin"),
    ("up --nodes 9999", USAGE, "--nodes"),
    ("up --cluster A_B", USAGE, "--cluster"),
)


def test_a_request_that_cannot_be_met_is_refused() -> None:
    for arguments, status, words in REQUESTS:
        answer = command(*arguments.split())
        assert words in answer.stderr, (arguments, answer.text)
        failed = answer.status not in (OK, 130)
        assert answer.status == status or (status is None and failed), (arguments, answer.text)
        assert not Path("copy").exists()


def test_an_empty_reason_is_refused() -> None:
    verbs = (["cancel", ENDED], ["cordon", "n1"], ["evict", "n1"], ["uncordon", "n1"])
    for reason, verb in itertools.product(("", "   ", "\n"), verbs):
        answer = command(*verb, "--reason", reason)
        assert (answer.status, "reason" in answer.stderr) == (USAGE, True), answer.text


def test_an_order_given_twice_is_carried_out_once() -> None:
    for verb in ("cordon", "cordon", "uncordon", "uncordon", "evict", "evict", "uncordon"):
        assert command(verb, "n2", "--reason", "twice").status == OK, verb
    command("evict", "n2", "--reason", "twice")
    refused = command("cordon", "n2", "--reason", "of a quarantined node")
    assert (refused.status, "quarantined" in refused.stderr) == (REFUSED, True)
    command("uncordon", "n2", "--reason", "twice")
    reasons = [event["reason"] for event in command("events", "nodes/n2", "--json").objects]
    assert [each for each in reasons if each.startswith("NODE_") and "CORDON" in each].count(
        "NODE_CORDONED"
    ) == 1


@pytest.fixture(scope="module")
def running(cluster: Path) -> Iterator[str]:
    """A job that runs until the end of its tests, on both nodes."""
    job = good_job(RUNNING, cluster / "corpus", 1_000_000)
    job = changed(job, {"trainer.parallelism.pp": 2, "trainer.optimizer": paced(0.1)})
    (cluster / "running.yaml").write_text(yaml.safe_dump(job))
    assert command("submit", cluster / "running.yaml").status == OK

    def first_step() -> bool:
        return int(command("job", RUNNING, "--json").objects[0]["step"]) > 0

    until(first_step, "the first step", lambda: command("explain", RUNNING).stdout)
    yield RUNNING
    settle(cluster / "runs")


REQUESTS_TO_A_RUNNING_JOB = (
    ("submit running.yaml", REFUSED, "exists"),
    ("logs running --rank 2", USAGE, "2 is not one of the job's 2 ranks"),
    ("logs running --attempt 2", NOT_FOUND, "attempt 2"),
    ("profile running --ranks 2", USAGE, "2"),
    ("profile running --first-step 1", REFUSED, "step"),
    ("profile running --first-step 999999", REFUSED, "step"),
    ("profile running --first-step 2000000", REFUSED, "step"),
    ("diagnose n1", REFUSED, "running"),
    ("checkpoint fetch running --to copy", NOT_FOUND, "no complete checkpoint"),
)


def test_a_request_that_a_running_job_cannot_meet_is_refused(running: str) -> None:
    for arguments, status, words in REQUESTS_TO_A_RUNNING_JOB:
        answer = command(*arguments.split())
        assert (answer.status, words in answer.stderr) == (status, True), (arguments, answer.text)
    assert jobs()[running] == "JOB_PHASE_RUNNING"


def test_a_job_cancelled_twice_is_cancelled_once(cluster: Path) -> None:
    job = good_job("twice", cluster / "corpus", 1_000_000)
    assert submitted(job).status == OK
    for _ in range(2):
        assert command("cancel", "twice", "--reason", "a test").status == OK
    events = command("events", "twice", "--json").objects
    assert [event["reason"] for event in events].count("CANCEL_REQUESTED") == 1
