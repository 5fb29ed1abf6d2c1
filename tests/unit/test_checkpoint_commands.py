"""`megascale checkpoint show`, `gc`, `pin` and `unpin` on folders; list and verify as JSON."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from tests.harness.checkpoint_files import write_checkpoint
from tests.harness.checkpoint_node import layout_of
from tests.harness.command_line import Answer, command

from megascale_checkpoint.commit.commit_log import CommitLog
from megascale_checkpoint.retention.collect import collect_all
from megascale_checkpoint.storage import FileStorage
from megascale_cli import checkpoints
from megascale_cli.exits import FAILED, NOT_FOUND, OK, REFUSED, UNAVAILABLE, USAGE
from megascale_job.names import is_dns_label

VALUES = {"matrix": np.ones((8, 96), np.float32), "bias": np.zeros(96, np.float32)}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with the checkpoints of steps 10 to 40."""
    folder = tmp_path / "example"
    for step in (10, 20, 30, 40):
        write_checkpoint(folder, [layout_of(0, 1)], VALUES, step=step)
    return folder


def checkpoint(verb: str, root: Path, *arguments: str, status: int = OK) -> Answer:
    answer = command("checkpoint", verb, root, *arguments)
    assert answer.status == status, answer.text
    return answer


def steps(root: Path) -> list[int]:
    return [int(each["step"]) for each in checkpoint("list", root, "--json").objects]


def test_gc_shows_first_and_removes_on_request(root: Path) -> None:
    shown = checkpoint("gc", root, "--keep-latest", "2")
    assert "step 10 of attempt 1, checkpoint, " in shown.stdout
    assert "would be freed; the job keeps the newest 2" in shown.stdout
    assert "repeat with --yes" in shown.stdout and steps(root) == [40, 30, 20, 10]
    assert checkpoint("gc", root, "--keep-latest", "2", "--dry-run").stdout == shown.stdout
    done = checkpoint("gc", root, "--keep-latest", "2", "--yes", "--json")
    assert [(each["step"], each["removed"]) for each in done.objects] == [(10, True), (20, True)]
    assert steps(root) == [40, 30] and len(list(root.glob("attempts/*/*"))) == 2
    again = checkpoint("gc", root, "--keep-latest", "2", "--yes")
    assert "nothing to remove: the job keeps the newest 2" in again.stdout


def test_gc_goes_by_the_rules_of_the_job(root: Path) -> None:
    assert "nothing to remove: the job keeps all" in checkpoint("gc", root, "--yes").stdout
    log = CommitLog(FileStorage(root))
    log.append_open(2, lambda: {"job": "job", "retention": {"keep_every_steps": 20}})
    checkpoint("gc", root, "--yes")
    assert steps(root) == [40, 20]


def test_gc_removes_files_that_belong_to_no_checkpoint(root: Path) -> None:
    CommitLog(FileStorage(root)).append_open(2, lambda: {"job": "job"})
    left = root / "attempts/attempt-000001/step-000000050"
    left.mkdir()
    (left / "rank-00000.safetensors").write_bytes(b"12345")
    assert "files of no checkpoint, 5 B: would be removed" in checkpoint("gc", root).stdout
    assert "5 B freed" in checkpoint("gc", root, "--yes").stdout
    assert not left.exists() and steps(root) == [40, 30, 20, 10]


@pytest.fixture
def archive(root: Path, tmp_path: Path) -> Path:
    """A folder of somebody, to which links below attempts/ lead in the place of what was there."""
    CommitLog(FileStorage(root)).append_open(2, lambda: {"job": "job"})
    folder = tmp_path / "archive"
    (root / "attempts/attempt-000001/step-000000010").rename(folder)
    (root / "attempts/attempt-000001/step-000000010").symlink_to(folder)
    (root / "attempts/attempt-000001/step-000000050").symlink_to(folder)
    (folder / "step-000000001").mkdir()
    (folder / "step-000000001/thesis.txt").write_text("nobody has a copy")
    (root / "attempts/attempt-000000").symlink_to(folder)
    return folder


