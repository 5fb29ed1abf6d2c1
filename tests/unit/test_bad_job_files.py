"""Job files that cannot run: each is refused by file, field and remedy, without a cluster."""

from __future__ import annotations

import hashlib
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.harness.bad_jobs import GROUPS, BadJob, changed, each_bad_job, good_job
from tests.harness.command_line import TRACEBACK, Answer, command
from typer.testing import CliRunner

from megascale_cli.exits import USAGE
from megascale_trainer.commands.data import app as data_commands


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MEGASCALE_RUN_FOLDER", raising=False)
    return tmp_path


def problems(answer: Answer) -> dict[str, dict[str, str]]:
    """The refused fields of `plan --json`, whoever refused them, by path."""
    found = answer.objects[-1]["refused"] if answer.stdout else answer.error["problems"]
    return {problem["field"]: problem for problem in found}


@each_bad_job
def test_a_bad_job_is_refused_by_field_and_remedy(bad: BadJob, folder: Path) -> None:
    (folder / "job.yaml").write_text(yaml.safe_dump(changed(good_job("good"), bad.changes)))
    answer = command("plan", "job.yaml", "--json")
    assert answer.status == USAGE, answer.text
    found = problems(answer)
    assert bad.field in found, found
    assert bad.problem in found[bad.field]["problem"], found
    assert bad.remedy in found[bad.field]["remedy"], found
    assert all(problem["remedy"] for problem in found.values()), found


@pytest.mark.parametrize("bad", [group[0] for group in GROUPS], ids=lambda bad: bad.case)
def test_people_read_the_same_field_problem_and_remedy(bad: BadJob, folder: Path) -> None:
    (folder / "job.yaml").write_text(yaml.safe_dump(changed(good_job("good"), bad.changes)))
    answer = command("plan", "job.yaml")
    assert answer.status == USAGE
    for text in (f"{bad.field}: ", bad.problem, bad.remedy):
        assert text in answer.text


def test_the_job_that_the_cases_change_is_good(folder: Path) -> None:
    (folder / "job.yaml").write_text(yaml.safe_dump(good_job("good")))
    answer = command("plan", "job.yaml")
    assert answer.status == 0, answer.text


def test_all_problems_are_reported_at_once(folder: Path) -> None:
    job = changed(good_job("Bad Name"), {"trainer.optimizer.beta1": 2, "recovery.spare_nodes": -1})
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    assert set(problems(command("plan", "job.yaml", "--json"))) == {
        "name",
        "trainer.optimizer.beta1",
        "recovery.spare_nodes",
    }


def test_all_missing_fields_are_reported_at_once(folder: Path) -> None:
    (folder / "job.yaml").write_text("trainer: {}\n")
    assert set(problems(command("plan", "job.yaml", "--json"))) >= {
        "name",
        "trainer.model.layers",
        "trainer.model.hidden_size",
        "trainer.model.heads",
        "trainer.model.vocab_size",
        "trainer.model.sequence_length",
        "trainer.training.steps",
        "trainer.training.global_batch_size",
    }


MEMORY_BYTES = 3 << 30
# Aliases of aliases: 33 million words in 26 lines.
BOMB = "a: &a [x, x]\n" + "".join(
    f"{chr(ord('b') + n)}: &{chr(ord('b') + n)} [*{chr(ord('a') + n)}, *{chr(ord('a') + n)}]\n"
    for n in range(24)
)
# Further ones, with their lines: test_cli_mistakes.py.
FILES: dict[str, tuple[bytes, str]] = {
    "an image": (b"\x89PNG\r\n\x1a\n" + bytes(range(256)), "not text"),
    "a null byte": (b"name: a\x00b\n", "not valid YAML"),
    "a word": (b"hello\n", "expected a mapping"),
    "a number": (b"7\n", "expected a mapping"),
    "an unknown anchor": (b"name: *nobody\n", "not valid YAML"),
    "a nested duplicate key": (
        b"trainer:\n  model:\n    layers: 1\n    layers: 2\n",
        "given twice",
    ),
    "a number as a key": (b"1: b\n", "unknown field"),
    "65 brackets": (b"[" * 65 + b"]" * 65, "nests"),
    "a mebibyte of brackets": (b"[" * (1 << 20), "nests"),
    "a structure in itself": (b"name: &a [*a]\n", "expected text"),
    "JSON with a comma": (b'{"name": "a",, }', "not valid YAML"),
    "more than a mebibyte": (b"#" * (1 << 20) + b"\n", "larger than"),
}


