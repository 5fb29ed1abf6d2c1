"""Mistakes of users: each is reported in a sentence with the remedy, without a traceback."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.harness import program_start
from tests.harness.command_line import application
from typer.testing import CliRunner

from megascale_cli.exits import NOT_FOUND, REFUSED, UNAVAILABLE, USAGE, with_client
from megascale_driver.platform.local.cluster import LocalCluster, LocalOptions

JOB: dict[str, Any] = {
    "name": "a",
    "trainer": {
        "model": {
            "layers": 2,
            "hidden_size": 16,
            "heads": 2,
            "vocab_size": 257,
            "sequence_length": 16,
        },
        "training": {"steps": 2, "global_batch_size": 2},
        "data": {"sources": [{"prefix": "corpus"}]},
    },
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with files for the mistakes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MEGASCALE_RUN_FOLDER", raising=False)
    files = {
        "good.yaml": yaml.safe_dump(JOB),
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "empty").mkdir()
    (tmp_path / "stale").mkdir()
    (tmp_path / "stale" / "token").write_text("x")
    (tmp_path / "broken.bin").write_bytes(b"")
    (tmp_path / "broken.idx").write_bytes(b"no index")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        # Wrong usage.
        ("sumbit good.yaml", USAGE, "No such command"),
        ("submit", USAGE, "Missing argument"),
        ("jobs --al", USAGE, "No such option"),
        ("logs a --lines 0", USAGE, "--lines"),
        ("cordon n1", USAGE, "--reason"),
        ("demo --steps 1", USAGE, "--steps"),
        ("demo --device cpu --tp 3", USAGE, "multiple"),
        ("demo --show-hang --show-straggler", USAGE, "one at a time"),
        ("plan good.yaml --devices-per-node 0", USAGE, "--devices-per-node"),
        ("init --output good.yaml", USAGE, "--overwrite"),
        ("init --output nowhere/job.yaml", USAGE, "cannot be written"),
        ("init --name Not_A_Name --output new.yaml", USAGE, "DNS-1123"),
        # No cluster.
        ("jobs", UNAVAILABLE, "megascale up"),
        ("nodes --cluster nowhere", UNAVAILABLE, "no cluster at nowhere"),
        ("nodes --cluster empty", UNAVAILABLE, "holds no cluster"),
        ("up --cluster Nice_Name", USAGE, "a-z, 0-9"),
        ("up --device cuda --nodes 200 --run-folder new", USAGE, "--device cpu"),
        # Files of other kinds.
        ("data tokenize absent --output x", USAGE, "no such file"),
        ("data tokenize empty --output x", USAGE, "no non-empty file"),
        ("data inspect absent", USAGE, "absent"),
        ("data inspect broken", USAGE, "broken"),
        ("checkpoint verify ./empty", NOT_FOUND, "empty holds no commit log"),
        ("checkpoint verify /nowhere", NOT_FOUND, "checkpoint.uri"),
    ],
)
def test_a_mistake_is_reported(folder: Path, arguments: str, status: int, message: str) -> None:
    with program_start.forked():  # what some of them ask another command
        result = CliRunner().invoke(
            application(), arguments.split(), env={"COLUMNS": "200", "TERM": "dumb"}
        )
    text = result.stdout + result.stderr
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(
        result.exception
    )
    assert (result.exit_code, message in text) == (status, True), text
    assert "Traceback" not in text


def test_another_users_token_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    app = application()
    monkeypatch.setattr(Path, "read_text", refuse)  # root can read everything
    result = CliRunner().invoke(app, ["jobs", "--cluster", "stale"])
    assert (result.exit_code, "cannot be read" in result.stderr) == (REFUSED, True)


@pytest.mark.parametrize("name", ["token", "driver.address"])
def test_a_file_of_the_run_folder_that_may_not_be_read_is_no_traceback(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (folder / "stale" / "driver.address").write_text("127.0.0.1:1")
    read = Path.read_text

    def refuse(path: Path, *arguments: Any, **options: Any) -> str:
        if path.name == name:
            raise PermissionError(13, "Permission denied", str(path))
        return read(path, *arguments, **options)

    app = application()
    monkeypatch.setattr(Path, "read_text", refuse)  # root can read everything
    result = CliRunner().invoke(app, ["jobs", "--cluster", "stale"])
    assert (result.exit_code, f"{name} cannot be read" in result.stderr) == (REFUSED, True)


def test_a_run_folder_that_may_not_be_entered_is_no_traceback(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    app = application()
    monkeypatch.setattr(Path, "is_dir", refuse)
    result = CliRunner().invoke(app, ["jobs", "--cluster", "stale"])
    assert (result.exit_code, "stale cannot be read" in result.stderr) == (REFUSED, True)


@pytest.mark.parametrize(
    ("name", "content", "status", "message"),
    [
        ("token", b"", REFUSED, "holds no token"),
        ("token", b"\xff\xfe", REFUSED, "holds no token"),
        ("token", b"two\nlines", REFUSED, "holds no token"),
        ("driver.address", b"", UNAVAILABLE, "the cluster in damaged is down"),
        (
            "driver.address",
            b"127.0.0.1:1",
            UNAVAILABLE,
            "the cluster in damaged is down: no driver answered",
        ),
    ],
)
def test_a_cluster_that_is_down_is_called_so(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    content: bytes,
    status: int,
    message: str,
) -> None:
    monkeypatch.setattr(with_client, "__kwdefaults__", {"retry_for_s": 0.3})
    files = {"token": b"x", "driver.address": b"127.0.0.1:1", name: content}
    (folder / "damaged").mkdir()
    for file, data in files.items():
        (folder / "damaged" / file).write_bytes(data)
    result = CliRunner().invoke(application(), ["job", "x", "--cluster", "damaged"])
    assert (result.exit_code, message in result.stderr) == (status, True), result.output
    assert "megascale up --run-folder damaged" in result.stderr
    assert "errno" not in result.stderr and "ipv4:" not in result.stderr


@pytest.fixture
def held(folder: Path) -> Iterator[Path]:
    """A run folder that a `megascale up` holds; its driver does not answer."""
    place = folder / "held"
    options = LocalOptions(run_folder=place, words=("--nodes", "3", "--cluster", "a b"))
    place.mkdir()
    cluster = LocalCluster(options, lambda *_: None)
    cluster._take_lock()
    (place / "token").write_text("x")
    (place / "driver.address").write_text("127.0.0.1:1")
    yield place
    if cluster._lock is not None:
        os.close(cluster._lock)


def release(held: Path) -> None:
    """End the `megascale up` of the folder, as the kernel does when its process is killed."""
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if entry.readlink() == (held / "up.lock").resolve():
                fcntl.flock(int(entry.name), fcntl.LOCK_UN)


@pytest.mark.parametrize("missing", ["", "driver.address"])
@pytest.mark.parametrize("command", ["jobs", "watch x", "logs x --follow"])
def test_a_cluster_whose_up_has_ended_is_down_without_a_retry(
    held: Path, monkeypatch: pytest.MonkeyPatch, missing: str, command: str
) -> None:
    async def no_retry(self: object) -> bool:
        raise AssertionError("nothing is to be awaited")

    release(held)
    (held / missing).unlink() if missing else None
    monkeypatch.setattr("megascale_client.connection.RetryTimer.wait", no_retry)
    result = CliRunner().invoke(application(), [*command.split(), "--cluster", "held"])
    assert (result.exit_code, result.stderr) == (
        UNAVAILABLE,
        "error: the cluster in held is down: no `megascale up` runs there; start it with "
        "`megascale up --run-folder held --nodes 3 --cluster 'a b'`\n",
    )


@pytest.mark.parametrize("missing", ["", "driver.address"])
def test_a_driver_that_is_away_below_a_running_up_is_awaited(
    held: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setattr("megascale_cli.jobs.RETRY_FOR_S", 0.3)
    (held / missing).unlink() if missing else None
    result = CliRunner().invoke(application(), ["jobs", "--cluster", "held"])
    assert result.exit_code == UNAVAILABLE
    assert result.stderr.startswith("error: the driver of the cluster in held is down: no driver ")
    assert "held/driver.log says why it ended" in result.stderr


def test_a_token_that_is_deleted_below_a_running_up_is_said(held: Path) -> None:
    (held / "token").unlink()
    result = CliRunner().invoke(application(), ["jobs", "--cluster", "held"])
    assert (result.exit_code, "put the file back" in result.stderr) == (REFUSED, True)
    release(held)
    result = CliRunner().invoke(application(), ["jobs", "--cluster", "held"])
    assert (result.exit_code, "held holds no cluster" in result.stderr) == (UNAVAILABLE, True)


def test_a_look_at_the_lock_does_not_keep_a_cluster_from_starting(
    held: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release(held)
    with (held / "up.lock").open() as asking:
        fcntl.flock(asking, fcntl.LOCK_SH)
        monkeypatch.setattr("time.sleep", lambda _: fcntl.flock(asking, fcntl.LOCK_UN))
        other = LocalCluster(LocalOptions(run_folder=held), lambda *_: None)
        other._take_lock()
    assert other._lock is not None
    os.close(other._lock)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("", ()),
        ("--nodes 2 --no-dashboard --tls --json", ("--nodes", "2", "--tls", "--no-dashboard")),
        ("--run-folder x --device cpu", ("--device", "cpu")),
        ("--calibration /a --calibration /b", ("--calibration", "/a", "--calibration", "/b")),
    ],
)
def test_up_notes_the_options_with_which_it_starts_again(
    monkeypatch: pytest.MonkeyPatch, given: str, words: tuple[str, ...]
) -> None:
    seen: list[LocalOptions] = []

    async def run(options: LocalOptions, *_: object) -> int:
        seen.append(options)
        return 0

    monkeypatch.setattr("megascale_driver.commands.up._run", run)
    result = CliRunner().invoke(application(), ["up", *given.split()])
    assert (result.exit_code, [options.words for options in seen]) == (0, [words]), result.output


GOOD = yaml.safe_dump(JOB)


@pytest.mark.parametrize(
    ("content", "field", "problem", "remedy"),
    [
        (b"", "file", "is empty", "megascale init"),
        (b"# only a comment\n", "file", "is empty", "megascale init"),
        (b"\xff\xfe\x00\x01", "line 1", "is not text", "UTF-8"),
        ("name: jöb\n".encode("latin-1"), "line 1", "is not text", "UTF-8"),
        (f"{GOOD}---\n{GOOD}".encode(), "line 15", "another document", "one job per file"),
        (f"{GOOD}owner: !!python/object:os.system {{}}\n".encode(), "line 15", "the tag", "remove"),
        (f"{GOOD}owner: !mine x\n".encode(), "line 15", "'!mine'", "remove the tag"),
        (f"{GOOD}name: b\n".encode(), "line 15", "given twice", "keep one of the two"),
        (f"{GOOD}owner: 2024-13-45\n".encode(), "line 15", "2024-13-45", "in quotes"),
        (f"{GOOD}priority: {'9' * 5000}\n".encode(), "line 15", "cannot be read", "in quotes"),
        (f"{GOOD}priority: 0x{'f' * 6000}\n".encode(), "priority", "out of range", "give"),
        (f"{GOOD}labels: {'[' * 2000}{']' * 2000}\n".encode(), "file", "too deeply", "levels"),
        (f'{GOOD}owner: "\\ud800"\n'.encode(), "owner", "half of a character", "UTF-8"),
        (f"{GOOD}owner: \x01\n".encode(), "file", "not allowed", "remove the character"),
        (f"{GOOD}? [a, b]\n: c\n".encode(), "line 15", "unhashable key", "a key is a word"),
        (f"{GOOD}labels: &a {{x: *a}}\n".encode(), "labels.x", "expected text", "in quotes"),
        (b"name:\n\t- a\n", "line 2", "cannot start any token", "indent with spaces"),
        (b"name: a: b\n", "line 1, column 8", "not allowed here", "in quotes"),
        (b"name: [a\n", "line 2", "expected ',' or ']'", "correct that line"),
        (b"- a\n", "job", "expected a mapping", "known here: name"),
    ],
)
def test_a_damaged_job_file_is_reported_with_its_name_line_and_remedy(
    folder: Path, content: bytes, field: str, problem: str, remedy: str
) -> None:
    (folder / "damaged.yaml").write_bytes(content)
    result = CliRunner().invoke(application(), ["submit", "damaged.yaml", "--json"])
    assert result.exit_code == USAGE, repr(result.exception)
    found = json.loads(result.stderr)
    (shown,) = found["problems"]
    assert found["error"].startswith("damaged.yaml: ")
    assert shown["field"].startswith(field) and problem in shown["problem"]
    assert remedy in shown["remedy"] and "unicode string" not in found["error"]


def test_a_job_file_in_unicode_with_a_mark_and_merged_keys_is_read(folder: Path) -> None:
    text = "\ufeff" + GOOD + "owner: Zoë ☃\nlabels: {<<: &base {a: b}, c: ☃}\n"
    (folder / "good.yaml").write_text(text, encoding="utf-8")
    result = CliRunner().invoke(application(), ["config", "show", "good.yaml", "--json"])
    found = json.loads(result.output)
    assert (found["owner"], found["labels"]) == ("Zoë ☃", {"a": "b", "c": "☃"})


@pytest.mark.parametrize("path", ["\0", "/dev/zero", "x" * 5000, "good.yaml/x", "empty"])
def test_a_path_that_is_no_job_file_is_reported(folder: Path, path: str) -> None:
    result = CliRunner().invoke(application(), ["submit", path, "--json"])
    (shown,) = json.loads(result.stderr)["problems"]
    assert (result.exit_code, shown["field"], bool(shown["remedy"])) == (USAGE, "file", True)