def contents(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_gc_removes_links_themselves_and_nothing_behind_them(root: Path, archive: Path) -> None:
    before = contents(archive)
    inside = root / "attempts/attempt-000001/step-000000060"
    inside.mkdir()
    (inside / "rank-00000.safetensors").symlink_to(archive / "manifest.json")
    shown = checkpoint("gc", root, "--keep-latest", "3")
    for step, what in ((10, "checkpoint"), (50, "files of no checkpoint")):
        assert f"step {step} of attempt 1, {what} (a symbolic link: only the link" in shown.stdout
    assert "attempt-000000" in shown.stderr and "left as it is" in shown.stderr
    checkpoint("gc", root, "--keep-latest", "3", "--yes")
    assert contents(archive) == before
    assert sorted(path.name for path in root.glob("attempts/attempt-000001/*")) == [
        f"step-0000000{step}" for step in (20, 30, 40)
    ]
    assert (root / "attempts/attempt-000000").is_symlink() and steps(root) == [40, 30, 20]


def test_retention_removes_links_themselves_and_nothing_behind_them(
    root: Path, archive: Path
) -> None:
    before, storage = contents(archive), FileStorage(root)
    log = CommitLog(storage)
    log.refresh()
    assert collect_all(log, storage) == 1
    assert not (root / "attempts/attempt-000001/step-000000050").is_symlink()
    assert contents(archive) == before


@pytest.mark.parametrize("place", ["attempts", "attempts/attempt-000001", "commits"])
def test_a_link_in_the_place_of_a_folder_is_refused_with_its_name(
    place: str, root: Path, tmp_path: Path
) -> None:
    (root / place).rename(tmp_path / "moved")
    (root / place).symlink_to(tmp_path / "moved")
    verbs = {"show": USAGE, "verify": FAILED, "gc": USAGE}
    if place == "commits":
        verbs = dict.fromkeys(("list", "show", "verify", "gc", "repair"), USAGE)
    for verb, status in verbs.items():
        answer = checkpoint(verb, root, status=status)
        assert f"{root / place}" in answer.text and "symbolic link" in answer.text
    exported = command("checkpoint", "export", root, "--to", tmp_path / "out", "--format", "dcp")
    assert exported.status != OK and "symbolic link" in exported.stderr


def test_what_a_folder_says_is_shown_and_not_sent_to_the_terminal(root: Path) -> None:
    checkpoint("pin", root, "--step", "10", "--reason", "\x1b[2J[bold]\u202ex")
    for shown in (checkpoint("show", root, "--step", "10"), checkpoint("list", root)):
        assert "\\x1b[2J[bold]\\u202ex" in shown.stdout.replace("\n", "")
        assert not {"\x1b", "\u202e"} & set(shown.stdout)


@pytest.mark.parametrize("verb", ["list", "show", "verify", "export"])
def test_what_is_logged_on_the_way_is_not_on_stdout(
    verb: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A snapshot of the log that is passed over, which loses nothing."""
    monkeypatch.setattr("megascale_checkpoint.commit.commit_log.SNAPSHOT_EVERY", 2)
    CommitLog(FileStorage(root)).append_open(2, lambda: {"job": "job"})
    for path in (root / "snapshots").iterdir():
        path.write_bytes(b"damaged")
    options = ["--to", str(root / "out"), "--format", "dcp"] if verb == "export" else []
    answer = checkpoint(verb, root, *options, "--json")
    assert answer.objects and "is passed over" in answer.stderr


def test_a_pinned_checkpoint_stays_with_its_reason(root: Path) -> None:
    pinned = checkpoint("pin", root, "--step", "10", "--reason", "table 2")
    assert "step 10 of attempt 1 is pinned" in pinned.stdout
    checkpoint("gc", root, "--keep-latest", "1", "--yes")
    listed = checkpoint("list", root, "--json").objects
    assert [(each["step"], each["pin"]) for each in listed] == [(40, ""), (10, "table 2")]
    assert "pinned: table 2" in checkpoint("show", root, "--step", "10").stdout
    assert checkpoint("unpin", root, "--step", "10", "--json").objects[0]["pin"] == ""
    refused = checkpoint("unpin", root, "--step", "10", status=REFUSED)
    assert "is not pinned" in refused.stderr
    checkpoint("gc", root, "--keep-latest", "1", "--yes")
    assert steps(root) == [40]
    gone = checkpoint("pin", root, "--step", "10", "--reason", "late", status=NOT_FOUND)
    assert "no complete checkpoint of step 10; the newest: 40" in gone.stderr


def test_a_checkpoint_is_shown_with_its_files(root: Path) -> None:
    [facts] = checkpoint("show", root, "--json").objects
    assert (facts["step"], facts["world_size"], facts["kept"]) == (40, 1, True)
    assert facts["files"][0]["path"] == "rank-00000.safetensors"
    assert "stays (the job keeps all)" in checkpoint("show", root).stdout
    log = CommitLog(FileStorage(root))
    log.append_open(2, lambda: {"job": "job", "retention": {"keep_latest": 2}})
    shown = checkpoint("show", root, "--step", "10").stdout
    assert "goes at the next commit" in shown and "the newest 2" in shown
    checkpoint("show", root, "--step", "11", status=NOT_FOUND)
    checkpoint("show", root, "--step", "10", "--attempt", "7", status=NOT_FOUND)


def test_one_step_is_verified(root: Path) -> None:
    next(root.glob("attempts/*/step-000000010/rank-*")).write_bytes(b"damaged")
    assert checkpoint("verify", root, "--step", "20").stdout == "step 20 of attempt 1: whole\n"
    found = checkpoint("verify", root, "--json", status=FAILED).objects
    assert [bool(each["problems"]) for each in found] == [False, False, False, True]


@pytest.mark.parametrize("verb", ["list", "show", "verify", "gc"])
def test_a_target_that_cannot_be_used_has_a_status_and_a_remedy(verb: str, tmp_path: Path) -> None:
    nowhere = command("checkpoint", verb, tmp_path / "none")
    assert nowhere.status == NOT_FOUND and "megascale jobs" in nowhere.stderr
    file = tmp_path / "file"
    file.write_text("x")
    assert command("checkpoint", verb, file).status == NOT_FOUND
    odd = command("checkpoint", verb, "gs://bucket/x", "--json")
    assert odd.status == USAGE and odd.error["problems"][0]["field"] == "checkpoint.uri"
    job = command("checkpoint", verb, "example", "--cluster", str(tmp_path))
    assert job.status == UNAVAILABLE and "megascale up" in job.stderr


def test_a_long_log_is_listed_to_its_end(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the oldest checkpoints, which a snapshot of the log leaves out."""
    monkeypatch.setattr("megascale_checkpoint.commit.commit_log.SNAPSHOT_EVERY", 2)
    monkeypatch.setattr("megascale_checkpoint.commit.commit_record.KEPT_COMMITS", 2)
    log = CommitLog(FileStorage(root))
    for attempt in (2, 3, 4):
        log.append_open(attempt, lambda: {"job": "job"})
    again = CommitLog(FileStorage(root))
    again.refresh()
    assert again.state.older == 2
    assert steps(root) == [40, 30, 20, 10]
    checkpoint("gc", root, "--keep-latest", "1", "--yes")
    assert steps(root) == [40]


@pytest.mark.parametrize("verb", ["list", "show", "verify", "gc", "repair"])
def test_a_folder_beside_is_a_folder_where_no_job_can_have_its_name(
    verb: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root.parent)
    monkeypatch.setenv("MEGASCALE_RUN_FOLDER", str(root.parent / "none"))
    root.rename(root.with_name("my_job"))
    assert command("checkpoint", verb, "my_job").status == OK
    root.with_name("my_job").rename(root)
    assert command("checkpoint", verb, "./example").status == OK
    # A name that a job can have is a job, whatever is beside.
    answer = command("checkpoint", verb, "example")
    assert answer.status == UNAVAILABLE
    assert "example is read as a job's name: for the folder give ./example" in answer.stderr
    assert "./other" not in command("checkpoint", verb, "other").stderr
    assert command("checkpoint", verb, "").status == UNAVAILABLE  # and not this folder
    assert "is always a job" in re.sub(r"[\s│]+", " ", command("checkpoint", verb, "--help").stdout)


@pytest.mark.parametrize(
    "name",
    ["a", "a-1", "", "-a", "a-", "A", "my_job", "a.b", "./a", "~", "a" * 63, "a" * 64, "a\n"],
)
def test_all_commands_agree_on_what_can_be_the_name_of_a_job(name: str) -> None:
    assert bool(checkpoints.JOB_NAME.fullmatch(name)) == is_dns_label(name)