@pytest.mark.parametrize("case", FILES, ids=lambda case: case.replace(" ", "-"))
def test_a_file_that_is_no_job_is_refused_by_name(case: str, folder: Path) -> None:
    content, problem = FILES[case]
    (folder / "odd.yaml").write_bytes(content)
    for verb in ("plan", "submit"):
        answer = command(verb, "odd.yaml")
        assert answer.status == USAGE, answer.text
        assert "odd.yaml" in answer.stderr
        assert problem in answer.stderr
        assert "<unicode string>" not in answer.stderr
        assert len(answer.stderr) < 10_000
    as_json = command("plan", "odd.yaml", "--json").error
    assert as_json["kind"] == "InvalidJob" and as_json["problems"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (f"{BOMB}name: *y\n", "expected text"),
        (f"{BOMB}labels: {{a: *y}}\n", "expected text"),
        (f"{BOMB}trainer: {{data: {{sources: *y}}}}\n", "expected a mapping"),
        ("/dev/zero", "larger than"),
    ],
    ids=["name", "labels", "sources", "endless"],
)
def test_a_file_that_would_take_all_memory_is_refused(
    text: str, problem: str, folder: Path
) -> None:
    if text == "/dev/zero":
        (folder / "odd.yaml").symlink_to(text)
    else:
        (folder / "odd.yaml").write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "megascale_cli", "plan", "odd.yaml"],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, problem in done.stderr) == (USAGE, True), done.stderr
    assert TRACEBACK not in done.stderr


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("absent.yaml", "No such file"),
        (".", "Is a directory"),
        ("odd.yaml/job.yaml", "Not a directory"),
        ("loop.yaml", "symbolic links"),
        ("x" * 300, "File name too long"),
    ],
)
def test_a_path_that_leads_to_no_file_is_refused(path: str, problem: str, folder: Path) -> None:
    (folder / "odd.yaml").write_text("name: a\n")
    (folder / "loop.yaml").symlink_to("loop.yaml")
    for verb in ("plan", "submit"):
        answer = command(verb, path)
        assert answer.status == USAGE, answer.text
        assert problem in answer.stderr and path in answer.stderr


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--devices-per-node", "0"], "--devices-per-node"),
        (["--devices-per-node", "many"], "--devices-per-node"),
        (["--device-memory-gib", "-1"], "--device-memory-gib"),
        (["--device-memory-gib", "0.0001"], "trainer.parallelism: "),
    ],
    ids=["no-devices", "many-devices", "negative-memory", "little-memory"],
)
def test_a_plan_for_an_impossible_node_is_refused(
    options: list[str], word: str, folder: Path
) -> None:
    (folder / "job.yaml").write_text(yaml.safe_dump(good_job("good")))
    answer = command("plan", "job.yaml", *options)
    assert (answer.status, word in answer.text) == (USAGE, True), answer.text


def test_a_group_that_fits_on_no_node_is_refused(folder: Path) -> None:
    job: dict[str, Any] = changed(good_job("good"), {"trainer.parallelism.tp": 2})
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    answer = command("plan", "job.yaml", "--devices-per-node", "1", "--json")
    assert answer.status == USAGE
    assert "at most 1" in problems(answer)["trainer.parallelism.tp"]["remedy"]


def _tokenized(folder: Path, name: str, seed: int) -> Path:
    """A corpus of a tokenizer of its own; returns the tokenizer's file."""
    (folder / "a.txt").write_text(f"text {seed} " * 50)
    given = ["tokenize", str(folder / "a.txt"), "--tokenizer", "bpe", "--vocab-size", "265"]
    done = CliRunner().invoke(data_commands, [*given, "-o", str(folder / name)])
    assert done.exit_code == 0, done.output
    return folder / f"{name}.tokenizer.json"


def _with_data(folder: Path, **tokenizer: str) -> dict[str, Any]:
    job: dict[str, Any] = good_job("good")
    trainer = job["trainer"]
    trainer["model"]["vocab_size"] = 288
    trainer["data"] = {"sources": [{"prefix": str(folder / "ours")}], "tokenizer": tokenizer}
    held_out = [{"prefix": str(folder / "held")}]
    trainer["evaluation"] = {"sources": held_out, "interval_steps": 1}
    return job


def _refused(folder: Path, job: dict[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    """What a plan refuses, and what is not on this machine, as sentences by field."""
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    answer = command("plan", "job.yaml", "--json")
    facts = answer.objects[-1]
    assert (answer.status == USAGE) == bool(facts["refused"])
    refused, missing = (
        {each["field"]: each["problem"] + each["remedy"] for each in facts[name]}
        for name in ("refused", "missing_files")
    )
    return refused, missing


def test_a_plan_compares_the_data_with_the_job_where_it_is(folder: Path) -> None:
    ours, theirs = (_tokenized(folder, name, seed) for seed, name in enumerate(("ours", "held")))
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in (ours, theirs)]
    job = _with_data(folder, kind="bpe", path=str(ours))
    refused, missing = _refused(folder, job)
    assert not missing and list(refused) == ["trainer.evaluation.sources[0].prefix"]
    said = refused["trainer.evaluation.sources[0].prefix"]
    assert all(digest[:12] in said for digest in digests), said

    job["trainer"]["evaluation"]["sources"][0]["prefix"] = str(folder / "ours")
    assert _refused(folder, job) == ({}, {})
    job["trainer"]["model"]["vocab_size"] = 100
    assert "vocab_size" in next(iter(_refused(folder, job)[0]))
    job["trainer"]["model"]["vocab_size"] = 288
    job["trainer"]["data"]["tokenizer"]["sha256"] = digests[1]
    assert list(_refused(folder, job)[0]) == ["trainer.data.tokenizer.sha256"]
    job["trainer"]["data"]["tokenizer"] = {"kind": "bytes"}
    assert "the tokenizer bytes" in _refused(folder, job)[0]["trainer.data.sources[0].prefix"]


def test_bytes_in_a_vocabulary_without_their_end_are_refused(folder: Path) -> None:
    (folder / "a.txt").write_text("text")
    made = CliRunner().invoke(data_commands, ["tokenize", "a.txt", "-o", str(folder / "ours")])
    assert made.exit_code == 0
    job = _with_data(folder, kind="bytes")
    del job["trainer"]["evaluation"]
    job["trainer"]["model"]["vocab_size"] = 256
    refused, _ = _refused(folder, job)
    assert "has token id 256" in refused["trainer.model.vocab_size"]
    assert "257" in refused["trainer.model.vocab_size"]


def test_a_plan_says_which_files_are_not_here(folder: Path) -> None:
    job = _with_data(folder, kind="bpe", path=str(folder / "no.json"))
    refused, missing = _refused(folder, job)
    assert not refused and set(missing) == {
        "trainer.data.sources[0].prefix",
        "trainer.evaluation.sources[0].prefix",
        "trainer.data.tokenizer.path",
    }
    for_people = command("plan", "job.yaml")
    assert for_people.status == 0
    assert "not here" in for_people.text and "megascale data tokenize" in for_people.text
